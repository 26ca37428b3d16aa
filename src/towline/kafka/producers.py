"""One Kafka producer per process and configuration, kept between batches for as long as it is healthy.

Spark reuses its Python workers, and partition p lands in another process almost every batch; so a producer belongs to
the process, not to a partition. One that erred is thrown away, records and all: a later batch must never meet the
reports, or the left-over records, of an earlier one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaException, Producer

from towline.kafka import faults
from towline.kafka.clientconfig import QUIET, largest_message, resolve
from towline.kafka.cluster import LastWord
from towline.kafka.options import FORMAT
from towline.kafka.screening import RESERVED, Refusal, refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from towline.kafka.columns import Record, Rows
    from towline.kafka.options import SinkSettings

__all__ = ["OWN", "KafkaProducer", "borrow", "discard"]

#: Errors kept for the message; all are counted.
FIRST_ERRORS: Final = 3
#: Seconds librdkafka may take, beyond the delivery timeout, to report that it ran out.
GRACE_S: Final = 5.0
#: Longest single wait for room in the queue, in seconds, before failures are looked at again.
_ROOM_WAIT_S: Final = 0.1
#: Longest wait for confirmations, in seconds, before it is looked whether there are any.
_FLUSH_S: Final = 0.2
#: What every producer is told beside the sink's settings.
OWN: Final[Mapping[str, Any]] = MappingProxyType({"delivery.report.only.error": True})


class KafkaProducer:
    """A producer, its delivery reports and the topics it has seen. Not thread-safe: a Spark task is one thread.

    Args:
        settings: The sink's settings.
        more: Further settings of librdkafka.

    Raises:
        ConfigError: A secret can't be read, or TLS material is unusable (TL-C45, TL-C46).
    """

    def __init__(self, settings: SinkSettings, more: Mapping[str, str] = MappingProxyType({})) -> None:
        self._settings = settings
        #: Topics seen in the cluster's list; only grows.
        self._topics: set[str] = set()
        #: Why the last connection failed, for when a call only says that it did.
        self._last = LastWord()
        self.reset()
        #: When nothing is waited for any more.
        self.ends = float("inf")
        config: dict[str, Any] = {
            **resolve(settings.client, FORMAT),
            **more,
            **OWN,
            "on_delivery": self._report,
            "error_cb": self._last.note,
        }
        try:
            self._producer = Producer(config, logger=QUIET)
        except faults.FOREIGN as problem:
            raise faults.unusable(FORMAT, problem) from None

    def _report(self, error: Any, message: Any, size: int | None = None) -> None:
        if error is None:
            return
        self.failures += 1
        if refusal := refusal_of(error, message, size):
            former = self.refusals.setdefault(refusal.kind, refusal)
            self.refusals[refusal.kind] = min(former, refusal, key=lambda one: one.size or 0)
        if len(self.first) < FIRST_ERRORS and faults.name_of(error) != "_INVALID_DIFFERENT_RECORD":
            self.first.append((message.topic(), error))

    def reported(self, record: Record, size: int) -> Record:
        """A record whose report says its size, in bytes as `screening` counts them: a report has no headers."""
        return (*record[:4], partial(self._report, size=size), None, *record[6:])

    @property
    def pending(self) -> int:
        """Records neither confirmed nor failed."""
        return len(self._producer)

    def require(self, topics: Iterable[str]) -> None:
        """Check that topics may be written and exist, by the cluster's whole list: asking by name could create one.

        Raises:
            KafkaError: TL-K06 for one that no row may name; TL-K01 without an answer in time; TL-K04 for missing ones.
        """
        for topic in filter(self._settings.reserves, topics):
            raise faults.unfit(self._settings.servers, topic, *RESERVED)
        if self._topics.issuperset(topics):
            return
        self.list_topics()
        absent = set(topics) - self._topics
        if absent:
            raise faults.missing(self._settings.servers, absent)

    def list_topics(self) -> None:
        """Ask for the cluster's topics.

        Raises:
            KafkaError: TL-K01 without an answer in time.
        """
        began = time.monotonic()
        try:
            self._topics.update(self._producer.list_topics(timeout=self._settings.timeout_s).topics)
        except faults.FOREIGN as problem:
            raise self._unanswered(problem, began) from None

    def _unanswered(self, problem: BaseException, began: float) -> Exception:
        with contextlib.suppress(*faults.FOREIGN):
            self._producer.poll(0)  # serves error_cb, which a blocking look-up does not
        why = self._last.why or faults.reason(problem)
        return faults.unreachable(self._settings.servers, time.monotonic() - began, why, rows=True)

    def send(self, rows: Rows) -> None:
        """Hand rows to librdkafka, in order; waits while its queue is full.

        Raises:
            KafkaError: TL-K05 or TL-K06 for a record the client refuses.
            QueueStuck: The queue stays full.
            KafkaException, SystemError: A fatal error; the client is unusable.
        """
        produce = self._producer.produce
        with _without_collector():
            for record in rows.records:
                try:
                    produce(*record)
                except BufferError:
                    self._retry(record)
                except faults.FOREIGN as problem:
                    raise self._refused(record, problem) from None
        self._producer.poll(0)

    def _retry(self, record: Record) -> None:
        """Produce again when there is room; a queue that stays full empties by message.timeout.ms at the latest."""
        deadline = min(self.ends, time.monotonic() + self._settings.timeout_s + GRACE_S)
        while time.monotonic() < deadline and not self.failures:
            self._producer.poll(_ROOM_WAIT_S)
            try:
                self._producer.produce(*record)
            except BufferError:
                continue
            except faults.FOREIGN as problem:
                raise self._refused(record, problem) from None
            else:
                return
        raise QueueStuck

    def _refused(self, record: Record, problem: BaseException) -> Exception:
        """A record the client refuses is a KafkaError; a client that can do nothing any more speaks for itself."""
        name, (topic, value, key, partition, *_) = faults.name_of(problem), record
        if name in faults.STATES or not isinstance(problem, KafkaException):
            raise problem
        why, detail = "", f"{faults.reason(problem)} (partition {partition})"
        if name == "MSG_SIZE_TOO_LARGE":
            size, most = len(value or b"") + len(key or b""), largest_message(self._settings.client)
            why, detail = "too_large", f"{size:,} bytes, the client takes {most:,} (kafka.message.max.bytes)"
        return faults.unfit(self._settings.servers, topic, why, detail)

    def flush(self, seconds: float, *, to_failure: bool = False) -> int:
        """Wait until every record is confirmed or failed, or none was for so long; how many are neither.

        Args:
            seconds: Longest time without one.
            to_failure: Wait no longer than to the first that failed: after it a transaction sends nothing more.

        Raises:
            KafkaException, SystemError: A fatal error; the client is unusable.
        """
        left, now = self.pending, time.monotonic()
        until = now + seconds
        while left and now < until and not (to_failure and self.failures):
            before, left = left, int(self._producer.flush(min(_FLUSH_S, until - now)))
            now = time.monotonic()
            until = min(now + seconds if left < before else until, self.ends)
        return left

    def reset(self) -> None:
        """Forget the reports of an earlier task."""
        #: Failed records since then, and the first of them; failures >= len(first).
        self.failures = 0
        self.first: list[tuple[str, Any]] = []
        #: Of these, those that Kafka refused for what they are: the smallest of each kind.
        self.refusals: dict[Any, Refusal] = {}

    def close(self) -> None:
        """Drop what is queued and let go of the connection; waits at most a moment."""
        with contextlib.suppress(*faults.FOREIGN):  # it is being thrown away because it failed
            self._producer.purge(in_queue=True, in_flight=True, blocking=False)
            self._producer.flush(0.1)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Don't look for cycles: tuples and lists of records have none, and looking costs as much as half of `produce`."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class QueueStuck(Exception):
    """The queue stayed full for longer than the delivery timeout, or records failed meanwhile."""

    def __str__(self) -> str:
        return "Kafka takes records too slowly, or not at all"


#: Process id and unresolved configuration -> client. The process id keeps a forked child off its parent's sockets.
_clients: Final[dict[tuple[int, str, frozenset[tuple[str, str]]], KafkaProducer]] = {}


def _key(settings: SinkSettings) -> tuple[int, str, frozenset[tuple[str, str]]]:
    return os.getpid(), settings.guarantee, frozenset(settings.client.items())


def borrow(settings: SinkSettings) -> KafkaProducer:
    """This process's client for a configuration, made at the first call; `discard` it when it erred."""
    key = _key(settings)
    client = _clients.get(key)
    if client is None:
        client = _clients[key] = KafkaProducer(settings)
    client.reset()
    return client


def discard(settings: SinkSettings) -> None:
    """Throw away this process's client for a configuration; the next `borrow` makes a new one."""
    client = _clients.pop(_key(settings), None)
    if client is not None:
        client.close()
