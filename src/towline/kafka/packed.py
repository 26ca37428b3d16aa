"""Many records in one row: Arrow IPC of the sink's own columns, for whoever has made records before Spark sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from towline.sinks import lower_case

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["PACKED", "pack", "unpacked"]

#: The column, binary: an Arrow IPC stream. All other columns of such a row are null; it is null in all other rows.
PACKED: Final = "towline_packed"


def pack(records: pa.RecordBatch) -> bytes:
    """Records as the value of the column.

    Args:
        records: Some of the sink's columns; those that are not there are null.
    """
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, records.schema) as stream:
        stream.write_batch(records)
    content: bytes = out.getvalue().to_pybytes()
    return content


def unpacked(batches: Iterable[Any]) -> Iterator[Any]:
    """The rows of batches in their order, those in the column too, and without it; names are in lower case."""
    for batch in map(lower_case, batches):
        if PACKED not in batch.schema.names:
            yield batch
            continue
        packed, others = batch.column(PACKED), batch.drop_columns([PACKED])
        start = 0
        for at in pc.indices_nonzero(packed.is_valid()).to_pylist():
            if at > start:
                yield others.slice(start, at - start)
            yield from _records(packed[at].as_buffer(), others.schema)
            start = at + 1
        if start < others.num_rows:
            yield others.slice(start)


def _records(content: pa.Buffer, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in pa.ipc.open_stream(content):
        there = set(batch.schema.names)
        columns = [
            batch.column(field.name) if field.name in there else pa.nulls(batch.num_rows, field.type)
            for field in schema
        ]
        yield pa.RecordBatch.from_arrays(columns, names=schema.names)
