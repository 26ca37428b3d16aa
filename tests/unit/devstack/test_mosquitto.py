from __future__ import annotations

import os
from pathlib import Path

import pytest

from towline.errors import ConfigError, SetupError
from towline_prove.devstack.mosquitto import Mosquitto, MosquittoBinary, find_mosquitto, version_problem


def fake_mosquitto(place: Path, says: str) -> Path:
    place.write_text(f"#!/bin/sh\necho '{says}'\nexit 3\n")
    place.chmod(0o755)
    return place


def lines(broker: Mosquitto) -> list[str]:
    return broker._configuration(broker.port).splitlines()


def test_the_version_is_read_though_help_ends_with_an_exit_code(tmp_path: Path) -> None:
    binary = fake_mosquitto(tmp_path / "mosquitto", "mosquitto version 2.0.21")
    assert find_mosquitto(binary) == MosquittoBinary(binary, (2, 0, 21))
    assert Mosquitto(tmp_path / "m", binary=binary).version == "2.0.21"


def test_the_environment_names_the_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = fake_mosquitto(tmp_path / "other", "mosquitto version 2.1.2")
    monkeypatch.setenv("TOWLINE_MOSQUITTO", str(binary))
    assert find_mosquitto().version == (2, 1, 2)


def test_no_mosquitto(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no such MQTT broker.*apt install mosquitto.*TL-S10"):
        find_mosquitto(tmp_path / "none")


def test_a_program_that_is_no_mosquitto(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"does not tell its version.*TL-S10"):
        find_mosquitto(fake_mosquitto(tmp_path / "mosquitto", "hello"))


@pytest.mark.parametrize(
    ("version", "old"),
    [((1, 6, 9), True), ((2, 0, 12), True), ((2, 0, 13), False), ((2, 0, 21), False), ((2, 1), False), ((3,), False)],
)
def test_an_old_one_is_named_with_the_reason(version: tuple[int, ...], old: bool) -> None:
    problem = version_problem(MosquittoBinary(Path("/usr/sbin/mosquitto"), version)) or ""
    assert all((word in problem) is old for word in ("loses QoS 2 messages by itself", "TL-S11"))


def test_settings_win(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path, settings={"allow_anonymous": "false", "max_queued_messages": "0"})
    assert "allow_anonymous false" in lines(broker)
    assert "allow_anonymous true" not in lines(broker)
    assert "max_queued_messages 0" in lines(broker)


def test_settings_of_the_listener_come_after_it(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path, settings={"certfile": "/c", "keyfile": "/k", "per_listener_settings": "true"})
    written = lines(broker)
    assert written[0] == "per_listener_settings true"
    assert written[1].startswith("listener ")
    assert written.index("certfile /c") > 1
    assert broker.uri.startswith("mqtts://")


def test_started_by_root_it_stays_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "user root" in lines(Mosquitto(tmp_path))
    assert "user mosquitto" in lines(Mosquitto(tmp_path, settings={"user": "mosquitto"}))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not [line for line in lines(Mosquitto(tmp_path)) if line.startswith("user ")]


@pytest.mark.parametrize("settings", [{"a\nlistener 1883": "x"}, {"a": "x\nlistener 1883"}, {"": "x"}, {"a": "\0"}])
def test_a_setting_can_not_smuggle_lines(tmp_path: Path, settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="TL-C70"):
        Mosquitto(tmp_path, settings=settings)
