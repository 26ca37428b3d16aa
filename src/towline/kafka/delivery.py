"""What each guarantee does with the rows of a task: one strategy class each, the same records and the same client.

A strategy sees one task: its identity and an iterator of Arrow batches. It returns what became of them, or raises, in
which case Spark does not commit the batch and runs it again.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from towline.errors import KafkaError
from towline.kafka import faults, producers
from towline.kafka.faults import KEPT, Meaning
from towline.kafka.producers import Indefinite
from towline.kafka.screening import Lessons, RecordCheck, has_learned, require_topics
from towline.sinks import Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from towline.kafka.columns import Columns
    from towline.kafka.markers import MarkerStep
    from towline.kafka.options import SinkSettings


@dataclass(frozen=True)
class Delivered:
    """What became of a task's rows.

    Attributes:
        rows: Rows that reached Kafka where they belong; with acks=0, that were handed to the network.
        bytes: Bytes of keys and values of all rows seen; 0 if skipped.
        lost: Rows given up; always 0 but for at_most_once.
        why: Why rows were given up, in a few words.
        dead_lettered: Rows that went to the dead-letter topic, named by the row or because Kafka would refuse it.
        skipped: The batch was in Kafka already; the numbers are those of then.
        seconds: How long it was written, from the first record to Kafka's last answer; None where none is waited for.
        by_hand: It was skipped because a marker says so that a person set: nobody counted its rows.
        marks: What its markers said before and say after it; None without.
    """

    rows: int
    bytes: int
    lost: int = 0
    why: str = ""
    dead_lettered: int = 0
    skipped: bool = False
    seconds: float | None = field(default=None, compare=False)
    by_hand: bool = False
    marks: MarkerStep | None = field(default=None, compare=False)


class Delivery(ABC):
    """How the rows of one task reach Kafka; picklable, made on the driver.

    Args:
        settings: The sink's settings.
        columns: The columns bound to the query's schema.
    """

    def __init__(self, settings: SinkSettings, columns: Columns) -> None:
        self.settings = settings
        self.columns = columns

    @abstractmethod
    def deliver(self, task: Task, batches: Iterable[Any]) -> Delivered:
        """Write ``pyarrow.RecordBatch``es.

        Raises:
            KafkaError: The rows are not safely in Kafka; the task must fail.
            ConfigError: A secret can't be read here.
        """


class AtLeastOnce(Delivery):
    """Idempotent producer, acks=all, and no success before every record is confirmed."""

    def deliver(self, task: Task, batches: Iterable[Any]) -> Delivered:  # noqa: ARG002 - who writes is all one here
        """Write and wait; any record without confirmation fails the task (TL-K02, TL-K03, TL-K29).

        No record has a time of its own: what Kafka takes slowly is waited for as long as it takes anything. Rows among
        which it refuses one are written again with what that tells, as far as they are at hand.
        """
        copies = _Copies(batches, self.settings.spool_memory)
        lessons = Lessons(self.settings)
        whole = self.settings.dead_letter_topic is None and has_learned(self.settings)
        while True:
            screen = RecordCheck(self.settings, self.columns, self.settings.sink_id or "")
            if whole and copies.complete():  # all of them are looked at before any is written
                screen.look(copies.batches)
            rows = iter(copies)
            first = [*islice(rows, 1)]
            screen.look(first)
            fitting = screen.fitting() if lessons.unclear is None else {"batch.num.messages": "1"}
            settings = replace(self.settings, client={**self.settings.client, "message.timeout.ms": "0", **fitting})
            try:
                with producers.borrowed(settings) as client:
                    return self._write(client, screen, chain(first, rows), lessons)
            except Indefinite as problem:
                if problem.refusal is None:
                    raise problem.told from None
                lessons.take(problem.refusal, problem.told)
                whole = True
                if not copies.complete():
                    raise problem.told from None

    def _write(
        self, client: producers.KafkaProducer, screen: RecordCheck, batches: Iterable[Any], lessons: Lessons
    ) -> Delivered:
        rows = size = 0
        begun = time.perf_counter()
        try:
            for batch in batches:
                screen.look([batch])
                converted = screen.rows(batch)
                rows += converted.size
                size += converted.bytes
                if lessons.unclear is not None:
                    converted = converted._replace(records=lessons.alone(converted.records, screen.size, client))
                client.send(converted)
                if client.failures and lessons.unclear is None:
                    break
            left = client.flush(self.settings.timeout_s)
        except producers.QueueStuck:
            left = client.pending
        except faults.FOREIGN as problem:
            raise Indefinite(faults.gave_up(self.settings.servers, problem), client.refusal) from None
        if lost := left + client.failures:
            raise Indefinite(self._undelivered(client, lost, rows), client.refusal)
        if lessons.unclear is not None:  # each alone was taken
            lessons.conclude()
        dead = screen.dead_letters
        return Delivered(rows - dead, size, dead_lettered=dead, seconds=time.perf_counter() - begun)

    def _undelivered(self, client: producers.KafkaProducer, lost: int, rows: int) -> KafkaError:
        """TL-K02: Kafka did not confirm records in time; TL-K03: it refused them."""
        failed, why = client.failed, client.last.why
        if failed is None or faults.means(failed.error, Meaning.TIMEOUT):
            within = f"within {self.settings.timeout_s:g} s{why and f': {why}'}"
            what = f"Kafka did not take {lost:,} of {rows:,} records {within}"
            return KafkaError("TL-K02", self.settings.servers, what, f"Is it up and reachable? {KEPT}")
        why = f'the first for topic "{failed.topic}": {faults.reason(failed.error)}'
        what = f"Kafka refused {lost:,} of {rows:,} records, {why}"
        return KafkaError("TL-K03", self.settings.servers, what, faults.advice(faults.name_of(failed.error)))


class _Copies:
    """Rows as they come, and again as long as there is room for all of them."""

    def __init__(self, batches: Iterable[Any], room: int) -> None:
        self._rest = iter(batches)
        #: Bytes that more rows may have; below 0 there is no room.
        self._room = room
        self.batches: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        yield from [*self.batches]
        for batch in self._rest:
            self._keep(batch)
            if self._room < 0:
                self.batches.clear()
            yield batch

    def _keep(self, batch: Any) -> None:
        self._room -= batch.nbytes
        self.batches.append(batch)

    def complete(self) -> bool:
        """Read the rest, as far as there is room; whether all rows are at hand."""
        while self._room >= 0:
            if (batch := next(self._rest, None)) is None:
                return True
            self._keep(batch)
        return False


class AtMostOnce(Delivery):
    """acks=0, nothing sent twice: a repeated attempt writes nothing, and Kafka's silence costs rows, not time."""

    def deliver(self, task: Task, batches: Iterable[Any]) -> Delivered:
        """Write what can be written now; the rest is counted as lost."""
        if task.attempt > 0:
            return _count(batches, f"attempt {task.attempt + 1} of a task writes nothing")
        with producers.borrowed(self.settings) as client:
            return self._deliver(client, batches)

    def _deliver(self, client: producers.KafkaProducer, batches: Iterable[Any]) -> Delivered:
        rows = size = sent = 0
        remaining = iter(batches)
        why, screen = "", RecordCheck(self.settings, self.columns, self.settings.sink_id or "")
        try:
            for batch in remaining:
                refused = self.columns.refusals(batch) is not None
                converted = screen.rows(batch) if refused else self.columns.rows(batch)
                rows, size = rows + converted.size, size + converted.bytes
                require_topics(self.settings, converted.topics)
                client.send(converted)
                sent = rows
            client.flush(self.settings.timeout_s)
        except (KafkaError, producers.QueueStuck, *faults.FOREIGN) as problem:
            if isinstance(problem, KafkaError) and problem.code not in faults.SILENCE:
                raise
            why = problem.what if isinstance(problem, KafkaError) else faults.reason(problem)
        rest = _count(remaining)
        reached = max(0, sent - client.pending - client.failures)
        if lost := rows + rest.lost - reached:
            client.healthy, failed = False, client.failed
            why = why or ("Kafka did not take them in time" if failed is None else faults.reason(failed.error))
        dead = min(screen.dead_letters, reached)
        return Delivered(reached - dead, size + rest.bytes, lost, why, dead)


def _count(batches: Iterable[Any], why: str = "") -> Delivered:
    """Read rows to the end without writing them."""
    rows = size = 0
    for batch in batches:
        rows, size = rows + batch.num_rows, size + batch.nbytes
    return Delivered(0, size, rows, why)


#: Seconds to wait for Kafka's list of topics.
_LOOK_S: Final = 2.0


def require_named_topics(settings: SinkSettings) -> None:
    """See that the topics that are always written to are there, before a task or a row asks.

    Raises:
        KafkaError: TL-K04. No answer is no reason: the tasks wait longer for Kafka, and tell it.
    """
    named = {name for name in (settings.topic, settings.dead_letter_topic) if name}
    try:
        require_topics(replace(settings, timeout_s=_LOOK_S), named)
    except KafkaError as problem:
        if problem.code == "TL-K04":
            raise
