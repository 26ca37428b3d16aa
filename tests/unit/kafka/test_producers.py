"""Producers: what one waits for and counts, and what each answer of librdkafka makes of a transaction."""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from tests.unit.kafka import memory as kafka
from tests.unit.kafka.memory import FULL, MemoryKafka, MemoryProducer, rows
from towline.errors import ConfigError, KafkaError
from towline.kafka import faults, producers
from towline.kafka.columns import Rows
from towline.kafka.faults import TransactionVerdict
from towline.kafka.markers import Marker
from towline.kafka.producers import (
    AttemptError,
    KafkaProducer,
    QueueStuck,
    StartingProducer,
    TransactionalProducer,
    pooled_producer,
)
from towline.kafka.recordcheck import FailedRecord


def test_records_wait_for_room_in_their_order(memory: MemoryKafka) -> None:
    producer = KafkaProducer(kafka.settings(deliveryTimeout="7"))
    memory.fail("produce", None, FULL, FULL, None, FULL)
    producer.send(rows(b"1", b"2", b"3"))
    assert memory.calls.count("poll") == 4, "one for each wait, and one at the end"
    assert producer.flush(1) == producer.pending == 0
    assert memory.committed("t") == [b"1", b"2", b"3"]
    memory.fail("produce", *[FULL] * 1000)
    before = memory.now
    with pytest.raises(QueueStuck):
        producer.send(rows(b"1"))
    assert 7 + producers.REPORT_GRACE_S <= memory.now - before < 13
    memory.fail("produce")
    producer.send(rows(b"1"))
    memory.producers[0].refuse()
    memory.fail("produce", *[FULL] * 1000)
    before = memory.now
    with pytest.raises(QueueStuck):
        producer.send(rows(b"2"))
    assert memory.now == before, "it is not waited for where records have failed"


@pytest.mark.parametrize("full", [0, 1])
def test_a_record_that_the_client_refuses_is_an_error_with_a_full_queue_too(memory: MemoryKafka, full: int) -> None:
    producer = KafkaProducer(kafka.settings(kafka__message__max__bytes="2000"))
    memory.fail("produce", *[FULL] * full, kafka.raised("MSG_SIZE_TOO_LARGE"))
    with pytest.raises(KafkaError, match=r"3,000 bytes, the client takes 2,000 .*message.max.bytes.*TL-K05"):
        producer.send(rows(b"x" * 3000))


def test_any_other_record_that_the_client_refuses(memory: MemoryKafka) -> None:
    producer = KafkaProducer(kafka.settings())
    memory.fail("produce", kafka.raised("_UNKNOWN_PARTITION", "Local: Unknown partition"))
    with pytest.raises(KafkaError, match=r'topic "t" can not be written: unknown partition \(partition 7\).*TL-K06'):
        producer.send(Rows(1, 0, frozenset(), iter([("t", b"1", None, 7)])))


def test_all_failed_records_are_counted_and_the_first_is_reported(memory: MemoryKafka) -> None:
    producer = KafkaProducer(kafka.settings())
    producer.send(rows(*[b"x"] * 9))
    client = memory.producers[0]
    client.config["on_delivery"](None, None)
    assert producer.failure_count == 0, "a report of success is none of a failure"
    client.refuse(ClientError(ClientError._MSG_TIMED_OUT))
    for error in (kafka.REFUSED, kafka.UNFIT):
        producer.send(rows(b"x"))
        client.refuse(error)
    assert (producer.failure_count, producer.failure) == (11, FailedRecord("t", kafka.REFUSED)), "not a time-out"
    producer.reset()
    assert producer.failure_count == 0
    assert producer.failure is None


def test_missing_metadata_is_an_error_with_the_cause_of_the_connection(memory: MemoryKafka) -> None:
    for memory.heard, told in (("", "failed to get metadata"), ("k1:9092: Connection refused",) * 2):
        memory.fail("list_topics", kafka.TRANSPORT)
        with pytest.raises(KafkaError, match=f"did not answer for 7 s: {told}.*TL-K01"):
            TransactionalProducer(kafka.settings(deliveryTimeout="7"), "towline.s.0")


@pytest.mark.usefixtures("memory")
def test_a_producer_that_can_not_be_created_is_a_config_error() -> None:
    def unusable(*_: object, **__: object) -> None:
        raise kafka.raised("_INVALID_ARG", "Failed to create producer: ssl.ca.location failed: No such file")

    with pytest.MonkeyPatch.context() as patch:  # the fixture's is undone after that of `memory`
        patch.setattr(producers, "Producer", unusable)
        with pytest.raises(ConfigError, match=r"ssl.ca.location failed.*TL-C45"):
            KafkaProducer(kafka.settings())


def test_closing_a_producer_drops_its_queue_and_hides_no_error(memory: MemoryKafka) -> None:
    producer = KafkaProducer(kafka.settings())
    producer.send(rows(b"1"))
    producer.close()
    assert memory.committed("t") == [], "nothing of it may come after it was given up"
    producer = KafkaProducer(kafka.settings())
    memory.calls.clear()
    memory.fail("flush", kafka.FENCED)
    for _ in range(2):
        producer.close()
        assert memory.calls == ["purge", "flush"]


def test_nobody_shares_a_producer_and_one_of_a_stopped_task_or_of_a_parent_is_not_used(
    memory: MemoryKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = kafka.settings(guarantee="at_least_once")
    with pooled_producer(of) as first, pooled_producer(of) as beside:
        assert first is not beside
        first.failure_count, beside.is_healthy = 2, False
    with pooled_producer(of) as again:
        assert (again is first, first.failure_count) == (True, 0), "reports of an earlier task are forgotten"
    monkeypatch.setattr(os, "getpid", lambda: -1)  # a fork has its parent's sockets
    with pooled_producer(of) as forked:
        assert forked is not first
    memory.calls.clear()
    with pytest.raises(KeyboardInterrupt), pooled_producer(of):
        raise KeyboardInterrupt
    assert memory.calls == ["purge", "flush"]
    assert forked not in producers._clients.values()


def test_the_collector_is_on_again_after_records_were_sent(memory: MemoryKafka) -> None:
    producer = KafkaProducer(kafka.settings())
    seen = (("t", b"1", None, -1) for _ in range(2) if not gc.isenabled())
    producer.send(Rows(2, 0, frozenset(), seen))
    assert producer.pending == 2, "it was off when they were asked for"
    assert gc.isenabled()


def test_a_producer_that_nobody_holds_is_destroyed_at_once() -> None:
    """The collector runs in any thread, its own among them while it asks for a token: librdkafka aborts the process."""
    gc.disable()
    try:
        producer = KafkaProducer(kafka.settings(kafka__bootstrap__servers="127.0.0.1:1"))
        producer.send(rows(b"1"))
        held = weakref.ref(producer)
        producer.close()
        del producer
        assert held() is None
    finally:
        gc.enable()


# -- a transaction: asked again, aborted, given up, or left for a new producer --

ID = "towline.s.0"
FOREVER = [kafka.TIMED_OUT] * 1000


@pytest.mark.parametrize(
    ("problem", "verdict"),
    [
        (kafka.TIMED_OUT, TransactionVerdict.RETRY),
        (kafka.INCONSISTENT, TransactionVerdict.ABORT),
        (kafka.raised("_TIMED_OUT", retriable=True, txn_requires_abort=True), TransactionVerdict.ABORT),
        (kafka.FENCED, TransactionVerdict.FENCED),
        (kafka.DEAD, TransactionVerdict.FENCED),
        (kafka.raised("INVALID_PRODUCER_EPOCH", txn_requires_abort=True), TransactionVerdict.FENCED),
        (kafka.raised("PRODUCER_FENCED"), TransactionVerdict.FENCED),
        (kafka.raised("_TIMED_OUT", fatal=True, retriable=True), TransactionVerdict.DISCARD),
        (kafka.raised("OUT_OF_ORDER_SEQUENCE_NUMBER", fatal=True, txn_requires_abort=True), TransactionVerdict.DISCARD),
        (kafka.UNKNOWN, TransactionVerdict.DISCARD),
        (SystemError("it gave no reason"), TransactionVerdict.DISCARD),
        (QueueStuck(), TransactionVerdict.DISCARD),
    ],
)
def test_an_error_is_classified_by_its_name_and_flags(problem: BaseException, verdict: TransactionVerdict) -> None:
    """An abort that Kafka asks for comes before another try, and what is fatal before both (KIP-360)."""
    assert faults.transaction_verdict(problem) is verdict


def begun(memory: MemoryKafka, *values: int, **options: str) -> tuple[TransactionalProducer, MemoryProducer]:
    """An open transaction with these rows, and librdkafka's side of it."""
    producer = TransactionalProducer(kafka.settings(**options), ID, {})
    producer.begin()
    producer.write(rows(*(b"%d" % value for value in values)))
    return producer, memory.producers[-1]


def told_by(problem: BaseException) -> tuple[str, bool]:
    """The code of an error, and whether a new producer may do better."""
    assert isinstance(problem, KafkaError)
    return problem.code, isinstance(problem, AttemptError)


@pytest.mark.parametrize(
    ("answers", "told", "aborts"),
    [
        ([kafka.INCONSISTENT], ("TL-K20", True), 1),
        ([kafka.TIMED_OUT, kafka.INCONSISTENT], ("TL-K20", True), 1),
        ([kafka.FENCED], ("TL-K19", False), 0),
        ([kafka.DEAD], ("TL-K19", False), 0),
        ([kafka.UNKNOWN], ("TL-K07", True), 0),
        ([SystemError("it gave no reason")], ("TL-K07", True), 0),
        (FOREVER, ("TL-K21", True), 0),
    ],
)
def test_a_commit_that_fails(memory: MemoryKafka, answers: list[Any], told: tuple[str, bool], aborts: int) -> None:
    """It is aborted at once where Kafka says so, once; where nobody knows, an abort could meet the commit."""
    producer, _ = begun(memory, 1)
    memory.fail("commit_transaction", *answers)
    with pytest.raises(KafkaError) as caught:
        producer.commit()
    assert told_by(caught.value) == told
    producer.close()
    assert memory.calls.count("abort_transaction") == aborts


def test_a_commit_is_asked_for_again_and_only_as_long_as_a_delivery_may_take(memory: MemoryKafka) -> None:
    producer, _ = begun(memory, 1)
    memory.fail("commit_transaction", kafka.TIMED_OUT, kafka.TIMED_OUT)
    producer.commit()
    assert memory.committed("t") == [b"1"]
    assert memory.calls.count("commit_transaction") == 3
    assert memory.calls[-2] == "poll", "what came meanwhile is heard between two tries"
    for memory.heard, cause in (("", "timed out"), ("k/1: Refused (after 0ms in x)", r"k/1: Refused\.")):
        producer, _ = begun(memory, 2, deliveryTimeout="12")
        memory.fail("commit_transaction", *FOREVER)
        before = memory.now
        with pytest.raises(AttemptError, match=f"within 12 s whether .* is committed: {cause}"):
            producer.commit()
        assert 12 <= memory.now - before < 13


def test_closing_a_producer_aborts_an_open_transaction_only(memory: MemoryKafka) -> None:
    producer, _ = begun(memory, 1)
    for _ in range(2):
        producer.close()
        assert memory.calls.count("abort_transaction") == 1
    producer, _ = begun(memory, 2)
    producer.commit()
    producer.close()
    assert memory.calls.count("abort_transaction") == 1
    with pytest.raises(AssertionError, match="one transaction"):
        producer.begin()  # a late answer to its commit could end the next one (KIP-890)
    producer, _ = begun(memory, 3)
    memory.fail("abort_transaction", kafka.TIMED_OUT)
    producer.close()  # the next `init_transactions` aborts it too
    assert memory.calls[-2:] == ["purge", "flush"]
    assert memory.committed("t") == [b"2"]


@pytest.mark.parametrize(
    ("reported", "told"),
    [(True, r'size too large \(topic "t"\)'), (False, r"4 message\(s\) failed: Broker: Message size too large")],
)
def test_an_error_while_sending_names_the_record_and_aborts(memory: MemoryKafka, reported: bool, told: str) -> None:
    """`produce` says only that the state is wrong. What the abort drops may be reported before what was refused."""
    producer, client = begun(memory, 1)
    if reported:
        client.refuse()
        producer.write(rows(b"2"))
    memory.fail("produce", kafka.STATE)
    memory.fail("begin_transaction", kafka.SPOILT)
    with pytest.raises(AttemptError, match=rf"failed to send: .*{told}.*Raise the topic's max") as caught:
        producer.write(rows(b"3"))
    assert told_by(caught.value) == ("TL-K20", True)
    assert memory.calls.count("abort_transaction") == 1


@pytest.mark.parametrize(
    ("known", "told"), [(kafka.FENCED, ("TL-K19", False)), (kafka.UNKNOWN, ("TL-K07", True)), (None, ("TL-K07", True))]
)
def test_a_fatal_error_is_asked_for_its_name(
    memory: MemoryKafka, known: BaseException | None, told: tuple[str, bool]
) -> None:
    producer, _ = begun(memory, 1)
    memory.fail("produce", kafka.FATAL)
    memory.fail("begin_transaction", known)
    with pytest.raises(KafkaError) as caught:
        producer.write(rows(b"2"))
    assert told_by(caught.value) == told
    producer.close()
    assert "abort_transaction" not in memory.calls


def test_a_marker_waits_for_room_as_its_records_do(memory: MemoryKafka) -> None:
    """The last record may have taken the last place."""
    memory.topics["m"] = 1
    producer, _ = begun(memory, 1)
    memory.fail("produce", FULL, FULL)
    producer.write_marker("m", 0, "s/0", Marker(0, 1))
    producer.commit()
    assert memory.committed("m") == [Marker(0, 1).to_json()]
    producer, _ = begun(memory, 2)
    memory.fail("produce", *[FULL] * 10_000)
    before = memory.now
    with pytest.raises(AttemptError, match=r"to write its marker: .*takes records too slowly"):
        producer.write_marker("m", 0, "s/0", Marker(1, 1))
    assert memory.now - before >= 54, "a moment before Kafka itself ends the transaction"
    assert memory.calls.count("abort_transaction") == 1


@pytest.mark.parametrize(
    ("answers", "code"), [(FOREVER, "TL-K01"), ([kafka.UNKNOWN], "TL-K20"), ([kafka.FENCED], "TL-K20")]
)
def test_a_producer_that_does_not_start_is_closed(memory: MemoryKafka, answers: list[Any], code: str) -> None:
    memory.fail("init_transactions", *answers)
    with pytest.raises(KafkaError, match=code):
        TransactionalProducer(kafka.settings(), ID, {})
    assert memory.calls[-2:] == ["purge", "flush"]
    assert "abort_transaction" not in memory.calls, "it could wait once more"
    assert memory.now - 1000 < 61


# -- one that is started while its task still waits for rows --


@pytest.mark.parametrize("answer", [None, kafka.UNKNOWN])
def test_a_starting_producer_is_used_once_and_with_its_settings_only(memory: MemoryKafka, answer: Any) -> None:
    starting = StartingProducer(kafka.settings(), ID)
    first = starting.take({})
    assert len(memory.producers) == 1
    assert starting.take({}) is not first
    with closing(StartingProducer(kafka.settings(), ID)) as starting:
        assert starting.take({"batch.size": "5000"}).extra == {"batch.size": "5000"}
    assert memory.producers[-1].config["batch.size"] == "5000"
    assert memory.calls.count("purge") == 1, "the one with other settings is let go"
    memory.fail("init_transactions", answer)
    with closing(StartingProducer(kafka.settings(), ID)) as starting:
        future = starting._future
    assert future is not None
    future.exception(60)
    assert memory.calls.count("purge") == 2, "an unused one is closed"


# -- Kafka's errors in our words --


def fault(code: int, text: str = "") -> Any:
    return ClientError(code, text or None)


CONNECT = fault(ClientError._TRANSPORT, "k1:9092/bootstrap: Connect to k1 failed: Connection refused (after 0ms in x)")
LOGIN = fault(ClientError._AUTHENTICATION, "k1:9092/bootstrap: SASL PLAIN failed (after 3ms in x)")
DOWN = fault(ClientError._ALL_BROKERS_DOWN, "1/1 brokers are down")


def test_a_system_error_has_the_text_of_its_cause() -> None:
    """The binding's way to say "fatal" while a delivery report is pending."""
    error = SystemError("returned a result with an exception set")
    error.__cause__ = KafkaException(fault(ClientError._FENCED, "Local: Fenced"))
    assert faults.error_text(error) == "fenced"
    assert faults.error_name(error) == "_FENCED"
    assert faults.error_text(SystemError("alone")) == "alone"


@pytest.mark.parametrize(
    ("events", "explanation"),
    [
        ([CONNECT, DOWN], "k1:9092: Connect to k1 failed: Connection refused"),
        ([DOWN], "no broker is up"),
        ([LOGIN, CONNECT, DOWN], "authentication failed: k1:9092: SASL PLAIN failed"),
        ([DOWN, LOGIN], "authentication failed: k1:9092: SASL PLAIN failed"),
    ],
)
def test_the_clearest_explanation_of_a_silence_wins(events: list[Any], explanation: str) -> None:
    last = faults.LastConnectionError()
    for event in events:
        last.on_error(event)
    assert last.reason == explanation
