"""One owner per directory [I8]."""

from __future__ import annotations

import fcntl
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.unit.journal.support import SMALL, Unsynced, fill, opened, rows, segments, served
from towline.errors import JournalError, JournalFailed, JournalLocked
from towline.journal.disk import Lock


def test_a_second_one_in_this_process_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(JournalLocked) as caught:
        opened(tmp_path)
    assert re.match(rf"{tmp_path}: this process has it open already, .*\[TL-J03\]", str(caught.value))
    (tmp_path / "x.seg").write_text("foreign")
    for _ in range(2):  # a failed opening leaves no lock
        with pytest.raises(JournalError, match=r"x.seg: is not a segment file of this journal format.*TL-J09"):
            opened(tmp_path)


@pytest.mark.parametrize(
    ("content", "holder"),
    [
        ("", "another process"),
        ("pid 4711 since 2026-11-28 12:31:00+01:00 \n", r"pid 4711 since 2026-11-28 12:31:00\+01:00\. One gateway"),
        ("\x1b[2J", r"\\x1b\[2J\. One gateway"),
    ],
)
def test_who_holds_it(tmp_path: Path, content: str, holder: str) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as another process does
        file.write(content)
        file.flush()
        with pytest.raises(JournalLocked, match=f"locked by .*{holder}"):
            Lock(tmp_path)
    lock = Lock(tmp_path)
    lock.release()
    lock.release()
    Lock(tmp_path).release()


@pytest.mark.parametrize("how", ["removed", "replaced", "moved", "copied over"])
def test_who_lost_the_lock_file_does_nothing_more(tmp_path: Path, how: str) -> None:
    """Another owner can be there from the moment on at which the name means no file, or another one."""
    place = tmp_path / "inbox"
    journal = opened(place, SMALL)
    fill(journal, 60, group=10)
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
            before = segments(place)
            for change in (partial(journal.append, rows(60, 1)), partial(journal.commit, "spark", 60)):
                with pytest.raises(JournalFailed, match=r"lock: the lock file was (removed|replaced).*\[TL-J11\]"):
                    change()
            assert segments(place) == before, "nothing of the other one's was touched"
            other.append(rows(60, 1))
            served(other)
    with pytest.raises(JournalFailed, match="TL-J11"):
        journal.sync()
    journal.close()


def test_what_was_made_durable_after_the_loss_is_not_promised(tmp_path: Path) -> None:
    """The other owner may have read the file just before these rows reached it."""

    class Losing(Unsynced):
        armed = False

        def sync_data(self, descriptor: int) -> None:
            assert descriptor
            if self.armed:
                (tmp_path / "lock").unlink()

    disk = Losing()
    journal = opened(tmp_path, disk=disk)
    journal.append(rows(0, 3))
    disk.armed = True
    with pytest.raises(JournalFailed, match="TL-J11"):
        journal.append(rows(3, 3))
    assert journal.end == 3
    journal.close()


def test_a_lock_that_cannot_be_had_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(JournalError, match=r"the journal can't be locked here.*\[TL-J01\]"):
        Lock(tmp_path)
    (tmp_path / "lock").rmdir()
    monkeypatch.setattr(fcntl, "flock", lambda *_: (tmp_path / "lock").unlink())
    with pytest.raises(JournalError, match=r"removed repeatedly.*TL-J01"):
        Lock(tmp_path)
