"""Processes and what tells one from another."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import wait_until
from towline import processes
from towline.processes import ProcessIdentity


def test_a_process_is_known_by_its_pid_namespace_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is not known, each process is known by itself only: nothing is said of the others."""
    mark = ProcessIdentity.of(os.getpid())
    other = ProcessIdentity(mark.pid, mark.started + 1, f"{mark.host} (pid namespace 4026532281)")
    assert (other.has_ended(), other.is_running()) == (False, False)
    monkeypatch.setattr(processes, "_FIRST_NAMESPACE", 1)
    assert ProcessIdentity.of(mark.pid).host.startswith(f"{mark.host} (pid namespace ")
    monkeypatch.setattr(os, "getpid", lambda: mark.pid + 1)  # /proc is that of another namespace
    unknown = ProcessIdentity.of(mark.pid)
    assert unknown.host.startswith(f"{mark.host} (pid namespace unknown, process {mark.pid + 1}-")
    assert unknown == ProcessIdentity.of(mark.pid)
    monkeypatch.setattr(processes, "_NONCE", "another process")
    assert not unknown.has_ended()


def test_a_zombie_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        wait_until(lambda: (processes.stat_fields(child.pid) or ["gone"])[0] == "Z", what="a zombie")
        assert processes.start_time(child.pid) is None
        assert ProcessIdentity.of(child.pid).started == 0
    finally:
        child.wait()
    assert processes.stat_fields(child.pid) is None


def test_a_process_whose_first_thread_has_ended_runs_on() -> None:
    """As a killed JVM, whose other threads still hold its files and ports."""
    program = (
        "import threading, ctypes, sys; done = threading.Event()\n"
        "threading.Thread(target=lambda: (print('up', flush=True), sys.stdin.read())).start()\n"
        "ctypes.CDLL(None).pthread_exit(0)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        wait_until(
            lambda: (processes.stat_fields(child.pid) or ["gone"])[0] == "Z", what="a first thread that has ended"
        )
        assert processes.start_time(child.pid) is not None
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("abstract", [False, True])
def test_a_service_manager_is_told(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sd_notify(3) says it, at either kind of address; where nobody asks, or listens any more, nothing happens."""
    processes.notify(READY="1")
    place = f"{tmp_path}/notify"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{place}" if abstract else place)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{place}" if abstract else place)
        processes.notify(READY="1", STATUS="line: running")
        assert manager.recv(100) == b"READY=1\nSTATUS=line: running"
        for _ in range(1000):  # more than it keeps
            processes.notify(STATUS="it does not listen")
    processes.notify(STOPPING="1")
