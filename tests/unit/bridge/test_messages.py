"""Messages that a downlink makes of columns are those that docs/kafka.md says, record by record (`down_oracle`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.bridge.down_oracle import becomes
from tests.unit.bridge.test_records import messages, with_verdicts
from towline.bridge.config.tables import DownlinkTable, RouteSection
from towline.bridge.downlink.sink import render_rows as rendering
from towline.bridge.messages import (
    KAFKA_COLUMNS,
    DeadLetterColumns,
    MessageTable,
    _MessageColumns,
    internal,
    message_table,
)
from towline.bridge.routes import OUTCOME, REJECT, RecordColumns, RouteTable, RowOutcome
from towline.delivery.outrows import add_arrival, outgoing_messages, rows_from_messages
from towline.errors import KafkaError
from towline.guarantee import Guarantee
from towline.kafka.deadletters import ChunkAssembler, DeadLetter, Reason
from towline.kafka.options import SinkSettings
from towline.kafka.recordcheck import RecordCheck
from towline.mqtt.message import OutboundMessage
from towline.schema import MESSAGE_SCHEMA, ROW_SCHEMA
from towline.timing import Timestamp

SENT = [name for name in MESSAGE_SCHEMA.names if name != "qos"]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
RECORD = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
#: Types of what Spark makes of SQL; texts come as bytes that nobody has looked at.
KINDS = {"retain": pa.bool_(), "expiry": pa.int64(), "payload": pa.binary(), "correlation_data": pa.binary()}

TABLES: tuple[dict[str, Any], ...] = (
    {},
    {"topic": "a/{key}", "properties": "mqtt"},
    {"topic": "{header.h}", "properties": "none", "retain": True, "expiry": 7, "control_characters": "send"},
    {
        "topic": "t{{{kafka.topic}}}/{kafka.partition}/{kafka.offset}/{kafka.timestamp}",
        "payload": "{value}!",
        "expiry": "{value.ttl}",
        "content_type": "{value.a[1].b}",
        "response_topic": "r/{key}",
        "correlation_data": "{header.h}",
    },
    {
        "topic": {"sql": "t"},
        "payload": {"sql": "p"},
        "retain": {"sql": "r"},
        "expiry": {"sql": "e"},
        "content_type": "{field}",
        "response_topic": {"sql": "s"},
        "correlation_data": {"sql": "c"},
        "fields": {"field": "f"},
        "reject": "r",
        "where": "w",
    },
)
SQL = TABLES[-1]

#: Control and non-characters at the ends of their ranges, with their neighbours, and lengths.
EDGES = ["\x01", "\x1f", " ", "~", "\x7f", "\x9f", "\xa0", "\ufdcf", "\ufdd0", "\ufdef", "\ufdf0", "\ufffd", "\uffff"]
EDGES += ["\U0001fffd", "\U0001fffe", "\U0010ffff", "\0", "", "x" * 65535, "x" * 65536]
NUMBERS = [-(2**63) - 1, -(2**63), -1, 0, 60, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 10**20]
texts = st.sampled_from(["a", "é/x", "a/+", "#", *EDGES])
blobs = texts.map(str.encode) | st.sampled_from([b"\xff", b"true", b"1", b"60", b" -7\n", b"+99999999999", b"1" * 20])
names = st.sampled_from(
    [
        *("h", "", "é", "mqtt.user.u", "mqtt.user.", "traceparent", "towline.dlq.reason", "mqtt.gateway", "mqtt.topic"),
        *("mqtt.retain", "mqtt.content-type", "mqtt.response-topic", "mqtt.correlation-data", "mqtt.message-expiry"),
        *("mqtt.payload-format", "h\0", "h\t"),
    ]
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "12", "é"]) | st.just([1])
documents = st.fixed_dictionaries({}, optional={"ttl": leaves, "a": st.just([{}, {"b": "x"}]) | leaves})
values = st.none() | blobs | documents.map(lambda document: json.dumps(document).encode())
records = st.fixed_dictionaries(
    {
        "key": st.none() | blobs,
        "value": values,
        "topic": st.sampled_from(["t", "t.2"]),
        "partition": st.integers(0, 3),
        "timestamp": st.sampled_from([NOW, NOW.replace(microsecond=120_000), NOW.replace(microsecond=3)]),
        "headers": st.none() | st.lists(st.fixed_dictionaries({"key": names, "value": st.none() | blobs}), max_size=4),
    }
)
answers = st.fixed_dictionaries(
    {
        "topic": st.none() | blobs,
        "payload": st.none() | blobs,
        "retain": st.none() | st.booleans(),
        "expiry": st.none() | st.integers(-(2**63), 2**63 - 1),
        "response_topic": st.none() | blobs,
        "correlation_data": st.none() | blobs,
        "field": st.none() | texts,
    },
    optional={"reject": st.none() | st.just("no"), "where": st.none() | st.booleans()},
)


def line_of(section: DownlinkTable, limit: int = 0) -> str:
    """What a line's records become, as its query says it."""
    written = {**section.message_table_config(), "line": section.name, "qos": 1, "limit": limit}
    return json.dumps({**written, "send_controls": section.control_characters == "send"})


def table_of(said: Mapping[str, Any], limit: int = 0) -> MessageTable:
    return message_table(line_of(DownlinkTable.model_validate({"name": "line", "from": "t", **said}), limit))


def unchecked(texts: Sequence[Any]) -> pa.Array:
    """A column of texts as Spark makes them of bytes."""
    return pa.array([one.encode() if isinstance(one, str) else one for one in texts], pa.binary()).view(pa.string())


def batch_of(rows: Sequence[Mapping[str, Any]], said: Sequence[Mapping[str, Any]] = ()) -> pa.RecordBatch:
    """Records as the task that writes gets them, with what SQL says of each."""
    batch = pa.RecordBatch.from_pylist([{"offset": n, **row} for n, row in enumerate(rows)], schema=RECORD)
    if not said:
        return batch
    for name in ("topic", "payload", "retain", "expiry", "response_topic", "correlation_data"):
        column = [one[name] for one in said]
        batch = batch.append_column(
            internal(name), pa.array(column, KINDS[name]) if name in KINDS else unchecked(column)
        )
    fields = pa.array([one["field"] for one in said], pa.string())
    return with_verdicts(batch.append_column(internal("text_field"), fields), said)


def rendered(table: MessageTable, batch: pa.RecordBatch) -> list[Any]:
    """As `becomes` says it."""
    out = table.render(batch)
    messages = out.select(list(map(internal, SENT))).rename_columns(SENT).to_pylist()
    results: list[Any] = []
    for at, code in enumerate(out.column(OUTCOME).to_pylist()):
        outcome = RowOutcome(code)
        original = batch.select(KAFKA_COLUMNS).slice(at, 1).to_pylist()[0]
        kept = out.select(KAFKA_COLUMNS).slice(at, 1).to_pylist()[0]
        if outcome.reason:
            assert kept == original
            results.append(outcome.reason.value)
        else:
            assert (kept["value"], kept["headers"], kept["offset"]) == (None, None, original["offset"])
            results.append(messages[at] if outcome is RowOutcome.RENDERED else outcome.name.lower())
    return results


@given(st.lists(st.tuples(records, answers), min_size=1, max_size=8), st.sampled_from(TABLES))
def test_columns_become_the_messages_that_the_page_says(
    met: list[tuple[dict[str, Any], dict[str, Any]]], said: dict[str, Any]
) -> None:
    rows, asked = [{**row, "offset": n} for n, (row, _) in enumerate(met)], [one for _, one in met]
    batch = batch_of(rows, asked if said is SQL else ())
    wanted = [becomes(said, row, one) for row, one in zip(rows, asked, strict=True)]
    assert rendered(table_of(said), batch) == wanted
    assert rendered(table_of(said), batch.slice(1)) == wanted[1:]


def record(key: bytes | None = b"k", value: bytes | None = b"v", **more: Any) -> dict[str, Any]:
    headers = [{"key": name, "value": content} for name, content in more.pop("headers", [])]
    return {"key": key, "value": value, "topic": "t", "partition": 0, "timestamp": NOW, "headers": headers, **more}


@pytest.mark.parametrize("policy", ["send", "dead_letter"])
def test_the_edges_of_characters_and_numbers(policy: str) -> None:
    said = {"topic": "{key}", "control_characters": policy}
    rows = [record(text.encode()) for text in EDGES]
    rows += [record(headers=[(name, text.encode())]) for text in EDGES for name in ("h", "mqtt.content-type")]
    rows += [record(headers=[("mqtt.message-expiry", b"%d" % number)]) for number in NUMBERS]
    assert rendered(table_of(said), batch_of(rows)) == [becomes(said, row, {}) for row in rows]


@example([record(value=b"x" * 4096, headers=[("h", b"t"), *[("u", b"x" * 65535)] * 33])])
@given(st.lists(records, min_size=1, max_size=8))
def test_the_size_of_a_packet_is_known_beforehand(rows: list[dict[str, Any]]) -> None:
    table = table_of({"topic": "{header.h}", "control_characters": "send"})
    batch = batch_of(rows)
    out, sizes = table.render(batch), _MessageColumns(table, batch).packet_size().to_pylist()
    for row, size in zip(out.to_pylist(), sizes, strict=True):
        if row[OUTCOME] == 0:
            written = packet({name: row[internal(name)] for name in SENT})
            assert len(written) <= size <= len(written) + 12


def packet(fields: Mapping[str, Any]) -> bytes:
    """The PUBLISH of a message with QoS 1, with everything MQTT 5 says in it."""
    (message,) = outgoing_messages(
        add_arrival(rows_from_messages([{**{name: fields[name] for name in SENT}, "qos": 1}]), Timestamp(0)), 0
    )
    assert isinstance(message.content_or_reason, OutboundMessage)
    return bytes(message.content_or_reason.to_packet(1, message.content_or_reason.message_expiry_interval).write())


def kafka_gets(table: MessageTable, batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """Topic, key, value and headers of what Kafka gets of refused records: first the dead letters."""
    settings = SinkSettings.parse({"kafka.bootstrap.servers": "k:1", "deadLetterTopic": "dead"})
    columns = DeadLetterColumns()
    check, parts = RecordCheck(settings, columns, "line"), table.dead_letters(batch)
    rows = (columns.rows(part) if columns.row_faults(part) is None else check.checked_rows(part) for part in parts)
    return [(topic, key, value, headers) for one in rows for topic, value, key, *_, headers in one.records]


def letters(table: MessageTable, batch: pa.RecordBatch) -> list[tuple[str, DeadLetter]]:
    got = ((topic, ChunkAssembler().add(*record)) for topic, *record in kafka_gets(table, batch))
    return [(topic, letter) for topic, letter in got if letter is not None]


def test_a_refused_record_is_a_letter_with_every_byte() -> None:
    table = table_of({"topic": "{key}"}, 80_000)
    sent = [record(b"a/+", headers=[("h", None), ("h", b"\xff")]), record(None), record(value=b"x" * 90_000)]
    made = letters(table, table.render(batch_of(sent)))
    assert [one.reason for _, one in made] == [Reason.TOPIC_ILLEGAL, Reason.TOPIC_ABSENT, Reason.TOO_LARGE]
    assert [(one.key, one.value) for _, one in made] == [(one["key"], one["value"]) for one in sent]
    topic, letter = made[0]
    assert (topic, letter.topic, letter.partition, letter.source) == ("dead", "t", 0, "line")
    assert (list(letter.headers), letter.timestamp) == ([("h", None), ("h", b"\xff")], int(NOW.timestamp() * 1000))
    assert made[-1][1].detail == "the broker takes packets of at most 80000 bytes"
    section = DownlinkTable.model_validate({"name": "line", "from": "t", "topic": "{key}"})
    rows = rendering(message_table(line_of(section)), [batch_of(sent[:1])], Counter(), has_dead_letter_topic=False)
    with pytest.raises(KafkaError, match=r"line line: record t/0 offset 0: MQTT takes no such topic.*\[TL-B05\]"):
        list(rows)


#: What a gateway takes in.
WHOLE: st.SearchStrategy[dict[str, Any]] = messages.filter(
    lambda row: row["payload"] is not None and row["topic"][:1] not in ("", "$") and row["response_topic"] != ""
)


@given(st.lists(WHOLE, min_size=1, max_size=6))
def test_what_goes_up_comes_down_byte_for_byte(rows: list[dict[str, Any]]) -> None:
    route = RouteSection.model_validate({"from": "#", "topic": "t", "key": "{mqtt.topic}"})
    sent = [{**row, "offset": n, "retain": bool(row["retain"])} for n, row in enumerate(rows)]
    went = RouteTable([route.compile(Guarantee.AT_LEAST_ONCE)]).render(
        pa.RecordBatch.from_pylist(sent, schema=ROW_SCHEMA)
    )
    up = [record(key, value, headers=headers) for _, value, key, *_, headers in RecordColumns().rows(went).records]
    for came, message in zip(rendered(table_of({"control_characters": "send"}), batch_of(up)), sent, strict=True):
        assert packet(came) == packet(message)
        assert came["payload_is_utf8"] == message["payload_is_utf8"]


def test_a_reason_that_is_no_text_is_a_reason() -> None:
    """Spark makes a text of any bytes: a record must not end a line by what its refusal quotes of it [I15]."""
    why = pa.StructArray.from_arrays([unchecked([b"bad \xff"])], ["why"])
    table = table_of({"topic": "t", "reject": "r"})
    ((_, letter),) = letters(table, table.render(batch_of([record()]).append_column(REJECT, why)))
    assert (letter.reason, letter.detail) == (Reason.REJECTED, "bad \ufffd")


def test_kafka_is_told_of_a_letter() -> None:
    notice = {
        "topic": "answers.{kafka.topic}",
        "key": "{key}",
        "payload": {"sql": "p"},
        "headers": {"id": "{header.id}", "status": {"sql": "s"}, "no": "{header.no}", "json": "{value.a}"},
        "copy_headers": ["keep*", "exact"],
        "where": "w",
    }
    table = table_of({"topic": "a/{key}", "failure_notice": notice})
    headers = [("keeper", b"\xff"), ("exact", None), ("id", b"7"), ("exactly", b"")]
    refused = table.render(batch_of([record(b"+", headers=headers), record(b"#", b'{"a": 1}', headers=headers)]))
    for name, column in {
        "payload": ["x"] * 2,
        f"header_{b'status'.hex()}": ["400"] * 2,
        "where": [True, False],
    }.items():
        refused = refused.append_column(internal(f"notice_{name}"), pa.array(column))
    *dead, (topic, key, value, said) = kafka_gets(table, refused)
    assert [one[0] for one in dead] == ["dead", "dead"]
    assert (topic, key, value) == ("answers.t", b"+", b"x")
    assert said == [("id", b"7"), ("status", b"400"), ("keeper", b"\xff"), ("exact", None)]


def test_the_text_of_sql_goes_no_way_with_the_messages() -> None:
    """It may hold values of the environment, and Spark shows options [I12]."""
    sql = "concat('hidden', key)"
    notice = {"topic": {"sql": sql}, "headers": {"h": {"sql": sql}}, "where": sql}
    said = {"topic": {"sql": sql}, "fields": {"f": sql}, "where": sql, "reject": sql, "failure_notice": notice}
    assert "hidden" not in line_of(DownlinkTable.model_validate({"name": "line", "from": "t", **said}))
