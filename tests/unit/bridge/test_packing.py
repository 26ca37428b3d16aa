"""What passes Spark as one row is what the routes say, message by message and in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.config.patterns import Pattern, Template
from towline.bridge.config.routes import Route, first_match
from towline.bridge.uplink import packing
from towline.bridge.uplink.packing import PACKED_SCHEMA, Packer, as_json, plain_routes
from towline.kafka.columns import ORIGIN, PROPERTIES, Columns
from towline.kafka.packed import PACKED, pack, unpacked
from towline.schema import OPTIONAL, ROW_SCHEMA

HEADERS = "array<struct<key:string,value:binary>>"
TOLD = "towline_message"
ORIGINS = {name: kind for name, kind in ORIGIN.items() if name != TOLD}
SINK = {"topic": "string", "key": "binary", "value": "binary", "headers": HEADERS, "timestamp": "timestamp"}
SINK |= {**PROPERTIES, **ORIGINS, PACKED: "binary"}
ARROW = {
    "string": pa.string(),
    "binary": pa.binary(),
    "tinyint": pa.int8(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    HEADERS: pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}
RARE = pa.struct([ROW_SCHEMA.field(name) for name in ("retain", *OPTIONAL)])


def route(pattern: str, topic: str, key: str | None = None, **more: Any) -> Route:
    taken = Pattern.parse(pattern)
    own = {name: Template.parse(text, taken.names) for name, text in more.pop("headers", {}).items()}
    template = None if key is None else Template.parse(key, taken.names)
    return Route(taken, 1, Template.parse(topic, taken.names), template, tuple(own.items()), **more)


ROUTES = (
    route("a/{x}/+", "fixed", "{x}"),
    route("a/{x}/#", "to.{x}", "{mqtt.topic}", headers={"one": "{x}", "two": "2"}, allowed_topics=("to.*",)),
    route("+/b", "b", key_required=True, key="k", properties=False),
    route("$SYS/#", "sys"),
    route("c/{y}/#", "{y}", dead_letter_topics=("dead",)),
)

MOMENTS = (datetime(2026, 1, 1, 1, 1, 1, 123456, UTC), datetime(2026, 1, 2, tzinfo=UTC))

levels = st.sampled_from(["a", "b", "c", "", "$SYS", "é x", "__secret", "dead", "."])
topics = st.lists(levels, min_size=1, max_size=4).map("/".join)
texts = st.none() | st.sampled_from(["", "é"])
pairs = st.lists(st.fixed_dictionaries({"key": st.sampled_from(["", "é"]), "value": st.just("v")}), max_size=2)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "topic": topics,
            "payload": st.none() | st.binary(max_size=3),
            "qos": st.integers(0, 2),
            "retain": st.booleans() | st.none(),
            "duplicate": st.booleans(),
            "content_type": texts,
            "payload_is_utf8": st.none() | st.booleans(),
            "response_topic": texts,
            "correlation_data": st.none() | st.just(b"\xff"),
            "user_properties": st.none() | pairs,
            "message_expiry_seconds": st.none() | st.just(7),
            "subscription_ids": st.none() | st.lists(st.integers(1, 9), max_size=2),
            "received_at": st.sampled_from(
                [datetime(2026, 1, 1, 1, 1, 1, 123456, UTC), datetime(2026, 1, 2, tzinfo=UTC)]
            ),
            "gateway": st.just("g"),
        }
    ),
    min_size=1,
    max_size=6,
)


def batches_of(messages: Sequence[Mapping[str, Any]], cuts: int) -> list[pa.RecordBatch]:
    numbered = [{**message, "offset": n} for n, message in enumerate(messages)]
    parts = [numbered[i : i + cuts] for i in range(0, len(numbered), cuts)]
    return [pa.RecordBatch.from_pylist(part, schema=ROW_SCHEMA) for part in parts]


def produced(packed: Iterator[pa.RecordBatch], *, signed: bool) -> list[tuple[Any, ...] | int]:
    """What the sink produces of packed rows, and the offset of each row that is left to SQL."""
    kinds = {name: kind for name, kind in SINK.items() if signed or name not in ORIGIN}
    columns = Columns.bind(kinds, None, include_headers=True)
    schema = pa.schema([(name, ARROW.get(kind, RARE)) for name, kind in kinds.items()])
    out: list[tuple[Any, ...] | int] = []
    for batch in packed:
        assert batch.schema == PACKED_SCHEMA
        for row in range(batch.num_rows):
            if (content := batch.column(PACKED)[row]).as_py() is None:
                out.append(batch.column("offset")[row].as_py())
                continue
            sunk = [pa.nulls(1, field.type) if field.name != PACKED else pa.array([content]) for field in schema]
            (records,) = unpacked([pa.RecordBatch.from_arrays(sunk, schema=schema)])
            assert records.schema.names == [name for name in kinds if name != PACKED]
            for at, record in enumerate(columns.rows(records).records):
                origin = {name: records.column(name)[at].as_py() for name in ORIGIN if signed and name != TOLD}
                out.append((*record, origin))
    return out


def expected(messages: Sequence[Mapping[str, Any]], *, signed: bool) -> list[tuple[Any, ...] | None]:
    """The same by the reference; None for what is left to SQL."""
    out: list[tuple[Any, ...] | None] = []
    for offset, message in enumerate(messages):
        taker = first_match(ROUTES, message["topic"])
        record = None if taker is None else ROUTES[taker].record({**message, "offset": offset})
        if taker is None or record is None or record["topic"] is None or message["payload"] is None:
            out.append(None)
            continue
        facts = 2 * len(ROUTES[taker].headers) + message["duplicate"]
        origin = {"towline_gateway": "g", "towline_offset": offset, "towline_facts": facts} if signed else {}
        millis = int(message["received_at"].timestamp() * 1000)
        named = (record["topic"], record["value"], record["key"], -1, None, None)
        out.append((*named, millis, record["headers"] or [], origin))
    return out


@given(messages=rows, cuts=st.integers(1, 6), short=st.sampled_from([0, 50]), signed=st.booleans())
def test_packed_rows_are_the_records_that_routes_say(
    messages: list[dict[str, Any]], cuts: int, short: int, signed: bool
) -> None:
    packer = Packer(as_json(ROUTES), signed=signed)
    with patch.object(packing, "_SHORT", short), patch.object(packing, "_ENOUGH", 300):
        out = produced(packer.packed(iter(batches_of(messages, cuts))), signed=signed)
    wanted = expected(messages, signed=signed)
    assert len(out) == len(messages)
    for offset, (made, said) in enumerate(zip(out, wanted, strict=True)):
        assert made == (offset if isinstance(made, int) else said)
        assert said is not None or made == offset
        assert short or isinstance(made, int) == (said is None)


def test_ordinary_rows_between_packed_ones_keep_their_places() -> None:
    """As Spark hands them to the sink: several rows of both kinds in one Arrow batch."""
    ordinary = pa.RecordBatch.from_pydict({"value": [b"0", None, b"3", None], "n": [0, None, 3, None]})
    packed = [pa.RecordBatch.from_pydict({"value": [b"1", b"2"]}), pa.RecordBatch.from_pydict({"value": [b"4"]})]
    column = pa.array([None, pack(packed[0]), None, pack(packed[1])], pa.binary())
    batches = list(unpacked([ordinary.append_column(PACKED, column), ordinary]))
    assert [batch.column("value").to_pylist() for batch in batches[:-1]] == [[b"0"], [b"1", b"2"], [b"3"], [b"4"]]
    assert batches[1].column("n").to_pylist() == [None, None]
    assert batches[-1].equals(ordinary)


def test_large_messages_are_left_as_they_are() -> None:
    """To copy them costs more than to make rows of them, and memory."""
    message = {"topic": "b/b", "qos": 1, "duplicate": False, "gateway": "g"}
    rows = batches_of([{**message, "payload": bytes(20_000)}], 1)
    (batch,) = Packer(as_json(ROUTES), signed=False).packed(iter(rows))
    assert batch.column(PACKED).null_count == 1


def test_topics_without_end_are_forgotten() -> None:
    packer = Packer(as_json(ROUTES), signed=False)
    with patch.object(packing, "_KEPT", 3):
        for first in range(0, 10, 2):
            rows = batches_of([{"topic": f"a/{n}/x", "payload": b"", "qos": 1} for n in range(first, first + 2)], 1)
            assert len(list(packer.packed(iter(rows)))) == 1
            assert packing._topics(as_json(ROUTES)).records.num_rows <= 3


@pytest.mark.parametrize(
    ("line", "route", "packs"),
    [
        ("", "", True),
        ('guarantee = "exactly_once"\n', "", True),
        ('dead_letter_topic = "dead"\n', "", True),
        ('guarantee = "at_most_once"\n', "", False),
        ("parallelism = 2\n", "", False),
        ('dedupe = { key = "{mqtt.topic}", within = "10 minutes" }\n', "", False),
        ("", 'where = "qos > 0"\n', False),
        ("", 'headers = { a = "{device}", b = "{mqtt.topic}" }\n', True),
        ("", 'headers = { a = "{mqtt.user.x}" }\n', False),
        ("", 'properties = "none"\n', True),
        ('dead_letter_topic = "dead"\n', 'properties = "none"\n', False),
    ],
)
def test_lines_that_ask_for_nothing_but_the_topic_are_packed(
    tmp_path: Path, line: str, route: str, packs: bool
) -> None:
    name = 'name = "telemetry"\n'
    bridge = read(GOOD.replace(name, name + line) + route, tmp_path)
    said = plain_routes(bridge.uplinks[0])
    assert (said is not None) is packs
    assert said is None or [one.pattern for one in packing._topics(said)._routes] == [
        one.pattern for one in bridge.uplinks[0].routes
    ]
