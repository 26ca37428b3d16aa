from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import wait_until
from towline_prove.devstack import process as ports
from towline_prove.devstack.process import LOOPBACK, Process, free_port, is_stopped, spawn


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Process]:
    child, process = spawn(["sleep", "60"], tmp_path / "log")
    yield process
    child.kill()
    child.wait()


def test_a_process_leads_a_session_of_its_own(sleeper: Process) -> None:
    assert os.getsid(sleeper.pid) == sleeper.pid


def test_a_killed_process_is_gone_though_nobody_has_waited_for_it(sleeper: Process) -> None:
    assert sleeper.send(signal.SIGKILL)
    assert sleeper.wait_gone(5)
    assert not sleeper.alive
    assert not sleeper.send(signal.SIGTERM)


def test_a_recycled_pid_is_never_signalled(sleeper: Process) -> None:
    namesake = Process(sleeper.pid, sleeper.started - 1, sleeper.host)
    assert not namesake.alive
    assert not namesake.send(signal.SIGKILL)
    assert sleeper.alive


def test_a_pid_that_does_not_exist_has_no_identity() -> None:
    beyond = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    assert not Process.of(beyond).alive
    assert not is_stopped(beyond)


def test_a_name_with_brackets_and_spaces_does_not_confuse(tmp_path: Path) -> None:
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/sleep")
    child, process = spawn([program, "60"], tmp_path / "log")
    try:
        wait_until(lambda: "a) S" in Path(f"/proc/{process.pid}/comm").read_text(), what="the new name")
        assert process.alive
        assert Process.of(process.pid) == process
    finally:
        child.kill()
        child.wait()


def test_stopped_and_continued(sleeper: Process) -> None:
    sleeper.send(signal.SIGSTOP)
    wait_until(lambda: is_stopped(sleeper.pid), what="the stop")
    assert sleeper.alive
    sleeper.send(signal.SIGCONT)
    wait_until(lambda: not is_stopped(sleeper.pid), what="the continuation")


def test_a_process_with_a_dead_first_thread_is_still_alive(tmp_path: Path) -> None:
    """A JVM that is being killed shows a zombie while other threads hold its files."""
    program = tmp_path / "half_dead.py"
    program.write_text(
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).syscall(60 if __import__('platform').machine() == 'x86_64' else 93, 0)\n"
    )
    child, process = spawn([sys.executable, program], tmp_path / "log")
    try:
        wait_until(lambda: ") Z " in Path(f"/proc/{process.pid}/stat").read_text(), what="the first thread's end")
        assert process.alive
    finally:
        child.kill()
        assert process.wait_gone(5)
        child.wait()


def test_output_is_appended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("one", "two"):
        child, _ = spawn(["echo", word], log)
        child.wait()
    assert log.read_text().split() == ["one", "two"]


# Ports


def test_free_ports_lie_outside_the_range_of_outgoing_connections() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if low - ports.LOWEST_PORT < ports.MIN_RANGE_SIZE and ports.HIGHEST_PORT - high < ports.MIN_RANGE_SIZE:
        pytest.skip("this machine gives nearly every port to outgoing connections")
    for _ in range(50):
        assert not low <= free_port() <= high


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
