"""Headers of an MQTT message: made of columns by the sink, and none larger than it says; and those of a dead letter."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.bridge.properties import TRACE_CONTEXT, property_headers
from towline.bridge.routes import FAULT, OUTCOME, RECORD_SCHEMA, RecordColumns, RowOutcome
from towline.kafka.deadletters import HEADER_OVERHEAD, Header, Reason
from towline.kafka.recordcheck import RecordFault
from towline.schema import OPTIONAL_COLUMNS

RARE = ("retain", *OPTIONAL_COLUMNS)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
text = st.text(st.characters(codec="utf-8"), max_size=6)
pair = st.fixed_dictionaries({"key": text | st.sampled_from(TRACE_CONTEXT), "value": st.none() | text})
rare = st.fixed_dictionaries(
    {
        "retain": st.none() | st.booleans(),
        "content_type": st.none() | text,
        "payload_is_utf8": st.none() | st.booleans(),
        "response_topic": st.none() | text,
        "correlation_data": st.none() | st.binary(max_size=4),
        "user_properties": st.none() | st.lists(pair, max_size=3),
        "message_expiry_seconds": st.none() | st.integers(0, 2**32 - 1),
        "subscription_ids": st.none() | st.lists(st.integers(1, 268_435_455), max_size=3),
    }
)
own = st.lists(st.fixed_dictionaries({"key": text, "value": st.none() | st.binary(max_size=4)}), max_size=2)
moments = (st.integers(0, 10) | st.integers(0, 2**52)).map(lambda micros: EPOCH + timedelta(microseconds=micros))
message = st.fixed_dictionaries(
    {
        "topic": st.just("t"),
        "value": st.none() | st.binary(max_size=4),
        "headers": st.none() | st.just([]) | own,
        "timestamp": moments,
        "towline_received_at": moments,
        "towline_topic": st.sampled_from(["a", "b/ü"]),
        "towline_qos": st.integers(0, 2),
        "towline_rare": st.none() | rare,
        "towline_properties": st.none() | st.booleans(),
    }
)


def batch_of(rows: list[dict[str, Any]]) -> Any:
    return pa.RecordBatch.from_pylist(rows, schema=RECORD_SCHEMA)


def wanted(row: dict[str, Any]) -> list[Header]:
    headers = [(one["key"], one["value"]) for one in row["headers"] or ()]
    if not row["towline_properties"]:
        return headers
    received = (row["towline_received_at"] - EPOCH) // timedelta(microseconds=1)
    rest = row["towline_rare"] or dict.fromkeys(RARE)
    return [*property_headers(row["towline_topic"].encode(), row["towline_qos"], received, rest), *headers]


@given(st.lists(message, max_size=8) | st.lists(message.map(lambda row: {**row, "towline_rare": None}), max_size=8))
def test_headers_are_made_of_columns(rows: list[dict[str, Any]]) -> None:
    batch, columns = batch_of(rows), RecordColumns()
    records = list(columns.rows(batch).records)
    assert [record[7] for record in records] == [wanted(row) for row in rows]
    largest = columns.max_record_bytes(batch)
    for _, value, key, _, _, _, _, headers in records:
        size = len(value or b"") + len(key or b"")
        assert size + sum(HEADER_OVERHEAD + len(name.encode()) + len(data or b"") for name, data in headers) <= largest


MESSAGE = {"towline_topic": "a", "towline_qos": 1, "towline_received_at": 5, "towline_offset": 7}
PROPERTIES = [("mqtt.topic", b"a"), ("mqtt.qos", b"1"), ("mqtt.received-at", b"5")]
PLACE = [("mqtt.gateway", b"g"), ("mqtt.offset", b"7")]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [*PROPERTIES, ("mqtt.gateway", b""), PLACE[1]]),
        ({"towline_gateway": "g", "headers": [{"key": "own", "value": b"x"}]}, [*PROPERTIES, *PLACE]),
        ({"towline_gateway": "g", "towline_duplicate": True}, [*PROPERTIES, *PLACE, ("mqtt.duplicate", b"true")]),
        (
            {"towline_gateway": "g", "towline_properties": False, "towline_rare": {"content_type": "c"}},
            [*PROPERTIES[:2], ("mqtt.content-type", b"c"), PROPERTIES[2], *PLACE],
        ),
    ],
)
def test_a_dead_letter_has_the_properties_of_its_message(more: dict[str, Any], expected: list[Header]) -> None:
    """Whatever headers its record has, and whether they are among them or not."""
    batch = batch_of([{"towline_topic": "x"}, {**MESSAGE, **more}])
    assert RecordColumns().original_headers(batch, 1, [("own", b"x")]) == expected


def test_rows_that_the_routes_refuse_say_why() -> None:
    for outcome in (RowOutcome.RENDERED, RowOutcome.FALLBACK):
        assert RecordColumns().row_faults(batch_of([{**MESSAGE, OUTCOME: outcome}])) is None
    assert RecordColumns().row_faults(batch_of([])) is None
    refused = batch_of([{**MESSAGE, OUTCOME: RowOutcome.UNROUTED, FAULT: "no route takes this topic"}])
    assert RecordColumns().row_faults(refused) == [RecordFault(Reason.UNROUTED, "no route takes this topic")]
