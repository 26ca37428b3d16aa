"""Many records in one row come out in their order, among the rows beside them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from towline.kafka.packed import PACKED, pack, unpacked

COLUMNS = {"key": pa.binary(), "value": pa.binary(), "partition": pa.int32()}
cells = st.one_of(st.none(), st.binary(max_size=3))
records = st.lists(st.tuples(cells, cells), max_size=3)
#: A row, or records in the place of one.
entries = st.lists(st.one_of(st.tuples(cells, cells), records), max_size=8)


def batch_of(batch: list[Any]) -> Any:
    """An Arrow batch of rows, some of which are packed records that have no partition of their own."""
    rows = [entry if isinstance(entry, tuple) else (None, None) for entry in batch]
    inner = [None if isinstance(entry, tuple) else pack(_records(entry)) for entry in batch]
    columns = {"key": [key for key, _ in rows], "value": [value for _, value in rows]}
    arrays = {name: pa.array(column, pa.binary()) for name, column in columns.items()}
    partitions = pa.array([7 if isinstance(entry, tuple) else None for entry in batch], pa.int32())
    return pa.record_batch({**arrays, "partition": partitions, PACKED: pa.array(inner, pa.binary())})


def _records(pairs: list[tuple[bytes | None, bytes | None]]) -> Any:
    columns = {"value": [value for _, value in pairs], "key": [key for key, _ in pairs]}  # in another order
    return pa.record_batch({name: pa.array(column, pa.binary()) for name, column in columns.items()})


@given(st.lists(entries, max_size=3))
def test_what_is_packed_comes_out_where_its_row_was(batches: list[list[Any]]) -> None:
    expected = []
    for entry in (entry for batch in batches for entry in batch):
        expected += [(*entry, 7)] if isinstance(entry, tuple) else [(*pair, None) for pair in entry]
    found = list(unpacked(map(batch_of, batches)))
    assert [(row["key"], row["value"], row["partition"]) for batch in found for row in batch.to_pylist()] == expected
    assert all(dict(zip(batch.schema.names, batch.schema.types, strict=True)) == COLUMNS for batch in found)


def test_a_batch_that_has_no_such_column_goes_by_as_it_is() -> None:
    plain = pa.record_batch({"value": pa.array([b"1"])})
    (found,) = unpacked([plain])
    assert found is plain
