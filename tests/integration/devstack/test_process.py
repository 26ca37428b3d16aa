from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from towline_prove.devstack import process as ports
from towline_prove.devstack.process import LOOPBACK, Process, free_port, spawn


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


# Ports


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
