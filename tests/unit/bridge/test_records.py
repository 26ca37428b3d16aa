"""Records that routes make of columns are those that docs/options.md says, message by message (`oracle`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import format_trace_id, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tests.unit.bridge.noted import journals, planned
from tests.unit.bridge.oracle import becomes, taker
from towline.bridge import routes as module
from towline.bridge.config.tables import RouteSection
from towline.bridge.deadletters import source_row
from towline.bridge.routes import (
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
from towline.bridge.uplink.sink import SLICE_COLUMN, LineReader, LineWriter, WriterPartition, open_slice, records
from towline.errors import GatewayError, KafkaError
from towline.gateway.access import ClientAccess
from towline.guarantee import Guarantee
from towline.kafka.deadletters import HEADER_OVERHEAD, DeadLetter, Reason
from towline.kafka.delivery import DeliveryResult
from towline.processes import ProcessIdentity
from towline.schema import OPTIONAL_COLUMNS, ROW_SCHEMA
from towline.spark import reader
from towline.spark.kafka_sink import KafkaTaskResult
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.reader import Slice
from towline.spark.sink_note import BatchResult, SinkNote, Span

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
    {"from": "c/{y}/#", "topic": "{y}", "allowed_topics": ["*"], "value": "{y}: {payload}"},
    {
        "from": "j/{z}",
        "topic": "towline.{payload.to}",
        "key": "{payload.ids[1].n}",
        "timestamp": "{payload.at}",
        "headers": {"to": "{payload.to}", "none": "{mqtt.content_type}"},
    },
    {"from": "j/+/#", "topic": "{mqtt.user.k}", "allowed_topics": ["?", "t1", "__*"], "key": "{mqtt.received_at}"},
    {
        "from": "s/{x}",
        "topic": "two.{field}",
        "key": "{field}{x}",
        "fields": {"field": "hidden"},
        "reject": "hidden",
        "where": "hidden",
        "headers": {"f": "{field}"},
        "header_map": "hidden",
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
messages: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
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
plain = messages.map(lambda row: {**row, **dict.fromkeys(("retain", *OPTIONAL_COLUMNS))})
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
    batch = batch.append_column("field", pa.array([one["field"] for one in said], pa.string()))
    more = pa.array([_entries(one.get("more")) for one in said], _ENTRIES)
    return with_verdicts(batch.append_column(HEADER_MAP, more), said)


def with_verdicts(batch: pa.RecordBatch, said: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """What ``reject`` and ``where`` say of each row, beside it; where one is missing, it raised."""
    why = [{"why": one["reject"]} if "reject" in one else None for one in said]
    wanted = [{"wanted": one["where"]} if "where" in one else None for one in said]
    batch = batch.append_column(REJECT, pa.array(why, pa.struct([("why", pa.string())])))
    return batch.append_column(WHERE, pa.array(wanted, pa.struct([("wanted", pa.bool_())])))


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
    made, longest = iter(RecordColumns().rows(out, any_topic=True).records), RecordColumns().max_record_bytes(out)
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
            size = sum(HEADER_OVERHEAD + len(name.encode()) + len(data or b"") for name, data in headers or ())
            assert len(value or b"") + len(key or b"") + size <= longest
            results.append((topic, value, key, millis, headers or []))
    return results


def asked_batch(met: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[pa.RecordBatch, list[Any]]:
    """Messages with what Spark says of those of the route with SQL; and what becomes of each by the page."""
    rows, said = [{**row, "offset": n} for n, (row, _) in enumerate(met)], [one for _, one in met]
    asked = [one if taker(TABLES, row["topic"]) == len(TABLES) - 1 else NOT_ASKED for row, one in met]
    return batch_of(rows, asked), [becomes(TABLES, row, one, DEAD) for row, one in zip(rows, said, strict=True)]


@given(st.lists(st.tuples(messages, answers), min_size=1, max_size=8))
def test_columns_become_the_records_that_the_page_says(met: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    (batch, wanted), text = asked_batch(met), routes_to_json(compiled(*TABLES))
    assert rendered(RouteTable(routes_from_json(text)), batch) == wanted
    assert "hidden" not in text, "SQL may hold values of the environment, and Spark shows options [I12]"


@given(st.lists(messages, min_size=1, max_size=8) | st.lists(plain, max_size=4), st.integers(0, len(TABLES) - 2))
def test_a_line_without_sql_needs_none_of_its_columns(rows: list[dict[str, Any]], first: int) -> None:
    tables, rows = TABLES[first:-1], [{**row, "offset": n} for n, row in enumerate(rows)]
    wanted = [becomes(tables, row, None, DEAD) for row in rows]
    assert rendered(RouteTable(compiled(*tables)), batch_of(rows)) == wanted


@given(st.lists(messages, max_size=8))
def test_a_dead_letter_keeps_the_whole_message(rows: list[dict[str, Any]]) -> None:
    """Whatever value and headers its record has, also where a value could not be made: a replay makes the same row."""
    batch = batch_of([{**row, "offset": n} for n, row in enumerate(rows)])
    for table in (RouteTable([]), RouteTable(compiled(*TABLES[:-1]))):
        out = table.render(batch)
        for n, (row, record) in enumerate(
            zip(batch.to_pylist(), RecordColumns().rows(out, any_topic=True).records, strict=True)
        ):
            value, headers = RecordColumns().original(out, n, record)
            if row["payload"] is not None:
                empty = {"retain": bool(row["retain"])} | {name: row[name] or None for name in LISTS}
                assert source_row(DeadLetter(Reason.UNROUTED, None, None, value, tuple(headers))) == {**row, **empty}


LISTS = ("user_properties", "subscription_ids")


@given(st.lists(st.tuples(messages, answers), max_size=6), st.integers(1, 3))
def test_each_message_has_one_writer_a_key_always_the_same_and_what_is_left_out_is_counted(
    met: list[tuple[dict[str, Any], dict[str, Any]]], writers: int
) -> None:
    (batch, wanted), table = asked_batch(met), RouteTable(compiled(*TABLES))
    owners, counts = dict[int, int](), Counter[str]()
    for writer in range(writers):
        parts = list(records(table, [(batch, writer, writers)], counts, has_dead_letters=True))
        order = [(code > RowOutcome.RENDERED, n) for part in parts for code, n in zip(*places(part), strict=True)]
        assert order == sorted(order), "records first, each in its order"
        assert not owners.keys() & {n for _, n in order}
        owners |= {n: writer for _, n in order}
    left_out = Counter(one for one in wanted if one in ("filtered", "undecided"))
    sent = {n: one for n, one in enumerate(wanted) if isinstance(one, tuple)}
    assert owners.keys() == {n for n, one in enumerate(wanted) if one not in [*left_out]}
    assert counts == left_out + Counter(seen=writers * len(met), own=len(met))
    keys = {n: met[n][0]["topic"].encode() if one[2] is None else one[2] for n, one in sent.items()}
    assert len({(keys[n], owners[n]) for n in sent}) == len(set(keys.values()))


def test_a_key_has_one_writer_whatever_its_topic() -> None:
    batch, counts = batch_of([row(f"a/d/{n}") for n in range(20)]), Counter[str]()
    parts = [records(RouteTable(compiled(*TABLES)), [(batch, n, 3)], counts, has_dead_letters=True) for n in range(3)]
    keys = [key for part in parts for one in part for key in set(one.column("key").to_pylist())]
    assert keys == [b"d"]


def test_trace_context_has_the_names_that_consumers_look_for() -> None:
    """OpenTelemetry's propagator of W3C Trace Context, with the headers of a record as its carrier."""
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    users = [{"key": "traceparent", "value": parent}, {"key": "tracestate", "value": "a=b"}]
    out = RouteTable(compiled(TABLES[0])).render(batch_of([row("a/d/x", user_properties=users)]))
    (*_, headers) = next(iter(RecordColumns().rows(out).records))
    carrier = {name: (value or b"").decode() for name, value in headers or ()}
    span = get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
    assert format_trace_id(span.trace_id) == parent.split("-")[1]
    assert span.trace_state.to_header() == "a=b"


def places(part: pa.RecordBatch) -> tuple[list[int], list[int]]:
    return codes(part), part.column("towline_offset").to_pylist()


def row(topic: str, payload: bytes | None = b"p", **more: Any) -> dict[str, Any]:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    return {"topic": topic, "payload": payload, "qos": 1, "received_at": moment, "gateway": "g", "offset": 0, **more}


@pytest.mark.parametrize(
    ("sent", "said", "code", "text"),
    [
        (row("a/x y"), None, "TL-B02", "Kafka takes no such topic name. The line stops"),
        (row("s/a"), {"field": "a", "reject": "no b\x1b[31m", "where": True}, "TL-B02", r"no b\x1b[31m. The"),
        (row("a/b", None), None, "TL-B02", "larger than max_packet_bytes"),
        (row("s/a"), {"field": "a", "where": True}, "TL-B02", "the SQL of reject raised an error"),
        (row("nobody"), None, "", ""),
    ],
)
def test_without_a_place_for_it_the_first_refused_message_of_a_route_ends_the_batch(
    sent: dict[str, Any], said: dict[str, Any] | None, code: str, text: str
) -> None:
    table, counts = RouteTable(compiled(TABLES[1], TABLES[7])), Counter[str]()
    parts = records(table, [(batch_of([sent], [said] if said else []), 0, 1)], counts, has_dead_letters=False)
    if not code:
        assert (list(parts), counts) == ([], {"seen": 1, "own": 1, "unrouted": 1})
        return
    with pytest.raises(KafkaError) as caught:
        list(parts)
    assert (caught.value.code, text in str(caught.value)) == (code, True), str(caught.value)


def test_topics_without_end_are_forgotten_and_long_ones_not_remembered() -> None:
    asked = Counter[str]()
    cached = module._cached_by_name(lambda name: asked.update([name]))
    for name in ("x", "x" * 250, *map(str, range(module._MAX_CACHED_TOPICS)), *["x", "x" * 250] * 2):
        cached(name)
    assert [asked[name] for name in ("x", "x" * 250, "1")] == [2, 3, 1]


def batch_result(place: Path, answers: list[KafkaTaskResult], **more: str) -> BatchResult:
    """Of a line whose batch 3 begins at offset 5 and ends at 15."""
    for number, offset in ((2, 5), (3, 15)):
        planned(place, number, journals(plant={"journal": "j", "offset": offset}), done=False)
    delivery: Any = SimpleNamespace(settings=SimpleNamespace(sink_id="s", parallelism=1))
    options = {"routes": "", "dedupes": "", "empty": "", **more}
    return LineWriter(delivery, str(place), options)._batch_result(answers, 3, SinkNote())


@pytest.mark.parametrize(
    ("rows", "whole_batch"),
    [([(5, 2), (5, 3)], True), ([(4, 4), (5, 5)], True), ([(5, 2), (5, 2)], False), ([(5, 2), (4, 2)], False)],
)
def test_writers_that_do_not_have_all_messages_between_them_commit_nothing(
    rows: list[tuple[int, int]], *, whole_batch: bool, tmp_path: Path
) -> None:
    """Behind a shuffle each has rows of its own."""
    answers = [
        KafkaTaskResult(n, 3, "q", DeliveryResult(own, 0), own, {"seen": seen, "own": own})
        for n, (seen, own) in enumerate(rows)
    ]
    with nullcontext() if whole_batch else pytest.raises(KafkaError, match="TL-K26"):
        batch_result(tmp_path, answers)


@pytest.mark.parametrize(
    ("given", "left_out", "more", "told"),
    [
        (9, {"unrouted": 1}, {}, {}),
        (7, {"filtered": 2, "undecided": 1}, {}, {}),
        (7, {"filtered": 1}, {}, {"astray": 2}),
        (11, {}, {"dedupes": "true"}, {"astray": -1}),
        (7, {"filtered": 1}, {"dedupes": "true"}, {"dropped": 2}),
        (0, {}, {"empty": "3"}, {"skipped": 10}),
        (0, {}, {"empty": "2"}, {"astray": 10}),
        (6, {"filtered": 1}, {"marked": 9}, {"left_out": 3}),  # its marker says other rows: the filter was changed
    ],
)
def test_messages_that_did_not_come_to_the_sink_have_a_reason_or_are_astray(
    tmp_path: Path, given: int, left_out: dict[str, int], more: dict[str, Any], told: dict[str, int]
) -> None:
    more = {**more}
    marked = more.pop("marked", None)
    done = DeliveryResult(given, 0, was_skipped=marked is not None)
    result = batch_result(tmp_path, [KafkaTaskResult(0, 3, "q", done, marked or given, left_out)], **more)
    known = {name: result.counts[name] for name in ("astray", "dropped", "skipped", "left_out")}
    assert {name: count for name, count in known.items() if count} == told
    assert result.spans == {"j": Span(5, 15)}


# -- slices of a batch on their way through Spark to the task that writes ----------------------------------------------

LOCAL = GatewayAddress("/state/é", settings='{"name": "g"}', owner=ProcessIdentity(7, 8, "host"))
REMOTE = GatewayAddress("grpc+tls://h:1", access=ClientAccess("/token", "/ca", "name"), ticket_s=5)
ADMITTED = replace(REMOTE, ticket="ticket", ca_pem="PEM")
SLICES = (
    Slice(LOCAL, "j1", 3, 9, "inc"),
    Slice(ADMITTED, "j2", 0, 4),
    Slice(LOCAL, "j3", 5, 5),
)


def test_a_slice_is_read_by_the_task_that_writes_where_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ticket lets it in to a gateway on a network; one without rows is nothing to read."""
    asked: list[Any] = []
    monkeypatch.setattr(GatewayAddress, "rows", lambda *place: asked.append(place))
    (batch,) = LineReader(ReadPlan(LOCAL), {"writers": "3"}).read(WriterPartition(SLICES, 2, 3))
    slices = [open_slice(text) for text in batch.column(SLICE_COLUMN).to_pylist()]
    assert [of for _, *of in slices] == [[2, 3]] * 2
    assert asked == [(LOCAL, "j1", 3, 9, "inc"), (ADMITTED, "j2", 0, 4, "")]
    assert not list(LineReader(ReadPlan(LOCAL), {"writers": "3"}).read(WriterPartition([], 0, 3)))


def test_each_writer_has_all_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a batch without rows: each writer leaves its marker."""
    for slices in (SLICES, ()):
        monkeypatch.setattr(reader.MqttStreamReader, "partitions", lambda *_: slices)  # noqa: B023 - asked at once
        parts: Any = LineReader(ReadPlan(LOCAL), {"writers": "2"}).partitions({}, {})
        assert [(part.slices, part.writer, part.writers) for part in parts] == [(slices, 0, 2), (slices, 1, 2)]


def test_what_is_handed_out_once_is_not_written_by_a_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_task_attempt", lambda: 1)
    partition, options = WriterPartition(SLICES, 0, 1), {"writers": "1"}
    with pytest.raises(GatewayError, match="TL-G62"):
        list(LineReader(ReadPlan(LOCAL, replays_batches=False), options).read(partition))
    assert len(list(LineReader(ReadPlan(LOCAL), options).read(partition))) == 1
