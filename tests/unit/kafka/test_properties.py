"""Headers of an MQTT message: made of columns by the sink, and none larger than it says."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import format_trace_id, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pyspark.sql.pandas.types import from_arrow_type

from towline.kafka.columns import A_HEADER, PROPERTIES, Columns
from towline.kafka.properties import TRACE_CONTEXT, Header, property_headers, user_header, user_property
from towline.schema import OPTIONAL, ROW_SCHEMA

RARE = ("retain", *OPTIONAL)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
KINDS = {
    "topic": pa.string(),
    "value": pa.binary(),
    "headers": HEADERS,
    "timestamp": pa.timestamp("us", "UTC"),
    "towline_topic": pa.string(),
    "towline_qos": pa.int8(),
    "towline_rare": pa.struct([ROW_SCHEMA.field(name) for name in RARE]),
}
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
message = st.fixed_dictionaries(
    {
        "topic": st.just("t"),
        "value": st.none() | st.binary(max_size=4),
        "headers": st.none() | st.just([]) | own,
        "timestamp": st.integers(0, 10) | st.integers(0, 2**52),
        "towline_topic": st.none() | st.sampled_from(["a", "b/ü"]),
        "towline_qos": st.none() | st.integers(0, 2),
        "towline_rare": st.none() | rare,
    }
)


def batch_of(rows: list[dict[str, Any]]) -> Any:
    return pa.RecordBatch.from_pylist(rows, schema=pa.schema(list(KINDS.items())))


def wanted(row: dict[str, Any]) -> list[Header]:
    headers = [(one["key"], one["value"]) for one in row["headers"] or ()]
    if row["towline_topic"] is None:
        return headers
    name = row["towline_topic"].encode(), row["towline_qos"], row["timestamp"]
    return [*property_headers(*name, row["towline_rare"] or dict.fromkeys(RARE)), *headers]


@given(st.lists(message, max_size=8) | st.lists(message.map(lambda row: {**row, "towline_rare": None}), max_size=8))
def test_headers_are_made_of_columns(rows: list[dict[str, Any]]) -> None:
    batch, columns = batch_of(rows), Columns(None, frozenset(KINDS))
    records = list(columns.rows(batch).records)
    assert [record[7] for record in records] == [wanted(row) for row in rows]
    largest = columns.largest(batch)
    for _, value, key, _, _, _, _, headers in records:
        size = len(value or b"") + len(key or b"")
        assert size + sum(A_HEADER + len(name.encode()) + len(data or b"") for name, data in headers) <= largest


def test_the_columns_are_those_of_the_sink() -> None:
    schema = {"value": "binary", "topic": "string", "headers": "array<struct<key:string,value:binary>>", **PROPERTIES}
    assert set(PROPERTIES) <= Columns.bind(schema, None, include_headers=True).present
    assert {name: from_arrow_type(KINDS[name]).simpleString() for name in PROPERTIES} == dict(PROPERTIES)


def test_messages_that_came_together_share_their_headers() -> None:
    row = {"topic": "t", "timestamp": 7, "towline_topic": "a", "towline_qos": 1, "headers": []}
    records = list(Columns(None, frozenset(KINDS)).rows(batch_of([row, row, {**row, "timestamp": 8}])).records)
    assert all(one is other for one, other in zip(records[0][7], records[1][7], strict=True))
    assert [one is other for one, other in zip(records[0][7], records[2][7], strict=True)] == [True, True, False]


@given(text | st.sampled_from(TRACE_CONTEXT))
def test_the_header_of_a_user_property_says_which_it_was(key: str) -> None:
    assert user_property(user_header(key)) == key
    assert user_property("mqtt.topic") is None


def test_trace_context_has_the_names_that_consumers_look_for() -> None:
    """OpenTelemetry's propagator of W3C Trace Context, with the headers of a record as its carrier."""
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    users = [{"key": "traceparent", "value": parent}, {"key": "tracestate", "value": "a=b"}]
    nothing = dict.fromkeys(RARE)
    headers = property_headers(b"t", 1, 0, {**nothing, "user_properties": users})
    carrier = {name: (value or b"").decode() for name, value in headers}
    span = get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
    assert format_trace_id(span.trace_id) == parent.split("-")[1]
    assert span.trace_state.to_header() == "a=b"
