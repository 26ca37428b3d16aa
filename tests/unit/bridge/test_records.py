"""Records that routes make of columns are those that docs/options.md says, message by message (`oracle`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bridge.oracle import becomes, taker
from towline.bridge import routes as module
from towline.bridge.config.file import parse
from towline.bridge.config.tables import RouteSection
from towline.bridge.patterns import Pattern
from towline.bridge.routes import (
    DEDUPE,
    FAULT,
    HEADER_MAP,
    OUTCOME,
    REJECT,
    WHERE,
    RecordColumns,
    Route,
    RouteTable,
    RowOutcome,
    routes_from_json,
    routes_to_json,
)
from towline.bridge.uplink.sink import LineWriter, records
from towline.errors import KafkaError
from towline.guarantee import Guarantee
from towline.kafka.deadletters import Reason
from towline.kafka.delivery import DeliveryResult
from towline.schema import ROW_SCHEMA
from towline.spark.kafka_sink import KafkaTaskResult
from towline.spark.sink_note import BatchResult, SinkNote, Span

ROOT = Path(__file__).parents[3]
DEAD = ("towline.t1", "two.b")
TABLES: tuple[dict[str, Any], ...] = (
    {"from": "a/{x}/+", "topic": "fixed", "key": "{x}"},
    {
        "from": "a/{x}/#",
        "topic": "to.{x}",
        "key": "{mqtt.topic}",
        "headers": {"one": "{x}"},
        "allowed_topics": ["to.*"],
    },
    {"from": "+/b", "topic": "b", "key_required": True, "key": "k{mqtt.user.k}", "properties": "none"},
    {
        "from": "$SYS/#",
        "topic": "sys",
        "headers": {"q": "<{mqtt.qos}>", "none": "{mqtt.user.no}", "n": "{mqtt.offset}"},
    },
    {"from": "c/{y}/#", "topic": "{y}", "fallback_topic": "other", "allowed_topics": ["*"], "value": "{y}: {payload}"},
    {
        "from": "j/{z}",
        "topic": "towline.{payload.to}",
        "key": "{payload.ids[1].n}",
        "timestamp": "{payload.at}",
        "headers": {"to": "{payload.to}", "none": "{mqtt.content_type}"},
        "missing_headers": "omit",
    },
    {"from": "j/+/#", "topic": "{mqtt.user.k}", "allowed_topics": ["?", "t1", "__*"], "key": "{mqtt.received_at}"},
    {
        "from": "s/{x}",
        "topic": "two.{field}",
        "key": "{field}{x}",
        "fields": {"field": "f"},
        "reject": "r",
        "where": "w",
        "headers": {"f": "{field}"},
        "header_map": "m",
    },
)

levels = st.sampled_from(["a", "b", "c", "j", "s", "", "$SYS", "é x", "__secret", "dead", ".", "t1"])
topics = st.lists(levels, min_size=1, max_size=4).map("/".join)
texts = st.none() | st.sampled_from(["", "é"])
users = st.lists(
    st.fixed_dictionaries(
        {"key": st.sampled_from(["", "k", "tracestate"]), "value": st.sampled_from(["v", "t1", "ü"])}
    ),
    max_size=3,
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([1])
documents = st.fixed_dictionaries(
    {}, optional={"to": leaves, "at": leaves | st.integers(0, 10**15), "ids": st.just([{}, {"n": 7}]) | leaves}
)
payloads = st.none() | st.binary(max_size=3) | documents.map(lambda document: json.dumps(document).encode())
moments = st.sampled_from([datetime(2026, 1, 1, 1, 1, 1, 123456, UTC), datetime(2026, 1, 2, tzinfo=UTC)])
messages = st.fixed_dictionaries(
    {
        "topic": topics,
        "payload": payloads,
        "qos": st.integers(0, 2),
        "retain": st.booleans() | st.none(),
        "duplicate": st.booleans(),
        "content_type": texts,
        "payload_is_utf8": st.none() | st.booleans(),
        "response_topic": texts,
        "correlation_data": st.none() | st.just(b"\xff"),
        "user_properties": st.none() | users,
        "message_expiry_seconds": st.none() | st.just(7),
        "subscription_ids": st.none() | st.lists(st.integers(1, 9), max_size=2),
        "received_at": moments,
        "gateway": st.just("g"),
    }
)
#: What Spark says of a message of a route without SQL.
NOT_ASKED = {"field": None, "more": None, "reject": None, "where": True}
more_headers = st.dictionaries(st.sampled_from(["k", "é", ""]), st.sampled_from(["", "v", "ü"]))
answers = st.fixed_dictionaries(
    {"field": st.none() | st.sampled_from(["a", "b", "a b"]), "more": st.none() | more_headers},
    optional={"reject": st.none() | st.just("no"), "where": st.none() | st.booleans()},
)


def compiled(*tables: Mapping[str, Any]) -> tuple[Route, ...]:
    return tuple(RouteSection.model_validate(one).compile(Guarantee.AT_LEAST_ONCE, None, DEAD) for one in tables)


def batch_of(rows: Sequence[Mapping[str, Any]], said: Sequence[Mapping[str, Any]] = ()) -> pa.RecordBatch:
    """Rows as the task that writes gets them, with what SQL says of each."""
    batch = pa.RecordBatch.from_pylist([{**row} for row in rows], schema=ROW_SCHEMA)
    if not said:
        return batch
    why = [{"why": one["reject"]} if "reject" in one else None for one in said]
    wanted = [{"wanted": one["where"]} if "where" in one else None for one in said]
    return (
        batch.append_column("field", pa.array([one["field"] for one in said], pa.string()))
        .append_column(HEADER_MAP, pa.array([_entries(one.get("more")) for one in said], _ENTRIES))
        .append_column(REJECT, pa.array(why, pa.struct([("why", pa.string())])))
        .append_column(WHERE, pa.array(wanted, pa.struct([("wanted", pa.bool_())])))
    )


_ENTRIES = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))


def _entries(more: dict[str, str] | None) -> list[dict[str, str]] | None:
    """As Spark gives a map."""
    return None if more is None else [{"key": key, "value": value} for key, value in more.items()]


def codes(rendered: pa.RecordBatch) -> list[int]:
    found: list[int] = rendered.column(OUTCOME).to_pylist()
    return found


def rendered(table: RouteTable, batch: pa.RecordBatch) -> list[Any]:
    """As `becomes` says it."""
    out = table.render(batch)
    made = iter(RecordColumns().rows(out, any_topic=True).records)
    results: list[Any] = []
    for code in codes(out):
        topic, value, key, partition, _, _, millis, headers = next(made)
        outcome = RowOutcome(code)
        if outcome.reason:
            results.append(outcome.reason.value)
        elif outcome < 0:
            results.append(outcome.name.lower())
        else:
            assert partition == -1
            results.append((topic, value, key, millis, headers or []))
    return results


@given(st.lists(st.tuples(messages, answers), min_size=1, max_size=8))
def test_columns_become_the_records_that_the_page_says(met: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    rows, said = [{**row, "offset": n} for n, (row, _) in enumerate(met)], [one for _, one in met]
    # Spark asks a message the SQL of its own route.
    asked = [one if taker(TABLES, row["topic"]) == len(TABLES) - 1 else NOT_ASKED for row, one in met]
    table = RouteTable(routes_from_json(routes_to_json(compiled(*TABLES))))
    wanted = [becomes(TABLES, row, one, DEAD) for row, one in zip(rows, said, strict=True)]
    assert rendered(table, batch_of(rows, asked)) == wanted


@given(st.lists(messages, min_size=1, max_size=8), st.integers(0, len(TABLES) - 2))
def test_a_line_without_sql_needs_none_of_its_columns(rows: list[dict[str, Any]], first: int) -> None:
    tables = TABLES[first:-1]
    rows = [{**row, "offset": n} for n, row in enumerate(rows)]
    wanted = [becomes(tables, row, None, DEAD) for row in rows]
    assert rendered(RouteTable(compiled(*tables)), batch_of(rows)) == wanted


# -- what becomes of a batch -----------------------------------------------------------------------------------------


def written(
    batch: pa.RecordBatch, *tables: Mapping[str, Any], letters: bool = True, writer: int = 0, writers: int = 1
) -> tuple[list[pa.RecordBatch], Counter[str]]:
    """What a task writes of a batch, and what it counts of it beside how many messages there are."""
    counts = Counter[str]()
    parts = list(records(RouteTable(compiled(*tables)), [(batch, writer, writers)], counts, has_dead_letters=letters))
    assert counts.pop("seen") == batch.num_rows
    assert counts["own"] == batch.num_rows or writers > 1
    return parts, counts


def row(topic: str, payload: bytes | None = b"p", **more: Any) -> dict[str, Any]:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    return {"topic": topic, "payload": payload, "qos": 1, "received_at": moment, "gateway": "g", "offset": 0, **more}


def test_records_come_before_what_is_refused_and_both_keep_their_order() -> None:
    sent = [row(topic, offset=n) for n, topic in enumerate(["a/x/y", "d/1", "a/x y", "a/x/z", "d/2"])]
    (good, refused), _ = written(batch_of(sent), *TABLES[:2])
    assert good.column("towline_offset").to_pylist() == [0, 3]
    assert refused.column("towline_offset").to_pylist() == [1, 2, 4]
    reasons = [RowOutcome(code).reason for code in codes(refused)]
    assert reasons == [Reason.UNROUTED, Reason.TOPIC_ILLEGAL, Reason.UNROUTED]
    assert refused.column(FAULT)[1].as_py() == "Kafka takes no such topic name"
    assert good.column(FAULT).null_count == 2
    assert refused.column("topic").to_pylist() == [None, "to.x y", None]
    assert good.schema == refused.schema


def test_what_is_left_out_is_counted_by_why() -> None:
    said = [{"field": "a", "reject": None, "where": answer} for answer in (True, False, None, False, True)]
    sent = [row("s/a"), row("s/a"), row("s/a"), row("s/a"), row("c/a b")]
    (batch,), counts = written(batch_of(sent, said), TABLES[4], TABLES[7])
    assert batch.num_rows == 2
    assert counts == {"own": 5, "filtered": 2, "undecided": 1, "fallback": 1}


@pytest.mark.parametrize(
    ("sent", "said", "code", "text"),
    [
        (row("a/x y"), None, "TL-B02", "Kafka takes no such topic name. The line stops"),
        (row("s/a"), {"field": "a", "reject": "no b\x1b[31m", "where": True}, "TL-B33", r"reject: no b\x1b[31m. The"),
        (row("a/b", None), None, "TL-B29", "a message was truncated"),
        (row("s/a"), {"field": "a", "where": True}, "TL-B02", "the SQL of reject raised an error"),
    ],
)
def test_without_a_place_for_it_the_first_refused_message_ends_the_batch(
    sent: dict[str, Any], said: dict[str, Any] | None, code: str, text: str
) -> None:
    with pytest.raises(KafkaError) as caught:
        written(batch_of([sent], [said] if said else []), TABLES[1], TABLES[7], letters=False)
    assert (caught.value.code, text in str(caught.value)) == (code, True), str(caught.value)


def test_without_a_place_for_them_messages_of_no_route_are_left_out() -> None:
    sent = batch_of([row("a/b/c"), row("nobody"), row("nobody")])
    (batch,), counts = written(sent, TABLES[0], letters=False)
    assert (batch.num_rows, counts) == (1, {"own": 3, "unrouted": 2})


def test_topics_without_end_are_forgotten() -> None:
    with (
        patch.object(module, "_MAX_CACHED_TOPICS", 3),
        patch.object(Pattern, "matches", autospec=True, side_effect=takes) as asked,
    ):
        table = RouteTable(compiled(*TABLES[:2]))
        for numbers in ((0, 1), (0, 1), (2, 3), (0, 1)):
            rows = batch_of([row(f"a/{n}/x") for n in numbers])
            assert table.render(rows).column("key").to_pylist() == [b"%d" % n for n in numbers]
    assert asked.call_count == 6


takes = Pattern.matches


def test_names_without_end_are_not_remembered() -> None:
    long = row("a/" + "x" * 250)
    table = RouteTable(compiled({"from": "a/+", "topic": "t.{payload}"}))
    rows = batch_of([row("a/b", b"x" * 250), row("a/b", b"x"), row("a/b", b"y" * 5000)])
    illegal = RowOutcome.TOPIC_ILLEGAL
    assert codes(table.render(rows)) == [illegal, RowOutcome.RENDERED, illegal]
    with (
        patch.object(Pattern, "matches", autospec=True, side_effect=takes) as asked,
        patch.object(Route, "destination", autospec=True, return_value=("t", RowOutcome.RENDERED)) as named,
    ):
        for _ in range(3):
            table.render(rows)
            table.render(batch_of([long]))
    assert (asked.call_count, named.call_count) == (3, 7)  # each time of three long names, once of one more


def test_a_key_that_alone_tells_repeats_has_to_be_there() -> None:
    keyed = {"from": "a", "topic": "t", "qos": 1, "dedupe": {"key": "{mqtt.user.id}"}}
    route = RouteSection.model_validate(keyed).compile(Guarantee.EXACTLY_ONCE)
    batch = batch_of([row("a"), row("a")]).append_column(DEDUPE, pa.array([None, "1"], pa.string()))
    assert codes(RouteTable([route]).render(batch)) == [RowOutcome.KEY_ABSENT, RowOutcome.RENDERED]


@given(st.lists(messages, min_size=1, max_size=12), st.integers(2, 5))
def test_each_message_has_one_of_several_writers_and_a_key_always_the_same(
    rows: list[dict[str, Any]], writers: int
) -> None:
    tables = TABLES[:-1]
    batch = batch_of([{**row, "offset": n} for n, row in enumerate(rows)])
    owners: dict[int, int] = {}
    for writer in range(writers):
        parts, counts = written(batch, *tables, writer=writer, writers=writers)
        for part in parts:
            owners |= dict.fromkeys(part.column("towline_offset").to_pylist(), writer)
        assert counts["own"] == sum(owner == writer for owner in owners.values())
    assert sorted(owners) == list(range(len(rows)))
    outcomes = rendered(RouteTable(compiled(*tables)), batch)
    keys = [
        one[2] if isinstance(one, tuple) and one[2] is not None else row["topic"]
        for one, row in zip(outcomes, rows, strict=True)
    ]
    records = [n for n, one in enumerate(outcomes) if isinstance(one, tuple)]
    assert len({(keys[n], owners[n]) for n in records}) == len({keys[n] for n in records})


@pytest.mark.parametrize(
    ("rows", "whole_batch"),
    [
        ([(5, 2), (5, 3)], True),
        ([(5, 5), (5, 0)], True),
        ([(4, 4), (5, 5)], True),  # of a shuffle: each has rows of its own
        ([(5, 2), (5, 2)], False),
        ([(5, 2), (4, 2)], False),
    ],
)
def test_writers_that_do_not_have_all_messages_between_them_commit_nothing(
    rows: list[tuple[int, int]], *, whole_batch: bool, tmp_path: Path
) -> None:
    answers = [
        KafkaTaskResult(n, 7, "q", DeliveryResult(own, 0), own, {"seen": seen, "own": own})
        for n, (seen, own) in enumerate(rows)
    ]
    with nullcontext() if whole_batch else pytest.raises(KafkaError, match="TL-K26"):
        result_of_line(tmp_path, answers, 7)


def line_writer(place: Path, **more: Any) -> LineWriter:
    delivery: Any = SimpleNamespace(settings=SimpleNamespace(sink_id="s", parallelism=1))
    return LineWriter(delivery, str(place), "", **more)


def result_of_line(place: Path, answers: list[KafkaTaskResult], batch: int, **more: Any) -> BatchResult:
    """Of a line whose batch begins at offset 5 and ends at 15."""
    (place / "offsets").mkdir()
    for number, offset in ((batch - 1, 5), (batch, 15)):
        end = {"gateways": {"plant": {"journal": "j", "offset": offset}}, "tick": 0}
        (place / "offsets" / str(number)).write_text(f"v1\n{{}}\n{json.dumps(end)}")
    return line_writer(place, **more)._batch_result(answers, batch, SinkNote())


@pytest.mark.parametrize(
    ("given", "left_out", "more", "told"),
    [
        (9, {"unrouted": 1}, {}, {}),
        (7, {"filtered": 2, "undecided": 1, "fallback": 4}, {}, {}),
        (7, {"filtered": 1}, {}, {"astray": 2}),
        (11, {}, {}, {"astray": -1}),
        (7, {"filtered": 1}, {"drops_duplicates": True}, {"dropped": 2}),
        (11, {}, {"drops_duplicates": True}, {"astray": -1}),
        (0, {}, {"empty_batch": 3}, {"skipped": 10}),
        (0, {}, {"empty_batch": 2}, {"astray": 10}),
    ],
)
def test_messages_that_did_not_come_to_the_sink_have_a_reason_or_are_astray(
    tmp_path: Path, given: int, left_out: dict[str, int], more: dict[str, Any], told: dict[str, int]
) -> None:
    result = result_of_line(
        tmp_path, [KafkaTaskResult(0, 3, "q", DeliveryResult(given, 0), given, left_out)], 3, **more
    )
    known = {name: result.counts[name] for name in ("astray", "dropped", "skipped", "left_out")}
    assert {name: count for name, count in known.items() if count} == told
    assert (result.counts["messages"], result.spans) == (10, {"j": Span(5, 15)})


def test_of_a_batch_that_kafka_had_with_other_rows_nobody_knows_why_they_were_left_out(tmp_path: Path) -> None:
    """Its marker says six rows, and what a line filters may have been changed since."""
    answer = KafkaTaskResult(0, 3, "q", DeliveryResult(6, 0, was_skipped=True), 9, {"filtered": 1})
    counts = result_of_line(tmp_path, [answer], 3).counts
    assert (counts["given"], counts["filtered"], counts["left_out"]) == (6, 1, 3)


def test_a_batch_of_which_nobody_knows_where_it_begins_is_before_what_is_counted(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    end = {"gateways": {"plant": {"journal": "j", "offset": 15}}, "tick": 0}
    (tmp_path / "offsets" / "0").write_text(f"v1\n{{}}\n{json.dumps(end)}")
    result = line_writer(tmp_path)._batch_result([KafkaTaskResult(0, 0, "q", DeliveryResult(15, 0), 15)], 0, SinkNote())
    assert (result.counts, result.spans) == (Counter(), {"j": Span(15, 15)})


def outcomes_of(text: str, tmp_path: Path, sent: Sequence[Mapping[str, Any]]) -> list[Any]:
    (line,) = parse(text, tmp_path / "bridge.toml", {}).uplinks
    return rendered(RouteTable(line.routes), batch_of(sent))


def test_the_example_routes_by_content(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "by_content.toml").read_text()
    sent = [
        row("events/x", b'{"type": "alarm", "id": "pump-7"}'),
        row("events/x", b'{"type": "order", "id": 12}'),
        row("events/x", b'{"type": "towline.x.markers"}'),
        row("events/x", b'{"id": 1.50}'),
        row("events/x", b"no JSON"),
        row("events/x", b'{"type": ["alarm"]}'),
    ]
    made = [one if isinstance(one, str) else one[:3:2] for one in outcomes_of(text, tmp_path, sent)]
    assert made == [
        ("events.alarm", b"pump-7"),
        ("events.order", b"12"),
        ("events.other", None),
        ("events.other", b"1.5"),
        "unmapped",
        "unmapped",
    ]
