"""Topics that are deleted and made again, on a real Kafka: known by their ids where offsets or markers are kept."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from tests.conftest import NewTopic
from tests.helpers import produce_all, wait_until
from tests.integration.kafka.reading import records
from tests.integration.kafka.test_exactly_once_spark import run_to_end, to_kafka
from tests.integration.kafka.test_sink import failure
from tests.integration.kafka.writing import QUERY, counted, exactly_once
from towline.checkpoint import Checkpoint
from towline.errors import KafkaError
from towline.kafka import admin, markerstore
from towline.kafka.admin import KafkaAdmin, check_source_topics, saved_topic_ids
from towline.kafka.delivery import batch_origin
from towline.sinks import Task
from towline_prove.devstack import Kafka


def make_anew(kafka: Kafka, topic: str, config: dict[str, str] | None = None) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.delete_topics([topic])[topic].result(30)
    wait_until(lambda: topic not in KafkaAdmin(kafka.bootstrap).info().topics, 30, "the topic's end")
    kafka.create_topics({topic: 1}, config)


def plan(checkpoint: Path, batch: int, end: dict[str, int]) -> None:
    """As Spark's Kafka source plans a batch of one partition of each topic."""
    for log in ("offsets", "commits"):
        (checkpoint / log).mkdir(parents=True, exist_ok=True)
    ends = json.dumps({name: {"0": at} for name, at in end.items()})
    (checkpoint / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{ends}")


def test_each_batch_is_held_against_the_ids_of_its_topics(kafka: Kafka, topic: NewTopic, tmp_path: Path) -> None:
    """A topic without records in the batch is not asked about, and not read either."""
    client, one, two = {"bootstrap.servers": kafka.bootstrap}, topic("one"), topic("two")
    look = partial(check_source_topics, client, str(tmp_path), 'line "x"', "Begin again.")
    logs = Checkpoint(str(tmp_path))
    plan(tmp_path, 0, {one: 3, two: 0})
    look()
    ids = saved_topic_ids(logs)
    assert ids == KafkaAdmin(client).topic_ids([one, two, "nowhere"])
    make_anew(kafka, two)
    plan(tmp_path, 1, {one: 5, two: 0})
    look()
    make_anew(kafka, one)
    with pytest.raises(KafkaError) as caught:
        look()
    assert caught.value.code == "TL-B06"
    assert f'"{one}" (its id was {ids[one]}, and is ' in caught.value.problem
    assert "offset 3 of partition 0; nothing is read from the new one" in caught.value.problem
    assert saved_topic_ids(logs) == ids, "what was noted stays"
    plan(tmp_path, 2, {two: 0})
    look()
    assert set(saved_topic_ids(logs)) == {two}, "one that is gone and comes again begins anew"


def test_nothing_is_read_while_kafka_does_not_say_which_topic_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "KafkaAdmin", partial(KafkaAdmin, timeout=0.5))
    plan(tmp_path, 0, {"t": 3})
    with pytest.raises(KafkaError, match="TL-K01"):
        check_source_topics({"bootstrap.servers": "127.0.0.1:1"}, str(tmp_path), 'line "x"', "")
    assert saved_topic_ids(Checkpoint(str(tmp_path))) == {}


def test_a_recreated_marker_topic_is_not_an_empty_one(
    kafka: Kafka, topic: NewTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch 0 is in Kafka and not in Spark's commit log; without its marker it would be written a second time."""
    name = topic()
    settings = exactly_once(kafka.bootstrap, topic=name, sinkId=name).settings
    plan(tmp_path, 0, {"t": 3})
    batch_origin(settings, str(tmp_path))
    exactly_once(kafka.bootstrap, topic=name, sinkId=name).deliver(Task(0, batch=0, query=QUERY), counted(0, 10))
    batch_origin(settings, str(tmp_path))
    make_anew(kafka, settings.marker_topic_of(name), {"cleanup.policy": "compact"})
    monkeypatch.setattr(markerstore, "_highest_ends", {})  # the same process says TL-K27
    with pytest.raises(KafkaError, match=r"was deleted or lost it.*--to-batch -1.*TL-K10"):
        batch_origin(settings, str(tmp_path))


@pytest.mark.long
@pytest.mark.spark
def test_a_user_query_stops_at_a_recreated_topic(
    spark: SparkSession, kafka: Kafka, topic: NewTopic, tmp_path: Path
) -> None:
    """As `examples/kafka_to_kafka.py` says it: the new topic is longer, so Spark's own check sees nothing."""
    source, target = topic("source"), topic("target")
    options = {"kafka.bootstrap.servers": kafka.bootstrap, "subscribe": source, "startingOffsets": "earliest"}
    frame = spark.readStream.format("kafka").options(**options).load().selectExpr("value")
    writer = to_kafka(frame, kafka, target, tmp_path, sinkId=target, verifySourceTopics="true")
    produce_all(kafka.bootstrap, source, ((None, b"old", []) for _ in range(3)))
    run_to_end(writer)
    make_anew(kafka, source)
    produce_all(kafka.bootstrap, source, ((None, b"new", []) for _ in range(8)))
    assert "[TL-B06]" in failure(writer.trigger(availableNow=True))
    assert [record.value() for record in records(kafka.bootstrap, target)] == [b"old"] * 3
