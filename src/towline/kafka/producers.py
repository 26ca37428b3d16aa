"""Producers: one of a process for each configuration, and one for each transaction.

Spark reuses its Python workers, and partition p lands in another process almost every batch; so a producer without
transactions belongs to the process, for as long as it is healthy. One that erred is thrown away, records and all: a
later batch must never meet the reports, or the left-over records, of an earlier one.

What each kind of error asks of a producer with a transactional id says `faults.TransactionVerdict`. A commit request
that timed out may reach Kafka late; under the old transaction protocol, the only one librdkafka speaks, it could then
end the *next* transaction of the same epoch (KIP-890). So such a producer serves one transaction: a new instance has a
new epoch, and the late request is refused.
"""

from __future__ import annotations

import contextlib
import gc
import time
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaException, Producer

from towline.errors import KafkaError
from towline.kafka import faults
from towline.kafka.admin import KafkaAdmin
from towline.kafka.clientconfig import connect, largest_message, lent
from towline.kafka.columns import Rows
from towline.kafka.faults import KEPT, LastWord, Meaning, TransactionVerdict
from towline.kafka.options import FORMAT
from towline.kafka.screening import FailedRecord
from towline.threads import later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future

    from towline.kafka.columns import Record
    from towline.kafka.markers import Marker
    from towline.kafka.options import SinkSettings

#: Seconds librdkafka may take, beyond the delivery timeout, to report that it ran out.
GRACE_S: Final = 5.0
#: Longest single wait for room in the queue, in seconds, before failures are looked at again.
_ROOM_WAIT_S: Final = 0.1
#: Longest wait for confirmations, in seconds, before it is looked whether there are any.
_FLUSH_S: Final = 0.2
#: Longest single call, in seconds, so that a deadline is met and a signal is heard.
_CALL_S: Final = 5.0
#: A transaction is aborted so long before Kafka would do it, in seconds, or as a part of its time if that is less.
_MARGIN_S: Final = 10.0
_MARGIN: Final = 0.1
#: Wait between two equal calls that Kafka answered at once, in seconds.
_PAUSE_S: Final = 0.05
#: Seconds for an abort when all is lost anyway; the next `init_transactions` aborts as well.
_ABORT_S: Final = 5.0
#: Bytes that a Kafka is trusted to take in a second as long as nobody has seen how many it does.
_TRUSTED: Final = 4 << 20
#: A transaction has so many times as long as its records take by the rate last seen, beside its usual time.
_SPARE: Final = 1.5
_CLOCK: Final = "transaction.timeout.ms"
MESSAGE_TIMEOUT: Final = "message.timeout.ms"
#: What every producer is told beside the sink's settings.
OWN: Final[Mapping[str, Any]] = {"delivery.report.only.error": True}


class KafkaProducer:
    """A producer, with more settings of librdkafka than the sink's, and its delivery reports. Not thread-safe.

    Raises:
        ConfigError: A secret can't be read, or TLS material is unusable (TL-C45, TL-C46).
    """

    def __init__(self, settings: SinkSettings, more: Mapping[str, str] = MappingProxyType({})) -> None:
        self._settings = settings
        #: Why the last connection failed, for when a call only says that it did.
        self.last = LastWord()
        #: When nothing is waited for any more.
        self.ends = float("inf")
        self.reset()
        own = {**more, **OWN, "on_delivery": self._report, "error_cb": self.last.note}
        self._producer = connect(Producer, settings.client, own, FORMAT)

    def reset(self) -> None:
        """Forget the reports of an earlier task."""
        #: Failed records of this task, and the first that was refused, else the last one that ran out of time.
        self.failures = 0
        self.failed: FailedRecord | None = None
        #: Whether another task may have it.
        self.healthy = True
        self.last.why = ""

    def _report(self, error: Any, message: Any, size: int | None = None) -> None:
        if error is None:
            return
        self.failures += 1
        more = self.failed is None or faults.means(self.failed.error, Meaning.TIMEOUT)
        if more and faults.name_of(error) != "_INVALID_DIFFERENT_RECORD":
            self.failed = FailedRecord(message.topic(), error)
        if size is not None and self.failed is not None:
            self.failed = self.failed.alone(error, message, size)

    @property
    def refused(self) -> FailedRecord | None:
        """What Kafka refused for what it is."""
        failed = self.failed
        return failed if failed is not None and faults.means(failed.error, Meaning.RECORD, Meaning.SIZE) else None

    def alone(self, records: Iterable[Record], topic: str, size: Callable[[Record], int]) -> Iterator[Record]:
        """Records to be sent one a request; reports on those of the topic say their size, as they have no headers."""
        for one in records:
            yield (*one[:4], partial(self._report, size=size(one)), None, *one[6:]) if one[0] == topic else one

    @property
    def pending(self) -> int:
        """Records neither confirmed nor failed."""
        return len(self._producer)

    def send(self, rows: Rows) -> None:
        """Hand rows to librdkafka, in order; waits while its queue is full.

        Raises:
            KafkaError: TL-K05 or TL-K06 for a record the client refuses.
            QueueStuck: The queue stays full.
            KafkaException, SystemError: A fatal error; the client is unusable.
        """
        produce, collects = self._producer.produce, gc.isenabled()
        # Tuples and lists of records have no cycles, and looking for them costs as much as half of `produce`.
        gc.disable()
        try:
            for record in rows.records:
                try:
                    produce(*record)
                except BufferError:
                    self._retry(record)
                except faults.FOREIGN as problem:
                    raise self._refused(record, problem) from None
        finally:
            if collects:
                gc.enable()
        self._producer.poll(0)

    def _retry(self, record: Record) -> None:
        """Produce again when there is room; a queue that stays full empties by message.timeout.ms at the latest."""
        deadline = min(self.ends, time.monotonic() + self._settings.timeout_s + GRACE_S)
        while time.monotonic() < deadline and not self.failures:
            self._producer.poll(_ROOM_WAIT_S)
            try:
                return self._producer.produce(*record)
            except BufferError:
                continue
            except faults.FOREIGN as problem:
                raise self._refused(record, problem) from None
        raise QueueStuck("Kafka takes records too slowly, or not at all")

    def _refused(self, record: Record, problem: BaseException) -> Exception:
        """A record the client refuses is a KafkaError; a client that can do nothing any more speaks for itself."""
        topic, value, key, partition, *_ = record
        if faults.means(problem, Meaning.UNNAMED, Meaning.FENCED) or not isinstance(problem, KafkaException):
            raise problem  # the producer is the matter, not the record
        why, detail = "", f"{faults.reason(problem)} (partition {partition})"
        if faults.name_of(problem) == "MSG_SIZE_TOO_LARGE":
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

    def close(self) -> None:
        """Drop what is queued and let go of the connection; waits at most a moment."""
        with contextlib.suppress(*faults.FOREIGN):  # it is being thrown away because it failed
            self._producer.purge(in_queue=True, in_flight=True, blocking=False)
            self._producer.flush(0.1)


class QueueStuck(Exception):
    """The queue stayed full for longer than the delivery timeout, or records failed meanwhile."""


#: Process id, guarantee and unresolved configuration -> client.
_clients: Final[dict[tuple[int, Any], KafkaProducer]] = {}


@contextlib.contextmanager
def borrowed(settings: SinkSettings) -> Iterator[KafkaProducer]:
    """This process's client for a configuration."""
    key = settings.guarantee, frozenset(settings.client.items())
    with lent(_clients, key, lambda: KafkaProducer(settings), lambda client: client.healthy) as client:
        client.reset()
        yield client


# -- with a transactional id --


def clock(settings: SinkSettings, size: int, rate: float | None, longest: Callable[[], int]) -> dict[str, str]:
    """Longer time-outs for a transaction that would take more than half of its usual time; none for others.

    A batch that is planned does not shrink: one that takes longer than its transaction may would be aborted for ever.
    A ``transaction.timeout.ms`` of the user's is the longest.

    Args:
        settings: The sink's settings.
        size: Bytes of its records.
        rate: Bytes that Kafka took in a second; None where nobody has seen it.
        longest: Asks for the longest transaction that the cluster allows, in ms.
    """
    usual, own = int(settings.client[MESSAGE_TIMEOUT]), int(settings.client[_CLOCK])
    takes = 1000 * size / (rate or _TRUSTED)
    if takes <= usual / 2:
        return {}
    needed = min(int(usual + _SPARE * takes), longest(), *([own] if own > usual else []))
    return {_CLOCK: str(max(own, needed)), MESSAGE_TIMEOUT: str(needed)} if needed > usual else {}


class AttemptFailed(KafkaError):
    """The error of an attempt that failed in a way that a new producer may mend.

    Args:
        error: What it says.
        refused: What Kafka refused in it for what it is.
        rate: Bytes a second that Kafka took in it, if it was too slow; else None.
    """

    def __init__(self, error: KafkaError, refused: FailedRecord | None = None, rate: float | None = None) -> None:
        super().__init__(error.code, error.where, error.what, error.do)
        self.refused, self.rate = refused, rate

    @property
    def final(self) -> KafkaError:
        """What is raised where no other attempt follows: Spark's text of an error names its class."""
        return KafkaError(*self.args)


class Transactional(KafkaProducer):
    """A producer with a transactional id, which says whom it fences; raises as `KafkaProducer` and `start`."""

    def __init__(
        self, settings: SinkSettings, transactional_id: str, more: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(settings, {**more, "transactional.id": transactional_id})
        self.transactional_id = transactional_id
        self.more = dict(more)
        self._open = False
        #: Topics of the open transaction.
        self._written: set[str] = set()
        #: Its records and their bytes, and when it was opened.
        self._records = self._bytes = 0
        self._begun = 0.0
        #: How long it may be open, in seconds.
        self._allowed_s = int({**settings.client, **more}[_CLOCK]) / 1000
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Fence older producers of this id; their open transaction is committed or aborted when this returns.

        Raises:
            KafkaError: TL-K01 no answer, TL-K20 Kafka refuses.
        """
        began, connected = time.monotonic(), False
        try:
            # Opens the connection that then asks for the coordinator: without it, librdkafka waits 500 ms (measured).
            self._producer.list_topics(timeout=self._settings.timeout_s)
            connected = True
            self._call(self._producer.init_transactions)
        except faults.FOREIGN as problem:
            if connected and faults.verdict(problem) is not TransactionVerdict.AGAIN:
                raise self._aborted("to begin", problem) from None
            with contextlib.suppress(*faults.FOREIGN):
                self._producer.poll(0)  # serves error_cb, which a blocking look-up does not
            why = self.last.why or faults.reason(problem)
            raise faults.unreachable(self._settings.servers, time.monotonic() - began, why, rows=True) from None

    def begin(self) -> None:
        """Open a transaction; Kafka's clock starts with the first record."""
        self.reset()
        with self._doing("to begin"):
            self._producer.begin_transaction()
        self._open, self._written = True, set()
        self._records, self._bytes, self._begun = 0, 0, time.monotonic()
        self.ends = self._begun + self._allowed_s - min(_MARGIN_S, _MARGIN * self._allowed_s)

    def write(self, rows: Rows) -> None:
        """Send rows within the transaction.

        Raises:
            KafkaError: TL-K05, TL-K06 for a record the client refuses; TL-K19 fenced.
            AttemptFailed: A new producer may do better.
        """
        self._records, self._bytes = self._records + rows.size, self._bytes + rows.bytes
        self._written |= rows.topics
        with self._doing("to send"):
            self.send(rows)

    def mark(self, topic: str, partition: int, key: str, marker: Marker | None) -> None:
        """Write a marker in the same transaction; None removes it. Raises as `write`."""
        value = None if marker is None else marker.to_json()
        record = (topic, value, key.encode(), partition)
        self._written.add(topic)
        with self._doing("to write its marker"):
            self.send(Rows(1, len(value or b""), frozenset({topic}), iter([record])))

    def commit(self) -> None:
        """Commit; when this returns it is decided, and a moment later records and marker are visible together.

        Visible for certain once the next `start` of this id has returned, or `KafkaAdmin.settled` (KIP-98: the answer
        comes with the decision, the control records after it).

        Raises:
            KafkaError: TL-K19 fenced.
            AttemptFailed: Aborted (TL-K20, TL-K28), or not known whether it is committed (TL-K21).
        """
        with self._doing("to commit"):
            # Once it was asked to commit, librdkafka can't be asked to abort.
            if self.flush(self._allowed_s, to_failure=True) and (slow := self._too_slow()):
                self.abort()
                raise slow
            self._call(self._producer.commit_transaction)
        self._open = False

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (QueueStuck, *faults.FOREIGN) as problem:
            raise self._judged(what, problem) from None

    def _call(self, call: Callable[[float], None]) -> None:
        """The same call again while the error is retriable and there is time."""
        deadline = time.monotonic() + self._settings.timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                return call(max(0.1, min(left, _CALL_S)))
            except faults.FOREIGN as problem:
                if left <= 0 or faults.verdict(problem) is not TransactionVerdict.AGAIN:
                    raise
                self._producer.poll(_PAUSE_S)

    def _judged(self, doing: str, problem: BaseException) -> Exception:
        """What to raise for an error; aborts where that is possible."""
        servers = self._settings.servers
        if faults.means(problem, Meaning.UNNAMED):  # a transactional call says which error there was
            try:
                self._producer.begin_transaction()
            except faults.FOREIGN as cause:
                problem = cause
        verdict = faults.verdict(problem)
        if isinstance(problem, QueueStuck) or verdict is TransactionVerdict.ABORT:
            slow = self._too_slow()
            self.abort()
            # Even a refused record is worth another attempt: the limits it was compared with may have been old.
            return slow or AttemptFailed(self._aborted(doing, problem), self.refused)
        self._open = False  # what became of it is for the next producer to find out: an abort now could meet its commit
        if verdict is TransactionVerdict.FENCED:
            what = f"another producer took over the transactional id {self.transactional_id}, or this one slept past"
            do = (
                "A newer attempt has the word, or a second query writes as this sink: nothing was written twice. If "
                "this comes again and again, a batch takes longer than kafka.transaction.timeout.ms: take less, or "
                "raise deliveryTimeout."
            )
            return KafkaError("TL-K19", servers, f"{what} its transaction", f"{do} {KEPT}")
        if verdict is TransactionVerdict.AGAIN:
            why, seconds = self.last.why or faults.reason(problem), self._settings.timeout_s
            what = f"Kafka did not say within {seconds:g} s whether the transaction is committed: {why}"
            do = "The next attempt reads that from the marker, and neither loses nor doubles it."
            return AttemptFailed(KafkaError("TL-K21", servers, what, f"{do} Is Kafka up and reachable?"))
        return AttemptFailed(faults.gave_up(servers, problem))

    def _aborted(self, doing: str, problem: BaseException) -> KafkaError:
        """TL-K20, by the record that tells most, if one failed: a bad one ruins its transaction."""
        name, why, failed = faults.name_of(problem), faults.reason(problem), self.failed
        if name == "TOPIC_AUTHORIZATION_FAILED":  # Kafka does not say of which topic
            with contextlib.suppress(KafkaError):
                denied = KafkaAdmin(self._settings.client, _ABORT_S).denied(self._written)
                failed = next((FailedRecord(topic, problem) for topic in denied), failed)
        # What the abort itself drops tells nothing.
        if failed is not None and not faults.name_of(failed.error).startswith("_PURGE"):
            name, why = faults.name_of(failed.error), f'{faults.reason(failed.error)} (topic "{failed.topic}")'
        what = f"the transaction failed {doing}: {why}"
        return KafkaError("TL-K20", self._settings.servers, what, faults.advice(name))

    def _too_slow(self) -> AttemptFailed | None:
        """TL-K28 where Kafka took records to the end of the transaction's time, and not all."""
        now = time.monotonic()
        seconds, left = now - self._begun, self.pending + self.failures
        if now < self.ends or left >= self._records:
            return None
        done = self._bytes * (self._records - left) // self._records
        what = f"Kafka is too slow: {done:,} of {self._bytes:,} bytes in {seconds:.0f} s, {done / seconds:,.0f} bytes/s"
        do = (
            "Raise the quota or the bandwidth; or the time that a transaction may take: transaction.max.timeout.ms of "
            "the brokers, and kafka.transaction.timeout.ms where you set it. Batches that are planned from now on are "
            f"smaller. {KEPT}"
        )
        what = f"{what}; the transaction has {self._allowed_s:g} s"
        return AttemptFailed(KafkaError("TL-K28", self._settings.servers, what, do), rate=done / seconds)

    def abort(self) -> None:
        """Abort an open transaction, so that readers need not wait for its time-out; never raises."""
        if self._open:
            self._open = False
            with contextlib.suppress(*faults.FOREIGN):  # the next init_transactions aborts it too
                self._producer.abort_transaction(_ABORT_S)

    def close(self) -> None:
        """Let go; an open transaction is aborted."""
        self.abort()
        super().close()


class Starting:
    """A producer that is started while its task still waits for rows, with the settings `more` beside the sink's.

    To start fences older producers and opens no transaction, so it may come as early as one likes. It takes as long as
    Spark takes to hand over the rows of a small batch.
    """

    def __init__(
        self, settings: SinkSettings, transactional_id: str, more: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._new = partial(Transactional, settings, transactional_id)
        #: None once it was taken.
        self._started: Future[Transactional] | None = later(partial(self._new, more), "producer")

    def take(self, more: Mapping[str, str]) -> Transactional:
        """The producer, if it has these settings and was not taken before; else a new one; raises as that."""
        started, self._started = self._started, None
        if started is not None:
            producer = started.result()
            if producer.more == dict(more):
                return producer
            producer.close()
        return self._new(more)

    def close(self) -> None:
        """Let go of one that was not taken."""
        if self._started is not None:  # it may still be asking a Kafka that does not answer
            self._started.add_done_callback(_closed)


def _closed(started: Future[Transactional]) -> None:
    if started.exception() is None:
        started.result().close()
