"""Look-ups: what is asked again, how long is waited, and what is told when there is no answer."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from itertools import repeat
from typing import Any

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.unit.kafka import memory as kafka
from tests.unit.kafka.memory import MemoryConsumer, MemoryKafka
from towline.errors import KafkaError
from towline.kafka import admin, faults
from towline.kafka.admin import KafkaAdmin, TopicLimits

K = "k:9092"
TIMES = {"message.timestamp.after.max.ms": "7", "message.timestamp.before.max.ms": "9"}


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({**TIMES, "max.message.bytes": "1000"}, TopicLimits(3, 1000, 7, 9)),
        ({**TIMES, "message.timestamp.type": "LogAppendTime"}, TopicLimits(3)),
        ({"max.message.bytes": None, "message.timestamp.after.max.ms": "", "cleanup.policy": None}, TopicLimits(3)),
        ({"max.message.bytes": "-1"}, TopicLimits(3)),
        ({"max.message.bytes": "3000", "segment.bytes": "2000"}, TopicLimits(3, 2000)),
        ({"cleanup.policy": "compact,delete"}, TopicLimits(3, None, None, None, "compact,delete")),
    ],
)
def test_the_limits_of_a_topic_are_read_from_its_config(config: dict[str, str | None], facts: TopicLimits) -> None:
    """Where it keeps its own time, that of a record does not matter; what can't be read is no limit."""
    assert TopicLimits.from_config(3, config) == facts
    assert facts.is_compacted == ("compact" in facts.cleanup_policy)


def test_what_may_not_be_seen_is_left_out(memory: MemoryKafka) -> None:
    memory.topics |= {"u": 4, "v": 1}
    memory.configs["u"] = {"cleanup.policy": "compact"}
    memory.fail("describe_configs", None, kafka.raised("TOPIC_AUTHORIZATION_FAILED"))
    assert KafkaAdmin(K).topic_limits(["u", "v", "away"]) == {
        "u": TopicLimits(4, 1_048_588, None, None, "compact"),
        "v": TopicLimits(1),
    }
    memory.fail("describe_topics", None, kafka.raised("TOPIC_AUTHORIZATION_FAILED"))
    assert KafkaAdmin(K).topic_ids(["t", "away"]) == {"t": ""}


def test_a_client_that_had_no_answer_is_not_asked_again(memory: MemoryKafka) -> None:
    asked = KafkaAdmin({"bootstrap.servers": K, "acks": "all"}, 4.0)
    assert asked.info().topics == asked.info().topics == {"t": 1}
    assert len(memory.admins) == 1
    memory.fail("admin.list_topics", kafka.TRANSPORT)
    with pytest.raises(KafkaError, match=r"k:9092: Kafka did not answer for 4 s: failed to get metadata.*TL-K01"):
        asked.info()
    memory.heard = "k:9092/bootstrap: Connection refused"
    memory.fail("admin.list_topics", kafka.TRANSPORT)
    with pytest.raises(KafkaError, match="for 4 s: k:9092: Connection refused"):
        asked.info()
    assert asked.info().topics
    assert len(memory.admins) == 3


def test_the_longest_transaction_is_that_of_the_strictest_broker(memory: MemoryKafka) -> None:
    """Of a cluster of several brokers it was Kafka's own limit: librdkafka tells the settings of one broker a call."""
    memory.brokers = [1, 2, 3]
    memory.configs |= {"1": {}, "2": {"transaction.max.timeout.ms": "777000"}, "3": {}}
    assert KafkaAdmin(K).max_transaction_ms() == 777_000
    memory.fail("describe_configs", *[kafka.raised("CLUSTER_AUTHORIZATION_FAILED")] * 3)
    assert KafkaAdmin(K).max_transaction_ms() == 900_000


@pytest.mark.parametrize(("looks", "decided"), [(0, True), (5, True), (1000, False)])
def test_a_topic_without_open_transactions_has_equal_end_offsets(
    memory: MemoryKafka, looks: int, decided: bool
) -> None:
    memory.topics["t"] = 3
    memory.undecided = looks
    assert KafkaAdmin(K).wait_for_open_transactions("away"), "a missing one has none"
    assert KafkaAdmin(K, 1.0).wait_for_open_transactions("t") is decided
    assert (memory.now - 1000 > 1.0) is not decided


def test_behind_a_reader_who_is_past_the_end_nothing_is_known(memory: MemoryKafka) -> None:
    """He stands in a topic that was deleted since: in the one of that name now he is not "0 behind" [I17], [I19]."""
    memory.log["t", 0] += [None] * 5
    asked = KafkaAdmin(K, 1.0)
    assert asked.backlog({"t": {"0": 3}}) == (2, 0)
    with pytest.raises(KafkaError, match=r"[Oo]ffset out of range.*TL-K01"):
        asked.backlog({"t": {"0": 6}})


def test_offsets_are_asked_for_again_while_a_topic_has_no_leader(memory: MemoryKafka) -> None:
    passing = ["LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_PARTITION"]
    memory.fail("list_offsets", *map(kafka.raised, passing))
    assert KafkaAdmin(K).wait_for_open_transactions("t")
    memory.fail("list_offsets", kafka.raised("TOPIC_AUTHORIZATION_FAILED"))
    with pytest.raises(KafkaError, match="TL-K01"):
        KafkaAdmin(K).wait_for_open_transactions("t")


@pytest.mark.parametrize("seconds", [2.0, 20.0])
def test_watermarks_are_retried_within_the_timeout(memory: MemoryKafka, seconds: float) -> None:
    consumer, place = MemoryConsumer(memory, {}), TopicPartition("t", 0)
    memory.fail("get_watermark_offsets", *[kafka.raised("_TIMED_OUT")] * 100)
    with pytest.raises(KafkaException):
        admin.watermarks(consumer, place, seconds)
    assert seconds < memory.now - 1000 < seconds + 4
    assert memory.calls.count("consumer.list_topics") == memory.calls.count("get_watermark_offsets"), "for the leader"
    memory.fail("get_watermark_offsets", kafka.TRANSPORT)
    before = memory.now
    with pytest.raises(KafkaException):
        admin.watermarks(consumer, place, seconds)
    assert memory.now - before <= 3.0, "another answer than 'not yet' is final"


def test_topics_are_created_once_and_waited_for(memory: MemoryKafka) -> None:
    memory.seen = repeat(False, 5)
    assert KafkaAdmin(K).create({"b": 2, "t": 9}, config={"cleanup.policy": "compact"}) == ["b"]
    assert next(memory.seen, True), "the controller answers before the brokers know of it"
    assert (memory.topics, memory.configs["b"]) == ({"t": 1, "b": 2}, {"cleanup.policy": "compact"})
    assert KafkaAdmin(K).create({}) == []


def test_a_topic_that_kafka_refuses_to_make_is_named(memory: MemoryKafka) -> None:
    memory.fail("create_topics", kafka.raised("POLICY_VIOLATION", "Broker: Too many."))
    with pytest.raises(KafkaError, match=r'^k:9092: topic "c" can not be created: too many.*TL-K09'):
        KafkaAdmin(K).create({"c": 1})


@pytest.mark.usefixtures("memory")
def test_an_answer_that_does_not_come_is_an_error_of_kafkas(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TimeoutError` of a future of the admin client (confluent-kafka 2.16.1) passed every except that knows Kafka."""
    monkeypatch.setattr(admin, "_ANSWER_GRACE_S", 0.0)
    never: Future[Any] = Future()
    with pytest.raises(KafkaError, match=r"Kafka did not answer: no answer in time.*TL-K01"):
        KafkaAdmin(K, 0.001).request_each(lambda _: {"t": never})
    with pytest.raises(faults.CLIENT_ERRORS) as caught:
        never.result(0)
    assert faults.is_kind(caught.value, faults.ErrorKind.TRANSIENT)


def test_a_client_that_had_no_answer_is_destroyed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector runs in any thread, its own among them while it asks for a token: librdkafka aborts the process."""
    held = list[weakref.ref[Client]]()

    def connected(*args: Any, **more: Any) -> Client:
        client = Client(*args, **more)
        held.append(weakref.ref(client))
        return client

    monkeypatch.setattr(admin, "AdminClient", connected)
    gc.disable()
    try:
        for ask in (KafkaAdmin.info, KafkaAdmin.check_reachable, lambda asked: asked.topic_ids(["t"])):
            with pytest.raises(KafkaError, match="TL-K01"):
                ask(KafkaAdmin("127.0.0.1:1", 0.1))
        assert KafkaAdmin("127.0.0.1:1", 0.1).configs(["t"]) == {}
        assert [one() for one in held] == [None] * 4
    finally:
        gc.enable()


class Client(AdminClient):
    """One that a weak reference can name."""
