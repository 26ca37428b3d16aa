"""One owner per directory, also across processes, also when the owner is killed [I8]."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.unit.journal.support import SMALL, fill, opened, rows, segments, served
from towline.errors import JournalError, JournalFailed, JournalLocked
from towline.journal import Disk
from towline.journal.disk import Lock

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
    pattern = rf"{tmp_path}: this process has it open already, .*\[TL-J03\]"
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
        ("4711 {today}\n", r"pid 4711 \(since 12:31\)"),
        ("4711 {before}\n", r"pid 4711 \(since \d{4}-\d\d-\d\d 12:31\)"),
    ],
    ids=["nothing", "no time", "rubbish", "today", "the day before yesterday"],
)
def test_who_holds_it(tmp_path: Path, content: str, holder: str) -> None:
    today = datetime.now().astimezone().replace(hour=12, minute=31)
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as another process does
        file.write(content.format(today=today.isoformat(), before=(today - timedelta(days=2)).isoformat()))
        file.flush()
        with pytest.raises(JournalLocked, match=f"locked by .*{holder}"):
            Lock(tmp_path)
    lock = Lock(tmp_path)
    lock.release()
    lock.release()
    Lock(tmp_path).release()


def test_a_lock_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(JournalError, match=r"the journal can't be locked here.*\[TL-J01\]"):
        Lock(tmp_path)


@pytest.mark.parametrize("how", ["removed", "replaced", "moved", "copied over"])
def test_who_lost_the_lock_file_does_nothing_more(tmp_path: Path, how: str) -> None:
    """Another owner can be there from the moment on at which the name means no file, or another one."""
    place = tmp_path / "inbox"
    journal = opened(place, SMALL)
    fill(journal, 60)
    if how == "removed":
        (place / "lock").unlink()
    elif how == "replaced":
        (tmp_path / "lock").touch()
        (tmp_path / "lock").replace(place / "lock")
    else:
        place.rename(tmp_path / "away")
        if how == "copied over":
            shutil.copytree(tmp_path / "away", place)
    if how != "moved":
        with opened(place, SMALL) as other:
            assert other.end == 60
            before = sorted(path.name for path in segments(place))
            for change in (
                lambda: journal.append(rows(60, 1)),
                lambda: journal.commit("spark", 60),
                lambda: journal.set_session({"a": 1}),
            ):
                with pytest.raises(JournalFailed, match=r"lock: the lock file was (removed|replaced).*\[TL-J11\]"):
                    change()
            assert sorted(path.name for path in segments(place)) == before, "nothing of the other one's was touched"
            other.append(rows(60, 1))
            served(other)
    with pytest.raises(JournalFailed, match="TL-J11"):
        journal.sync()
    journal.close()


def test_what_was_made_durable_after_the_loss_is_not_promised(tmp_path: Path) -> None:
    """The other owner may have read the file just before these rows reached it."""

    class Losing(Disk):
        armed = False

        def sync_data(self, descriptor: int) -> None:
            if self.armed:
                (tmp_path / "lock").unlink()
            super().sync_data(descriptor)

    disk = Losing()
    journal = opened(tmp_path, disk=disk)
    journal.append(rows(0, 3))
    disk.armed = True
    with pytest.raises(JournalFailed, match="TL-J11"):
        journal.append(rows(3, 3))
    assert journal.end == 3
    journal.close()


def test_a_file_that_is_removed_just_before_it_is_locked_locks_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, removed = fcntl.flock, 0

    def slow(descriptor: int, operation: int) -> None:
        nonlocal removed
        if removed < 3:
            removed += 1
            (tmp_path / "lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    lock = Lock(tmp_path)
    assert removed == 3
    with pytest.raises(JournalLocked):
        Lock(tmp_path)
    lock.check()
    lock.release()


def test_a_lock_file_that_never_stays_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: (tmp_path / "lock").unlink())
    with pytest.raises(JournalError, match=r"removed repeatedly.*TL-J01"):
        Lock(tmp_path)


def test_a_failed_opening_leaves_no_lock(tmp_path: Path) -> None:
    (tmp_path / "x.seg").write_text("foreign")
    for _ in range(2):
        with pytest.raises(JournalError, match="TL-J09"):
            opened(tmp_path)
    (tmp_path / "x.seg").unlink()
    opened(tmp_path).close()
