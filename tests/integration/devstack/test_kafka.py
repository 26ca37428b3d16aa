"""A real Kafka: started, killed, paused."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tests.conftest import NewTopic
from tests.helpers import wait_until
from towline.errors import KafkaError, SetupError
from towline_prove.devstack import Kafka
from towline_prove.devstack.kafka import ANSWER_SECONDS, PERFORMANCE_VARIABLE

pytestmark = pytest.mark.kafka

YEARS_AGO = 1_577_836_800_000  # 2020-01-01, in ms


def send(broker: Kafka, topic: str, *values: bytes, at: int = 0) -> None:
    """`at` is the records' time in ms since 1970; 0 is now."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all", "log_level": 0})
    for value in values:
        producer.produce(topic, value, timestamp=at)
    assert producer.flush(30) == 0


@contextlib.contextmanager
def reader(broker: Kafka) -> Iterator[Consumer]:
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": "check", "enable.auto.commit": False, "log_level": 0}
    )
    try:
        yield consumer
    finally:
        consumer.close()


def begin(broker: Kafka, topic: str) -> int:
    """Offset of the first record that is there still."""
    with reader(broker) as consumer:
        return int(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=60)[0])


def read(broker: Kafka, topic: str) -> list[bytes | None]:
    with reader(broker) as consumer:
        low, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=60)
        consumer.assign([TopicPartition(topic, 0, low)])
        return [message.value() for message in consumer.consume(end - low, 20)] if end > low else []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """One for all that a Kafka bears: each test leaves it running."""
    often = {"log.initial.task.delay.ms": "100", "log.retention.check.interval.ms": "200"}  # 30 s and 5 min by itself
    with Kafka(tmp_path_factory.mktemp("kafka"), settings=often) as broker:
        yield broker


@pytest.mark.long
def test_records_survive_kill_and_restart_on_the_same_port(shared: Kafka) -> None:
    port, pid = shared.port, shared.pid
    shared.create_topics({"killed": 1})
    send(shared, "killed", b"one")
    shared.kill()
    assert not shared.running
    shared.start()
    assert (shared.port, shared.pid == pid) == (port, False)
    send(shared, "killed", b"two")
    shared.restart()
    assert read(shared, "killed") == [b"one", b"two"]


@pytest.mark.long
def test_a_paused_kafka_answers_after_resume(shared: Kafka) -> None:
    shared.create_topics({"paused": 1})
    shared.pause()
    assert shared.paused
    assert not shared._answers(shared.port)
    threading.Timer(0.2, shared.resume).start()
    send(shared, "paused", b"one")
    assert read(shared, "paused") == [b"one"]


@pytest.mark.long
def test_a_topic_is_created_by_a_kafka_that_takes_its_time(shared: Kafka) -> None:
    shared.pause()
    threading.Timer(ANSWER_SECONDS + 1, shared.resume).start()
    shared.create_topics({"slow": 1})
    send(shared, "slow", b"one")


@pytest.mark.long
def test_a_clean_end_leaves_no_session_to_wait_for_and_the_directory_formatted(shared: Kafka) -> None:
    meta = shared.directory / "data" / "meta.properties"
    before = meta.read_text()
    shared.stop()
    assert not shared._was_killed()
    shared.start()
    assert meta.read_text() == before
    shared.kill()
    assert shared._was_killed()
    shared.start()


@pytest.mark.long
def test_a_record_is_not_deleted_because_its_time_is_years_back(shared: Kafka) -> None:
    """Retention goes by the time that the producer gave, which a test or a device may have from anywhere."""
    shared.create_topics({"old-kept": 1})
    shared.create_topics({"old-deleted": 1}, {"retention.ms": "1000"})
    for topic in ("old-kept", "old-deleted"):
        send(shared, topic, b"one", at=YEARS_AGO)
    wait_until(lambda: begin(shared, "old-deleted") == 1, 60, "Kafka has looked for what is too old")
    assert read(shared, "old-kept") == [b"one"]


def test_options_that_java_does_not_know_are_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split at spaces, as Kafka's own start script does; so a lone quotation mark is Java's to refuse."""
    monkeypatch.setenv(PERFORMANCE_VARIABLE, "-XX:+UseSerialGC -XX:+No'Such")
    with pytest.raises(SetupError, match=r"Unrecognized VM option 'No'Such'.*TL-S12"), Kafka(tmp_path):
        pass


def test_topics_have_leaders_when_create_topics_returns(kafka: Kafka, topic: NewTopic) -> None:
    name = topic("led", partitions=3)
    description = kafka._admin(kafka.port).list_topics(name, timeout=60).topics[name]
    assert [partition.leader for partition in description.partitions.values()] == [1, 1, 1]
    send(kafka, name, b"x")


def test_a_topic_that_exists_is_an_error(kafka: Kafka, topic: NewTopic) -> None:
    name = topic()
    with pytest.raises(KafkaError, match=rf"can't create topic '{name}': .*already exists.*TL-K70"):
        kafka.create_topics({name: 1})


def test_a_topic_setting_that_can_not_be_is_an_error(kafka: Kafka) -> None:
    with pytest.raises(KafkaError, match="TL-K70"):
        kafka.create_topics({"bad-setting": 1}, {"cleanup.policy": "sometimes"})


@pytest.mark.long
def test_nobody_talks_on_standard_error(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from towline_prove.devstack import Kafka\n"
        "with Kafka(pathlib.Path(sys.argv[1])) as kafka:\n"
        "    kafka.create_topics({'t': 1}); kafka.kill(); kafka.start()\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout == ""


def test_a_setting_kafka_can_not_take_is_one_line(tmp_path: Path) -> None:
    broker = Kafka(tmp_path, settings={"num.io.threads": "none"})
    with pytest.raises(SetupError, match="TL-S12") as caught:
        broker.start()
    assert "num.io.threads" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not broker.running
