"""Where one message is, on a real Kafka, for a line whose records name it; its gateway has stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from tests.conftest import NewTopic
from tests.helpers import produce_all
from tests.integration.bridge.running import Running
from tests.unit.journal.support import ROOMY, Unsynced, rows
from tests.unit.test_checkpoint import Spark, put
from towline.bridge.config.file import load
from towline.errors import ConfigError
from towline.journal import Journal
from towline.kafka.deadletters import DeadLetter, Header, Reason, to_records
from towline.monitor import message
from towline.monitor.message import Tracer
from towline_prove.devstack import Kafka

LINE = """
[[uplink]]
name = "line"
dead_letter_topic = "{dead}"
[[uplink.route]]
from = "t/{{device}}"
topic = "{topic}"
key = "{{device}}"
where = "qos > 0"
headers = {{ position = "{{mqtt.offset}}", from = "{{mqtt.gateway}}" }}
"""


def headers_of(offset: int, gateway: str = "line", topic: bytes = b"t/d") -> list[Header]:
    message = [("mqtt.topic", topic), ("mqtt.received-at", b"1700000000250000")]
    return [*message, ("position", str(offset).encode()), ("from", gateway.encode())]


def place_of(entry: dict[str, Any]) -> tuple[str, int, int]:
    topic, partition, offset = entry["kafka"].split("/")
    return topic, int(partition), int(offset)


def test_records_that_name_their_messages(
    kafka: Kafka, topic: NewTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, dead = topic("target", 2), topic("dead", 2)
    file, directory = tmp_path / "bridge.toml", tmp_path / "state" / "line"
    Running(tmp_path, file).write("mqtt://127.0.0.1:1", kafka.bootstrap, LINE.format(topic=target, dead=dead))
    produce_all(kafka.bootstrap, target, [(b"d", b"%d" % n, headers_of(n)) for n in (3, 4, 4)])
    produce_all(kafka.bootstrap, target, [(b"e", b"", headers_of(6, "other", b"t/e"))])
    origin = [("mqtt.topic", b"t/d"), ("mqtt.gateway", b"line"), ("mqtt.offset", b"5")]
    letter = DeadLetter(Reason.TOO_LARGE, target, b"d", b"x" * 9000, origin, detail="9,000 bytes", source="line")
    produce_all(kafka.bootstrap, dead, to_records(letter, 4096))
    with Journal.open(directory / "inbox", schema=rows(0, 1).schema, limits=ROOMY, disk=Unsynced()) as journal:
        journal.append(rows(0, 10))
    spark = Spark(directory / "checkpoint")
    position = {"gateways": {"line": {"journal": journal.journal_id, "offset": 10}}, "tick": 0}
    put(spark.path / "offsets" / "0", f'v1\n{{"batchTimestampMs":1700000000250}}\n{json.dumps(position)}')
    spark.commit(0)

    bridge = load(file)
    stories = {offset: Tracer(bridge).by_offset(offset) for offset in (3, 4, 5, 6)}
    assert [story.state for story in stories.values()] == ["in_kafka", "in_kafka", "dead_letter", "committed"]
    (third,) = stories[3].candidates
    assert third["kafka"].startswith(f"{target}/")
    assert third == {**third, "text": "topic t/d", "gateway": "line", "offset": 3}
    assert stories[3].steps[-1]["text"] == f"{third['kafka']}, topic t/d"
    assert [step["name"] for step in stories[4].steps][-2:] == ["kafka", "kafka"], "a repeated batch"
    (dead_letter,) = stories[5].candidates
    assert (dead_letter["kafka"].startswith(f"{dead}/"), dead_letter["text"]) == (
        True,
        "dead letter, too_large: 9,000 bytes",
    )
    assert stories[6].steps[-1]["text"].startswith("not found: not written yet, dropped by where")

    tracer = Tracer(bridge)
    back = tracer.by_record(*place_of(third))
    assert (back.offset, back.gateway, back.state, back.candidates) == (3, "line", "in_kafka", [third])
    assert tracer.by_record(target, 0, 10**9).state == tracer.by_record(target, 7, 0).state == "unknown"
    (other,) = tracer.by_device("e").candidates
    with pytest.raises(ConfigError, match=r'line "line" has the gateways line. .* \[TL-C120\]'):
        tracer.by_record(*place_of(other))
    listed = tracer.by_device("d").candidates
    assert sorted(entry["offset"] for entry in listed) == [3, 4, 4, 5]
    assert tracer.by_device("nobody").candidates == []
    monkeypatch.setattr(message, "MAX_RECORDS", 4)
    bounded = tracer.by_device("d")
    assert len(bounded.candidates) < 4
    assert bounded.steps[1]["text"].startswith("at most 4 records of ")
    groups = AdminClient({"bootstrap.servers": kafka.bootstrap}).list_consumer_groups().result().valid
    assert [group.group_id for group in groups if target in group.group_id] == []
