"""The load's claims against a real Mosquitto, and the reader of a real Kafka: what they say a referee believes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.conftest import NewMosquitto, NewTopic
from tests.helpers import wait_until
from towline.errors import KafkaError, Unreachable
from towline_prove.devstack import Kafka
from towline_prove.history import SenderClaim, read_history
from towline_prove.load import LoadPlan, run_load
from towline_prove.reader import TopicTail, read_topic


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_load_claims_what_was_acknowledged_at_its_rate(new_mosquitto: NewMosquitto, tmp_path: Path, qos: int) -> None:
    plan = LoadPlan(port=new_mosquitto().port, messages=2000, rate=4000, qos=qos)
    result, claims = run_load(plan, tmp_path / "claims"), read_history(tmp_path / "claims")
    assert (result.attempted, result.acked) == (2000, 2000 if qos else 0)
    assert claims.count(SenderClaim.ATTEMPTED) == 2000
    assert claims.count(SenderClaim.ACKED) == result.acked
    assert 0.45 <= result.seconds < 5


def test_a_killed_load_has_claimed_what_it_sent(new_mosquitto: NewMosquitto, tmp_path: Path) -> None:
    broker, claims = new_mosquitto(), tmp_path / "claims"
    command = [sys.executable, "-m", "towline_prove", "load", str(claims), "--port", str(broker.port)]
    child = subprocess.Popen([*command, "--messages", "100000", "--rate", "5000"], stdout=subprocess.DEVNULL)
    wait_until(lambda: claims.exists() and read_history(claims).count(SenderClaim.ACKED) > 500, what="500 acknowledged")
    child.kill()
    child.wait(60)
    history = read_history(claims)
    assert 500 <= history.count(SenderClaim.ACKED) <= history.count(SenderClaim.ATTEMPTED) < 100_000


def test_no_broker_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"no connection .*TL-M60"):
        run_load(LoadPlan(port=1, messages=1, seconds=0.5), tmp_path / "claims")


# -- the reader: a record that it has not seen is told, and never called lost


def send(kafka: Kafka, topic: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "linger.ms": 0})
    for value in values:
        producer.produce(topic, value, b"key", partition=0)
    producer.flush(30)


def stop(tail: TopicTail, topic: str) -> None:
    """Kafka answers OFFSET_OUT_OF_RANGE to a place beyond its end, and the client stops reading."""
    tail._consumer.seek(TopicPartition(topic, 0, 1_000))
    wait_until(lambda: tail.read_all(0.5) == [] and tail._stopped_partitions, what="a stop")


def test_a_tail_leaves_the_past_out_and_loses_nothing_where_the_client_stops(kafka: Kafka, topic: NewTopic) -> None:
    """The client's default would go on at the end without a word, and the account would call the rest lost."""
    name, found = topic("stopped"), list[bytes | None]()
    send(kafka, name, b"old")
    tail = TopicTail(kafka.bootstrap, name, skip_existing=True)
    assert (tail.read_all(20), tail.at_end) == ([], True)
    stop(tail, name)
    send(kafka, name, b"0", b"1")
    while len(found) < 2:
        found += [one.value for one in tail.read_all(20)]
    assert found == [one.value for one in read_topic(kafka.bootstrap, name, start=tail.start)] == [b"0", b"1"]
    stop(tail, name)
    send(kafka, name, b"2", b"3", b"4")
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    deleted = admin.delete_records([TopicPartition(name, 0, 5)])
    assert [future.result(30).low_watermark for future in deleted.values()] == [5]
    with pytest.raises(KafkaError, match="records 3 to 4 were deleted unread"):
        tail.read_all(20)
    tail.close()


def test_no_kafka_and_no_topic_are_clear_lines(kafka: Kafka) -> None:
    with pytest.raises(KafkaError, match=r"TL-K60"):
        TopicTail("127.0.0.1:1", "t", timeout=0.5)
    with pytest.raises(KafkaError, match=r"missing.*TL-K60"):
        TopicTail(kafka.bootstrap, "missing")
