"""Kafka producers: idempotent ones in a pool per process, transactional ones for one transaction each.

Spark reuses its Python workers, and partition p lands in another process almost every batch; so a producer without
transactions belongs to the process, for as long as it is healthy. After an error it is closed, with its queued records:
a later batch must never see delivery reports or queued records of an earlier one.

`faults.TransactionVerdict` lists the next step for each kind of error of a transactional producer. A commit request
that timed out may reach Kafka late; under the old transaction protocol, the only one librdkafka speaks, it could then
end the *next* transaction of the same epoch (KIP-890). So such a producer serves one transaction: a new instance has a
new epoch, and the late request is refused.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaException, Producer

from towline.errors import KafkaError
from towline.kafka import faults
from towline.kafka.admin import KafkaAdmin
from towline.kafka.clientconfig import connect, max_message_bytes, pooled_client
from towline.kafka.columns import Rows
from towline.kafka.faults import NOT_COMMITTED, ErrorKind, LastConnectionError, TransactionVerdict
from towline.kafka.options import FORMAT
from towline.kafka.recordcheck import FailedRecord
from towline.threads import call_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future

    from towline.kafka.columns import Record
    from towline.kafka.markers import Marker
    from towline.kafka.options import SinkSettings

REPORT_GRACE_S: Final = 5.0  #: Seconds librdkafka may take, beyond the delivery timeout, to report that it ran out.
_QUEUE_WAIT_S: Final = 0.1  #: Longest single wait for room in the queue, in seconds, before failures are checked again.
_FLUSH_POLL_S: Final = 0.2  #: Longest wait for acknowledgements, in seconds, before progress is checked.
_CALL_TIMEOUT_S: Final = 5.0  #: Longest single call, in seconds, so that deadlines are met and signals are handled.
#: A transaction is aborted this long before Kafka would do it: seconds, or a share of its time if that is less.
_ABORT_MARGIN_S: Final = 10.0
_ABORT_MARGIN_SHARE: Final = 0.1
_RETRY_PAUSE_S: Final = 0.05  #: Pause before a call is repeated, in seconds.
_ABORT_TIMEOUT_S: Final = 5.0  #: Seconds for an abort; if it fails, the next `init_transactions` aborts as well.
_DEFAULT_RATE: Final = 4 << 20  #: Assumed throughput of a Kafka, in bytes/s, until one is measured.
#: A transaction's time-out: its usual one, and this many times the time its records take at the last rate.
_TIME_FACTOR: Final = 1.5
_TRANSACTION_TIMEOUT: Final = "transaction.timeout.ms"
_NO_SETTINGS: Final[Mapping[str, str]] = MappingProxyType({})
MESSAGE_TIMEOUT: Final = "message.timeout.ms"
#: Settings of every producer, beside the sink's.
PRODUCER_CONFIG: Final[Mapping[str, Any]] = {"delivery.report.only.error": True}


class KafkaProducer:
    """Kafka producer with its delivery reports; `extra` settings override the sink's. Not thread-safe.

    Raises:
        ConfigError: A secret can't be read, or TLS material is unusable (TL-C45, TL-C46).
    """

    def __init__(self, settings: SinkSettings, extra: Mapping[str, str] = _NO_SETTINGS) -> None:
        self._settings = settings
        #: The last connection error, for calls that fail without a cause.
        self.last_error = LastConnectionError()
        #: Time on the monotonic clock at which every wait ends.
        self.deadline = float("inf")
        self.reset()
        report = weakref.WeakMethod(self._report)

        def on_delivery(error: Any, message: Any) -> None:
            if (method := report()) is not None:
                method(error, message)

        # Without a cycle, which the collector could find in the client's own thread while that asks for a token, and
        # librdkafka ends the process that destroys a client there.
        config = {**extra, **PRODUCER_CONFIG, "on_delivery": on_delivery, "error_cb": self.last_error.on_error}
        self._producer: Any = connect(Producer, settings.client, config, FORMAT)

    def reset(self) -> None:
        """Clear the delivery reports of an earlier task."""
        #: Failed records of this task; and the first refused one, else the last one that timed out.
        self.failure_count = 0
        self.failure: FailedRecord | None = None
        #: Whether another task may use it.
        self.is_healthy = True
        self.last_error.reason = ""

    def _report(self, error: Any, message: Any, size: int | None = None) -> None:
        if error is None:
            return
        self.failure_count += 1
        replaces = self.failure is None or faults.is_kind(self.failure.error, ErrorKind.TIMEOUT)
        if replaces and faults.error_name(error) != "_INVALID_DIFFERENT_RECORD":
            self.failure = FailedRecord(message.topic(), error)
        if size is not None and self.failure is not None:
            self.failure = self.failure.learn_limits(error, message, size)

    @property
    def refusal(self) -> FailedRecord | None:
        """The failed record, if Kafka refused the record itself: invalid or too large."""
        record = self.failure
        refused = record is not None and faults.is_kind(record.error, ErrorKind.INVALID_RECORD, ErrorKind.TOO_LARGE)
        return record if refused else None

    def one_per_request(self, records: Iterable[Record], topic: str, size: Callable[[Record], int]) -> Iterator[Record]:
        """Yield records to be sent one per request; the failure of a record of the topic is reported with its size."""
        for record in records:
            if record[0] != topic:
                yield record
            else:
                yield (*record[:4], partial(self._report, size=size(record)), None, *record[6:])

    @property
    def pending(self) -> int:
        """Number of records neither acknowledged nor failed."""
        return len(self._producer)

    def send(self, rows: Rows) -> None:
        """Queue rows in librdkafka, in order; waits while its queue is full.

        Raises:
            KafkaError: TL-K05 or TL-K06 for a record the client refuses.
            QueueStuck: The queue stays full.
            KafkaException, SystemError: A fatal error; the client is unusable.
        """
        produce, gc_enabled = self._producer.produce, gc.isenabled()
        record: Record = ()
        # Records are tuples and lists without cycles, and a collection costs as much as half of `produce`.
        gc.disable()
        try:
            for record in rows.records:
                try:
                    produce(*record)
                except BufferError:
                    self._produce_when_free(record)
        except faults.CLIENT_ERRORS as error:
            raise self._client_refusal(record, error) from None
        finally:
            if gc_enabled:
                gc.enable()
        self._producer.poll(0)

    def _produce_when_free(self, record: Record) -> None:
        """Produce again when the queue has room; message.timeout.ms empties a queue that stays full."""
        deadline = min(self.deadline, time.monotonic() + self._settings.timeout_s + REPORT_GRACE_S)
        while time.monotonic() < deadline and not self.failure_count:
            self._producer.poll(_QUEUE_WAIT_S)
            with contextlib.suppress(BufferError):
                self._producer.produce(*record)
                return
        raise QueueStuck("Kafka takes records too slowly, or not at all")

    def _client_refusal(self, record: Record, error: BaseException) -> Exception:
        """Return the KafkaError of a record that the client refuses; raise an error of the client itself."""
        topic, value, key, partition, *_ = record
        if faults.is_kind(error, ErrorKind.UNSPECIFIED, ErrorKind.FENCED) or not isinstance(error, KafkaException):
            raise error  # an error of the producer, not of the record
        reason, detail = "", f"{faults.error_text(error)} (partition {partition})"
        if faults.error_name(error) == "MSG_SIZE_TOO_LARGE":
            size, max_bytes = len(value or b"") + len(key or b""), max_message_bytes(self._settings.client)
            reason, detail = "too_large", f"{size:,} bytes, the client takes {max_bytes:,} (kafka.message.max.bytes)"
        return faults.bad_record_error(self._settings.servers, topic, reason, detail)

    def flush(self, seconds: float, *, until_failure: bool = False) -> int:
        """Wait until every record is acknowledged or failed; return the number of records that are neither.

        Args:
            seconds: Longest time without progress.
            until_failure: Stop at the first failed record: after it a transaction sends nothing more.

        Raises:
            KafkaException, SystemError: A fatal error; the client is unusable.
        """
        pending_count, now = self.pending, time.monotonic()
        deadline = now + seconds
        while pending_count and now < deadline and not (until_failure and self.failure_count):
            previous, pending_count = pending_count, int(self._producer.flush(min(_FLUSH_POLL_S, deadline - now)))
            now = time.monotonic()
            deadline = min(now + seconds if pending_count < previous else deadline, self.deadline)
        return pending_count

    def close(self) -> None:
        """Drop queued records and destroy the client, here and not where the collector runs; waits 0.1 s at most."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(*faults.CLIENT_ERRORS):  # it may have failed before
                producer.purge(in_queue=True, in_flight=True, blocking=False)
                producer.flush(0.1)


class QueueStuck(Exception):
    """Producer queue that stayed full for longer than the delivery timeout, or in which records failed."""


#: Process id, guarantee and unresolved configuration -> client.
_clients: Final[dict[tuple[int, Any], KafkaProducer]] = {}


@contextlib.contextmanager
def pooled_producer(settings: SinkSettings) -> Iterator[KafkaProducer]:
    """Lend this process's producer of a configuration."""
    key = settings.guarantee, frozenset(settings.client.items())
    with pooled_client(_clients, key, lambda: KafkaProducer(settings), lambda client: client.is_healthy) as client:
        client.reset()
        yield client


# -- transactional producers --


def longer_timeouts(
    settings: SinkSettings, size: int, rate: float | None, longest_ms: Callable[[], int]
) -> dict[str, str]:
    """Return longer time-outs for a transaction expected to take over half of its usual time; empty for others.

    A planned batch does not shrink: one that takes longer than its transaction may would be aborted for ever.

    Args:
        settings: The sink's settings.
        size: Bytes of its records.
        rate: Kafka's throughput in bytes/s; None where unknown.
        longest_ms: Returns the longest transaction that the cluster allows, in ms.
    """
    usual_ms, expected_ms = int(settings.client[_TRANSACTION_TIMEOUT]), 1000 * size / (rate or _DEFAULT_RATE)
    if expected_ms <= usual_ms / 2:
        return {}
    needed_ms = min(int(usual_ms + _TIME_FACTOR * expected_ms), longest_ms())
    return dict.fromkeys((_TRANSACTION_TIMEOUT, MESSAGE_TIMEOUT), str(needed_ms)) if needed_ms > usual_ms else {}


class AttemptError(KafkaError):
    """Error of a failed attempt that a new producer may avoid.

    Args:
        error: The error to raise if no other attempt follows.
        refusal: The record that Kafka refused in it, if any.
        rate: Kafka's throughput in bytes/s, if it was too slow; else None.
    """

    def __init__(self, error: KafkaError, refusal: FailedRecord | None = None, rate: float | None = None) -> None:
        super().__init__(error.code, error.location, error.problem, error.remedy)
        self.refusal, self.rate = refusal, rate

    @property
    def final_error(self) -> KafkaError:
        """The error to raise where no other attempt follows, as a plain KafkaError: Spark prints the class name."""
        return KafkaError(*self.args)


class TransactionalProducer(KafkaProducer):
    """Producer with a transactional id, which fences older producers; raises as `KafkaProducer` and `start`."""

    def __init__(self, settings: SinkSettings, transactional_id: str, extra: Mapping[str, str] = _NO_SETTINGS) -> None:
        super().__init__(settings, {**extra, "transactional.id": transactional_id})
        self.transactional_id = transactional_id
        self.extra = dict(extra)
        self._in_transaction = False
        #: Topics of the transaction.
        self._topics: set[str] = set()
        #: Its records, their bytes, and the time when it was opened; 0 before.
        self._record_count = self._byte_count = 0
        self._started_at = 0.0
        #: Longest time that it may be open, in seconds.
        self._time_limit_s = int({**settings.client, **extra}[_TRANSACTION_TIMEOUT]) / 1000
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
        started_at, connected = time.monotonic(), False
        try:
            # Opens the connection for the coordinator look-up: without it, librdkafka waits 500 ms (measured).
            self._producer.list_topics(timeout=self._settings.timeout_s)
            connected = True
            self._retry_call(self._producer.init_transactions)
        except faults.CLIENT_ERRORS as error:
            if connected and faults.transaction_verdict(error) is not TransactionVerdict.RETRY:
                raise self._aborted_error("to begin", error) from None
            with contextlib.suppress(*faults.CLIENT_ERRORS):
                self._producer.poll(0)  # serves error_cb, which a blocking look-up does not
            reason = self.last_error.reason or faults.error_text(error)
            waited_s = time.monotonic() - started_at
            raise faults.unreachable_error(self._settings.servers, waited_s, reason, rows=True) from None

    def begin(self) -> None:
        """Open the transaction; its time-out at the broker starts with the first record."""
        assert not self._started_at, "a producer serves one transaction"
        self.reset()
        with self._convert_errors("to begin"):
            self._producer.begin_transaction()
        self._in_transaction, self._started_at, limit_s = True, time.monotonic(), self._time_limit_s
        self.deadline = self._started_at + limit_s - min(_ABORT_MARGIN_S, _ABORT_MARGIN_SHARE * limit_s)

    def write(self, rows: Rows) -> None:
        """Send rows within the transaction.

        Raises:
            KafkaError: TL-K05, TL-K06 for a record the client refuses; TL-K19 fenced.
            AttemptError: A new producer may succeed.
        """
        self._record_count, self._byte_count = self._record_count + rows.size, self._byte_count + rows.bytes
        self._topics |= rows.topics
        with self._convert_errors("to send"):
            self.send(rows)

    def write_marker(self, topic: str, partition: int, key: str, marker: Marker) -> None:
        """Write a marker in the same transaction. Raises as `write`."""
        value = marker.to_json()
        record = (topic, value, key.encode(), partition)
        self._topics.add(topic)
        with self._convert_errors("to write its marker"):
            self.send(Rows(1, len(value), frozenset({topic}), iter([record])))

    def commit(self) -> None:
        """Commit the transaction; records and marker become visible together, a moment after this returns.

        They are visible for certain once the next `start` of this id has returned, or
        `KafkaAdmin.wait_for_open_transactions` (KIP-98: the answer comes with the decision, the control records after
        it).

        Raises:
            KafkaError: TL-K19 fenced.
            AttemptError: Aborted (TL-K20, TL-K28), or not known whether it is committed (TL-K21).
        """
        with self._convert_errors("to commit"):
            # After a commit request librdkafka does not abort any more.
            if self.flush(self._time_limit_s, until_failure=True) and (too_slow := self._too_slow_error()):
                self.abort()
                raise too_slow
            self._retry_call(self._producer.commit_transaction)
        self._in_transaction = False

    @contextlib.contextmanager
    def _convert_errors(self, step: str) -> Iterator[None]:
        try:
            yield
        except (QueueStuck, *faults.CLIENT_ERRORS) as error:
            raise self._error_for(step, error) from None

    def _retry_call(self, call: Callable[[float], None]) -> None:
        """Repeat a call while its error is retriable and there is time."""
        deadline = time.monotonic() + self._settings.timeout_s
        while True:
            remaining_s = deadline - time.monotonic()
            try:
                return call(max(0.1, min(remaining_s, _CALL_TIMEOUT_S)))
            except faults.CLIENT_ERRORS as error:
                if remaining_s <= 0 or faults.transaction_verdict(error) is not TransactionVerdict.RETRY:
                    raise
                self._producer.poll(_RETRY_PAUSE_S)

    def _error_for(self, step: str, error: BaseException) -> Exception:
        """Return the exception to raise for an error in a transaction; aborts the transaction if possible."""
        servers = self._settings.servers
        if faults.is_kind(error, ErrorKind.UNSPECIFIED):  # a transactional call names the error
            try:
                self._producer.begin_transaction()
            except faults.CLIENT_ERRORS as cause:
                error = cause
        verdict = faults.transaction_verdict(error)
        if isinstance(error, QueueStuck) or verdict is TransactionVerdict.ABORT:
            too_slow = self._too_slow_error()
            self.abort()
            # A refused record gets another attempt too: it may have been checked against outdated limits.
            return too_slow or AttemptError(self._aborted_error(step, error), self.refusal)
        # The next producer finds out the outcome: an abort now could reach Kafka after the commit.
        self._in_transaction = False
        if verdict is TransactionVerdict.FENCED:
            problem = f"another producer took over the transactional id {self.transactional_id}, or this one outlived"
            remedy = (
                "A newer attempt is running, or a second query writes as this sink: nothing was written twice. If "
                "this repeats, a batch takes longer than its transaction may: use smaller batches, or raise "
                "deliveryTimeout."
            )
            return KafkaError("TL-K19", servers, f"{problem} its transaction", f"{remedy} {NOT_COMMITTED}")
        if verdict is TransactionVerdict.RETRY:
            reason, seconds = self.last_error.reason or faults.error_text(error), self._settings.timeout_s
            problem = f"Kafka did not say within {seconds:g} s whether the transaction is committed: {reason}"
            remedy = "The next attempt reads that from the marker, and neither loses nor doubles it."
            return AttemptError(KafkaError("TL-K21", servers, problem, f"{remedy} Is Kafka up and reachable?"))
        return AttemptError(faults.fatal_client_error(servers, error))

    def _aborted_error(self, step: str, error: BaseException) -> KafkaError:
        """Return TL-K20, with the most informative failed record: one bad record ruins its transaction."""
        name, reason, failure = faults.error_name(error), faults.error_text(error), self.failure
        if name == "TOPIC_AUTHORIZATION_FAILED":  # Kafka does not name the topic
            with contextlib.suppress(KafkaError):
                denied_topics = KafkaAdmin(self._settings.client, _ABORT_TIMEOUT_S).unwritable_topics(self._topics)
                failure = next((FailedRecord(topic, error) for topic in denied_topics), failure)
        # A record purged by the abort is no cause.
        if failure is not None and not faults.error_name(failure.error).startswith("_PURGE"):
            error = failure.error
            name, reason = faults.error_name(error), f'{faults.error_text(error)} (topic "{failure.topic}")'
        problem = f"the transaction failed {step}: {reason}"
        return KafkaError("TL-K20", self._settings.servers, problem, faults.remedy_for(name))

    def _too_slow_error(self) -> AttemptError | None:
        """Return TL-K28 if the transaction's time is over and Kafka has taken some records, but not all."""
        now = time.monotonic()
        seconds, pending_count = now - self._started_at, self.pending + self.failure_count
        if now < self.deadline or pending_count >= self._record_count:
            return None
        sent_bytes = self._byte_count * (self._record_count - pending_count) // self._record_count
        rate = sent_bytes / seconds
        problem = (
            f"Kafka is too slow: {sent_bytes:,} of {self._byte_count:,} bytes in {seconds:.0f} s, {rate:,.0f} bytes/s"
        )
        remedy = (
            "Raise the quota or the bandwidth, or transaction.max.timeout.ms of the brokers. Batches that are planned "
            f"from now on are smaller. {NOT_COMMITTED}"
        )
        problem = f"{problem}; the transaction has {self._time_limit_s:g} s"
        return AttemptError(KafkaError("TL-K28", self._settings.servers, problem, remedy), rate=rate)

    def abort(self) -> None:
        """Abort an open transaction, so that readers need not wait for its time-out; never raises."""
        if self._in_transaction:
            self._in_transaction = False
            with contextlib.suppress(*faults.CLIENT_ERRORS):  # the next init_transactions aborts it too
                self._producer.abort_transaction(_ABORT_TIMEOUT_S)

    def close(self) -> None:
        """Close the producer; aborts an open transaction."""
        self.abort()
        super().close()


class StartingProducer:
    """Transactional producer that starts in the background while its task still waits for rows.

    Starting fences older producers and opens no transaction, so it may happen at any time before. It takes as long as
    Spark takes to hand over the rows of a small batch. `extra` settings override the sink's.
    """

    def __init__(self, settings: SinkSettings, transactional_id: str, extra: Mapping[str, str] = _NO_SETTINGS) -> None:
        self._create = partial(TransactionalProducer, settings, transactional_id)
        #: None after `take`.
        self._future: Future[TransactionalProducer] | None = call_in_thread(partial(self._create, extra), "producer")

    def take(self, extra: Mapping[str, str]) -> TransactionalProducer:
        """Return the producer if it has these settings and was not taken before; else a new one, which may raise."""
        future, self._future = self._future, None
        if future is not None:
            producer = future.result()
            if producer.extra == dict(extra):
                return producer
            producer.close()
        return self._create(extra)

    def close(self) -> None:
        """Close the producer if it was not taken."""
        if self._future is not None:  # it may still be waiting for Kafka
            self._future.add_done_callback(_close_when_started)


def _close_when_started(future: Future[TransactionalProducer]) -> None:
    if future.exception() is None:
        future.result().close()
