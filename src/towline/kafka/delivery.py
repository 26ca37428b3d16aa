"""What each guarantee does with the rows of a task: one strategy class each, the same records and the same client.

A strategy sees one task: its identity and an iterator of Arrow batches. It returns what became of them, or raises, in
which case Spark does not commit the batch and runs it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from towline.errors import KafkaError
from towline.kafka import admin, faults, producers
from towline.kafka.screening import RecordCheck, RecordLimits, fault_of
from towline.sinks import Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from towline.kafka.columns import Columns, Rows
    from towline.kafka.markers import MarkerStep
    from towline.kafka.options import SinkSettings

__all__ = ["AtLeastOnce", "AtMostOnce", "Delivered", "Delivery", "Task", "require_topics"]


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
        seconds: How long its transaction was open, from the first record to Kafka's answer; None without one.
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

    def _refuse_reserved(self, rows: Rows) -> None:
        """Stop at a topic that no row may name; with a dead-letter topic there is none left.

        Raises:
            KafkaError: TL-K06.
        """
        for topic in filter(self.settings.reserves, rows.topics):
            limits = RecordLimits({}, 0, None, 0, self.settings.reserves)
            fault = fault_of((topic,), limits)
            assert fault is not None, "it is reserved"
            raise faults.unfit(self.settings.servers, topic, fault.reason, fault.detail)


class AtLeastOnce(Delivery):
    """Idempotent producer, acks=all, and no success before every record is confirmed."""

    def deliver(self, task: Task, batches: Iterable[Any]) -> Delivered:  # noqa: ARG002 - who writes is all one here
        """Write and wait; any record without confirmation fails the task (TL-K02, TL-K03)."""
        settings, batches = self._fitted(iter(batches))
        client = producers.borrow(settings)
        try:
            return self._deliver(client, batches)
        except BaseException:
            # Also for KeyboardInterrupt and a stopped query: left-over records must not meet the next batch.
            producers.discard(settings)
            raise

    def _fitted(self, batches: Iterator[Any]) -> tuple[SinkSettings, Iterator[Any]]:
        """Settings whose batches fit into the topics of the first rows, and all rows; only with a dead-letter topic."""
        first = next(batches, None)
        if first is None or self.settings.dead_letter_topic is None:
            return self.settings, batches if first is None else chain([first], batches)
        screen = RecordCheck(self.settings, self.columns, "")
        screen.look([first])
        fitting = {**self.settings.client, **screen.fitting()}
        return replace(self.settings, client=fitting), chain([first], batches)

    def _deliver(self, client: producers.KafkaProducer, batches: Iterable[Any]) -> Delivered:
        rows = size = 0
        screen = RecordCheck(self.settings, self.columns, self.settings.sink_id or "")
        if self.columns.topic is not None:
            client.require({self.columns.topic})
        try:
            for batch in batches:
                converted = self._converted(screen, batch)
                self._refuse_reserved(converted)
                client.require(converted.topics)
                rows += converted.size
                size += converted.bytes
                client.send(converted)
                if client.failures:
                    break
            left = client.flush(self.settings.timeout_s + producers.GRACE_S)
        except producers.QueueStuck:
            left = client.pending
        except faults.FOREIGN as problem:
            raise faults.gave_up(self.settings.servers, problem) from None
        if left or client.failures:
            raise faults.undelivered(
                self.settings.servers,
                left + client.failures,
                rows,
                self.settings.timeout_s,
                client.first,
            )
        return Delivered(rows - screen.dead_letters, size, dead_lettered=screen.dead_letters)

    def _converted(self, screen: RecordCheck, batch: Any) -> Rows:
        """A batch to be sent; with a dead-letter topic, looked at first."""
        if self.settings.dead_letter_topic is None:
            return self.columns.rows(batch)
        screen.look([batch])
        return screen.rows(batch)


class AtMostOnce(Delivery):
    """acks=0, nothing sent twice: a repeated attempt writes nothing, and Kafka's silence costs rows, not time."""

    def deliver(self, task: Task, batches: Iterable[Any]) -> Delivered:
        """Write what can be written now; the rest is counted as lost."""
        if task.attempt > 0:
            return _count(batches, f"attempt {task.attempt + 1} of a task writes nothing")
        client = producers.borrow(self.settings)
        try:
            return self._deliver(client, batches)
        except BaseException:
            producers.discard(self.settings)
            raise

    def _deliver(self, client: producers.KafkaProducer, batches: Iterable[Any]) -> Delivered:
        rows = size = sent = 0
        remaining = iter(batches)
        why, screen = "", RecordCheck(self.settings, self.columns, self.settings.sink_id or "")
        try:
            for batch in remaining:
                refused = self.columns.refusals(batch) is not None
                converted = screen.rows(batch) if refused else self.columns.rows(batch)
                rows, size = rows + converted.size, size + converted.bytes
                self._refuse_reserved(converted)
                client.require(converted.topics)
                client.send(converted)
                sent = rows
            client.flush(self.settings.timeout_s)
        except (KafkaError, producers.QueueStuck, *faults.FOREIGN) as problem:
            if isinstance(problem, KafkaError) and problem.code not in faults.SILENCE:
                raise
            why = problem.what if isinstance(problem, KafkaError) else faults.reason(problem)
        rest = _count(remaining)
        reached = max(0, sent - client.pending - client.failures)
        lost = rows + rest.lost - reached
        if lost:
            producers.discard(self.settings)
            why = why or (faults.reason(client.first[0][1]) if client.first else "Kafka did not take them in time")
        dead = min(screen.dead_letters, reached)
        return Delivered(reached - dead, size + rest.bytes, lost, why, dead)


def _count(batches: Iterable[Any], why: str = "") -> Delivered:
    """Read rows to the end without writing them."""
    rows = size = 0
    for batch in batches:
        rows, size = rows + batch.num_rows, size + batch.nbytes
    return Delivered(0, size, rows, why)


#: Bootstrap servers and topics that were there.
_seen: Final[set[tuple[str, str]]] = set()
#: Seconds to wait for Kafka's list of topics.
_LOOK_S: Final = 2.0


def require_topics(settings: SinkSettings) -> None:
    """See that the topics that are always written to are there, once in a process, and before a task or a row asks.

    Raises:
        KafkaError: TL-K04. No answer is no reason: the tasks wait longer for Kafka, and tell it.
    """
    named = {name for name in (settings.topic, settings.dead_letter_topic) if name}
    asked = {(settings.servers, name) for name in named}
    if asked <= _seen:
        return
    try:
        absent = admin.missing_topics(settings.client, named, _LOOK_S)
    except KafkaError:
        return
    if absent:
        raise faults.missing(settings.servers, absent)
    _seen.update(asked)
