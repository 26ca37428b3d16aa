"""The mapping of the way down on a real Spark: what went up comes down the same; what MQTT can't carry stays out."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from tests.integration.bridge.losing import numbers, progress_of_a_lost_shuffle
from tests.integration.bridge.mapped import mapped
from towline.bridge.config.downlink import DownlinkSection
from towline.bridge.config.model import RouteSection
from towline.bridge.downlink import sql as downsql
from towline.bridge.downlink.sql import DEAD_LETTER, NOTICE, PLACE, DownlinkStatements
from towline.bridge.lines.query import COUNTER, KEPT_COUNTER, LineQuery
from towline.bridge.lines.sql import HEADER_TYPE, DeadLetterTarget
from towline.delivery.outrows import message_of
from towline.errors import ConfigError
from towline.guarantee import Guarantee
from towline.kafka.deadletters import DeadLetter, Reason, from_record
from towline.mqtt.message import OutboundMessage
from towline.schema import MESSAGE_SCHEMA

pytestmark = pytest.mark.spark

RECORD = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
NOW = datetime(2026, 1, 1, tzinfo=UTC)

#: What MQTT allows in a string [MQTT-1.5.4-2], and in a topic name.
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")
TEXT = st.text(CHARACTERS, max_size=20)
TOPIC = st.text(CHARACTERS.filter(lambda c: c not in "+#"), min_size=1, max_size=20).filter(lambda t: t[0] != "$")
MESSAGE = st.fixed_dictionaries(
    {
        "topic": TOPIC,
        "payload": st.binary(max_size=40),
        "qos": st.integers(0, 2),
        "retain": st.booleans(),
        "duplicate": st.just(value=False),
        "content_type": st.none() | TEXT,
        "payload_is_utf8": st.none() | st.booleans(),
        "response_topic": st.none() | TOPIC,
        "correlation_data": st.none() | st.binary(max_size=20),
        "user_properties": st.none()
        | st.lists(st.fixed_dictionaries({"key": TEXT | st.just("tracestate"), "value": TEXT}), max_size=4),
        "message_expiry_seconds": st.none() | st.integers(0, 0xFFFFFFFF),
        "subscription_ids": st.none() | st.lists(st.integers(1, 268_435_455), max_size=2),
        "received_at": st.just(NOW),
        "gateway": st.just("g"),
        "offset": st.just(0),
    }
)
#: Many messages at once, because a Spark job costs more than all of them.
MANY = st.lists(MESSAGE, min_size=60, max_size=120)
LETTERS = DeadLetterTarget("dead", "line")


def section(**said: Any) -> DownlinkSection:
    return DownlinkSection.model_validate({"name": "line", "from": "t", **said})


def way(limit: int = 0, *, letters: bool = True, qos: int = 1, **said: Any) -> DownlinkStatements:
    return DownlinkStatements(section(**said), "line", qos, limit, LETTERS if letters else None)


def sent(row: Row, qos: int = 1) -> bytes:
    """The packet of a row of the sink, with everything MQTT 5 says in it."""
    fields = row.asDict(recursive=True)
    fields.pop(DEAD_LETTER, None)
    fields.pop(PLACE, None)
    return written(message_of(**{**fields, "payload": bytes(fields["payload"]), "qos": qos}))


def written(message: OutboundMessage | int) -> bytes:
    """The packet of a message that MQTT has a way to say."""
    assert isinstance(message, OutboundMessage)
    return bytes(message.packet(message.qos and 1, message.message_expiry_interval).write())


def up(spark: SparkSession, messages: list[dict[str, Any]]) -> DataFrame:
    """What the way up writes, as Spark's Kafka source would read it."""
    route = RouteSection.model_validate({"from": "#", "topic": "t", "key": "{mqtt.topic}"})
    made = mapped(spark, (route.compile(Guarantee.AT_LEAST_ONCE),), messages)
    rows = [(key, value, topic, 0, n, NOW, headers) for n, (topic, value, key, *_, headers) in enumerate(made)]
    return spark.createDataFrame(rows, RECORD)


@given(messages=MANY)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_goes_up_comes_down_byte_for_byte(spark: SparkSession, messages: list[dict[str, Any]]) -> None:
    rows = downsql.apply(up(spark, messages), way(), "c").collect()
    assert len(rows) == len(messages)
    for row, message in zip(rows, messages, strict=True):
        assert row[DEAD_LETTER] is None
        original = message_of(**{name: message[name] for name in MESSAGE_SCHEMA.names} | {"qos": 1})
        assert sent(row, 1) == written(original)
        assert row.payload_is_utf8 == message["payload_is_utf8"]


@given(messages=MANY)
@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_size_of_a_packet_is_known_beforehand(spark: SparkSession, messages: list[dict[str, Any]]) -> None:
    rows = downsql.apply(up(spark, messages), way(), "c").withColumns(
        {f"__{name}": F.col(name) for name in MESSAGE_SCHEMA.names if name != "qos"}
    )
    for row in rows.select("*", F.expr(downsql.packet_size(1)).alias("size")).collect():
        plain = Row(**{name: row[name] for name in MESSAGE_SCHEMA.names if name != "qos"})
        assert len(sent(plain)) <= row["size"] <= len(sent(plain)) + 12


def record(key: bytes | None = b"k", value: bytes | None = b"v", **more: Any) -> tuple[Any, ...]:
    headers = more.pop("headers", [])
    return key, value, "t", more.get("partition", 0), more.get("offset", 0), NOW, headers


def down(spark: SparkSession, how: DownlinkStatements, *records: tuple[Any, ...]) -> list[Row]:
    return downsql.apply(spark.createDataFrame(records, RECORD), how, "c", "k").collect()


def letter_of(row: Row) -> DeadLetter:
    letter = row[DEAD_LETTER]
    headers = [(h.key, None if h.value is None else bytes(h.value)) for h in letter.headers]
    dead = from_record(letter.key and bytes(letter.key), letter.value and bytes(letter.value), headers)
    assert isinstance(dead, DeadLetter)
    return dead


LONG = b"x" * 65536
POISON: list[tuple[tuple[Any, ...], Reason]] = [
    (record(None), Reason.TOPIC_ABSENT),
    (record(b"\xff\xfe"), Reason.TOPIC_ABSENT),
    (record(b"a/+"), Reason.TOPIC_ILLEGAL),
    (record(b"#"), Reason.TOPIC_ILLEGAL),
    (record(b"a\0b"), Reason.TOPIC_ILLEGAL),
    (record(b""), Reason.TOPIC_ILLEGAL),
    (record(LONG), Reason.TOPIC_ILLEGAL),
    (record(headers=[("h", b"\xff")]), Reason.UNDELIVERABLE),
    (record(headers=[("h", LONG)]), Reason.UNDELIVERABLE),
    (record(headers=[("h\0", b"")]), Reason.UNDELIVERABLE),
    (record(headers=[("mqtt.content-type", b"\xff")]), Reason.UNDELIVERABLE),
    (record(headers=[("mqtt.content-type", LONG)]), Reason.UNDELIVERABLE),
    (record(headers=[("mqtt.response-topic", b"a/#")]), Reason.UNDELIVERABLE),
    (record(headers=[("mqtt.correlation-data", LONG)]), Reason.UNDELIVERABLE),
    (record(value=b"x" * 90_000), Reason.TOO_LARGE),
    (record(value=b"boom"), Reason.UNMAPPED),
]


def test_what_mqtt_cant_carry_becomes_a_letter_with_every_byte(spark: SparkSession) -> None:
    fine = record(b"fine", b"v", headers=[("h", None), ("mqtt.user.u", b"1"), ("h", b"2")], offset=99)
    where = "CASE WHEN value = 'boom' THEN raise_error('boom') ELSE true END"
    records = [(*one[:4], at, *one[5:]) for at, (one, _) in enumerate(POISON)]
    rows = down(spark, way(80_000, topic="{key}", where=where), *records, fine)
    assert [letter_of(row).reason for row in rows[:-1]] == [reason for _, reason in POISON]
    for row, one in zip(rows, records, strict=False):
        letter = letter_of(row)
        assert (letter.key, letter.value, list(letter.headers)) == (one[0], one[1], one[6])
        assert (letter.topic, letter.partition, letter.source, row[DEAD_LETTER].topic) == ("t", 0, "line", "dead")
        assert letter.detail
    assert rows[-1][DEAD_LETTER] is None
    assert [tuple(p) for p in rows[-1].user_properties] == [("h", ""), ("u", "1"), ("h", "2")]


@pytest.mark.parametrize("said", ["topic", "content_type", "response_topic"])
def test_text_that_is_said_in_sql_is_looked_at_too(spark: SparkSession, said: str) -> None:
    """Spark casts any bytes to a string, and Arrow carries them: the gateway would have to set them aside."""
    values: dict[str, Any] = {"topic": "fine", said: {"sql": "concat('a/', CAST(key AS STRING))"}}
    how = way(**values)
    bad, fine, none = down(spark, how, record(b"\xff"), record("ü".encode()), record(None))
    assert letter_of(bad).reason is (Reason.TOPIC_ILLEGAL if said == "topic" else Reason.UNDELIVERABLE)
    assert "UTF-8" in letter_of(bad).detail
    assert (fine[DEAD_LETTER], fine[said]) == (None, "a/ü")
    assert (none[DEAD_LETTER] is None) is (said != "topic")


NOTICE_OF: dict[str, Any] = {
    "topic": {"sql": "IF(key = 'mute', NULL, concat('answers.', topic))"},
    "key": "{key}",
    "payload": {"sql": "to_json(named_struct('error', fault))"},
    "headers": {"id": "{header.id}", "status": {"sql": "'400'"}},
    "copy_headers": ["keep*", "exact"],
    "where": "exists(headers, h -> h.key = 'id')",
}


def test_what_a_line_refuses_is_a_dead_letter_and_kafka_is_told(spark: SparkSession) -> None:
    how = way(
        topic="a/{key}",
        properties="mqtt",
        reject="CASE key WHEN 'bad' THEN 'no such device' WHEN 'odd' THEN raise_error('odd') END",
        failure_notice=NOTICE_OF,
    )
    headers = [("keeper", b"\xff"), ("exact", None), ("id", b"7"), ("exactly", b"")]
    records = [
        record(key, headers=headers, offset=at) for at, key in enumerate([b"ok", b"bad", b"odd", b"+", b"mute+"])
    ]
    records += [record(b"mute", headers=headers), record(b"bad")]
    told, refused = "the SQL of reject raised an error on this record", "no such device"
    topic = "MQTT takes no such topic: empty, no UTF-8, longer than 65,535 bytes, with +, # or U+0000"
    rows = down(spark, how, *records)
    faults = [row[DEAD_LETTER] and (letter_of(row).reason, letter_of(row).detail) for row in rows]
    assert faults == [
        None,
        (Reason.REJECTED, refused),
        (Reason.UNMAPPED, told),
        (Reason.TOPIC_ILLEGAL, topic),
        (Reason.TOPIC_ILLEGAL, topic),
        None,
        (Reason.REJECTED, refused),
    ]
    notices = [row[NOTICE] for row in rows]
    assert [notice and (notice.topic, bytes(notice.key), json.loads(bytes(notice.value))) for notice in notices] == [
        None,
        ("answers.t", b"bad", {"error": refused}),
        ("answers.t", b"odd", {"error": told}),
        ("answers.t", b"+", {"error": topic}),
        ("answers.t", b"mute+", {"error": topic}),
        None,
        None,
    ]
    assert [(h.key, h.value and bytes(h.value)) for h in notices[1].headers] == [
        ("id", b"7"),
        ("status", b"400"),
        ("keeper", b"\xff"),
        ("exact", None),
    ]


CONTROL = ["\x01", "a\tb", "\n", "\x1f", "\x7f", "\x85", "\x9f", "\ufdd0", "\uffff", "\U0001fffe", "\U0010ffff"]


@pytest.mark.parametrize("policy", ["send", "dead_letter"])
def test_control_characters_are_sent_or_dead_letters(spark: SparkSession, policy: str) -> None:
    text = [character.encode() for character in CONTROL]
    records = [
        *(record(one) for one in text),
        *(record(headers=[("h", one)]) for one in text),
        record(headers=[("h\t", b"")]),
        record(headers=[("mqtt.content-type", b"\x02")]),
        record(headers=[("mqtt.response-topic", b"\x02")]),
    ]
    fine = [record("aé€\U0001f600 ".encode(), b"\x00\x01", headers=[("mqtt.correlation-data", b"\x01")]), record()]
    rows = down(spark, way(topic="{key}", control_characters=policy), *records, *fine)
    letters = [row for row in rows if row[DEAD_LETTER] is not None]
    assert len(letters) == (len(records) if policy == "dead_letter" else 0)
    assert {letter_of(row).reason for row in letters} <= {Reason.UNDELIVERABLE}
    assert [row[DEAD_LETTER] for row in rows[-2:]] == [None, None]


def test_an_expiry_is_one_that_mqtt_has(spark: SparkSession) -> None:
    longest = 2**32 - 1
    numbers = {str(n): min(max(n, 0), longest) for n in (-(2**63), -1, 0, 60, longest, longest + 1, 2**63 - 1)}
    said = {**numbers, "soon": None, str(10**20): None}
    rows = down(spark, way(topic="t"), *(record(headers=[("mqtt.message-expiry", s.encode())]) for s in said))
    assert [row.message_expiry_seconds for row in rows] == list(said.values())
    assert all(row[DEAD_LETTER] is None for row in rows)


def test_a_line_without_dead_letters_stops_and_says_where(spark: SparkSession) -> None:
    with pytest.raises(Exception, match=r"line line: record t/0 offset 7: MQTT takes no such topic.*\[TL-B05\]"):
        down(spark, way(topic="{key}", letters=False), record(b"a/+", offset=7))


def test_everything_can_be_said_in_sql_or_as_a_template(spark: SparkSession) -> None:
    how = way(
        topic="c/{key}/{header.tenant}/{value.a.b[1]}/{kafka.offset}",
        payload={"sql": "upper(CAST(value AS STRING)) -- loud"},
        retain={"sql": "offset > 3"},
        expiry="{value.ttl}",
        content_type="text/{header.tenant}",
        response_topic={"sql": "concat('r/', CAST(key AS STRING))"},
        correlation_data="{kafka.topic}",
        properties="mqtt",
    )
    value = b'{"a": {"b": [1, "x"]}, "ttl": 60}'
    headers = [("tenant", b"acme"), ("mqtt.user.u", b"1"), ("mqtt.retain", b"true"), ("traceparent", b"00-1-2-01")]
    (row,) = down(spark, how, record(value=value, headers=headers, offset=4))
    assert (row.topic, bytes(row.payload)) == ("c/k/acme/x/4", value.upper())
    assert (row.retain, row.message_expiry_seconds, row.content_type) == (True, 60, "text/acme")
    assert (row.response_topic, bytes(row.correlation_data)) == ("r/k", b"t")
    assert [tuple(p) for p in row.user_properties] == [("u", "1"), ("traceparent", "00-1-2-01")]


def test_properties_none_takes_nothing_from_the_headers(spark: SparkSession) -> None:
    headers = [("mqtt.user.u", b"1"), ("mqtt.retain", b"true"), ("mqtt.content-type", b"\xff")]
    (row,) = down(spark, way(topic="{key}", properties="none"), record(headers=headers))
    assert (row.user_properties, row.retain, row.content_type, row[DEAD_LETTER]) == (None, False, None, None)


def test_a_where_filters_and_parts_are_by_topic(spark: SparkSession) -> None:
    how = DownlinkStatements(section(topic="d/{key}", where="offset % 2 = 0"), "line", 1, 0, LETTERS, 3)
    records = [record(b"%d" % (n % 4), b"%d" % n, offset=n) for n in range(40)]
    frame = downsql.apply(spark.createDataFrame(records, RECORD), how, "c", "k")
    rows = frame.withColumn("part", F.spark_partition_id()).collect()
    assert len({(row.topic, row.part) for row in rows}) == len({row.topic for row in rows}) == 2
    assert sorted(row[PLACE].offset for row in rows) == list(range(0, 40, 2))


def reported(progress: dict[str, Any]) -> dict[str, Any]:
    line: Any = SimpleNamespace(line=SimpleNamespace(guarantee=Guarantee.EXACTLY_ONCE, checkpoint="nowhere"))
    return LineQuery.report(line, progress)


def test_what_is_counted_on_the_way_down_is_counted_once_though_tasks_run_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Of an executor that was lost with what it had written for a shuffle (`towline.bridge.lines.sql.observed`)."""
    records = numbers(spark, 600).selectExpr(
        "CAST(CAST(n % 30 AS STRING) AS BINARY) AS key",
        "CAST(IF(n % 10 = 7, repeat('/', 70000), 'v') AS BINARY) AS value",
        "'t' AS topic",
        "0 AS partition",
        "n AS offset",
        "timestamp",
        f"CAST(array() AS {HEADER_TYPE}) AS headers",
    )
    how = DownlinkStatements(
        section(topic="{key}", content_type="{value}", where="offset % 3 > 0"), "line", 1, 0, LETTERS, 3
    )
    progress = progress_of_a_lost_shuffle(downsql.apply(records, how, COUNTER, KEPT_COUNTER), tmp_path)
    assert progress["numInputRows"] > 600, "the tasks have not run again"
    report = reported(progress)
    assert (report["rows"], report["observed"]) == (600, {"kept": 600, "filtered": 200, "dead_lettered": 60 - 20})


def test_a_transform_keeps_the_columns(spark: SparkSession) -> None:
    frame = spark.createDataFrame([record(b"a"), record(b"b")], RECORD)
    how = way(topic="{key}", transform="m:f")
    rows = downsql.apply(frame, how, "c", transform=lambda rows: rows.where("key = 'b'")).collect()
    assert [row.topic for row in rows] == ["b"]
    with pytest.raises(ConfigError, match="does not keep the column headers"):
        downsql.apply(frame, how, "c", transform=lambda rows: rows.drop("headers"))
