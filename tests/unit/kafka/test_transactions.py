"""What each answer of librdkafka makes of a transaction: asked again, aborted, given up, or left for a new producer."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from tests.unit.kafka import memory as kafka
from tests.unit.kafka.memory import MemoryKafka, MemoryProducer, rows
from towline.errors import KafkaError
from towline.kafka import faults
from towline.kafka.faults import TransactionVerdict
from towline.kafka.markers import Marker
from towline.kafka.producers import AttemptError, QueueStuck, StartingProducer, TransactionalProducer

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
    producer, _ = begun(memory, 2, deliveryTimeout="12")
    memory.fail("commit_transaction", *FOREVER)
    before = memory.now
    with pytest.raises(AttemptError, match="did not say within 12 s whether the transaction is committed: timed out"):
        producer.commit()
    assert 12 <= memory.now - before < 13


def test_an_undecided_commit_has_the_cause_of_the_connection(memory: MemoryKafka) -> None:
    producer, _ = begun(memory, 1)
    memory.heard = "k:9092/1: Connection refused (after 0ms in x)"
    memory.fail("commit_transaction", *FOREVER)
    with pytest.raises(AttemptError, match=r"committed: k:9092/1: Connection refused\."):
        producer.commit()


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
    memory.fail("produce", kafka.FULL, kafka.FULL)
    producer.write_marker("m", 0, "s/0", Marker(0, 1))
    producer.commit()
    assert memory.committed("m") == [Marker(0, 1).to_json()]
    producer, _ = begun(memory, 2)
    memory.fail("produce", *[kafka.FULL] * 10_000)
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
