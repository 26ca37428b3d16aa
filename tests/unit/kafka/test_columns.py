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
from towline.kafka.deadletters import RECORD_OVERHEAD, record_bytes

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TYPES = {name: kinds[0] for name, kinds in COLUMN_TYPES.items()}

header = st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=8))


def bound(*names: str, topic: str | None = "t", include_headers: bool = True) -> Columns:
    return Columns.bind({name: TYPES[name] for name in names}, topic, include_headers=include_headers)


def headers_of(rows: list[list[tuple[str, bytes | None]] | None]) -> Any:
    return pa.array([None if row is None else [{"key": k, "value": v} for k, v in row] for row in rows], HEADERS)


def test_the_topic_comes_from_the_column_unless_the_option_names_it() -> None:
    data = pa.record_batch({"value": pa.array([b"12", b"3"]), "topic": pa.array(["x", "y"])})
    rows = bound("value", "topic", topic=None).rows(data)
    assert [record[0] for record in rows.records] == ["x", "y"]
    assert (rows.size, rows.bytes, sorted(rows.topics)) == (2, 3, ["x", "y"])
    assert [record[0] for record in bound("value", "topic", topic="t").rows(data).records] == ["t", "t"]


def test_timestamps_in_milliseconds() -> None:
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, dt.UTC)
    column = pa.array([moment, None, dt.datetime.fromtimestamp(0, dt.UTC)], pa.timestamp("us", tz="UTC"))
    rows = bound("value", "timestamp").rows(pa.record_batch({"value": [b"1", b"2", b"3"], "timestamp": column}))
    assert [record[6] for record in rows.records] == [int(moment.timestamp()) * 1000 + 678, 0, 1], "0 is now"


row = st.tuples(
    st.none() | st.text(max_size=30),
    st.none() | st.binary(max_size=30),
    st.none() | st.integers(0, 99),
    st.none() | st.lists(header, max_size=5),
)


@given(st.lists(row, min_size=1, max_size=20), st.integers(0, 19), st.booleans(), st.booleans())
def test_records_are_the_rows_in_order_and_none_is_larger_than_told(
    rows: list[tuple[Any, ...]], start: int, has_large_types: bool, include_headers: bool
) -> None:
    """Else one that Kafka refuses passes the quick look, and costs its whole batch.

    Spark makes the large types with spark.sql.execution.arrow.useLargeVarTypes.
    """
    text, binary = (pa.large_string(), pa.large_binary()) if has_large_types else (pa.string(), pa.binary())
    keys, values, partitions, lists = zip(*rows, strict=True)
    given = {
        "key": pa.array(keys, text),
        "value": pa.array(values, binary),
        "partition": pa.array(partitions, pa.int32()),
        "headers": headers_of([*lists]),
    }
    columns = Columns.bind(
        {**{name: TYPES[name] for name in given}, "key": "string"}, "t", include_headers=include_headers
    )
    cut = pa.record_batch(given).slice(start)
    kept = [(headers or []) if include_headers else None for headers in lists]
    expected = [
        ("t", value, None if key is None else key.encode(), -1 if part is None else part, None, None, 0, headers)
        for key, value, part, headers in zip(keys, values, partitions, kept, strict=True)
    ][start:]
    made = columns.rows(cut)
    assert (made.bytes, [*made.records]) == (sum(len(v or b"") + len(k or b"") for _, v, k, *_ in expected), expected)
    sizes = [record_bytes(record[2], record[1], record[7] or ()) - RECORD_OVERHEAD for record in expected]
    assert columns.max_record_bytes(cut) >= max(sizes, default=0)


@pytest.mark.parametrize(
    ("schema", "topic", "says"),
    [
        ({"key": "string"}, "t", 'column "value" is missing'),
        ({"value": "string"}, None, "no topic"),
        ({"value": "int"}, "t", 'column "value" is int, Kafka takes binary or string'),
        ({"value": "string", "partition": "bigint"}, "t", "Select it as int"),
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


def test_rows_that_are_no_records() -> None:
    for bad in ({"key": None, "value": b"1"}, None):
        with pytest.raises(KafkaError, match=r"a header has no key.*TL-K06"):
            header_lists(pa.array([[bad]], HEADERS))
    batch = pa.record_batch({"value": pa.array([b"1", b"2"]), "topic": pa.array(["x", None])})
    with pytest.raises(KafkaError, match=r"row 1 of its Arrow batch.*TL-K06"):
        bound("value", "topic", topic=None).rows(batch)
