"""Rows that an older version stored and that MQTT has no way to say: set aside, and in nobody's way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.conftest import NewMosquitto
from tests.integration.publisher.test_receipts import write_key
from towline import Publisher
from towline.delivery.outrows import arrived, rows_of
from towline.journal import Outbox
from towline.schema import OUTBOX_SCHEMA

ROWS: list[dict[str, Any]] = [
    {"topic": "t", "payload": bytes(268_435_456), "qos": 1},
    {"topic": "t", "payload": b"", "qos": 1, "content_type": "a\0"},
    {"topic": "t\0", "payload": b"", "qos": 2},
    {"topic": "t", "payload": b"", "qos": 1, "user_properties": [{"key": "a\0", "value": ""}]},
    {"topic": "t", "payload": b"", "qos": 0, "response_topic": "#"},
    {"topic": "t", "payload": b"", "qos": 1, "correlation_data": bytes(65_536)},
]


def test_a_row_that_cannot_be_sent_is_set_aside(new_mosquitto: NewMosquitto, tmp_path: Path) -> None:
    broker = new_mosquitto()
    outbox = Outbox.open(tmp_path / "p" / "outbox", schema=OUTBOX_SCHEMA)
    for row in ROWS:
        outbox.append(arrived(rows_of([row]), time.time_ns() // 1000))
    outbox.close()
    outcomes: list[tuple[int, str]] = []
    with Publisher(
        broker.uri,
        state_dir=tmp_path / "p",
        receipts=True,
        receipt_key_file=write_key(tmp_path),
        on_outcome=lambda n, o: outcomes.append((n, o)),
    ) as publisher:
        behind = publisher.publish("t", "1")
        behind.at_broker.result(60)
        assert publisher.flush(10, end_to_end=False) == 0
        status = publisher.status()
        assert (status["refused"], status["delivered"]) == (len(ROWS), 1)
        publisher.close(0)
    assert {n for n, outcome in outcomes if outcome == "refused"} == set(range(len(ROWS)))
