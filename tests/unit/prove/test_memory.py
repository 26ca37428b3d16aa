"""What may not grow, and that memory is seen while it is taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import wait_until
from towline_prove.devstack.process import Process
from towline_prove.processes import MemorySample, MemoryWatch, Peaks, growth_problems
from towline_prove.subject import BridgeRun


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
