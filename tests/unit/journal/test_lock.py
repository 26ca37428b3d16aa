"""One owner per directory, also across processes, also when the owner is killed [I8]."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.unit.journal.support import opened, rows, served
from towline.errors import JournalError, JournalLocked
from towline.journal.lock import Lock

CHILD = """
import sys
from pathlib import Path
from tests.unit.journal.support import opened, rows
journal = opened(Path(sys.argv[1]))
print("open", flush=True)
while True:
    journal.append(rows(journal.end, 3))
    print(journal.end, flush=True)
"""


def test_a_second_one_in_this_process_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(JournalLocked) as caught:
        opened(tmp_path)
    pattern = rf"{tmp_path}: locked by the process with pid {os.getpid()} \(since \d\d:\d\d\)\. .*\[TL-J03\]"
    assert re.match(pattern, str(caught.value))
    opened(tmp_path).close()


def test_a_child_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "open\n"
        with pytest.raises(JournalLocked, match=f"pid {child.pid} "):
            opened(tmp_path)
        acknowledged = [int(child.stdout.readline()) for _ in range(200)][-1]
    finally:
        child.kill()
        child.wait(60)
    acknowledged = max([acknowledged, *(int(line) for line in child.stdout if line.endswith("\n"))])
    child.stdout.close()
    with opened(tmp_path) as journal:
        assert journal.epoch == 2
        assert acknowledged <= journal.end <= acknowledged + 3
        served(journal)
        journal.append(rows(journal.end, 1))


@pytest.mark.parametrize(
    ("content", "holder"),
    [
        ("", "another process"),
        ("4711", "another process"),
        ("x y\n", "another process"),
        (f"4711 {datetime.now().astimezone().replace(hour=12, minute=31).isoformat()}\n", r"pid 4711 \(since 12:31\)"),
        (
            f"4711 {(datetime.now().astimezone() - timedelta(days=2)).isoformat()}\n",
            r"pid 4711 \(since \d{4}-\d\d-\d\d \d\d:\d\d\)",
        ),
    ],
    ids=["nothing", "no time", "rubbish", "today", "the day before yesterday"],
)
def test_who_holds_it(tmp_path: Path, content: str, holder: str) -> None:
    lock = Lock(tmp_path)
    (tmp_path / "lock").write_text(content)
    with pytest.raises(JournalLocked, match=f"locked by .*{holder}"):
        Lock(tmp_path)
    lock.release()
    lock.release()
    Lock(tmp_path).release()


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(JournalError, match=r"the journal's lock can't be taken here.*\[TL-J01\]"):
        Lock(tmp_path)


def test_a_failed_opening_leaves_no_lock(tmp_path: Path) -> None:
    (tmp_path / "x.seg").write_text("foreign")
    for _ in range(2):
        with pytest.raises(JournalError, match="TL-J09"):
            opened(tmp_path)
    (tmp_path / "x.seg").unlink()
    opened(tmp_path).close()
