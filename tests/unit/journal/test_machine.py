"""Random lives of a journal against a list: append, commit, read, roll, close, kill, torn writes."""

from __future__ import annotations

import random
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.journal.support import FAST, SCHEMA, crash, opened, rows, segments, segments_of, served
from towline.journal import Journal, Limits


class JournalLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=FAST))
        self.limits = Limits()
        self.journal: Journal
        self.end = 0
        self.committed: dict[str, int] = {}
        self.session: dict[str, Any] = {}
        self.ledger: dict[str, int] = {}
        self.flushed: dict[str, int] = {}
        self.held: dict[int, tuple[int, int]] = {}
        self.first = 0
        self.epoch = 1
        self.writers: list[str] = []

    @initialize(segment=st.sampled_from([3000, 6000, 20_000]), retain=st.sampled_from([0, 10_000]))
    def begin(self, segment: int, retain: int) -> None:
        self.limits = Limits(min_free_bytes=0, segment_bytes=segment, retain_bytes=retain)
        self.journal = opened(self.directory, self.limits)
        self.identity = self.journal.journal_id
        assert re.fullmatch("[0-9a-f]{12}", self.identity)

    @rule(count=st.integers(1, 40), size=st.integers(20, 120))
    def append(self, count: int, size: int) -> None:
        assert self.journal.append(rows(self.end, count, size)) == self.end + count
        self.end += count
        self.writers += [self.journal.incarnation] * count
        self.flushed = dict(self.ledger)

    @rule(
        count=st.integers(0, 5),
        ids=st.sets(st.integers(1, 20), max_size=5),
        released=st.sets(st.integers(1, 20), max_size=5),
        digest=st.integers(0, 2**32 - 1),
    )
    def append_with_packet_ids(self, count: int, ids: set[int], released: set[int], digest: int) -> None:
        held = dict.fromkeys(ids, (self.end, digest))
        self.journal.append(rows(self.end, count), held_ids=held, released_ids=sorted(released))
        self.end += count
        self.writers += [self.journal.incarnation] * count
        if count or held or released:
            self.held = {k: v for k, v in self.held.items() if k not in released} | held
            self.flushed = dict(self.ledger)

    @rule(number=st.integers())
    def session_changes(self, number: int) -> None:
        self.session = {"number": number}
        self.journal.set_session(self.session)
        self.flushed = dict(self.ledger)

    @rule(name=st.sampled_from(["received", "dropped"]), more=st.integers(1, 9))
    def count(self, name: str, more: int) -> None:
        self.journal.count(**{name: more})
        self.ledger[name] = self.ledger.get(name, 0) + more

    @rule(consumer=st.sampled_from("ab"), part=st.floats(0, 1))
    def commit(self, consumer: str, part: float) -> None:
        upto = round(self.end * part)
        self.journal.commit(consumer, upto)
        before = self.committed.get(consumer, -1)
        if max(upto, self.journal.first_offset) > before:
            self.committed[consumer] = max(upto, self.first)
            self.flushed = dict(self.ledger)

    @rule(consumer=st.sampled_from("ab"))
    def forget(self, consumer: str) -> None:
        if self.committed.pop(consumer, None) is not None:
            self.flushed = dict(self.ledger)
        self.journal.forget(consumer)

    @rule(start=st.floats(0, 1), length=st.floats(0, 1), batch_rows=st.integers(1, 60))
    def read(self, start: float, length: float, batch_rows: int) -> None:
        first, end = self.journal.first_offset, self.end
        begin = first + round((end - first) * start)
        served(self.journal, begin, begin + round((end - begin) * length), batch_rows=batch_rows)

    @rule(start=st.floats(0, 1), max_bytes=st.integers(0, 20_000), max_rows=st.integers(1, 100))
    def locate(self, start: float, max_bytes: int, max_rows: int) -> None:
        begin = self.journal.first_offset + round((self.end - self.journal.first_offset) * start)
        end = self.journal.find_range_end(begin, max_bytes=max_bytes, max_rows=max_rows)
        assert min(begin + 1, self.end) <= end <= min(begin + max_rows, self.end)

    @rule()
    def reopen(self) -> None:
        self.journal.close()
        self.flushed = dict(self.ledger)
        self._open()

    @rule()
    def kill(self) -> None:
        crash(self.journal)
        self._open()

    def _open(self) -> None:
        before = self.journal.incarnation
        self.journal = opened(self.directory, self.limits)
        assert self.journal.incarnation != before
        self.epoch += 1
        self.ledger = dict(self.flushed)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "journal"):
            return
        journal = self.journal
        assert journal.end == self.end
        assert journal.epoch == self.epoch
        assert journal.consumers == self.committed
        assert journal.session == self.session
        assert journal.ledger == self.ledger
        assert journal.held_ids == self.held
        assert self.first <= journal.first_offset <= min(self.committed.values(), default=journal.first_offset)
        self.first = journal.first_offset
        assert journal.journal_id == self.identity
        for offset in {journal.first_offset, journal.end, (journal.first_offset + journal.end) // 2} - {0}:
            assert journal.incarnation_of(offset) == self.writers[offset - 1]
        for offset in (0, journal.first_offset - 1, journal.end + 1):
            assert journal.incarnation_of(offset) == ""

    @precondition(lambda self: self.end > 0)
    @rule(keep=st.floats(0, 0.99), noise=st.booleans(), seed=st.integers(0, 1000))
    def kill_in_a_write(self, keep: float, noise: bool, seed: int) -> None:
        """The next frame reaches the disk in part; the blocks behind it may hold anything."""
        crash(self.journal)
        last = segments(self.directory)[-1]
        whole = last.read_bytes()
        torn = b"TWLJ" + random.Random(seed).randbytes(2000)
        last.write_bytes(whole + torn[: max(1, round(len(torn) * keep))] + (bytes(seed) if noise else b""))
        self._open()
        assert ": cut " in self.journal.repair_note

    @invariant()
    def files_agree(self) -> None:
        if not hasattr(self, "journal"):
            return
        journal = self.journal
        files = segments(self.directory)
        assert journal.bytes_on_disk == sum(path.stat().st_size for path in files)
        assert [segment.path for segment in segments_of(journal)] == files
        assert journal._schema.equals(SCHEMA)

    def teardown(self) -> None:
        try:
            if hasattr(self, "journal"):
                served(self.journal)
                self.journal.close()
        finally:
            shutil.rmtree(self.directory)


JournalLife.TestCase.settings = settings(stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestLife = JournalLife.TestCase
