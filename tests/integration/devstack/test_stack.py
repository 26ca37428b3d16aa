"""Both brokers together, the command line over them, and the forms of a stack: kept, told without a secret."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.helpers import lacking, present
from towline.errors import ConfigError, SetupError
from towline.kafka.admin import KafkaAdmin
from towline_prove.cli.devstack import _login_lines, _requested_form, _submit_lines, app
from towline_prove.devstack import Kafka, Stack, spark
from towline_prove.devstack.kafka import KafkaCluster
from towline_prove.devstack.secured import SecuredKafka
from towline_prove.devstack.stack import StackForm, default_directory

pytestmark = [pytest.mark.broker, pytest.mark.kafka]


@pytest.fixture
def directory(tmp_path: Path, stack_programs: None) -> Iterator[Path]:
    yield tmp_path / "stack"
    Stack(tmp_path / "stack").stop()


@pytest.fixture
def openssl() -> None:
    if shutil.which("openssl") is None or shutil.which("mosquitto_passwd", path="/usr/bin:/usr/local/bin") is None:
        lacking("openssl or mosquitto_passwd")


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


def test_a_directory_keeps_its_form(tmp_path: Path) -> None:
    assert isinstance(Stack(tmp_path, form=StackForm(brokers=3)).kafka, KafkaCluster)
    again = Stack(tmp_path)
    assert [server.label for server in again.servers] == ["mosquitto", "kafka-1", "kafka-2", "kafka-3"]
    with pytest.raises(SetupError, match=r"has a stack of another form \(3 brokers of Kafka\)\. Name .*\[TL-S23\]"):
        Stack(tmp_path, form=StackForm(secure=True))


def test_three_brokers_with_passwords_are_not_offered() -> None:
    assert (_requested_form(None, secure=None), _requested_form(3, secure=None)) == (None, StackForm(brokers=3))
    with pytest.raises(SetupError, match=r"--secure: is for one broker of Kafka"):
        _requested_form(3, secure=True)


@pytest.mark.usefixtures("openssl")
def test_how_to_log_in_shows_no_secret(tmp_path: Path) -> None:
    stack = Stack(tmp_path, form=StackForm(secure=True))
    kafka = stack.kafka
    assert isinstance(kafka, SecuredKafka)
    words = "\n".join(_login_lines(stack))
    secrets = [kafka.password_file, kafka.connection_string_file, tmp_path / "mosquitto" / "secrets" / "password"]
    for file in secrets:
        assert str(file) in words
        assert file.read_text() not in words
        assert file.stat().st_mode & 0o77 == 0
    assert Stack(tmp_path).kafka.client["sasl.password"] == kafka.client["sasl.password"], "made once"


@pytest.mark.usefixtures("openssl")
def test_a_stack_with_spark_says_where_everything_is_without_a_secret(tmp_path: Path) -> None:
    assert _requested_form(None, secure=None, workers=2) == StackForm(spark_workers=2)
    stack = Stack(tmp_path, form=StackForm(spark_workers=2))
    assert [one.label for one in stack.servers[2:]] == ["spark-master", "spark-worker-1", "spark-worker-2"]
    assert stack.spark is not None
    assert [one.host for one in stack.spark.servers] == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    stack.spark.prepare()
    stack.spark.describe()
    variables = stack.variables()
    assert variables["STACK_GATEWAY_1"] == Stack(tmp_path).variables()["STACK_GATEWAY_1"], "addresses are kept"
    assert variables["STACK_SPARK"] == stack.spark.master.address
    assert len({variables["STACK_GATEWAY_1"], variables["STACK_GATEWAY_2"]}) == 2
    words = "\n".join([*_submit_lines(stack), *variables.values()])
    for file in (stack.spark.secret_file, stack.spark.properties_file, tmp_path / "gateway" / "token"):
        assert file.stat().st_mode & 0o77 == 0
        assert file.read_text().strip() not in words
    with pytest.raises(SetupError, match=r"\(1 broker of Kafka, 2 workers of Spark\)"):
        Stack(tmp_path, form=StackForm(spark_workers=2, bare=True))


def test_where_nobody_may_mount_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "_UNSHARE_COMMANDS", (("false",), ("no-such-program",)))
    spark._unshare.cache_clear()
    try:
        with pytest.raises(SetupError, match=r"unshare --mount: this user gets no mount namespaces.*\[TL-S30\]$"):
            spark.enclose_command(["true"], tmp_path, ())
    finally:
        spark._unshare.cache_clear()


@pytest.mark.spark
def test_spark_starts_from_its_archive(tmp_path: Path) -> None:
    """That `make setup` makes, with the environment that `tests.conftest` has; Java ignores one that does not fit."""
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    if "SharedArchiveFile" not in options:
        lacking("there is no archive of Spark's classes: make setup")
    options += f" -Xlog:class+load:file={tmp_path / 'loaded'}"
    command = [f"{os.environ['SPARK_HOME']}/bin/spark-submit", "--version"]
    environment = {**os.environ, "SPARK_SUBMIT_OPTS": options}
    subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120)
    assert (tmp_path / "loaded").read_text().count("source: shared objects file (top)") > 500
