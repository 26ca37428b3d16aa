"""One producer with a transactional id: what is called when, and what each kind of error asks for (KIP-98, KIP-360).

    retriable                    the same call again, until the delivery timeout
    abortable                    abort; the batch may be written anew
    fenced                       a newer producer has the id: stop, never fight
    anything else, SystemError   nothing is certain: throw the producer away, make a new one, read the marker

A commit request that timed out may reach Kafka late; under the old transaction protocol, the only one librdkafka
speaks, it could then end the *next* transaction of the same epoch (KIP-890). So a producer serves one transaction: a
new instance has a new epoch, and the late request is refused.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final, Self

from towline.errors import KafkaError
from towline.kafka import faults
from towline.kafka.cluster import LONGEST_MS, Cluster
from towline.kafka.columns import Rows
from towline.kafka.faults import TransactionVerdict
from towline.kafka.producers import KafkaProducer, QueueStuck
from towline.threads import later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Future

    from towline.kafka.markers import Marker
    from towline.kafka.options import SinkSettings
    from towline.kafka.screening import Refusal

__all__ = ["Indefinite", "Starting", "Transactional", "clock", "halved", "longest_ms", "take"]

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
_MESSAGE: Final = "message.timeout.ms"


def clock(settings: SinkSettings, size: int, rate: float | None, longest: Callable[[], int]) -> dict[str, str]:
    """Longer time-outs for a transaction that would take more than half of its usual time; none for others.

    A batch that is planned does not shrink: one that takes longer than its transaction may would be aborted for ever.

    Args:
        settings: The sink's settings; a ``transaction.timeout.ms`` of the user's is the longest.
        size: Bytes of its records.
        rate: Bytes that Kafka took in a second; None where nobody has seen it.
        longest: Asks for the longest transaction that the cluster allows, in ms.
    """
    usual = int(settings.client[_MESSAGE])
    takes = 1000 * size / (rate or _TRUSTED)
    if takes <= usual / 2:
        return {}
    own = int(settings.client[_CLOCK])
    needed = min(own if own > usual else longest(), int(usual + _SPARE * takes))
    return {_CLOCK: str(max(own, needed)), _MESSAGE: str(needed)} if needed > usual else {}


def halved(settings: SinkSettings, longer: Mapping[str, str]) -> dict[str, str]:
    """Half of what `clock` has said, where the cluster did not allow that; none if that is no more than usual."""
    needed = int(longer[_MESSAGE]) // 2
    return {_CLOCK: str(needed), _MESSAGE: str(needed)} if needed > int(settings.client[_CLOCK]) else {}


#: Bootstrap servers -> the longest transaction that they allow, in ms; of this process.
_longest: Final[dict[str, int]] = {}


def longest_ms(settings: SinkSettings) -> int:
    """The longest transaction that the cluster allows, in ms; Kafka's own limit where this user may not see it."""
    if settings.servers not in _longest:
        with contextlib.suppress(KafkaError):
            _longest[settings.servers] = Cluster(settings.client, settings.timeout_s).longest_transaction_ms()
    return _longest.setdefault(settings.servers, LONGEST_MS)


class Indefinite(Exception):
    """The attempt failed in a way that a new producer may mend; `told` says it to people.

    Args:
        told: The error for people.
        refusals: Records that Kafka refused in it.
        rate: Bytes a second that Kafka took in it, if it was too slow; else None.
    """

    def __init__(self, told: KafkaError, refusals: Iterable[Refusal] = (), rate: float | None = None) -> None:
        super().__init__(told)
        self.told, self.refusals, self.rate = told, list(refusals), rate


class Transactional(KafkaProducer):
    """A producer with a transactional id.

    Args:
        settings: The sink's settings.
        transactional_id: Whom it fences.
        more: Further settings of librdkafka.
    """

    def __init__(self, settings: SinkSettings, transactional_id: str, more: Mapping[str, str]) -> None:
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

    def start(self) -> None:
        """Fence older producers of this id; their open transaction is committed or aborted when this returns.

        Raises:
            KafkaError: TL-K01 no answer, TL-K20 Kafka refuses.
        """
        # Opens the connection that then asks for the coordinator: without it, librdkafka waits 500 ms (measured).
        began = time.monotonic()
        self.list_topics()
        try:
            self._call(self._producer.init_transactions)
        except faults.FOREIGN as problem:
            if faults.verdict(problem) is TransactionVerdict.AGAIN:
                raise self._unanswered(problem, began) from None
            raise faults.failed(self._settings.servers, "to begin", problem) from None

    def begin(self) -> None:
        """Open a transaction; Kafka's clock starts with the first record."""
        self.reset()
        try:
            self._producer.begin_transaction()
        except faults.FOREIGN as problem:
            raise self._judged("to begin", problem) from None
        self._open, self._written = True, set()
        self._records, self._bytes, self._begun = 0, 0, time.monotonic()
        self.ends = self._begun + self._allowed_s - min(_MARGIN_S, _MARGIN * self._allowed_s)

    def write(self, rows: Rows) -> None:
        """Send rows within the transaction.

        Raises:
            KafkaError: TL-K05, TL-K06 for a record the client refuses; TL-K19 fenced.
            Indefinite: A new producer may do better.
        """
        self._written |= rows.topics
        self._records, self._bytes = self._records + rows.size, self._bytes + rows.bytes
        try:
            self.send(rows)
        except (QueueStuck, *faults.FOREIGN) as problem:
            raise self._judged("to send", problem) from None

    def mark(self, topic: str, partition: int, key: str, marker: Marker | None) -> None:
        """Write a marker in the same transaction; None removes it."""
        self._written.add(topic)
        value = None if marker is None else marker.to_json()
        record = (topic, value, key.encode(), partition)
        try:
            self.send(Rows(1, len(value or b""), frozenset({topic}), iter([record])))
        except (QueueStuck, *faults.FOREIGN) as problem:
            raise self._judged("to write its marker", problem) from None

    def commit(self) -> None:
        """Commit; when this returns it is decided, and a moment later records and marker are visible together.

        Visible for certain once the next `start` of this id has returned, or `Cluster.settled` (KIP-98: the answer
        comes with the decision, the control records after it).

        Raises:
            KafkaError: TL-K19 fenced.
            Indefinite: Aborted (TL-K20, TL-K28), or not known whether it is committed (TL-K21).
        """
        try:
            # Once it was asked to commit, librdkafka can't be asked to abort.
            if self.flush(self._allowed_s, to_failure=True) and (slow := self._too_slow()):
                self.abort()
                raise slow
            self._call(self._producer.commit_transaction)
        except faults.FOREIGN as problem:
            raise self._judged("to commit", problem) from None
        self._open = False

    def _call(self, call: Callable[[float], Any]) -> None:
        """The same call again while the error is retriable and there is time."""
        deadline = time.monotonic() + self._settings.timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                call(max(0.1, min(left, _CALL_S)))
            except faults.FOREIGN as problem:
                if left <= 0 or faults.verdict(problem) is not TransactionVerdict.AGAIN:
                    raise
                self._producer.poll(_PAUSE_S)
            else:
                return

    def _judged(self, doing: str, problem: BaseException) -> Exception:
        """What to raise for an error; aborts where that is possible."""
        servers = self._settings.servers
        problem = self._cause(problem)
        verdict = faults.verdict(problem)
        if verdict is TransactionVerdict.FENCED:
            self._open = False
            return faults.fenced(servers, self.transactional_id)
        if isinstance(problem, QueueStuck) or verdict is TransactionVerdict.ABORT:
            slow = self._too_slow()
            self.abort()
            # Even a refused record is worth another attempt: the limits it was compared with may have been old.
            told = faults.failed(servers, doing, problem, self._denied(problem) or self.first)
            return slow or Indefinite(told, self.refusals.values())
        self._open = False  # what became of it is for the next producer to find out: an abort now could meet its commit
        if verdict is TransactionVerdict.AGAIN:
            return Indefinite(
                faults.undecided(servers, self._settings.timeout_s, self._last.why or faults.reason(problem))
            )
        return Indefinite(faults.gave_up(servers, problem))

    def _too_slow(self) -> Indefinite | None:
        """What to raise where Kafka took records to the end of the transaction's time, and not all."""
        now = time.monotonic()
        seconds, left = now - self._begun, self.pending + self.failures
        if now < self.ends or left >= self._records:
            return None
        done = self._bytes * (self._records - left) // self._records
        told = faults.too_slow(self._settings.servers, done, self._bytes, seconds, self._allowed_s)
        return Indefinite(told, rate=done / seconds)

    def _denied(self, problem: BaseException) -> list[tuple[str, Any]]:
        """Topics of the transaction that this user may not write to, where Kafka has refused one without its name."""
        if faults.name_of(problem) == "TOPIC_AUTHORIZATION_FAILED":
            with contextlib.suppress(KafkaError):
                denied = Cluster(self._settings.client, _ABORT_S).denied(self._written)
                return [(name, problem) for name in denied]
        return []

    def _cause(self, problem: BaseException) -> BaseException:
        """`produce` says only that there was an error; a transactional call says which."""
        if faults.name_of(problem) in faults.UNNAMED:
            try:
                self._producer.begin_transaction()
            except faults.FOREIGN as known:
                return known
        return problem

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


def take(settings: SinkSettings, transactional_id: str, more: Mapping[str, str]) -> Transactional:
    """A new producer, started.

    Raises:
        KafkaError: TL-K01, TL-K20.
        ConfigError: Secrets or TLS files.
    """
    fresh = Transactional(settings, transactional_id, more)
    try:
        fresh.start()
    except BaseException:
        fresh.close()
        raise
    return fresh


class Starting:
    """A producer that is started while its task still waits for rows; a context manager, which closes one not taken.

    To start fences older producers and opens no transaction, so it may come as early as one likes. It takes as long as
    Spark takes to hand over the rows of a small batch.

    Args:
        settings: The sink's settings.
        transactional_id: Whom it fences.
    """

    def __init__(self, settings: SinkSettings, transactional_id: str) -> None:
        self._settings = settings
        self._id = transactional_id
        #: None once it was taken.
        self._started: Future[Transactional] | None = later(lambda: take(settings, transactional_id, {}), "producer")

    def take(self, more: Mapping[str, str]) -> Transactional:
        """The producer, if it has these settings and was not taken before; else a new one.

        Raises:
            KafkaError: TL-K01, TL-K20.
            ConfigError: Secrets or TLS files.
        """
        started, self._started = self._started, None
        if started is not None:
            producer = started.result()
            if producer.more == dict(more):
                return producer
            producer.close()
        return take(self._settings, self._id, more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._started is not None:  # it may still be asking a Kafka that does not answer
            self._started.add_done_callback(_closed)


def _closed(started: Future[Transactional]) -> None:
    if started.exception() is None:
        started.result().close()
