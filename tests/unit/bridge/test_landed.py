"""``inbox = "kafka"`` in a bridge file: what the gateway is told, and what does not go together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from towline.bridge.config.file import parse
from towline.bridge.config.model import Bridge
from towline.bridge.config.plan import plan_of, render
from towline.bridge.uplink.landed import KEY_SCHEMA, columns
from towline.errors import ConfigError
from towline.kafka.reserved import reserved
from towline.schema import ROW_SCHEMA, SPARK_SCHEMA


def read(line: str, kafka: str = 'bootstrap_servers = "k:9092"') -> Bridge:
    text = f"""
name = "plant"
state_dir = "state"
mqtt = {{ brokers = "mqtt://127.0.0.1" }}
[kafka]
{kafka}
[[uplink]]
name = "line"
inbox = "kafka"
{line}
route = [{{ from = "#", topic = "t" }}]
"""
    return parse(text, Path("/tmp/bridge.toml"), {})  # noqa: S108 - it is only named


def test_the_gateway_is_told_where_and_who_reads() -> None:
    more = 'create_topics = { partitions = 6, replication_factor = 3 }\nsettings = { "linger.ms" = 5 }'
    landing = read("", f'bootstrap_servers = "k:9092"\n{more}').uplinks[0].gateway.landing
    assert landing is not None
    assert (landing.name, landing.partition, landing.consumers) == ("plant.line", 0, ("bridge",))
    assert (landing.create, landing.partitions, landing.replication) == (True, 1, 3)
    assert landing.client == {"bootstrap.servers": "k:9092", "linger.ms": "5"}
    assert read("").reads_kafka


def test_the_plan_says_what_it_rests_on() -> None:
    text = render(plan_of(read("")))
    assert "when Kafka has the message in the landing topic" in text
    assert "while Kafka is down nothing is received" in text
    assert "the machine that holds state_dir" not in text


@pytest.mark.parametrize(
    ("line", "do"),
    [
        ('guarantee = "at_most_once"', 'Take inbox = "disk"; or .*by_qos'),
        ('dedupe = { key = "{mqtt.user.id}", within = "1 minute" }', 'Take inbox = "disk"; or .*QoS 2'),
    ],
)
def test_what_needs_the_disk_is_refused(line: str, do: str) -> None:
    with pytest.raises(ConfigError, match=f"{do}.*TL-C132"):
        read(line)


def test_two_promises_on_one_line_are_kept() -> None:
    assert read('guarantee = "by_qos"').uplinks[0].gateway.landing is not None


def test_the_columns_of_a_key_are_those_of_a_row() -> None:
    """Bytes and times travel in another form, the payload is the value; all else has Spark's own type."""
    spoken = dict(part.split(" ", 1) for part in SPARK_SCHEMA.split(", ") if not part.startswith("value:"))
    keyed = dict(part.split(" ", 1) for part in KEY_SCHEMA.split(", ") if not part.startswith("value:"))
    assert {name: kind for name, kind in spoken.items() if keyed.get(name) != kind} == {
        "payload": "binary",
        "correlation_data": "binary",
        "received_at": "timestamp",
    }
    assert [text.rpartition(" AS ")[2] for text in columns(ROW_SCHEMA.names)] == ROW_SCHEMA.names


def test_a_route_cannot_write_there() -> None:
    for name, taken in (("towline.plant.line.landing", True), ("towline.x.state", True), ("my.landing", False)):
        assert bool(re.fullmatch(reserved(), name)) is taken
