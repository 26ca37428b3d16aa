"""Topics that are deleted and made again, on a real Kafka: known by their ids where offsets or markers are kept."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from pyspark.sql.types import StringType, StructField, StructType

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.kafka.writing import QUERY, counted, exactly_once
from towline.checkpoint import Checkpoint
from towline.cli import main
from towline.errors import KafkaError
from towline.kafka import markerstore
from towline.kafka.admin import KafkaAdmin, check_source_topics, saved_topic_ids
from towline.kafka.delivery import batch_origin
from towline.sinks import Task
from towline.spark.kafka_sink import KafkaTransactional
from towline_prove.devstack import Kafka


def delete(kafka: Kafka, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})  # which must live until it has its answer
    admin.delete_topics([topic])[topic].result(30)
    wait_until(lambda: topic not in KafkaAdmin(kafka.bootstrap).info().topics, 30, "the topic's end")


def make_anew(kafka: Kafka, topic: str, config: dict[str, str] | None = None) -> None:
    delete(kafka, topic)
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
    options = {"topic": two, "verifySourceTopics": "true", "checkpointlocation": str(tmp_path)}
    asked = KafkaTransactional({"kafka.bootstrap.servers": kafka.bootstrap, "guarantee": "at_least_once", **options})
    with pytest.raises(KafkaError, match="TL-B06"):  # as a query of one's own asks for it
        asked.streamWriter(StructType([StructField("value", StringType())]), overwrite=False).write(iter(()))
    plan(tmp_path, 2, {two: 0})
    look()
    assert set(saved_topic_ids(logs)) == {two}, "one that is gone and comes again begins anew"


def test_a_recreated_marker_topic_is_not_an_empty_one(
    kafka: Kafka, topic: NewTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch 0 is in Kafka and not in Spark's commit log; without its marker it would be written a second time."""
    name = topic()
    sink = exactly_once(kafka.bootstrap, topic=name, sinkId=name)
    plan(tmp_path, 0, {"t": 3})
    batch_origin(sink.settings, str(tmp_path))
    sink.deliver(Task(0, batch=0, query=QUERY), counted(0, 10))
    batch_origin(sink.settings, str(tmp_path))
    make_anew(kafka, sink.settings.marker_topic_of(name), {"cleanup.policy": "compact"})
    monkeypatch.setattr(markerstore, "_highest_ends", {})  # the same process says TL-K27
    with pytest.raises(KafkaError, match=r"was deleted or lost it.*--to-batch -1.*TL-K10") as caught:
        batch_origin(sink.settings, str(tmp_path))
    command = caught.value.remedy.split("`towline ")[1].split("`")[0].replace("--to-batch -1", "--to-batch 0").split()
    for arguments in (command[:-1], command, [*command[:2], "show", *command[3:7], "--json"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = capsys.readouterr().out
        assert ended.value.code == ("--yes" not in arguments and "show" not in arguments), "nothing without --yes"
    assert json.loads(said)["markers"]["0"]["batch"] == 0
    batch_origin(sink.settings, str(tmp_path))
    assert sink.deliver(Task(0, batch=0, query=QUERY), counted(0, 10)).was_skipped
