"""What a recorded run says, and that memory is seen while it is taken."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.helpers import wait_until
from towline_prove.account import RunAccount
from towline_prove.large import LargePlan, LargeRun, append
from towline_prove.memory import Peaks, Watch
from towline_prove.referee import Verdict

if TYPE_CHECKING:
    from pathlib import Path


def run(*, acked: int = 20, rss: int = 300_000_000) -> LargeRun:
    verdict = Verdict(attempted=20, acked=acked, delivered=20, copies=20)
    peaks = Peaks(rss, 200_000_000, 100_000_000, 7)
    return LargeRun(LargePlan(messages=20), RunAccount(verdict), peaks, 6_000_000, 1.23, 4.56)


def test_a_run_is_good_where_nothing_is_missing_and_the_gateway_stayed_small() -> None:
    assert run().ok
    assert not run(acked=19).ok
    assert not run(rss=400_000_001).ok


def test_a_line_names_no_machine_and_no_directory(tmp_path: Path) -> None:
    record = tmp_path / "proof" / "large.jsonl"
    append(run(), record)
    append(run(acked=3), record)
    lines = record.read_text().splitlines()
    assert [json.loads(line)["ok"] for line in lines] == [True, False]
    assert all(socket.gethostname() not in line and str(tmp_path) not in line for line in lines)
    assert json.loads(lines[0])["gateway_peak_rss_mb"] == 300.0


#: Takes memory and a file without a name when it is told to, and keeps both until its standard input ends.
TAKER = """
import sys, tempfile
sys.stdin.readline()
held, spool = bytearray(b"x") * (40 << 20), tempfile.TemporaryFile()
spool.truncate(1 << 30)
sys.stdin.read()
"""


def test_memory_and_spools_are_seen() -> None:
    """Of a process of its own: this one may give back what other tests took."""
    with subprocess.Popen([sys.executable, "-c", TAKER], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        with Watch(lambda: child.pid, lambda: [child.pid]) as watch:
            wait_until(lambda: watch.peaks.rss > 0)
            before = watch.peaks.anonymous
            child.stdin.write(b"\n")
            child.stdin.flush()
            wait_until(lambda: watch.peaks.anonymous > before + (30 << 20) and watch.peaks.spool >= 1 << 30)
            assert watch.peaks.rss >= watch.peaks.mapped > 0


def test_a_process_that_is_not_there_has_no_memory() -> None:
    with Watch(lambda: None, lambda: [1 << 22]) as watch:
        watch._look(spools=True)
    assert watch.peaks == Peaks()
