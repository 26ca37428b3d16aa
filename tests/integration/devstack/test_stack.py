"""Both brokers together, and the command line over them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.helpers import present
from towline.errors import ConfigError, SetupError
from towline.kafka.admin import KafkaAdmin
from towline_prove.cli.devstack import app
from towline_prove.devstack import Kafka, Stack
from towline_prove.devstack.stack import default_directory

pytestmark = [pytest.mark.broker, pytest.mark.kafka]


@pytest.fixture
def directory(tmp_path: Path, stack_programs: None) -> Iterator[Path]:
    yield tmp_path / "stack"
    Stack(tmp_path / "stack").stop()


def call(*words: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def status(directory: Path, code: int = 0) -> dict[str, dict[str, str | int | None]]:
    return {row["name"]: row for row in json.loads(call("status", "--json", "--dir", directory, code=code))}


@pytest.mark.long  # bridge/test_first_session.py types both commands
def test_up_leaves_them_running_and_down_ends_them(directory: Path) -> None:
    said = call("up", "--dir", directory)
    uri = present(re.search(r"mqtt://127\.0\.0\.1:\d+", said))
    assert f"towline devstack down --dir {directory}" in said

    first = status(directory)
    assert [row["state"] for row in first.values()] == ["running", "running"]
    assert first["mosquitto"]["address"] == uri[0]
    assert call("up", "--dir", directory)
    assert status(directory) == first, "a second up changes nothing"

    call("kill", "kafka", "--dir", directory)
    with pytest.raises(SetupError, match="TL-S17"):
        call("topics", "a", "--dir", directory)
    assert status(directory, code=1)["kafka"]["state"] == "stopped"
    assert "running" in call("status", "--dir", directory, code=1)
    call("restart", "kafka", "--dir", directory)
    again = status(directory)
    assert again["kafka"]["address"] == first["kafka"]["address"]
    assert again["kafka"]["pid"] != first["kafka"]["pid"]

    assert (
        call("topics", "b", "a", "--partitions", "3", "--dir", directory)
        == "kafka: created a, b with 3 partitions each\n"
    )
    assert call("topics", "a", "--dir", directory) == "kafka: a existed already\n"
    assert KafkaAdmin(str(first["kafka"]["address"])).info().topics["a"] == 3

    call("pause", "mosquitto", "--dir", directory)
    assert status(directory, code=1)["mosquitto"]["state"] == "paused"
    call("resume", "mosquitto", "--dir", directory)
    assert status(directory)["mosquitto"]["pid"] == first["mosquitto"]["pid"]

    assert "stopped mosquitto and kafka" in call("down", "--dir", directory)
    assert [row["state"] for row in status(directory, code=1).values()] == ["stopped", "stopped"]
    assert call("down", "--dir", directory) == "nothing was running\n"


def test_nothing_is_known_before_the_first_start(tmp_path: Path) -> None:
    assert [row["address"] for row in status(tmp_path / "never", code=1).values()] == [None, None]
    assert not (tmp_path / "never").exists()


def test_the_default_directory_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_directory() == tmp_path / "state" / "towline" / "devstack"


def test_an_unknown_broker(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rabbit: is no server of the devstack\. There are mosquitto, kafka.*TL-C71"):
        Stack(tmp_path).server("rabbit")


def test_when_one_can_not_start_the_other_is_stopped_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(directory)

    def fail(self: Kafka) -> Kafka:
        raise SetupError("TL-S21", "java", "is missing")

    monkeypatch.setattr(Kafka, "start", fail)
    with pytest.raises(SetupError, match="TL-S21"):
        stack.start()
    assert not stack.mosquitto.running
