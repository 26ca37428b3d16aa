"""One producer of a process: what it waits for, what it counts, and when it is thrown away."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
from confluent_kafka import KafkaError as ClientError

from tests.unit.kafka import memory as kafka
from tests.unit.kafka.memory import FULL, MemoryKafka, rows
from towline.errors import ConfigError, KafkaError
from towline.kafka import producers
from towline.kafka.columns import Rows
from towline.kafka.producers import KafkaProducer, QueueStuck, TransactionalProducer, pooled_producer
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
