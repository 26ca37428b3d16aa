"""A real Mosquitto: started, killed, paused, refused; its process, and the port that it is given."""

from __future__ import annotations

import json
import os
import signal
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from towline.errors import SetupError
from towline_prove.devstack import Mosquitto, MosquittoTooOld
from towline_prove.devstack import process as ports
from towline_prove.devstack.mosquitto import find_mosquitto
from towline_prove.devstack.process import LOOPBACK, Process, free_port, spawn

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


# -- any server's process and port


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Process]:
    child, process = spawn(["sleep", "60"], tmp_path / "log")
    yield process
    child.kill()
    child.wait()


def test_a_recycled_pid_is_never_signalled(sleeper: Process) -> None:
    namesake = Process(sleeper.pid, sleeper.started - 1, sleeper.host)
    assert not namesake.alive
    assert not namesake.send(signal.SIGKILL)
    assert sleeper.alive


@pytest.mark.parametrize(
    ("outgoing", "candidates"),
    [
        ((32_768, 60_999), range(15_000, 32_768)),
        ((20_000, 50_000), range(50_001, 65_536)),
        ((1_024, 65_535), range(15_000, 65_536)),  # nothing left outside: better any port than none
    ],
)
def test_the_larger_side_is_used(monkeypatch: pytest.MonkeyPatch, outgoing: tuple[int, int], candidates: range) -> None:
    monkeypatch.setattr(ports, "_outgoing_range", lambda: outgoing)
    assert ports._candidates() == candidates


def test_a_taken_port_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "_candidates", lambda: range(taken, taken + 1))
        assert free_port() != taken  # after a hundred tries the kernel is asked
