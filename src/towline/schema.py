"""The row that a message becomes: one Arrow schema from the journal to Spark.

It must *equal* Spark's own conversion of `SPARK_SCHEMA` (``to_arrow_schema(schema, timezone="UTC")``), or Spark
refuses the batch with DATA_SOURCE_RETURN_SCHEMA_MISMATCH; a test compares the two.
"""

from __future__ import annotations

import pyarrow as pa

__all__ = ["EVENT_TIME", "NO_ROWS", "ROW_SCHEMA", "SPARK_SCHEMA", "TIMED_SCHEMA"]

SPARK_SCHEMA = (
    "topic string, payload binary, qos byte, retain boolean, duplicate boolean, content_type string, "
    "payload_is_utf8 boolean, response_topic string, correlation_data binary, "
    "user_properties array<struct<key: string, value: string>>, message_expiry_seconds long, "
    "subscription_ids array<int>, received_at timestamp, gateway string, offset long"
)

_PROPERTY = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.string())])

ROW_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("payload", pa.binary()),
        ("qos", pa.int8()),
        ("retain", pa.bool_()),
        ("duplicate", pa.bool_()),
        ("content_type", pa.string()),
        ("payload_is_utf8", pa.bool_()),
        ("response_topic", pa.string()),
        ("correlation_data", pa.binary()),
        ("user_properties", pa.list_(pa.field("element", _PROPERTY))),
        ("message_expiry_seconds", pa.int64()),
        ("subscription_ids", pa.list_(pa.field("element", pa.int32()))),
        ("received_at", pa.timestamp("us", "UTC")),
        ("gateway", pa.string()),
        ("offset", pa.int64()),
    ]
)

#: One more column for a query with a watermark: `received_at`, but never so early that the row would be late. A clock
#: that was ahead for a moment and is right again would else make every row late until it has caught up.
EVENT_TIME = "event_time"
TIMED_SCHEMA = ROW_SCHEMA.append(pa.field(EVENT_TIME, pa.timestamp("us", "UTC")))

#: For a frame that brings only packet ids or notes.
NO_ROWS = pa.RecordBatch.from_pylist([], schema=ROW_SCHEMA)
