"""Bytes on disk of a message beside its topic, payload and properties: what doctor and docs/scaling.md count."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mqtt5 import PublishPacket, QoS

from towline.delivery.inbound import to_rows
from towline.journal import Journal
from towline.mqtt.codec import PublishRun
from towline.mqtt.events import Messages
from towline.schema import ROW_SCHEMA

_TOPIC, _PAYLOAD = 40, 150
_PROPERTIES = [("sensor", "temperature"), ("unit", "celsius"), ("site", "plant-7/hall-3")]


def run(messages: int) -> None:
    """Print a table of chunk sizes, with and without user properties.

    Args:
        messages: Of each case.
    """
    print("bytes on disk beside topic, payload and properties")
    print(f"{'messages a chunk':>18}{'plain':>10}{'3 properties':>15}")
    for chunk in (1, 10, 100, 1000):
        plain, with_properties = (_beside(messages, chunk, properties) for properties in ([], _PROPERTIES))
        print(f"{chunk:>18,}{plain:>10.0f}{with_properties:>15.0f}")


def _beside(messages: int, chunk: int, properties: list[tuple[str, str]]) -> float:
    topics = [f"telemetry/{number:06d}/".ljust(_TOPIC, "x") for number in range(chunk)]
    packets = [
        PublishPacket(topic, payload=b"x" * _PAYLOAD, qos=QoS.AT_LEAST_ONCE, packet_id=1, user_properties=properties)
        for topic in topics
    ]
    rows = to_rows(
        Messages([PublishRun.from_packets(packets, bytes([0x32]) * chunk)]), 0, 1_800_000_000_000_000, "plant-7"
    )
    with tempfile.TemporaryDirectory() as directory, Journal.open(Path(directory), schema=ROW_SCHEMA) as journal:
        before = journal.bytes_on_disk
        chunks = max(1, messages // chunk)
        for _ in range(chunks):
            journal.append(rows)
        written = (journal.bytes_on_disk - before) / (chunks * chunk)
    return written - _TOPIC - _PAYLOAD - sum(len(key) + len(value) for key, value in properties)
