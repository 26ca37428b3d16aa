"""A row as a record and back: nothing of any column is lost, whatever is in it."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.landing.records import number_of, rows_of, to_records
from towline.schema import OUTBOX_SCHEMA, ROW_SCHEMA

ENOUGH = 1 << 30

_text = st.text(st.characters(codec="utf-8"), max_size=12)
_pair = st.fixed_dictionaries({"key": _text, "value": _text})
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "topic": _text,
    "payload": st.binary(max_size=20),
    "qos": st.integers(0, 2),
    "retain": st.booleans(),
    "duplicate": st.booleans(),
    "content_type": _text,
    "payload_is_utf8": st.booleans(),
    "response_topic": _text,
    "correlation_data": st.binary(max_size=20),
    "user_properties": st.lists(_pair, max_size=4),
    "message_expiry_seconds": st.integers(0, 2**32 - 1),
    "subscription_ids": st.lists(st.integers(1, 268_435_455), max_size=3),
    "received_at": st.integers(-(2**50), 2**53),
    "arrived_at": st.integers(-(2**50), 2**53),
    "gateway": _text,
    "offset": st.integers(0, 2**62),
}


def rows(schema: Any) -> st.SearchStrategy[Any]:
    """Any rows of a schema, nulls everywhere."""
    row = st.fixed_dictionaries({name: st.none() | _VALUES[name] for name in schema.names})
    return st.lists(row, max_size=5).map(lambda many: _batch(many, schema))


def _batch(many: list[dict[str, Any]], schema: Any) -> Any:
    columns = []
    for field in schema:
        values = [row[field.name] for row in many]
        made = pa.array(values, pa.int64()).cast(field.type) if pa.types.is_timestamp(field.type) else None
        columns.append(pa.array(values, field.type) if made is None else made)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@given(rows(ROW_SCHEMA), st.integers(0, 2**60))
def test_any_received_row_comes_back(batch: Any, first: int) -> None:
    records, aside = to_records(batch, first, ENOUGH)
    assert aside == 0
    assert rows_of(records, ROW_SCHEMA).equals(batch)
    assert [number_of(record.key) for record in records] == list(range(first, first + batch.num_rows))


@given(rows(OUTBOX_SCHEMA))
def test_any_row_to_be_sent_comes_back(batch: Any) -> None:
    records, _ = to_records(batch, 0, ENOUGH)
    assert rows_of(records, OUTBOX_SCHEMA).equals(batch)


@given(rows(ROW_SCHEMA), st.integers(0, 60))
def test_what_is_too_large_keeps_its_place(batch: Any, limit: int) -> None:
    records, aside = to_records(batch, 5, limit)
    whole, _ = to_records(batch, 5, ENOUGH)
    large = [index for index, record in enumerate(whole) if record.size > limit]
    assert aside == len(large)
    back = rows_of(records, ROW_SCHEMA)
    for index in large:
        assert records[index].value is None
        for name in ("topic", "qos", "offset", "received_at"):
            assert back.column(name)[index].equals(batch.column(name)[index])
        facts = json.loads(records[index].key)["user_properties"]
        assert facts[1] == {"key": "towline-size", "value": str(whole[index].size)}


@pytest.mark.parametrize("key", [b"", b"x", b"{}", b"[]", b'{"number": "1"}', b'{"number": null}', b"\xff"])
def test_another_key_is_no_row(key: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        number_of(key)
