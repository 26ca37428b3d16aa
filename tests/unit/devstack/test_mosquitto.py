from __future__ import annotations

from pathlib import Path

import pytest

from towline.errors import ConfigError, SetupError
from towline_prove.devstack.mosquitto import Mosquitto, MosquittoBinary, find_mosquitto, version_problem


def fake_mosquitto(place: Path, says: str) -> Path:
    place.write_text(f"#!/bin/sh\necho '{says}'\nexit 3\n")
    place.chmod(0o755)
    return place


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


@pytest.mark.parametrize("settings", [{"a\nlistener 1883": "x"}, {"a": "x\nlistener 1883"}, {"": "x"}, {"a": "\0"}])
def test_a_setting_can_not_smuggle_lines(tmp_path: Path, settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="TL-C70"):
        Mosquitto(tmp_path, settings=settings)
