"""Look-ups: what is asked again, how long is waited, and what is told when there is no answer."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, TopicPartition

from tests.unit.kafka import memory as kafka
from tests.unit.kafka.memory import MemoryConsumer, MemoryKafka
from towline.errors import ConfigError, KafkaError
from towline.kafka import admin, faults
from towline.kafka.admin import ClusterInfo, KafkaAdmin, TopicLimits

K = "k:9092"
#: A topic that is being made, or changes its leader.
PASSING = [
    "LEADER_NOT_AVAILABLE",
    "NOT_LEADER_FOR_PARTITION",
    "UNKNOWN_TOPIC_OR_PART",
    "_UNKNOWN_PARTITION",
    "_TIMED_OUT",
]


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({}, TopicLimits(3)),
        (
            {
                "max.message.bytes": "1000",
                "message.timestamp.after.max.ms": "7",
                "message.timestamp.before.max.ms": "9",
                "cleanup.policy": "compact,delete",
            },
            TopicLimits(3, 1000, 7, 9, "compact,delete"),
        ),
        (
            {
                "message.timestamp.type": "LogAppendTime",
                "message.timestamp.after.max.ms": "7",
                "message.timestamp.before.max.ms": "9",
            },
            TopicLimits(3),
        ),
        ({"max.message.bytes": None, "message.timestamp.after.max.ms": "", "cleanup.policy": None}, TopicLimits(3)),
        ({"max.message.bytes": "-1"}, TopicLimits(3)),
        ({"max.message.bytes": "3000", "segment.bytes": "2000"}, TopicLimits(3, 2000)),
    ],
)
def test_the_limits_of_a_topic_are_read_from_its_config(config: dict[str, str | None], facts: TopicLimits) -> None:
    """Where it keeps its own time, that of a record does not matter; what can't be read is no limit."""
    assert TopicLimits.from_config(3, config) == facts
    assert facts.is_compacted == ("compact" in facts.cleanup_policy)


def test_facts_of_topics_leave_out_what_may_not_be_seen(memory: MemoryKafka) -> None:
    memory.topics |= {"u": 4, "v": 1}
    memory.configs["u"] = {"cleanup.policy": "compact"}
    memory.fail("describe_configs", None, kafka.raised("TOPIC_AUTHORIZATION_FAILED"))
    assert KafkaAdmin(K).topic_limits(["u", "v", "away"]) == {
        "u": TopicLimits(4, 1_048_588, None, None, "compact"),
        "v": TopicLimits(1),
    }
    assert KafkaAdmin(K).topic_limits(["away"]) == {}


def test_the_metadata_of_a_cluster(memory: MemoryKafka) -> None:
    memory.topics["u"] = 4
    assert KafkaAdmin(K).info() == ClusterInfo("c", {1: K}, {"t": 1, "u": 4})


def test_a_client_that_had_no_answer_is_not_asked_again(memory: MemoryKafka) -> None:
    clients: list[kafka.MemoryAdmin] = []

    def made(config: dict[str, Any], logger: object) -> kafka.MemoryAdmin:
        clients.append(memory.admin(config, logger))
        return clients[-1]

    with pytest.MonkeyPatch.context() as patch:  # the fixture's is undone after that of `memory`
        patch.setattr(admin, "AdminClient", made)
        asked = KafkaAdmin(K)
        assert asked.topic_ids(["t", "away"]).keys() == asked.topic_ids(["t"]).keys() == {"t"}
        assert len(clients) == 1
        memory.fail("describe_topics", kafka.raised("TOPIC_AUTHORIZATION_FAILED"), kafka.TIMED_OUT)
        assert asked.topic_ids(["t"]) == {"t": ""}, "it is unknown, and that is an answer"
        with pytest.raises(KafkaError, match=r"timed out waiting.*TL-K01"):
            asked.topic_ids(["t"])
        assert len(clients) == 1
        assert asked.topic_ids(["t"])["t"]
        assert len(clients) == 2


def test_the_longest_transaction_is_that_of_the_strictest_broker(memory: MemoryKafka) -> None:
    """Of a cluster of several brokers it was Kafka's own limit: librdkafka tells the settings of one broker a call."""
    memory.brokers = [1, 2, 3]
    memory.configs |= {"1": {}, "2": {"transaction.max.timeout.ms": "777000"}, "3": {}}
    assert KafkaAdmin(K).max_transaction_ms() == 777_000
    memory.fail("describe_configs", *[kafka.raised("CLUSTER_AUTHORIZATION_FAILED")] * 3)
    assert KafkaAdmin(K).max_transaction_ms() == 900_000


@pytest.mark.parametrize("client", [K, {"bootstrap.servers": K, "acks": "all"}])
def test_a_missing_answer_is_an_error_with_servers_time_and_cause(memory: MemoryKafka, client: Any) -> None:
    memory.fail("admin.list_topics", kafka.TRANSPORT, kafka.TRANSPORT)
    with pytest.raises(KafkaError, match=r"k:9092: Kafka did not answer for 4 s: failed to get metadata.*TL-K01"):
        KafkaAdmin(client, 4.0).info()
    heard: list[dict[str, Any]] = []

    def noting(config: dict[str, Any], logger: object) -> kafka.MemoryAdmin:
        heard.append(config)
        config["error_cb"](ClientError(ClientError._TRANSPORT, "k:9092/bootstrap: Connection refused"))
        return memory.admin(config, logger)

    with pytest.MonkeyPatch.context() as patch:  # the fixture's is undone after that of `memory`
        patch.setattr(admin, "AdminClient", noting)
        with pytest.raises(KafkaError, match="for 4 s: k:9092: Connection refused"):
            KafkaAdmin(client, 4.0).info()
    assert heard[0]["bootstrap.servers"] == K


@pytest.mark.usefixtures("memory")
def test_an_admin_client_that_can_not_be_created_is_a_config_error() -> None:
    def unusable(*_: object, **__: object) -> None:
        raise kafka.raised("_INVALID_ARG", "Failed to create producer: no such file")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admin, "AdminClient", unusable)
        with pytest.raises(ConfigError, match=r"no such file.*TL-C45"):
            KafkaAdmin(K).info()


# -- a transaction that is not decided --


@pytest.mark.parametrize(("looks", "seconds", "decided"), [(0, 1.0, True), (5, 1.0, True), (1000, 1.0, False)])
def test_a_topic_without_open_transactions_has_equal_end_offsets(
    memory: MemoryKafka, looks: int, seconds: float, decided: bool
) -> None:
    memory.topics["t"] = 3
    memory.undecided = looks
    assert KafkaAdmin(K, seconds).wait_for_open_transactions("t") is decided
    assert (memory.now - 1000 > seconds) is not decided


def test_behind_a_reader_who_is_past_the_end_nothing_is_known(memory: MemoryKafka) -> None:
    """He stands in a topic that was deleted since: in the one of that name now he is not "0 behind" [I17], [I19]."""
    memory.topics["t"] = 1
    asked = KafkaAdmin(K, 1.0)
    assert asked.backlog({"t": {"0": 0}}) == (0, 0)
    with pytest.raises(KafkaError, match=r"[Oo]ffset out of range.*TL-K01"):
        asked.backlog({"t": {"0": 1}})


def test_a_missing_topic_has_no_open_transactions(memory: MemoryKafka) -> None:
    memory.undecided = 1000
    assert KafkaAdmin(K).wait_for_open_transactions("away")


def test_ends_are_asked_for_again_while_a_topic_has_no_leader(memory: MemoryKafka) -> None:
    memory.fail("list_offsets", *map(kafka.raised, PASSING))
    assert KafkaAdmin(K).wait_for_open_transactions("t")
    memory.fail("list_offsets", kafka.raised("TOPIC_AUTHORIZATION_FAILED"))
    with pytest.raises(KafkaError, match="TL-K01"):
        KafkaAdmin(K).wait_for_open_transactions("t")


# -- what a consumer may read --


def test_a_leader_that_changed_is_asked_for_and_then_for_its_offsets(memory: MemoryKafka) -> None:
    memory.log["t", 0] += [None] * 5
    consumer = MemoryConsumer(memory, {})
    memory.fail("get_watermark_offsets", *map(kafka.raised, PASSING))
    memory.fail("consumer.list_topics", kafka.TRANSPORT)
    assert admin.watermarks(consumer, TopicPartition("t", 0), 60.0) == (0, 5)
    assert memory.calls.count("consumer.list_topics") == len(PASSING), "after each that failed"


@pytest.mark.parametrize("seconds", [2.0, 20.0])
def test_watermarks_are_retried_within_the_timeout(memory: MemoryKafka, seconds: float) -> None:
    consumer = MemoryConsumer(memory, {})
    memory.fail("get_watermark_offsets", *[kafka.raised("_TIMED_OUT")] * 100)
    with pytest.raises(KafkaException):
        admin.watermarks(consumer, TopicPartition("t", 0), seconds)
    assert seconds < memory.now - 1000 < seconds + 4
    memory.fail("get_watermark_offsets", kafka.TRANSPORT)
    before = memory.now
    with pytest.raises(KafkaException):
        admin.watermarks(consumer, TopicPartition("t", 0), seconds)
    assert memory.now - before <= 3.0, "another answer than 'not yet' is final"


# -- topics that are made --


def test_topics_are_created_once(memory: MemoryKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KafkaAdmin(K).create({"b": 2, "t": 9, "a": 1}, config={"cleanup.policy": "compact"}) == ["a", "b"]
    assert (memory.topics, memory.configs["b"]) == ({"t": 1, "a": 1, "b": 2}, {"cleanup.policy": "compact"})
    assert KafkaAdmin(K).create({}) == []


def test_a_created_topic_is_waited_for(memory: MemoryKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller answers before the brokers know of it."""
    unknown: dict[str, int] = {}
    create, slept = kafka.MemoryAdmin._create, memory.sleep

    def later(self: kafka.MemoryAdmin, one: Any) -> None:
        create(self, one)
        unknown[one.topic] = memory.topics.pop(one.topic)

    def sleep(seconds: float) -> None:
        slept(seconds)
        memory.topics.update(unknown)

    monkeypatch.setattr(kafka.MemoryAdmin, "_create", later)
    monkeypatch.setattr(memory, "sleep", sleep)
    assert KafkaAdmin(K).create({"c": 1}) == ["c"]
    assert "c" in memory.topics


def test_a_topic_that_kafka_refuses_to_make_is_named(memory: MemoryKafka) -> None:
    memory.fail("create_topics", kafka.raised("POLICY_VIOLATION", "Broker: Too many."))
    with pytest.raises(KafkaError, match=r'topic "c" can not be created: too many.*TL-K09') as caught:
        KafkaAdmin(K).create({"c": 1})
    assert caught.value.location == K
    memory.fail("create_topics", TimeoutError())
    with pytest.raises(KafkaError, match=r"Kafka did not answer: no answer in time.*TL-K01"):
        KafkaAdmin(K).create({"c": 1})


def test_an_answer_that_does_not_come_is_an_error_of_kafkas(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TimeoutError` of a future of the admin client (confluent-kafka 2.16.1) passed every except that knows Kafka."""
    monkeypatch.setattr(admin, "_ANSWER_GRACE_S", 0.0)
    with pytest.raises(faults.CLIENT_ERRORS) as caught:
        admin.wait_for_result(Future(), 0.001)
    assert faults.error_text(caught.value) == "no answer in time"
    assert faults.is_kind(caught.value, faults.ErrorKind.TRANSIENT)
