"""strace itself: counting, killing and failing the n-th call of a tiny program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.strace import Injection, can_trace, count_calls, count_command, inject_command, was_injected
from towline.errors import SetupError

traced = pytest.mark.skipif(not can_trace(), reason="strace is missing or ptrace is not allowed here")

PROGRAM = """
import os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
for n in range(3):
    os.write(fd, b"x")
    os.fdatasync(fd)
"""


def program(path: Path) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(path)]


@traced
@pytest.mark.faults
def test_calls_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = count_command(program(tmp_path / "data"), ["fdatasync", "write"], log, [tmp_path / "data"])
    assert subprocess.run(command, check=False).returncode == 0
    assert count_calls(log) == {"fdatasync": 3, "write": 3}
    assert not was_injected(log)


@traced
@pytest.mark.faults
@pytest.mark.parametrize(("when", "kills"), [(1, True), (2, True), (3, True), (4, False)])
def test_the_nth_call_kills_if_it_comes(tmp_path: Path, when: int, *, kills: bool) -> None:
    log = tmp_path / "log"
    command = inject_command(program(tmp_path / "data"), Injection("fdatasync", str(when), "KILL"), log)
    assert subprocess.run(command, check=False).returncode in ({-9, 137} if kills else {0})
    assert was_injected(log) == kills
    assert (tmp_path / "data").stat().st_size == min(when, 3)


@traced
@pytest.mark.faults
@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
def test_the_nth_call_fails_on_the_named_file(tmp_path: Path, fault: str) -> None:
    log = tmp_path / "log"
    injection = Injection("write", "2+", "EIO" if fault == "EIO" else "ENOSPC", (tmp_path / "data",))
    done = subprocess.run(inject_command(program(tmp_path / "data"), injection, log), check=False, capture_output=True)
    assert done.returncode == 1
    assert (b"Errno 5" if fault == "EIO" else b"Errno 28") in done.stderr
    assert was_injected(log)


def test_a_missing_strace_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    assert not can_trace()
    with pytest.raises(SetupError, match=r"strace: not installed.*TL-S61"):
        inject_command(["true"], Injection("write", "1", "KILL"), tmp_path / "log")
