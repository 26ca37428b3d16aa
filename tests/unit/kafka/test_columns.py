"""Columns: the contract of Spark's Kafka sink, and Arrow columns as arguments of produce()."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.errors import ConfigError, KafkaError
from towline.kafka.columns import COLUMN_TYPES, Columns, header_lists
from towline.kafka.deadletters import HEADER_OVERHEAD

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TYPES = {name: kinds[0] for name, kinds in COLUMN_TYPES.items()}

header = st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=8))
header_column = st.lists(st.none() | st.lists(header, max_size=5), max_size=20)


def bound(*names: str, topic: str | None = "t", include_headers: bool = True) -> Columns:
    return Columns.bind({name: TYPES[name] for name in names}, topic, include_headers=include_headers)


def produced(columns: Columns, **data: Any) -> list[tuple[Any, ...]]:
    return list(columns.rows(pa.record_batch(data)).records)


def headers_of(rows: list[list[tuple[str, bytes | None]] | None]) -> Any:
    return pa.array([None if row is None else [{"key": k, "value": v} for k, v in row] for row in rows], HEADERS)


#: Callbacks, time and headers of a record that has none.
PLAIN = (None, None, 0, None)


def test_large_types_of_arrow_too() -> None:
    """Spark makes them with spark.sql.execution.arrow.useLargeVarTypes."""
    assert produced(bound("value"), value=pa.array([b"a"], pa.large_binary())) == [("t", b"a", None, -1, *PLAIN)]
    assert produced(bound("value"), value=pa.array(["a"], pa.large_string())) == [("t", b"a", None, -1, *PLAIN)]


def test_the_topic_comes_from_the_column_unless_the_option_names_it() -> None:
    data = pa.record_batch({"value": pa.array([b"12", b"3"]), "topic": pa.array(["x", "y"])})
    rows = bound("value", "topic", topic=None).rows(data)
    assert [record[0] for record in rows.records] == ["x", "y"]
    assert (rows.size, rows.bytes, sorted(rows.topics)) == (2, 3, ["x", "y"])
    assert [record[0] for record in bound("value", "topic", topic="t").rows(data).records] == ["t", "t"]


def test_timestamps_in_milliseconds() -> None:
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, dt.UTC)
    column = pa.array([moment, None, dt.datetime.fromtimestamp(0, dt.UTC)], pa.timestamp("us", tz="UTC"))
    records = produced(bound("value", "timestamp"), value=pa.array([b"1", b"2", b"3"]), timestamp=column)
    assert [record[6] for record in records] == [int(moment.timestamp()) * 1000 + 678, 0, 1], "0 is now"


def test_headers_can_be_left_out() -> None:
    columns = bound("value", "headers", include_headers=False)
    (record,) = produced(columns, value=pa.array([b"1"]), headers=headers_of([[("a", b"1")]]))
    assert record == ("t", b"1", None, -1, *PLAIN)


@given(header_column, st.integers(0, 20), st.integers(0, 20))
def test_header_lists_are_what_arrow_holds_in_slices_too(
    rows: list[list[tuple[str, bytes | None]] | None], start: int, length: int
) -> None:
    expected = [row or [] for row in rows[start : start + length]]
    assert list(header_lists(headers_of(rows).slice(start, length))) == expected


@given(st.lists(st.tuples(st.none() | st.binary(), st.none() | st.text(), st.none() | st.integers(0, 99)), max_size=20))
def test_records_are_the_rows_in_order(rows: list[tuple[bytes | None, str | None, int | None]]) -> None:
    columns = Columns.bind({"key": "string", "value": "binary", "partition": "int"}, "t", include_headers=True)
    records = produced(
        columns,
        value=pa.array([row[0] for row in rows], pa.binary()),
        key=pa.array([row[1] for row in rows], pa.string()),
        partition=pa.array([row[2] for row in rows], pa.int32()),
    )
    expected = [("t", v, None if k is None else k.encode(), -1 if p is None else p, *PLAIN) for v, k, p in rows]
    assert records == expected


@pytest.mark.parametrize("bad", [[{"key": None, "value": b"1"}], [None]])
def test_a_header_without_key(bad: list[Any]) -> None:
    with pytest.raises(KafkaError, match="a header has no key") as caught:
        header_lists(pa.array([bad], HEADERS))
    assert caught.value.code == "TL-K06"


def test_a_row_without_topic() -> None:
    batch = pa.record_batch({"value": pa.array([b"1", b"2"]), "topic": pa.array(["x", None])})
    with pytest.raises(KafkaError, match="row 1 of its Arrow batch") as caught:
        bound("value", "topic", topic=None).rows(batch)
    assert caught.value.code == "TL-K06"


@pytest.mark.parametrize(
    ("schema", "topic", "says"),
    [
        ({"key": "string"}, "t", 'column "value" is missing'),
        ({"value": "string"}, None, "no topic"),
        ({"value": "int"}, "t", 'column "value" is int, Kafka takes binary or string'),
        ({"value": "string", "partition": "bigint"}, "t", "CAST(partition AS int)"),
        ({"value": "string", "headers": "map<string,string>"}, "t", "array<struct<key:string,value:binary>>"),
        ({"value": "string", "topic": "binary"}, None, 'column "topic" is binary'),
        ({"value": "string", "payload": "binary"}, "t", 'unknown column "payload"'),
    ],
)
def test_columns_that_do_not_fit(schema: dict[str, str], topic: str | None, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Columns.bind(schema, topic, include_headers=True)
    assert caught.value.code == "TL-C48"
    assert says in str(caught.value)


cells = st.none() | st.binary(max_size=30)


@given(st.lists(st.tuples(cells, cells, st.none() | st.lists(header, max_size=5)), min_size=1, max_size=8))
def test_the_largest_record_is_never_underrated(rows: list[tuple[Any, Any, Any]]) -> None:
    """Else one that Kafka refuses passes the quick look, and costs its whole batch."""
    keys, values, lists = zip(*rows, strict=True)
    columns = {
        "key": pa.array(keys, pa.binary()),
        "value": pa.array(values, pa.binary()),
        "headers": headers_of([*lists]),
    }
    records = produced(bound("key", "value", "headers"), **columns)
    sizes = [
        len(key or b"")
        + len(value or b"")
        + sum(HEADER_OVERHEAD + len(n.encode()) + len(v or b"") for n, v in record[7])
        for record in records
        for value, key in [record[1:3]]
    ]
    assert bound("key", "value", "headers").max_record_bytes(pa.record_batch(columns)) >= max(sizes)
