"""What a recorded run says, and that memory is seen while it is taken."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from typing import TYPE_CHECKING

from tests.helpers import wait_until
from towline.prove.account import Account
from towline.prove.large import LargePlan, LargeRun, append
from towline.prove.memory import Peaks, Watch
from towline.prove.referee import Verdict

if TYPE_CHECKING:
    from pathlib import Path


def run(*, acked: int = 20, rss: int = 300_000_000) -> LargeRun:
    verdict = Verdict(attempted=20, acked=acked, delivered=20, copies=20)
    peaks = Peaks(rss, 200_000_000, 100_000_000, 7)
    return LargeRun(LargePlan(messages=20), Account(verdict), peaks, 6_000_000, 1.23, 4.56)


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


def test_memory_and_spools_are_seen() -> None:
    with Watch(os.getpid, lambda: [os.getpid()]) as watch, tempfile.TemporaryFile() as spool:
        wait_until(lambda: watch.peaks.rss > 0)
        before = watch.peaks.anonymous
        held = bytearray(b"x") * (40 << 20)
        spool.truncate(1 << 30)
        wait_until(lambda: watch.peaks.anonymous > before + (30 << 20) and watch.peaks.spool >= 1 << 30)
        assert watch.peaks.rss >= watch.peaks.mapped > 0
        del held


def test_a_process_that_is_not_there_has_no_memory() -> None:
    with Watch(lambda: None, lambda: [1 << 22]) as watch:
        watch._look(spools=True)
    assert watch.peaks == Peaks()
