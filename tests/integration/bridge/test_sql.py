"""The SQL of the routes says what the Python statement of their rules says, on a real Spark."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import Observation, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from tests.integration.bridge.mapped import mapped
from towline.bridge.config.model import RouteSection
from towline.bridge.config.patterns import Pattern
from towline.bridge.config.routes import Route, first_match
from towline.bridge.deadletters.remap import Mapper, row_of
from towline.bridge.lines.sql import DeadLetterTarget, literal
from towline.bridge.uplink.sql import apply, expressions, level_sql, matches
from towline.bridge.uplink.working import COUNTS, KEPT, REASON, SAME
from towline.guarantee import Guarantee
from towline.kafka import screening
from towline.kafka.admin import TopicFacts
from towline.kafka.columns import PROPERTIES, Columns
from towline.kafka.deadletters import DeadLetter, Reason, from_record
from towline.kafka.options import SinkSettings
from towline.kafka.screening import RecordCheck
from towline.schema import SPARK_SCHEMA

pytestmark = pytest.mark.spark

COLUMNS = [part.split(" ")[0] for part in SPARK_SCHEMA.replace("struct<key: string, value: string>", "x").split(", ")]
NASTY = ["", "a", "b", "t1", "$SYS", "it's", 'say "x"', "back\\slash", "${HOME}", "%_", "ü", "🚀", "line\nend"]
NASTY += ["{x}", "a b", "..", "x" * 250, "a.markers", "__x"]


def compiled(*tables: dict[str, Any]) -> tuple[Route, ...]:
    dead = ("towline.t1", "two.b")
    return tuple(RouteSection.model_validate(table).compile(Guarantee.AT_LEAST_ONCE, None, dead) for table in tables)


ROUTES = compiled(
    {"from": "one/{x}", "topic": "one", "key": "{x}", "headers": {"h": "<{x}>{mqtt.qos}", "n": "{mqtt.user.none}"}},
    {"from": "two/{x}/{y}/#", "topic": "two.{x}", "key": "{y}{x}", "fallback_topic": "two.other", "properties": "none"},
    {"from": "tri/{x}", "topic": "{x}", "allowed_topics": ["t1", "a*", "?"], "fallback_topic": "tri.other"},
    {"from": "it's/+/#", "topic": "quote", "key": "'{mqtt.user.k}\\", "headers": {"it's": "${{}}%"}},
    {"from": "+/b", "topic": "wild", "where": "length(payload) > 1", "key": "{mqtt.retain}{mqtt.content_type}"},
    {"from": "$SYS/{x}", "topic": "s", "key": "{mqtt.offset}{mqtt.gateway}{mqtt.message_expiry}{mqtt.response_topic}"},
    {"from": "tow/{x}", "topic": "towline.{x}", "fallback_topic": "tow.other"},
    {"from": "low/{x}", "topic": "_{x}", "fallback_topic": "low.other"},
    {"from": "{x}/{y}/{z}", "topic": "deep", "properties": "none", "key": "{mqtt.topic}"},
)


def message(topic: str, **more: Any) -> dict[str, Any]:
    """One without any property."""
    nothing = dict.fromkeys(COLUMNS)
    place = {"gateway": "g", "offset": 0, "received_at": datetime(2026, 1, 1, 0, 0, 0, 123_456, tzinfo=UTC)}
    flags = {"qos": 1, "retain": False, "duplicate": False}
    return {**nothing, **place, **flags, "topic": topic, "payload": b"xyz", **more}


def rows(count: int, seed: int = 7) -> list[dict[str, Any]]:
    rng = random.Random(seed)

    def maybe(value: Any) -> Any:
        return value if rng.random() < 0.5 else None

    rows = []
    for offset in range(count):
        levels = [rng.choice(["one", "two", "tri", "tow", "low", *NASTY])] + [
            rng.choice(NASTY) for _ in range(rng.randint(0, 3))
        ]
        users = [
            {"key": rng.choice(["k", "k", "", "ü", "traceparent"]), "value": rng.choice(NASTY)}
            for _ in range(rng.randint(0, 3))
        ]
        if rng.random() < 0.3:
            rows.append({**message("/".join(levels)), "offset": offset, "qos": rng.randint(0, 2)})
            continue
        rows.append(
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
    return rows


def expected(message: dict[str, Any]) -> dict[str, Any] | str:
    taken = first_match(ROUTES, message["topic"])
    if taken is None:
        return "unrouted"
    if ROUTES[taken].where and len(message["payload"]) <= 1:
        return "filtered"
    record = ROUTES[taken].record(message)
    assert record is not None
    return record


def record_of(row: Row) -> dict[str, Any]:
    headers = [(h.key, None if h.value is None else bytes(h.value)) for h in row.headers] or None
    key = None if row.key is None else bytes(row.key)
    return {"topic": row.topic, "key": key, "value": bytes(row.value), "headers": headers, "micros": row.micros}


def test_sql_and_python_agree_on_thousands_of_messages(spark: SparkSession) -> None:
    messages = rows(6000)
    frame = spark.createDataFrame([tuple(m[c] for c in COLUMNS) for m in messages], SPARK_SCHEMA).coalesce(1)
    counts, kept = Observation("counts"), Observation("kept")
    result = mapped(frame, ROUTES, counters=(counts, kept)).withColumn("micros", F.expr("unix_micros(timestamp)"))
    got = [record_of(row) for row in result.drop("timestamp").collect()]
    want = [expected(message) for message in messages]
    records = [record for record in want if isinstance(record, dict)]
    assert len(got) == len(records)
    for ours, theirs in zip(got, records, strict=True):
        micros = (theirs.pop("timestamp") - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        assert ours == {**theirs, "micros": micros}
    counted = counts.get  # without repeats one observation has it all
    fallbacks = sum(record["topic"].endswith(".other") for record in records)
    outcomes = {"filtered": want.count("filtered"), "unrouted": want.count("unrouted"), "fallback": fallbacks}
    assert counted == outcomes
    assert min(counted.values()) > 20, "every kind of outcome was met"


def test_any_filter_takes_the_same_topics_in_sql_and_in_python(spark: SparkSession) -> None:
    rng = random.Random(14)
    texts = ["", "a", "b", "größe", "$SYS", "a-very-long-level"]
    wild = [f"{{{name}}}" for name in "wxyz"]
    patterns: dict[str, Pattern] = {}
    while len(patterns) < 120:
        levels = [rng.choice([rng.choice(texts), wild[i]]) for i in range(rng.randint(1, 4))]
        text = "/".join(levels + ["#"] * rng.randint(0, 1))
        if text:
            patterns[text] = Pattern.parse(text)
    topics = {"/".join(rng.choice([*texts, "ü"]) for _ in range(rng.randint(1, 5))) for _ in range(600)} - {""}
    frame = spark.createDataFrame([(topic,) for topic in sorted(topics)], "topic string")
    met = 0
    kinds = list(patterns.values())
    for part in (kinds[at : at + 20] for at in range(0, len(kinds), 20)):
        columns = [F.expr(matches(pattern)) for pattern in part]
        captures = [
            F.array(*(F.expr(level_sql(pattern, i)) for i in sorted(pattern.names.values())), F.lit(""))
            for pattern in part
        ]
        for row in frame.select("topic", *columns, *captures).collect():
            for at, pattern in enumerate(part):
                wanted = pattern.match(row[0])
                assert row[1 + at] is (wanted is not None), (pattern.text, row[0])
                if wanted is not None:
                    met += 1
                    assert row[1 + len(part) + at][:-1] == list(wanted.values()), (pattern.text, row[0])
    assert met > 2_000


def test_the_sink_writes_what_python_says(spark: SparkSession) -> None:
    """Headers that are columns on their way, of one QoS and one moment or of many, and of those that are not."""
    several, alike = rows(2_000), [message("low/x/y", offset=n, payload=b"%d" % n) for n in range(200)]
    for messages in (several, alike, [*alike, *several]):
        frame = spark.createDataFrame([tuple(m[c] for c in COLUMNS) for m in messages], SPARK_SCHEMA).coalesce(1)
        records = apply(frame, ROUTES)
        bound = Columns.bind({f.name: f.dataType.simpleString() for f in records.schema}, None, include_headers=True)
        written = [record for batch in records.toArrow().to_batches() for record in bound.rows(batch).records]
        wanted = [record for record in map(expected, messages) if isinstance(record, dict)]
        assert len(written) == len(wanted) > 100
        for (topic, value, key, _, _, _, millis, headers), record in zip(written, wanted, strict=True):
            assert (topic, value, key, headers or None) == tuple(
                record[name] for name in ("topic", "value", "key", "headers")
            )
            assert millis == int(record["timestamp"].timestamp() * 1000)


def test_no_device_drops_anothers_messages_by_its_key(spark: SparkSession) -> None:
    routes = compiled({"from": "t/{device}", "topic": "t", "dedupe": {"key": "{mqtt.user.id}"}})
    message = {**rows(1)[0], "user_properties": [{"key": "id", "value": "1"}]}
    messages = [
        {**message, "topic": topic, "offset": n} for n, topic in enumerate(["t/forger", "t/victim", "t/victim"])
    ]
    frame = spark.createDataFrame([tuple(m[c] for c in COLUMNS) for m in messages], SPARK_SCHEMA)
    for name, text in expressions(routes, repeats=True).items():
        frame = frame.withColumn(name, F.expr(text)) if name.startswith("__") else frame
    kept = frame.dropDuplicates(list(SAME)).select("topic").collect()
    assert sorted(row.topic for row in kept) == ["t/forger", "t/victim"]


def test_what_no_route_takes_has_no_key(spark: SparkSession) -> None:
    """With one route there is one expression for all rows; a key of columns would name rows of no route too."""
    routes = compiled({"from": "t/{device}", "topic": "t", "dedupe": {"key": "'same'"}})
    columns = expressions(routes, DeadLetterTarget("dead", "line"), repeats=True)
    sent = [message("t/a"), message("x/a", offset=7)]
    frame = spark.createDataFrame([tuple(m[c] for c in COLUMNS) for m in sent], SPARK_SCHEMA).coalesce(1)
    for name in ("__route", *SAME):
        frame = frame.withColumn(name, F.expr(columns[name]))
    assert [tuple(row) for row in frame.select(*SAME).collect()] == [("t/a", "same", None), ("x/a", None, 7)]


def test_without_a_key_a_message_is_a_letter_where_that_alone_tells_a_repeat(spark: SparkSession) -> None:
    keyed = {"topic": "t", "dedupe": {"key": "{mqtt.user.id}"}}
    tables = ({"from": "a", "qos": 1}, {"from": "b", "promise": "at_least_once"}, {"from": "c"})
    routes = [RouteSection.model_validate({**keyed, **one}).compile(Guarantee.EXACTLY_ONCE) for one in tables]
    sent = [message("a"), message("b"), message("c"), message("a", user_properties=[{"key": "id", "value": "1"}])]
    frame = spark.createDataFrame([tuple(m[c] for c in COLUMNS) for m in sent], SPARK_SCHEMA).coalesce(1)
    for name, text in expressions(routes, DeadLetterTarget("dead", "line"), repeats=True).items():
        frame = frame.withColumn(name, F.expr(text)) if name.startswith("__") else frame
    assert [row[REASON] for row in frame.select(REASON).collect()] == ["key_absent", None, None, None]


def test_a_topic_that_nothing_takes_stops_the_batch_and_says_so(spark: SparkSession) -> None:
    routes = compiled({"from": "e/{x}", "topic": "e.{x}"})
    message = {**rows(1)[0], "topic": "e/not legal"}
    frame = spark.createDataFrame([tuple(message[c] for c in COLUMNS)], SPARK_SCHEMA)
    with pytest.raises(Exception, match=r"is not legal, not allowed or reserved\. .* fallback_topic\.   \[TL-B02\]"):
        mapped(frame, routes).collect()


def test_a_where_may_end_in_a_comment_and_a_bad_cast_filters(spark: SparkSession) -> None:
    routes = compiled({"from": "#", "topic": "t", "where": "CAST(CAST(payload AS STRING) AS INT) > 20 -- warm"})
    base = rows(1)[0] | {"topic": "a"}
    messages = [base | {"payload": payload} for payload in (b"21", b"20", b"none", b"")]
    frame = spark.createDataFrame([tuple(m[c] for c in COLUMNS) for m in messages], SPARK_SCHEMA)
    assert [bytes(row.value) for row in mapped(frame, routes).collect()] == [b"21"]


@pytest.mark.parametrize("text", [*NASTY, "\0", "\x7f", "' OR 1=1 --", "a\\'b"])
@pytest.mark.parametrize("escaped", ["false", "true"])
def test_literals_come_back_as_they_went(spark: SparkSession, text: str, escaped: str) -> None:
    name = "spark.sql.parser.escapedStringLiterals"
    spark.conf.set(name, escaped)
    try:
        assert spark.range(1).select(F.expr(literal(text)).alias("x")).collect()[0].x == text
    finally:
        spark.conf.unset(name)


def test_a_route_is_taken_with_the_escapes_of_spark_1(spark: SparkSession) -> None:
    routes = compiled({"from": "größe/+/#", "topic": "t.{mqtt.user.ü}", "key": "ü"})
    name = "spark.sql.parser.escapedStringLiterals"
    spark.conf.set(name, "true")
    try:
        sent = message("größe/a/b", user_properties=[{"key": "ü", "value": "x"}])
        (row, letter) = letters(spark, routes, sent)[0]
        (_, sys) = letters(spark, compiled({"from": "+/b", "topic": "t"}), message("$SYS/b"))[0]
    finally:
        spark.conf.unset(name)
    assert (row.topic, bytes(row.key), letter) == ("t.x", "ü".encode(), None)
    assert str(sys.reason) == "unrouted"


def test_the_columns_are_those_the_sink_takes(spark: SparkSession) -> None:
    rows = apply(spark.createDataFrame([], SPARK_SCHEMA), ROUTES)
    assert rows.dtypes == [
        ("topic", "string"),
        ("key", "binary"),
        ("value", "binary"),
        ("headers", "array<struct<key:string,value:binary>>"),
        ("timestamp", "timestamp"),
        *PROPERTIES.items(),
    ]
    assert [name for name in expressions(ROUTES) if not name.startswith("__")] == rows.columns
    assert set(COUNTS).isdisjoint(KEPT)


# -- dead letters ----------------------------------------------------------------------------------------------------

BROKEN = compiled(
    {"from": "one/{x}", "topic": "one.{x}"},
    {"from": "two/{x}", "topic": "{x}", "allowed_topics": ["a*"]},
    {"from": "tri/{x}", "topic": "t{mqtt.user.to}"},
    {"from": "key/{x}", "topic": "k", "key": "{mqtt.user.id}", "key_required": True},
    {"from": "own/{x}", "topic": "_{x}"},
)
SQL_ERROR = "raise_error(concat('no ', CAST(payload AS STRING)))"


def letters(spark: SparkSession, routes: tuple[Route, ...], *messages: dict[str, Any]) -> list[tuple[Row, Any]]:
    frame = spark.createDataFrame([tuple(m[c] for c in COLUMNS) for m in messages], SPARK_SCHEMA).coalesce(1)
    rows = mapped(frame, routes, dead_letters=DeadLetterTarget("dead", "line"), counters=("c", "k")).collect()
    return [
        (
            row,
            from_record(
                row.key, bytes(row.value), [(h.key, None if h.value is None else bytes(h.value)) for h in row.headers]
            ),
        )
        if row.topic == "dead"
        else (row, None)
        for row in rows
    ]


def test_what_cant_be_mapped_becomes_a_letter_with_every_byte(spark: SparkSession) -> None:
    users = [{"key": "k", "value": "1"}, {"key": "k", "value": "2"}]
    sent = [
        message("one/fine"),
        message("one/not legal", payload=b"\x00\xff", user_properties=users, correlation_data=b"\x01"),
        message("two/b", offset=7),
        message("tri/x"),
        message("key/x"),
        message("nobody/takes/this"),
        message("own/_consumer_offsets"),
    ]
    rows = letters(spark, BROKEN, *sent)
    assert [letter and str(letter.reason) for _, letter in rows] == [
        None,
        "topic_illegal",
        "topic_not_allowed",
        "topic_absent",
        "key_absent",
        "unrouted",
        "topic_reserved",
    ]
    _, illegal = rows[1]
    assert (illegal.topic, illegal.value, illegal.source) == ("one.not legal", b"\x00\xff", "line")
    assert illegal.timestamp == int(sent[1]["received_at"].timestamp() * 1000)
    assert [pair for pair in illegal.headers if pair[0] == "mqtt.user.k"] == [
        ("mqtt.user.k", b"1"),
        ("mqtt.user.k", b"2"),
    ]
    assert ("mqtt.correlation-data", b"\x01") in illegal.headers
    assert rows[2][1].headers[-2:] == (("mqtt.gateway", b"g"), ("mqtt.offset", b"7"))


def test_every_letter_has_all_that_a_route_may_name(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given up by the mapping, or refused by Kafka: its row comes back, with whatever headers its record has."""
    monkeypatch.setattr(screening, "facts_of", lambda *_: {"dead": TopicFacts(1, 1_000_000, None, None, "delete")})
    messages = [{**message, "duplicate": message["offset"] % 3 == 0} for message in rows(500)]
    frame = spark.createDataFrame([tuple(m[c] for c in COLUMNS) for m in messages], SPARK_SCHEMA).coalesce(1)
    records = apply(frame, ROUTES, dead_letters=DeadLetterTarget("dead", "tests.line"))
    settings = SinkSettings.parse({"kafka.bootstrap.servers": "k:9092", "deadLetterTopic": "dead"})
    bound = Columns.bind({f.name: f.dataType.simpleString() for f in records.schema}, None, include_headers=True)
    screen = RecordCheck(settings, bound, "tests.line")
    reasons: Counter[Reason] = Counter()
    for batch in records.toArrow().to_batches():
        screen.look([batch])
        for _, value, key, _, _, _, _, headers in screen.rows(batch).records:
            letter = from_record(key, value, headers)
            assert isinstance(letter, DeadLetter)
            row = row_of(letter)
            assert row is not None
            message = messages[row["offset"]]
            assert row == {name: None if found == [] else found for name, found in message.items()}
            reasons[letter.reason] += 1
    assert reasons.keys() == {Reason.UNROUTED, Reason.TOPIC_MISSING}
    assert min(reasons.values()) > 20
    assert screen.dead_letters == reasons.total()


def test_a_condition_that_raises_costs_one_message_not_the_line(spark: SparkSession) -> None:
    routes = compiled(
        {"from": "#", "topic": "t", "where": f"CASE WHEN payload = X'31' THEN {SQL_ERROR} ELSE length(payload) > 0 END"}
    )
    rows = letters(spark, routes, message("a", payload=b"1"), message("a", payload=b"2"), message("a", payload=b""))
    assert [(row.topic, letter and str(letter.reason)) for row, letter in rows] == [("dead", "unmapped"), ("t", None)]


# -- fields, and what a line refuses ---------------------------------------------------------------------------------

BODY = {
    "body": "CAST(payload AS STRING)",
    "id": "get_json_object(body, '$.id')",
    "parts": "split(id, '-') -- an array is no text, and may be asked by what comes after it",
    "site": "get(parts, 0)",
    "loud": f"IF(site = 'boom', {SQL_ERROR}, upper(site))",
}
PICKED: dict[str, Any] = {
    "from": "p/{x}",
    "topic": "p.{site}",
    "key": "{id}",
    "headers": {"site": "{site}", "loud": "{loud}", "none": "{mqtt.user.none}", "x": "{x}"},
    "properties": "none",
    "fields": BODY,
    "where": "size(parts) > 1",
    "reject": f"CASE WHEN site = 'evil' THEN concat('no site ', site) WHEN site = 'odd' THEN {SQL_ERROR} END",
}


def test_fields_name_what_the_payload_says_and_reject_says_no(spark: SparkSession) -> None:
    routes = compiled({**PICKED, "missing_headers": "omit"}, {"from": "#", "topic": "other", "key": "{mqtt.topic}"})
    ids = ["a-1", "evil-1", "odd-1", "boom-2", "alone", "b-2"]
    sent = [message("p/q", payload=f'{{"id": "{one}"}}'.encode()) for one in ids]
    rows = letters(spark, routes, *sent, message("z", payload=b"no json"))
    assert [(row.topic, letter and (str(letter.reason), letter.detail)) for row, letter in rows] == [
        ("p.a", None),
        ("dead", ("rejected", "no site evil")),
        ("dead", ("unmapped", "the SQL of where or reject raised an error on this message")),
        ("p.boom", None),
        ("p.b", None),
        ("other", None),
    ]
    kept = [(bytes(row.key), [(h.key, bytes(h.value)) for h in row.headers]) for row, letter in rows if not letter]
    assert kept[0] == (b"a-1", [("site", b"a"), ("loud", b"A"), ("x", b"q")])
    assert kept[1] == (b"boom-2", [("site", b"boom"), ("x", b"q")])
    again = Mapper(line_of(routes), lambda: spark).outcomes([letter for _, letter in rows if letter is not None])
    assert [one.why for one in again] == ["it is refused: no site evil", "its reject raises an error"]
    mended = (replace(routes[0], reject=None), routes[1])
    (one, _) = Mapper(line_of(mended), lambda: spark).outcomes([letter for _, letter in rows if letter is not None])
    assert one.record is not None
    assert (one.record[0], one.record[2]) == ("p.evil", b"evil-1")
    assert one.record[7] == [("site", b"evil"), ("loud", b"EVIL"), ("x", b"q")]


def test_what_is_refused_stops_a_line_that_has_nowhere_to_put_it(spark: SparkSession) -> None:
    one = message("p/q", payload=b'{"id": "evil-1"}')
    frame = spark.createDataFrame([tuple(one[c] for c in COLUMNS)], SPARK_SCHEMA)
    with pytest.raises(Exception, match=r"reject: no site evil\. The line stops .* dead_letter_topic\.   \[TL-B33\]"):
        mapped(frame, compiled(PICKED)).collect()


def test_a_header_that_kafka_refuses_keeps_what_the_message_had(spark: SparkSession) -> None:
    """The sink counts a record's own headers off its end; with those left out there are fewer."""
    one = message("p/q", payload=b'{"id": "boom-1"}')
    frame = spark.createDataFrame([tuple(one[c] for c in COLUMNS)], SPARK_SCHEMA)
    routes = compiled({**PICKED, "missing_headers": "omit", "properties": "all"})
    (row,) = mapped(frame, routes, dead_letters=DeadLetterTarget("dead", "line")).collect()
    assert [h.key for h in row.headers][-row.towline_facts // 2 :] == ["site", "x"]


def line_of(routes: tuple[Route, ...]) -> Any:
    return SimpleNamespace(routes=routes)


# -- stubs -----------------------------------------------------------------------------------------------------------

NEVER = "raise_error('a stub was asked')"
FACTS = [{"key": "towline-reason", "value": "packet_too_large"}, {"key": "towline-size", "value": "70000"}]


def stub(topic: str, reason: str = "packet_too_large", **more: Any) -> dict[str, Any]:
    facts = [{"key": "towline-reason", "value": reason}, FACTS[1]]
    return message(topic, **{"payload": None, "correlation_data": None, "user_properties": facts, **more})


def test_what_was_not_taken_in_whole_is_a_letter_and_nobody_is_asked(spark: SparkSession) -> None:
    routes = compiled(
        {
            "from": "one/{x}",
            "topic": "t",
            "key": "{x}",
            "where": f"length(payload) > 0 AND IF(payload IS NULL, {NEVER}, true) -- large ones are nobody's",
            "dedupe": {"key": "IF(payload IS NULL, 'same', 'other')", "within": "10 minutes"},
        },
    )
    sent = [
        stub("one/a"),
        stub("one/b", "too_many_properties", correlation_data=b"\x32packet", qos=2, retain=True),
        stub("nobody/takes/this"),
        message("one/c", payload=b"fine", user_properties=FACTS, correlation_data=b"\x01"),
    ]
    rows = letters(spark, routes, *sent)
    assert [letter and str(letter.reason) for _, letter in rows] == [
        "packet_too_large",
        "too_many_properties",
        "packet_too_large",
        None,
    ]
    first, second = rows[0][1], rows[1][1]
    assert (first.value, first.topic, first.key, first.source) == (b"", "t", b"a", "line")
    assert ("mqtt.user.towline-size", b"70000") in first.headers
    assert second.value == b"\x32packet"
    headers = dict(second.headers)
    assert (headers["mqtt.topic"], headers["mqtt.qos"], headers["mqtt.retain"]) == (b"one/b", b"2", b"true")
    assert "mqtt.correlation-data" not in headers
    fine = rows[3][0]
    assert (bytes(fine.value), fine.topic) == (b"fine", "t")
    assert ("mqtt.correlation-data", b"\x01") in [(h.key, bytes(h.value)) for h in fine.headers]


def test_stubs_are_no_repeats_of_each_other(spark: SparkSession) -> None:
    """A key made of columns that a stub does not have would be the same for all."""
    routes = compiled({"from": "#", "topic": "t", "dedupe": {"key": "coalesce(payload, X'')", "within": "1 hour"}})
    frame = spark.createDataFrame([], SPARK_SCHEMA)
    columns = expressions(routes, DeadLetterTarget("dead", "line"), repeats=True)
    row = stub("a")
    one = spark.createDataFrame([tuple(row[c] for c in COLUMNS)], frame.schema)
    one = one.withColumn("__route", F.lit(0))
    for name in SAME:
        one = one.withColumn(name, F.expr(columns[name]))
    (got,) = one.select(*SAME).collect()
    assert (got[SAME[1]], got[SAME[2]]) == (None, row["offset"])


def test_without_a_place_for_it_a_stub_ends_the_line_and_is_no_tombstone(spark: SparkSession) -> None:
    routes = compiled({"from": "#", "topic": "t", "where": "length(payload) > 0"})
    frame = spark.createDataFrame([tuple(stub("a")[c] for c in COLUMNS)], SPARK_SCHEMA)
    with pytest.raises(Exception, match=r"not taken in whole.* dead_letter_topic\.   \[TL-B29\]"):
        mapped(frame, routes).collect()
