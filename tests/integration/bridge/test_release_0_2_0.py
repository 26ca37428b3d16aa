"""A bridge that 0.2.0 left behind goes on between real brokers: nothing is lost, nothing comes twice."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NewMosquitto
from tests.fixtures.reading import Release, StoredRecord
from tests.helpers import produce_all, producer_in_order, wait_until
from tests.integration.bridge.conftest import ended
from tests.integration.bridge.running import PATIENCE, Running, publish
from tests.integration.conftest import KEEPING
from tests.integration.devices import listening
from tests.integration.kafka.reading import records
from towline import Publisher
from towline.bridge.config.file import load
from towline.bridge.config.model import CHECKPOINT
from towline.bridge.deadletters import dead_letter_topics
from towline.checkpoint import Checkpoint
from towline.kafka.admin import KafkaAdmin, save_topic_ids, saved_topic_ids
from towline_prove.devstack import Kafka

pytestmark = pytest.mark.spark

NAME, LINES = "release-0-2-0", ("telemetry", "commands")
#: Records keep the times of their messages, which are years ago, or to come by a clock that is slow.
ANY_TIME = {"retention.ms": "-1", "message.timestamp.after.max.ms": "9223372036854775807"}


def restore(kafka: Kafka, topic: str, stored: list[StoredRecord]) -> None:
    """Write records at their former offsets; the end of a transaction becomes a record that nobody reads."""
    producer, at = producer_in_order(kafka.bootstrap), 0
    for record in stored:
        for _ in range(at, record.offset):
            producer.produce(topic, b"", b"nobody")
        producer.produce(topic, record.value, record.key, headers=[*record.headers])
        at = record.offset + 1
    assert producer.flush(60) == 0
    there = {record.offset(): record.value() for record in records(kafka.bootstrap, topic)}
    assert {record.offset: record.value for record in stored}.items() <= there.items()


def test_a_bridge_goes_on(new_mosquitto: NewMosquitto, kafka: Kafka, tmp_path: Path) -> None:
    """Both directions from their checkpoints, journals and markers; the publisher gets the receipts it waits for."""
    release, mosquitto = Release.copied("0.2.0", tmp_path), new_mosquitto(**KEEPING)
    expected, file = release.expected, release.directory / "bridge.toml"
    text = re.sub(r"mqtt://[\d.:]+", mosquitto.uri, file.read_text()).replace("[monitor]\n", "")
    text = re.sub(r"bootstrap_servers = .*", f'bootstrap_servers = "{kafka.bootstrap}"', text)
    file.write_text(re.sub(r"listen = .*\n", "", text))
    markers = [topic for topic in release.records if topic.endswith(".markers")]
    kafka.create_topics({f"{NAME}.{part}": 1 for part in ("telemetry", "commands", "dead")}, ANY_TIME)
    kafka.create_topics(dict.fromkeys(markers, 1), {"cleanup.policy": "compact"})
    for topic, stored in release.records.items():
        if topic != f"{NAME}.telemetry":
            restore(kafka, topic, stored)
    # Another cluster gives its topics other ids.
    logs = Checkpoint(f"file:{release.line('commands') / CHECKPOINT}")
    save_topic_ids(logs, KafkaAdmin(kafka.bootstrap).topic_ids(saved_topic_ids(logs)))
    by_key: dict[str, list[str]] = defaultdict(list)
    committed = expected["checkpoints"]["telemetry"]["offsets"][0]["gateways"]["telemetry"]["offset"]
    for row in expected["telemetry"]["rows"]:
        if row["offset"] >= committed:
            by_key[row["topic"].split("/")[1]].append(row["payload"])
    by_key["d1"] += ["100", "101", "102"]
    by_key["p"] += ["p9", "p10", "p11"]
    total, before = sum(map(len, by_key.values())), expected["account"]["telemetry"]

    with (
        ended(Running(release.directory, file)) as bridge,
        listening(mosquitto.port, ("command/#", 2)) as (_, heard),
    ):
        bridge.command("resume", "telemetry")
        bridge.start()
        for line in LINES:
            wait_until(partial(bridge.online, line), PATIENCE, f"the gateway of {line}")
        key, place = release.directory / "line.key", release.directory / "publisher"
        given: dict[str, Any] = {"receipts": True, "receipt_key_file": key, "receipt_patience_s": 1}
        with Publisher(mosquitto.uri, state_dir=place, **given) as publisher:
            publish(mosquitto, 100, 3, topic="telemetry/d1/t", text="{}", qos=2)
            produce_all(kafka.bootstrap, f"{NAME}.commands", [(b"d1", b"c%d" % n, []) for n in range(11, 14)])
            assert publisher.flush(PATIENCE) == 0, "each has its receipt"
        wait_until(lambda: len(heard) >= 6, PATIENCE, "the commands")
        in_kafka = before["in_kafka"] + total
        wait_until(lambda: bridge.account("telemetry").get("in_kafka") == in_kafka, PATIENCE, "all messages in Kafka")
        wait_until(lambda: bridge.account("commands")["waiting"] == 0, PATIENCE, "the end of the outbox")
        accounts = {line: bridge.account(line) for line in LINES}
        assert [account["adds_up"] for account in accounts.values()] == [True, True]
        assert bridge.interrupt() == 0

    arrived: dict[str, list[str]] = defaultdict(list)
    for record in records(kafka.bootstrap, f"{NAME}.telemetry"):
        arrived[record.key().decode()].append(record.value().decode())
    assert arrived == by_key
    assert accounts["telemetry"]["dead_lettered"] == before["dead_lettered"]
    # c5 and c6 were with the former broker, c7 was refused by it.
    assert sorted(message.payload.decode() for message in heard) == ["c10", "c11", "c12", "c13", "c8", "c9"]
    assert accounts["commands"]["refused"] == 1
    last: dict[str, Any] = {topic: json.loads(records(kafka.bootstrap, topic)[-1].value()) for topic in markers}
    up = last[f"towline.{NAME}.telemetry.markers"]
    former = expected["markers"][f"towline.{NAME}.telemetry.markers"]
    assert (up["writer"], up["total_dead_lettered"]) == (former["writer"], former["total_dead_lettered"])
    assert up["total_rows"] == former["total_rows"] + total
    (letters,) = dead_letter_topics(load(file))
    left = [letter["offset"] for letter in expected["dead_letters"] if not letter["replayed"]]
    assert [letter.offset for letter in letters.waiting_letters()] == left
