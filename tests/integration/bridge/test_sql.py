"""The SQL of the routes says what the Python statement of their rules says, on a real Spark."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Observation, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from towline.bridge.model import RouteSection
from towline.bridge.routes import Route, first_match
from towline.bridge.sql import COUNTS, KEPT, Letters, apply, expressions, literal
from towline.gateway.rows import SPARK_SCHEMA
from towline.gateway.settings import Guarantee
from towline.kafka.deadletters import from_record

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

COLUMNS = [part.split(" ")[0] for part in SPARK_SCHEMA.replace("struct<key: string, value: string>", "x").split(", ")]
NASTY = ["", "a", "b", "t1", "$SYS", "it's", 'say "x"', "back\\slash", "${HOME}", "%_", "ü", "🚀", "line\nend"]
NASTY += ["{x}", "a b", "..", "x" * 250]


def compiled(*tables: dict[str, Any]) -> tuple[Route, ...]:
    return tuple(RouteSection.model_validate(table).compile(Guarantee.AT_LEAST_ONCE) for table in tables)


ROUTES = compiled(
    {"from": "one/{x}", "topic": "one", "key": "{x}", "headers": {"h": "<{x}>{mqtt.qos}", "n": "{mqtt.user.none}"}},
    {"from": "two/{x}/{y}/#", "topic": "two.{x}", "key": "{y}{x}", "fallback_topic": "two.other", "properties": "none"},
    {"from": "tri/{x}", "topic": "{x}", "allowed_topics": ["t1", "a*", "?"], "fallback_topic": "tri.other"},
    {"from": "it's/+/#", "topic": "quote", "key": "'{mqtt.user.k}\\", "headers": {"it's": "${{}}%"}},
    {"from": "+/b", "topic": "wild", "where": "length(payload) > 1", "key": "{mqtt.retain}{mqtt.content_type}"},
    {
        "from": "$SYS/{x}",
        "topic": "sys",
        "key": "{mqtt.offset}{mqtt.gateway}{mqtt.message_expiry}{mqtt.response_topic}",
    },
    {"from": "{x}/{y}/{z}", "topic": "deep", "properties": "none", "key": "{mqtt.topic}"},
)


def rows(count: int, seed: int = 7) -> list[dict[str, Any]]:
    rng = random.Random(seed)

    def maybe(value: Any) -> Any:
        return value if rng.random() < 0.5 else None

    made = []
    for offset in range(count):
        levels = [rng.choice(["one", "two", "tri", *NASTY])] + [rng.choice(NASTY) for _ in range(rng.randint(0, 3))]
        users = [{"key": rng.choice(["k", "k", "", "ü"]), "value": rng.choice(NASTY)} for _ in range(rng.randint(0, 3))]
        made.append(
            {
                "topic": "/".join(levels),
                "payload": rng.randbytes(rng.randint(0, 3)),
                "qos": rng.randint(0, 2),
                "retain": rng.random() < 0.3,
                "duplicate": False,
                "content_type": maybe("text/plain"),
                "payload_is_utf8": maybe(rng.random() < 0.5),
                "response_topic": maybe("re/ply"),
                "correlation_data": maybe(rng.randbytes(3)),
                "user_properties": users or maybe([]),
                "message_expiry_seconds": maybe(rng.randint(0, 2**32 - 1)),
                "subscription_ids": maybe([rng.randint(1, 9) for _ in range(rng.randint(0, 2))]),
                "received_at": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randint(0, 10**12)),
                "gateway": "g",
                "offset": offset,
            }
        )
    return made


def expected(message: dict[str, Any]) -> dict[str, Any] | str:
    taken = first_match(ROUTES, message["topic"])
    if taken is None:
        return "unrouted"
    if ROUTES[taken].where and len(message["payload"]) <= 1:
        return "filtered"
    record = ROUTES[taken].record(message)
    assert record is not None
    return record


def told(row: Row) -> dict[str, Any]:
    headers = (
        None if row.headers is None else [(h.key, None if h.value is None else bytes(h.value)) for h in row.headers]
    )
    key = None if row.key is None else bytes(row.key)
    return {"topic": row.topic, "key": key, "value": bytes(row.value), "headers": headers, "micros": row.micros}


def test_sql_and_python_agree_on_thousands_of_messages(spark: SparkSession) -> None:
    messages = rows(4000)
    frame = spark.createDataFrame([tuple(m[c] for c in COLUMNS) for m in messages], SPARK_SCHEMA).coalesce(1)
    observation, kept = Observation("counts"), Observation("kept")
    result = apply(frame, ROUTES, observation, kept=kept).withColumn("micros", F.expr("unix_micros(timestamp)"))
    got = [told(row) for row in result.drop("timestamp").collect()]
    want = [expected(message) for message in messages]
    records = [record for record in want if isinstance(record, dict)]
    assert len(got) == len(records)
    for ours, theirs in zip(got, records, strict=True):
        micros = (theirs.pop("timestamp") - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        assert ours == {**theirs, "micros": micros}
    counted = {**observation.get, **kept.get}
    fallbacks = sum(record["topic"] in {"two.other", "tri.other"} for record in records)
    assert counted == {
        "rows": 4000,
        "filtered": want.count("filtered"),
        "unrouted": want.count("unrouted"),
        "fallback": fallbacks,
        "kept": len(records),
        "dead_lettered": 0,
    }
    assert counted.pop("dead_lettered") == 0
    assert min(counted.values()) > 20, "every kind of outcome was met"


def test_a_topic_that_nothing_takes_stops_the_batch_and_says_so(spark: SparkSession) -> None:
    routes = compiled({"from": "e/{x}", "topic": "e.{x}"})
    message = {**rows(1)[0], "topic": "e/not legal"}
    frame = spark.createDataFrame([tuple(message[c] for c in COLUMNS)], SPARK_SCHEMA)
    with pytest.raises(Exception, match=r"is not legal or not allowed\. .* fallback_topic\.   \[TL-B02\]"):
        apply(frame, routes, "c").collect()


@pytest.mark.parametrize("text", ["payload ===", "no_such_column = 1", "payload", "length(payload) > 1) OR (true"])
def test_a_wrong_where_is_refused_before_the_query_begins(spark: SparkSession, text: str) -> None:
    frame = spark.createDataFrame([], SPARK_SCHEMA)
    with pytest.raises((AnalysisException, ParseException)):
        _ = apply(frame, compiled({"from": "#", "topic": "t", "where": text}), "c").schema


def test_a_where_may_end_in_a_comment_and_a_bad_cast_filters(spark: SparkSession) -> None:
    routes = compiled({"from": "#", "topic": "t", "where": "CAST(CAST(payload AS STRING) AS INT) > 20 -- warm"})
    base = rows(1)[0] | {"topic": "a"}
    messages = [base | {"payload": payload} for payload in (b"21", b"20", b"none", b"")]
    frame = spark.createDataFrame([tuple(m[c] for c in COLUMNS) for m in messages], SPARK_SCHEMA)
    assert [bytes(row.value) for row in apply(frame, routes, "c").collect()] == [b"21"]


@pytest.mark.parametrize("text", [*NASTY, "\0", "\x7f", "' OR 1=1 --", "a\\'b"])
def test_literals_come_back_as_they_went(spark: SparkSession, text: str) -> None:
    assert spark.range(1).select(F.expr(literal(text)).alias("x")).collect()[0].x == text


def test_the_columns_are_those_the_sink_takes(spark: SparkSession) -> None:
    made = apply(spark.createDataFrame([], SPARK_SCHEMA), ROUTES, "c")
    assert made.dtypes == [
        ("topic", "string"),
        ("key", "binary"),
        ("value", "binary"),
        ("headers", "array<struct<key:string,value:binary>>"),
        ("timestamp", "timestamp"),
    ]
    assert [name for name in expressions(ROUTES) if not name.startswith("__")] == made.columns
    assert set(COUNTS).isdisjoint(KEPT)


# -- dead letters ----------------------------------------------------------------------------------------------------

BROKEN = compiled(
    {"from": "one/{x}", "topic": "one.{x}"},
    {"from": "two/{x}", "topic": "{x}", "allowed_topics": ["a*"]},
    {"from": "tri/{x}", "topic": "t{mqtt.user.to}"},
    {"from": "key/{x}", "topic": "k", "key": "{mqtt.user.id}", "key_required": True},
)
SQL_ERROR = "raise_error(concat('no ', CAST(payload AS STRING)))"


def letters(spark: SparkSession, routes: tuple[Route, ...], *messages: dict[str, Any]) -> list[tuple[Row, Any]]:
    frame = spark.createDataFrame([tuple(m[c] for c in COLUMNS) for m in messages], SPARK_SCHEMA).coalesce(1)
    made = apply(frame, routes, "c", letters=Letters("dead", "line"), kept="k").collect()
    return [
        (
            row,
            from_record(
                row.key, bytes(row.value), [(h.key, None if h.value is None else bytes(h.value)) for h in row.headers]
            ),
        )
        if row.topic == "dead"
        else (row, None)
        for row in made
    ]


def message(topic: str, **more: Any) -> dict[str, Any]:
    return {**rows(1)[0], "topic": topic, "retain": False, "user_properties": None, **more}


def test_what_cant_be_mapped_becomes_a_letter_with_every_byte(spark: SparkSession) -> None:
    users = [{"key": "k", "value": "1"}, {"key": "k", "value": "2"}]
    sent = [
        message("one/fine"),
        message("one/not legal", payload=b"\x00\xff", user_properties=users, correlation_data=b"\x01"),
        message("two/b", offset=7),
        message("tri/x"),
        message("key/x"),
        message("nobody/takes/this"),
    ]
    made = letters(spark, BROKEN, *sent)
    assert [letter and str(letter.reason) for _, letter in made] == [
        None,
        "topic_illegal",
        "topic_not_allowed",
        "topic_absent",
        "key_absent",
        "unrouted",
    ]
    _, illegal = made[1]
    assert (illegal.topic, illegal.value, illegal.source) == ("one.not legal", b"\x00\xff", "line")
    assert illegal.timestamp == int(sent[1]["received_at"].timestamp() * 1000)
    assert [pair for pair in illegal.headers if pair[0] == "mqtt.user.k"] == [
        ("mqtt.user.k", b"1"),
        ("mqtt.user.k", b"2"),
    ]
    assert ("mqtt.correlation-data", b"\x01") in illegal.headers
    assert made[2][1].headers[-2:] == (("mqtt.gateway", b"g"), ("mqtt.offset", b"7"))


def test_a_condition_that_raises_costs_one_message_not_the_line(spark: SparkSession) -> None:
    routes = compiled(
        {"from": "#", "topic": "t", "where": f"CASE WHEN payload = X'31' THEN {SQL_ERROR} ELSE length(payload) > 0 END"}
    )
    made = letters(spark, routes, message("a", payload=b"1"), message("a", payload=b"2"), message("a", payload=b""))
    assert [(row.topic, letter and str(letter.reason)) for row, letter in made] == [("dead", "unmapped"), ("t", None)]
