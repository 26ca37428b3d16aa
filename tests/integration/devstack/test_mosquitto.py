"""A real Mosquitto: started, killed, paused, refused."""

from __future__ import annotations

import json
import os
import socket
import warnings
from pathlib import Path

import pytest

from towline.errors import SetupError
from towline_prove.devstack import Mosquitto, MosquittoTooOld
from towline_prove.devstack.mosquitto import find_mosquitto

pytestmark = pytest.mark.broker


def answers(broker: Mosquitto) -> bool:
    return broker._answers(broker.port)


@pytest.mark.parametrize("verb", ["kill", "pause", "resume"])
def test_a_stopped_broker_can_not_be_killed_or_paused(tmp_path: Path, verb: str) -> None:
    broker = Mosquitto(tmp_path)
    with pytest.raises(SetupError, match=r"does not run\. Start it first.*TL-S17"):
        getattr(broker, verb)()


def test_a_recycled_pid_is_not_killed(tmp_path: Path) -> None:
    """The state file names a pid that now belongs to another: to this very test, say."""
    broker = Mosquitto(tmp_path)
    with broker:
        state = json.loads(broker._state_file.read_text())
    state["process"] = {"pid": os.getpid(), "started": 1, "host": "here"}
    broker._state_file.write_text(json.dumps(state))
    assert not broker.running
    broker.stop()
    with broker:
        assert answers(broker)


def test_a_broken_state_file_is_one_line(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path)
    broker._state_file.write_text("{")
    with pytest.raises(SetupError, match=r"is not a state file of ours.*TL-S18"):
        broker.start()


def test_a_taken_port_that_was_asked_for_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        broker = Mosquitto(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(SetupError, match=r"the port for mosquitto is taken.*TL-S13"):
            broker.start()
    assert not broker.running
    with broker:
        assert answers(broker)


def test_a_picked_port_that_was_taken_meanwhile_is_exchanged(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path)
    picked = broker.port
    with socket.create_server(("127.0.0.1", picked)), broker:
        assert broker.port != picked
        assert answers(broker)


def test_a_setting_it_does_not_know(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path, settings={"max_queued_mesages": "1"})
    with pytest.raises(SetupError, match=r"ended at once: .*max_queued_mesages.*TL-S12") as caught:
        broker.start()
    assert "\n" not in str(caught.value)
    assert not broker.running


def test_an_old_mosquitto_runs_with_a_warning(tmp_path: Path) -> None:
    sound = find_mosquitto().binary
    old = tmp_path / "old"
    old.write_text(f'#!/bin/sh\n[ "$1" = -h ] && echo "mosquitto version 2.0.11" && exit 3\nexec {sound} "$@"\n')
    old.chmod(0o755)
    broker = Mosquitto(tmp_path / "broker", binary=old)
    with pytest.warns(MosquittoTooOld, match="loses QoS 2 messages by itself"):
        broker.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        broker.restart()
    assert broker.running
    broker.stop()


def test_its_files_and_its_port_are_for_us_alone(mosquitto: Mosquitto) -> None:
    assert mosquitto.directory.stat().st_mode & 0o777 == 0o700
    assert (mosquitto.directory / "mosquitto.conf").stat().st_mode & 0o777 == 0o600
    listeners = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    port = f"{mosquitto.port:04X}"
    assert {row[1] for row in listeners if row[3] == "0A" and row[1].endswith(port)} == {f"0100007F:{port}"}
