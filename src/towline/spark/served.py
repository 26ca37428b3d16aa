"""What becomes of rows between the gateway and Spark, in a worker. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from towline.schema import EVENT_TIME, TIMED_SCHEMA

__all__ = ["timed", "unrepeated"]


def unrepeated(rows: Iterator[pa.RecordBatch], once_below: int, fresh: int) -> Iterator[pa.RecordBatch]:
    """Rows in their order, without those below the offset `fresh` whose QoS is below `once_below`."""
    import pyarrow.compute as pc  # noqa: PLC0415 - workers only

    for batch in rows:
        again = pc.greater_equal(batch.column("qos"), once_below)
        kept = batch.filter(pc.or_(again, pc.greater_equal(batch.column("offset"), fresh)))
        if kept.num_rows:
            yield kept


def timed(rows: Iterator[pa.RecordBatch], watermark_ms: int) -> Iterator[pa.RecordBatch]:
    """Rows with their event time: a row is late at or before the watermark (`WatermarkSupport`), and none is."""
    import pyarrow.compute as pc  # noqa: PLC0415 - workers only

    kind, earliest = TIMED_SCHEMA.field(EVENT_TIME).type, (watermark_ms + 1) * 1000
    for batch in rows:
        times = pc.max_element_wise(batch.column("received_at").cast(pa.int64()), earliest)
        yield pa.RecordBatch.from_arrays([*batch.columns, times.cast(kind)], schema=TIMED_SCHEMA)
