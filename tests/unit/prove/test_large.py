"""What a recorded run says, and that memory is seen while it is taken."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers import wait_until
from towline_prove.account import RunAccount
from towline_prove.large import LargePlan, LargeRun
from towline_prove.memory import Peaks, Watch
from towline_prove.referee import Verdict


def run(*, acked: int = 20, rss: int = 300_000_000) -> LargeRun:
    verdict = Verdict(attempted=20, acked=acked, delivered=20, copies=20)
    peaks = Peaks(rss, 200_000_000, 100_000_000, 7)
    return LargeRun(LargePlan(messages=20), RunAccount(verdict), peaks, 6_000_000, 1.23, 4.56)


def test_a_run_is_good_where_nothing_is_missing_and_the_gateway_stayed_small() -> None:
    assert run().ok
    assert not run(acked=19).ok
    assert not run(rss=400_000_001).ok


def test_the_record_has_what_was_asked_for_and_what_was_found() -> None:
    record = run().as_json()
    assert (record["messages"], record["attempted"], record["lost"], record["longest_s"]) == (20, 20, 0, 900.0)
    assert record["gateway_peak_rss_mb"] == 300.0


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
