"""What a route says in SQL, on a real Spark: columns beside those of its messages, asked of no other's."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from tests.integration.bridge.mapped import frame_of, mapped, message
from tests.integration.spark.collecting import configured
from tests.unit.bridge.oracle import becomes, taker
from towline.bridge.config.tables import RouteSection
from towline.bridge.lines.sql import DEDUPE_COLUMNS, RouteSql
from towline.bridge.patterns import sql_literal
from towline.bridge.routes import DEDUPE, REJECT, WHERE, Route
from towline.guarantee import Guarantee
from towline.kafka.deadletters import DeadLetter
from towline.schema import EVENT_TIME

NASTY = ["", "a", "b", "t1", "$SYS", "it's", 'say "x"', "back\\slash", "${HOME}", "%_", "ü", "🚀", "line\nend"]
NASTY += ["{x}", "a b", "..", "x" * 250, "a.markers", "__x"]
SQL_ERROR = "raise_error(concat('no ', CAST(payload AS STRING)))"
NEVER = "raise_error('a message that was not taken in whole was asked')"


def compiled(*tables: dict[str, Any]) -> tuple[Route, ...]:
    return tuple(RouteSection.model_validate(table).compile(Guarantee.AT_LEAST_ONCE) for table in tables)


#: Each asks what the others do not have: wildcards, columns and fields of its own.
TABLES: tuple[dict[str, Any], ...] = (
    {
        "from": "one/{Machine}/#",
        "topic": "one.{site}",
        "key": "{Machine}-{site}",
        "fields": {"site": "coalesce(machine, 'none') -- in any case of letters", "long": "length(site) > 3"},
        "headers": {"long": "{long}", "site": "{site}"},
        "where": "IF(qos = 0, NULL, NOT long OR qos = 2)",
        "reject": f"CASE WHEN machine = 'a' THEN 'no a' WHEN machine = 'b' THEN {SQL_ERROR} END",
    },
    {
        "from": "two/+/{machine}",
        "topic": "two",
        "key": "{other}{mqtt.user.k}",
        "fields": {"other": f"IF(machine = 'b', {SQL_ERROR}, upper(machine))"},
        "where": f"IF(machine = 'a', {SQL_ERROR}, octet_length(payload) > 1)",
    },
    {"from": "#", "topic": "rest", "key": "{mqtt.topic}"},
)


def answers(row: dict[str, Any]) -> dict[str, Any]:
    """What the SQL says of a message, read by hand."""
    levels = row["topic"].split("/")
    route = taker(TABLES, row["topic"])
    if route == 0:
        machine = levels[1]
        far = len(machine) > 3
        said: dict[str, Any] = {"site": machine, "long": str(far).lower(), "reject": "no a" if machine == "a" else None}
        if machine == "b":
            del said["reject"]
        return {**said, "where": None if row["qos"] == 0 else not far or row["qos"] == 2}
    if route == 1:
        machine = levels[2]
        said = {"other": None if machine == "b" else machine.upper()}
        return said if machine == "a" else {**said, "where": len(row["payload"]) > 1}
    return {}


def messages(count: int, seed: int = 7) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = []
    for offset in range(count):
        levels = [rng.choice(["one", "two", *NASTY])] + [rng.choice(NASTY) for _ in range(rng.randint(0, 3))]
        users = [{"key": rng.choice(["k", "ü"]), "value": rng.choice(NASTY)} for _ in range(rng.randint(0, 2))]
        received = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randint(0, 10**12))
        more: dict[str, Any] = {"user_properties": users or None, "received_at": received, "offset": offset}
        payload = rng.randbytes(rng.randint(0, 3))
        rows.append(message("/".join(levels), payload, rng.randint(0, 2), **more))
    return rows


def read(made: Any) -> Any:
    """As the oracle says it."""
    if isinstance(made, str):
        return made
    if isinstance(made, DeadLetter):
        return made.reason.value
    topic, value, key, _, _, _, millis, headers = made
    return topic, value, key, millis, headers or []


def test_each_message_is_asked_the_sql_of_its_route(spark: SparkSession) -> None:
    rows = messages(3000)
    wanted = [becomes(TABLES, row, answers(row)) for row in rows]
    assert [read(made) for made in mapped(spark, compiled(*TABLES), rows)] == wanted
    met = {one if isinstance(one, str) else one[0][:3] for one in wanted}
    assert met >= {"rejected", "unmapped", "undecided", "filtered", "topic_illegal", "one", "two", "res"}


@pytest.mark.parametrize("text", [*NASTY, "\0", "\x7f", "' OR 1=1 --", "a\\'b"])
@pytest.mark.parametrize("escaped", ["false", "true"])
def test_literals_come_back_as_they_went(spark: SparkSession, text: str, escaped: str) -> None:
    with configured(spark, {"spark.sql.parser.escapedStringLiterals": escaped}):
        assert spark.range(1).select(F.expr(sql_literal(text)).alias("x")).collect()[0].x == text


def test_what_was_not_taken_in_whole_is_a_letter_and_nobody_is_asked(spark: SparkSession) -> None:
    asks = {
        "from": "one/{x}",
        "topic": "t",
        "key": "{x}",
        "where": f"IF(payload IS NULL, {NEVER}, true) -- large ones are nobody's",
        "dedupe": {"key": f"IF(payload IS NULL, {NEVER}, 'other')", "within": "10 minutes"},
    }
    large, many = (
        [{"key": "towline-reason", "value": reason}] for reason in ("packet_too_large", "too_many_properties")
    )
    sent = [
        message("one/a", None, user_properties=large),
        message("one/b", None, 2, retain=True, user_properties=many, correlation_data=b"\x32packet"),
        message("nobody/takes/this", None, user_properties=large),
        message("one/c", b"fine", user_properties=large, correlation_data=b"\x01"),
    ]
    *letters, fine = mapped(spark, compiled(asks), sent)
    said = [(one.reason.value, one.value, one.topic, one.key) for one in letters]
    assert said[:2] == [("packet_too_large", b"", "t", b"a"), ("too_many_properties", b"\x32packet", "t", b"b")]
    assert letters[2].reason.value == "packet_too_large"
    headers = dict(letters[1].headers)
    assert (headers["mqtt.topic"], headers["mqtt.qos"], headers["mqtt.retain"]) == (b"one/b", b"2", b"true")
    assert "mqtt.correlation-data" not in headers
    assert (fine[0], fine[1], ("mqtt.correlation-data", b"\x01") in fine[7]) == ("t", b"fine", True)


def test_no_payload_holds_a_line_by_what_sql_makes_of_it(spark: SparkSession) -> None:
    """A text of Spark's may hold any bytes, as a topic, a time or a refusal."""
    text = {"text": "CAST(payload AS STRING)"}
    routes = compiled(
        {"from": "topic", "topic": "t.{text}", "fields": text},
        {"from": "time", "topic": "t", "timestamp": "{text}", "fields": text},
        {"from": "reject", "topic": "t", "reject": "concat('no ', CAST(payload AS STRING))"},
        {"from": "key", "topic": "t", "key": "{text}", "fields": text},
    )
    sent = [message(topic, b"a\xff") for topic in ("topic", "time", "reject", "key")]
    topic, moment, refused, keyed = mapped(spark, routes, sent)
    assert [read(one) for one in (topic, moment, refused)] == ["topic_illegal", "timestamp", "rejected"]
    assert (topic.topic, refused.detail, keyed[2]) == ("t.a\ufffd", "no a\ufffd", b"a\xff")


# -- repeats, and several writers ------------------------------------------------------------------------------------


def applied(spark: SparkSession, table: dict[str, Any], sent: list[dict[str, Any]], **more: Any) -> list[Row]:
    statements = RouteSql(compiled(table), **more)
    rows = frame_of(spark, compiled(table), sent, statements).withColumn(EVENT_TIME, F.col("received_at"))
    return statements.with_sql_columns(rows).withColumn(DEDUPE_COLUMNS[-1], F.expr(UNIQUE)).collect()


UNIQUE = f"CASE WHEN {DEDUPE} IS NULL THEN offset END"


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("{mqtt.user.id}/{device}", ["1/a", "1/b", None, None, None]),
        ("{mqtt.user.id}{own}", ["1A", "1B", None, None, None]),
        ("concat(device, own, qos)", ["aA1", "bB1", "cC1", None, None]),
        ("'same'", ["same", "same", "same", None, None]),
    ],
)
def test_a_dedupe_key_is_a_template_or_sql(spark: SparkSession, key: str, keys: list[str | None]) -> None:
    """With the topic before it: no device drops another's. What no route takes, or was cut, is nobody's repeat."""
    table = {"from": "t/{device}", "topic": "t", "fields": {"own": "upper(device)"}, "dedupe": {"key": key}}
    users = [{"key": "id", "value": "1"}]
    sent = [message("t/a", user_properties=users), message("t/b", user_properties=users), message("t/c")]
    sent += [message("x/a", user_properties=users), message("t/d", None, user_properties=users)]
    rows = applied(spark, table, [{**one, "offset": n} for n, one in enumerate(sent)], dedupe_window="1 minute")
    assert DEDUPE_COLUMNS[0] == "topic"
    assert [row[DEDUPE] for row in rows] == keys
    assert [row[DEDUPE_COLUMNS[-1]] for row in rows] == [None if key else n for n, key in enumerate(keys)]


def test_records_of_one_key_have_one_writer(spark: SparkSession) -> None:
    table = {"from": "t/{device}/#", "topic": "t", "key": "{mqtt.user.id}{own}", "fields": {"own": "device"}}
    users = [{"key": "id", "value": "1"}]
    sent = [message(f"t/{n % 7}/{n % 3}", user_properties=users if n % 2 else None, offset=n) for n in range(200)]
    statements = RouteSql(compiled(table), parallelism=4)
    rows = statements.writer_frame(frame_of(spark, compiled(table), sent, statements))
    parts: dict[str, set[int]] = {}
    for row in rows.withColumn("part", F.spark_partition_id()).collect():
        key = f"1{row['own']}" if row["user_properties"] else row["topic"]  # without a key the topic tells
        parts.setdefault(key, set()).add(row["part"])
    assert len(parts) == 7 + 21
    assert all(len(one) == 1 for one in parts.values())
    assert len(set.union(*parts.values())) > 1


# -- dead letters again ----------------------------------------------------------------------------------------------


def test_lines_ask_spark_for_no_more_than_their_sql_needs() -> None:
    plain = compiled({"from": "a/{x}", "topic": "{x}", "key": "{payload.id}", "allowed_topics": ["*"]})
    assert not RouteSql(plain).needs_spark
    assert not RouteSql(plain, parallelism=2).needs_spark
    asks = compiled({"from": "a/{x}/{Other}", "topic": "t", "where": "other = 'b'"})
    assert (RouteSql(asks).needs_spark, RouteSql(asks).value_columns) == (True, {"other": "Other"})
    assert [*RouteSql(compiled(*TABLES))._column_sql()] == ["site", "long", "other", REJECT, WHERE]
