"""Processes told apart by what they run, and their memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import wait_until
from towline.bridge.runtime.child_supervisors import DriverSupervisor
from towline_prove import processes
from towline_prove.devstack.process import Process
from towline_prove.processes import (
    MemorySample,
    MemoryWatch,
    Peaks,
    Role,
    command_line,
    cpu_time_of,
    growth_problems,
    memory_of,
    pids_with_role,
    process_tree,
    role_of,
)
from towline_prove.subject import BridgeRun


def test_our_own_process_is_the_root_of_its_tree() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in process_tree(os.getpid())
        assert process_tree(os.getpid())[0] == os.getpid()
        assert command_line(child.pid).endswith("\0-c\0input()")
        assert memory_of(child.pid) > 1_000_000
        assert Process.of(child.pid).alive
    finally:
        child.communicate(b"\n", timeout=10)
    assert child.pid not in process_tree(os.getpid())
    assert not Process.of(child.pid).alive
    assert memory_of(child.pid) == 0
    assert command_line(child.pid) == ""


def test_cpu_of_this_process_grows() -> None:
    before = cpu_time_of([os.getpid()])
    deadline = time.monotonic() + 10
    while cpu_time_of([os.getpid()]).own_s - before.own_s < 0.05:
        assert time.monotonic() < deadline
    assert cpu_time_of([os.getpid()]).total_s >= cpu_time_of([os.getpid()]).own_s


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("/usr/bin/java\0-cp\0x\0org.apache.spark.deploy.SparkSubmit", Role.JVM),
        ("/v/bin/python\0-m\0pyspark.daemon\0pyspark.worker", Role.WORKER),
        ("/v/bin/python\0-m\0towline.gateway", Role.GATEWAY),
        ("\0".join(DriverSupervisor.command), Role.DRIVER),
        ("/v/bin/python\0/v/bin/towline\0run\0bridge.toml", Role.BRIDGE),
        ("/v/bin/python\0-m\0pytest", Role.OTHER),
        ("", Role.OTHER),
    ],
)
def test_roles(line: str, role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "command_line", lambda _: line)
    assert role_of(1) is role


def test_a_role_is_found_below_its_root(tmp_path: Path) -> None:
    package = tmp_path / "towline" / "gateway"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "towline" / "__init__.py").touch()
    (package / "__main__.py").write_text("input()")
    others = {*pids_with_role(os.getpid(), Role.GATEWAY)}  # of tests before, which end with this process
    child = subprocess.Popen([sys.executable, "-m", "towline.gateway"], stdin=subprocess.PIPE, cwd=tmp_path)
    try:
        wait_until(
            lambda: {*pids_with_role(os.getpid(), Role.GATEWAY)} - others == {child.pid}, what="the process in its role"
        )
    finally:
        child.communicate(b"\n", timeout=10)


def test_who_was_killed_is_gone_when_the_kill_returns(tmp_path: Path) -> None:
    """Memory takes the kernel a moment to free: who looks meanwhile would find the role played, and start nobody."""
    bridge = BridgeRun(tmp_path / "b.toml", tmp_path, tmp_path / "log")
    large = "import sys; held = b'x' * (1 << 29); print(flush=True); sys.stdin.read()"
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", large], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as bridge.child:
            assert bridge.child.stdout is not None
            bridge.child.stdout.readline()
            assert bridge.kill_role(Role.BRIDGE)
            assert not bridge.running
    assert not bridge.kill_role(Role.BRIDGE)


# Memory


def looks(driver: float = 121.0, *, heap: float = 91.0, files: int = 420) -> list[MemorySample]:
    settled = [MemorySample(batch, {"driver": 120.0, "jvm": 800.0}, 90.0, 420, 3000) for batch in range(5, 100, 5)]
    last = MemorySample(100, {"driver": driver, "jvm": 1300.0}, heap, files, 3000)
    return [MemorySample(1, {"driver": 60.0, "jvm": 300.0}, 50.0, 19, 300), *settled, last]


def test_what_grows_before_the_first_tenth_is_a_start() -> None:
    assert growth_problems(looks()) == []


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (looks(150.0), "driver grew from 120 to 150 MB"),
        (looks(heap=130.0), "heap grew from 90 to 130 MB"),
        (looks(files=20_000), "20,000 files"),
    ],
)
def test_growth_is_a_problem(seen: list[MemorySample], said: str) -> None:
    (problem,) = growth_problems(seen)
    assert said in problem


#: Takes memory and a file without a name when it is told to, and keeps both until its standard input ends.
TAKER = """
import sys, tempfile
sys.stdin.readline()
held, spool = bytearray(b"x") * (40 << 20), tempfile.TemporaryFile()
spool.truncate(1 << 30)
sys.stdin.read()
"""


class Taker(BridgeRun):
    """One process is all of it."""

    pid: int | None = None

    def gateway_process(self) -> Process | None:
        return None if self.pid is None else Process.of(self.pid)

    def all_pids(self) -> list[int]:
        return [1 << 22 if self.pid is None else self.pid]


def test_memory_and_spools_are_seen(tmp_path: Path) -> None:
    """Of a process of its own: this one may give back what other tests took."""
    bridge = Taker(tmp_path, tmp_path, tmp_path)
    with subprocess.Popen([sys.executable, "-c", TAKER], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        bridge.pid = child.pid
        with MemoryWatch(bridge) as watch:
            wait_until(lambda: watch.peaks.rss > 0)
            before = watch.peaks.anonymous
            child.stdin.write(b"\n")
            child.stdin.flush()
            wait_until(lambda: watch.peaks.anonymous > before + (30 << 20) and watch.peaks.spool >= 1 << 30)
            assert watch.peaks.rss >= watch.peaks.mapped > 0


def test_a_process_that_is_not_there_has_no_memory(tmp_path: Path) -> None:
    with MemoryWatch(Taker(tmp_path, tmp_path, tmp_path)) as watch:
        watch.take_sample(with_spools=True)
    assert watch.peaks == Peaks()
