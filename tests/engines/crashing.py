"""Every step of a journal's transactions in Kafka as a place to be killed at: enumerated, not sampled.

A process forked from one that has imported everything opens the journal, does a fixed piece of work, and writes down
each step whose call has returned: that is what a gateway would have acknowledged. Its Kafka client counts its calls,
and at the n-th it sends what is queued and kills its process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import KafkaException, Producer

from towline.journal import Journal
from towline.kafka import producers
from towline.landing.opening import open_journal
from towline.landing.place import LandingPlace
from towline.landing.topics import NewTopics
from towline.schema import ROW_SCHEMA

__all__ = ["WORK", "Model", "received", "reopened", "run_killed"]

_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(["__main__", "towline.gateway.__main__", "tests.engines.crashing"])


def received(first: int, count: int) -> Any:
    """Rows as a gateway receives them."""
    rows = [
        {"topic": f"t/{number}", "payload": b"%d" % number, "qos": 2, "retain": False, "gateway": "g", "offset": number}
        for number in range(first, first + count)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=ROW_SCHEMA)


@dataclass
class Model:
    """What has to be in the journal after some steps."""

    end: int = 0
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    session: Mapping[str, object] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    consumers: dict[str, int] = field(default_factory=dict)

    def agrees(self, journal: Journal) -> bool:
        """Whether a journal holds that, and rows of these numbers in this order."""
        numbers = [n for batch in journal.read(journal.first, journal.end) for n in batch.column("offset").to_pylist()]
        return (journal.end, dict(journal.held), dict(journal.session), dict(journal.notes)) == (
            self.end,
            self.held,
            self.session,
            self.notes,
        ) and (dict(journal.consumers) == self.consumers and numbers == list(range(journal.first, self.end)))


def _rows(count: int, held: Mapping[int, int], released: tuple[int, ...] = ()) -> Callable[[Journal, Model], None]:
    def step(journal: Journal, model: Model) -> None:
        entries = {packet_id: (model.end + index, 7) for packet_id, index in held.items()}
        journal.append(received(model.end, count), held=entries, released=released, notes={"last": model.end})
        _expect_rows(model, count, entries, released)

    return step


def _expect_rows(model: Model, count: int, held: Mapping[int, tuple[int, int]], released: tuple[int, ...]) -> None:
    model.notes["last"] = model.end
    model.end += count
    model.held = {packet_id: one for packet_id, one in model.held.items() if packet_id not in released} | dict(held)


def _release(journal: Journal, model: Model) -> None:
    journal.append(journal.no_rows, released=(2,))
    model.held.pop(2, None)


def _session(journal: Journal, model: Model) -> None:
    journal.set_session({"client": "plant-7"})
    model.session = {"client": "plant-7"}


def _commit(journal: Journal, model: Model) -> None:
    journal.commit("spark", 2)
    model.consumers = {"spark": 2}


#: What is done, in order: rows with packet ids, rows and ids that are free again, ids alone, session, a watermark.
WORK: Final[tuple[Callable[[Journal, Model], None], ...]] = (
    _session,
    _rows(3, {1: 0, 2: 1, 3: 2}),
    _rows(2, {1: 0}, released=(1,)),
    _release,
    _commit,
)


class _Counting:
    """A producer whose n-th call is never answered: what is queued goes out, and the process is killed."""

    def __init__(self, config: Mapping[str, Any], **more: Any) -> None:
        self._producer = Producer(dict(config), **more)

    at: int = 0
    seen: int = 0
    counting: bool = False

    def _reach(self, last: Callable[[], object] = lambda: None) -> None:
        if not _Counting.counting:
            return
        _Counting.seen += 1
        if _Counting.seen == _Counting.at:
            with contextlib.suppress(KafkaException):
                self._producer.flush(5)
                last()
            os.kill(os.getpid(), signal.SIGKILL)

    def begin_transaction(self, *args: Any) -> Any:
        self._reach()
        return self._producer.begin_transaction(*args)

    def produce(self, *args: Any, **more: Any) -> Any:
        self._reach()
        return self._producer.produce(*args, **more)

    def commit_transaction(self, *args: Any) -> None:
        self._reach()  # before it is sent
        self._reach(lambda: self._producer.commit_transaction(0.001))  # sent, and the answer not awaited
        self._producer.commit_transaction(*args)
        self._reach()  # answered, and nobody was told

    def __len__(self) -> int:
        return len(self._producer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)


def _work(place: LandingPlace, at: int, done: Path) -> None:
    """In the process that is killed."""
    setattr(producers, "Producer", _Counting)  # noqa: B010 - every transactional producer counts
    _Counting.at = at
    journal = open_journal(place, schema=ROW_SCHEMA, create=NewTopics(), repeats=True)
    _Counting.counting = True
    model = Model()
    for number, step in enumerate(WORK, start=1):
        step(journal, model)
        done.write_text(str(number))
    _Counting.counting = False
    journal.close()


def run_killed(place: LandingPlace, at: int, done: Path) -> tuple[int, bool]:
    """Do the work and be killed at a call; how many steps had returned, and whether it was killed."""
    done.write_text("0")
    process = _forkserver.Process(target=_work, args=(place, at, done))
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return int(done.read_text()), process.exitcode != 0


def reopened(place: LandingPlace) -> Journal:
    """The journal as the next owner finds it."""
    return open_journal(place, schema=ROW_SCHEMA, repeats=True)
