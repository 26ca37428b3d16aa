"""Power lost, or a call failed, at every step of a journal's and an outbox's life: what had returned is on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest

from tests.unit.journal.support import SMALL, opened, opened_outbox, rows, served, step_before
from towline.errors import JournalError
from towline.journal import Batch, Disk, InFlight, Journal, Outbox
from towline.journal.outbox import PHASE_PUBLISHED, PHASE_RELEASED


class PowerLoss(Disk):
    """The real disk; a power failure leaves what was synced, under names that were, or some of the rest."""

    def __init__(self, life: Life) -> None:
        self.life, self.calls, self.fail_at, self.failed = life, 0, 0, ""
        self.content: dict[int, bytes] = {}
        self.names: dict[Path, dict[str, int]] = {}
        #: Open as long as the disk, so that no inode number is used twice.
        self.files: dict[int, int] = {}

    def step(self, name: str) -> None:
        self.calls += 1
        self.life.look()
        if self.calls == self.fail_at:
            self.failed = name
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self.files[os.fstat(descriptor).st_ino] = os.dup(descriptor)
        return descriptor

    def sync(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        self.content[stat.st_ino] = os.pread(descriptor, stat.st_size, 0)

    sync_data = sync

    def sync_directory(self, directory: Path) -> None:
        if directory.is_relative_to(self.life.top):
            self.names[directory] = {child.name: child.stat().st_ino for child in directory.iterdir()}

    def left(self, dice: Random | None, source: Path, name: str = "") -> Iterator[tuple[str, bytes]]:
        """Files below a directory after a power failure, the worst one without dice."""
        now = {child.name: child.stat().st_ino for child in source.iterdir()}
        durable = self.names.get(source, {})
        for child in {**durable, **now}:
            inode = (now if dice and dice.random() < 0.5 else durable).get(child, 0)
            if inode in self.files:
                yield f"{name}{child}", self._content(inode, dice)
            elif inode and (source / child).is_dir():
                yield from self.left(dice, source / child, f"{name}{child}/")

    def _content(self, inode: int, dice: Random | None) -> bytes:
        durable = self.content.get(inode, b"")
        if dice is None:
            return durable
        tail = bytearray(os.pread(self.files[inode], 1 << 20, len(durable)))
        for at in range(0, len(tail), 64):
            if dice.random() < 0.5:
                tail[at : at + 64] = bytes(len(tail[at : at + 64]))
        return durable + tail[: dice.randrange(len(tail) + 1)]

    def close(self) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)


step_before(PowerLoss, "create", "write", "sync_data", "sync", "sync_directory", "truncate", "rename", "remove")


class Life:
    """A journal that is opened in a new directory, lives, and is opened again."""

    def __init__(self, top: Path, *, openings: int = 2, watched: bool = True) -> None:
        self.top, self.openings, self.watched, self.looks = top, openings, watched, 0
        top.mkdir()
        self.disk = PowerLoss(self)
        self.journal: Journal | None = None
        #: Rows whose append has returned, and those that were to be appended.
        self.rows = self.tried = self.committed = 0
        #: What may be on the disk, the newest last; one that has returned is all there may be.
        self.held: list[dict[int, tuple[int, int]]] = [{}]
        self.sessions: list[dict[str, int]] = [{}]
        self._seen: set[int] = set()

    def look(self) -> None:
        """Judge the disks that power lost now, or a kill, could leave."""
        if self.watched:
            for dice in (None, Random(self.looks)):
                self.judge(dict(self.disk.left(dice, self.top)))
            self.judge({str(path.relative_to(self.top)): path.read_bytes() for path in self.top.rglob("*.*")})

    def judge(self, files: dict[str, bytes]) -> None:
        state = hash((frozenset(files.items()), self.rows, self.committed, str(self.held), str(self.sessions)))
        if state in self._seen:
            return
        self._seen.add(state)
        self.looks += 1
        target = self.top.with_name("looked at")
        for name, content in files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(content)
        self.check(target / "state" / "inbox")
        shutil.rmtree(target, ignore_errors=True)

    def check(self, directory: Path) -> None:
        with opened(directory, SMALL) as journal:
            assert self.rows <= journal.end <= self.tried
            assert journal.held_ids in self.held
            assert journal.session in self.sessions
            assert journal.first_offset <= self.committed
            assert journal.committed <= self.committed
            served(journal)
            journal.append(rows(journal.end, 1))

    def live(self) -> None:
        for opening in range(self.openings):
            self.journal = journal = opened(self.top / "state" / "inbox", SMALL, self.disk)
            for number in range(6):
                packet_id = 10 * opening + number + 2
                self.append(journal, 5, {packet_id: (self.rows, 7)}, [packet_id - 2])
                if number % 3 == 1:
                    self.append(journal, 0, {}, [packet_id])
                    self.sessions = [self.sessions[-1], {"opening": opening, "number": number}]
                    journal.set_session(self.sessions[-1])
                    del self.sessions[0]
                if number % 3 == 2:
                    self.committed = self.rows - 5
                    journal.commit("spark", self.committed)
            journal.close()

    def append(self, journal: Journal, count: int, held: dict[int, tuple[int, int]], released: list[int]) -> None:
        before, self.tried = self.held[-1], self.rows + count
        self.held = [before, {i: entry for i, entry in before.items() if i not in released} | held]
        batch = rows(self.rows, count, 300) if count else None
        journal.append(batch, held_ids=held, released_ids=released)
        self.rows = self.tried
        del self.held[0]


class OutboxLife(Life):
    """An outbox whose messages are published, released and done, and whose batches come twice."""

    def __init__(self, top: Path) -> None:
        super().__init__(top)
        #: Packet id → row, the phase that is durable, and the one that was to be.
        self.given: dict[int, tuple[int, list[int]]] = {}
        self.marked: set[int] = set()
        self.batches = 0

    def check(self, directory: Path) -> None:
        with opened_outbox(directory, SMALL) as outbox:
            assert self.rows <= outbox.end <= self.tried
            assert {number for number in range(self.tried) if number in outbox.done_rows} <= self.marked
            for packet_id, (row, phases) in self.given.items():
                flight = outbox.in_flight.get(packet_id)
                if flight is None or flight.row_number != row:
                    assert row in outbox.done_rows or phases[0] < 0, "it would leave under another id"
                else:
                    assert flight.phase in phases
            for number in range(self.batches):
                assert outbox.batch_status(Batch("q/0", number)).whole
            start = outbox.done_rows.watermark
            assert sum(batch.num_rows for batch in outbox.read(start, outbox.end)) == outbox.end - start

    def live(self) -> None:
        for _ in range(2):
            self.journal = outbox = opened_outbox(self.top / "state" / "inbox", SMALL, self.disk)
            for _ in range(5):
                self.tried = self.rows + 3
                outbox.append_batch(rows(self.rows, 3, 300), Batch("q/0", self.batches))
                self.rows, self.batches = self.tried, self.batches + 1
                packet_id = self.batches % 2 + 1
                for phase in (PHASE_PUBLISHED, PHASE_RELEASED):
                    self.fly(outbox, packet_id, self.rows - 1, phase)
                self.marked |= {self.rows - 1, self.rows - 2, self.rows - 3}
                outbox.mark_done([self.rows - 1, self.rows - 2, self.rows - 3], [packet_id], outcomes={"sent": 1})
                if self.batches % 3 == 0:
                    outbox.flush(durable=self.batches % 2 == 0)
            outbox.flush()
            outbox.close()

    def fly(self, outbox: Outbox, packet_id: int, row: int, phase: int) -> None:
        previous = self.given.get(packet_id, (-1, [-1]))
        before = previous[1][-1] if previous[0] == row else -1
        self.given[packet_id] = (row, [before, phase])
        outbox.write_in_flight({packet_id: InFlight(row, phase)})
        self.given[packet_id] = (row, [phase])


@pytest.mark.parametrize("kind", [Life, OutboxLife])
def test_power_lost_at_every_call_takes_nothing_that_had_returned(memory_path: Path, kind: type[Life]) -> None:
    """[I2] [I3] [I5] [I10]: rows, packet ids and phases, session; names up to the top, before there is a journal."""
    life = kind(memory_path / "top")
    life.live()
    life.disk.close()
    assert life.looks > 100


def test_a_call_that_fails_is_the_last_one_and_loses_nothing(memory_path: Path) -> None:
    """[I6]: the kernel tells of a failed sync once, and says "ok" to the next one."""
    for at in range(1, 1000):
        life = Life(memory_path / str(at), openings=1, watched=False)
        life.disk.fail_at = at
        with contextlib.suppress(JournalError):
            life.live()
        if not life.disk.failed:
            break
        journal, calls = life.journal, life.disk.calls
        if journal is not None and life.disk.failed != "remove":  # a file that can't be removed goes later
            for repeat in (partial(journal.append, rows(0, 1)), partial(journal.read, 0, 0), journal.sync):
                with pytest.raises(JournalError, match=r"TL-J(04|10)"):
                    repeat()
            journal.close()
            assert life.disk.calls == calls
        life.judge(dict(life.disk.left(None, life.top)))
        life.disk.close()
    assert at > 30
