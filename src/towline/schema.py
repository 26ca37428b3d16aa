"""Arrow schemas of messages, for each store and transfer.

    ROW_SCHEMA       a received message, from the inbox to Spark
    TIMED_SCHEMA     the same with an event time, for a query with a watermark
    MESSAGE_SCHEMA   a message to be sent, as Spark or the `Publisher` brings it
    OUTBOX_SCHEMA    the same with the time of its arrival, from which its expiry counts: a `towline.timing.Stamp`
    REFUSED_SCHEMA   a message that the broker refused for good

`ROW_SCHEMA` must *equal* Spark's own conversion of `SPARK_SCHEMA` (``to_arrow_schema(schema, timezone="UTC")``), or
Spark refuses the batch with DATA_SOURCE_RETURN_SCHEMA_MISMATCH; a test compares the two.
"""

from __future__ import annotations

import pyarrow as pa

#: Columns with their types as Spark names them, and what they hold.
_ROW_COLUMNS = (
    ("topic", "string", "MQTT topic"),
    ("payload", "binary", "as it was sent; null where the message was not taken in whole"),
    ("qos", "byte", "QoS of the delivery to the gateway: 0, 1 or 2"),
    ("retain", "boolean", "RETAIN flag"),
    ("duplicate", "boolean", "DUP flag: the broker may have sent it before"),
    ("content_type", "string", "what the publisher calls the payload (MQTT 5)"),
    ("payload_is_utf8", "boolean", "whether the publisher calls the payload text (MQTT 5)"),
    ("response_topic", "string", "where the publisher wants an answer (MQTT 5)"),
    ("correlation_data", "binary", "what belongs into that answer (MQTT 5)"),
    ("user_properties", "array<struct<key: string, value: string>>", "in the order of the publisher (MQTT 5)"),
    ("message_expiry_seconds", "long", "seconds it was still valid for when it came (MQTT 5)"),
    ("subscription_ids", "array<int>", "of the subscriptions that it matches (MQTT 5)"),
    ("received_at", "timestamp", "when the gateway received it"),
    ("gateway", "string", "name of the gateway"),
    ("offset", "long", "number in the journal of the gateway; with gateway it names the message for ever"),
)
SPARK_SCHEMA = ", ".join(f"{name} {column_type}" for name, column_type, _ in _ROW_COLUMNS)
#: With comments, which ``DESCRIBE`` of a table shows.
DESCRIBED_SCHEMA = ", ".join(f"{name} {kind} COMMENT '{comment}'" for name, kind, comment in _ROW_COLUMNS)

_PROPERTY = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.string())])
#: As Spark converts its types.
_ARROW_TYPES = {
    "string": pa.string(),
    "binary": pa.binary(),
    "byte": pa.int8(),
    "boolean": pa.bool_(),
    "long": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "array<int>": pa.list_(pa.field("element", pa.int32())),
    "array<struct<key: string, value: string>>": pa.list_(pa.field("element", _PROPERTY)),
}
ROW_SCHEMA = pa.schema([(name, _ARROW_TYPES[kind]) for name, kind, _ in _ROW_COLUMNS])

#: What a publisher or the broker may say beside topic, payload, QoS and RETAIN, in the order of the columns.
OPTIONAL_COLUMNS = (
    "content_type",
    "payload_is_utf8",
    "response_topic",
    "correlation_data",
    "user_properties",
    "message_expiry_seconds",
    "subscription_ids",
)

#: One more column for a query with a watermark: `received_at`, but never so early that the row would be late. A clock
#: that was ahead for a moment and is right again would else make every row late until it has caught up.
EVENT_TIME = "event_time"
TIMED_SCHEMA = ROW_SCHEMA.append(pa.field(EVENT_TIME, pa.timestamp("us", "UTC")))

#: For a chunk without messages.
NO_ROWS = pa.RecordBatch.from_pylist([], schema=ROW_SCHEMA)

#: What a received message has and a message to be sent has too: what came up can be sent down as it is.
_SENDABLE = ("topic", "payload", "qos", "retain", *(n for n in OPTIONAL_COLUMNS if n != "subscription_ids"))
MESSAGE_SCHEMA = pa.schema([ROW_SCHEMA.field(name) for name in _SENDABLE])
ARRIVAL_SCHEMA = pa.schema(
    [("arrived_at", pa.timestamp("us", "UTC")), ("arrived_boottime_us", pa.int64()), ("arrived_boot", pa.int64())]
)
OUTBOX_SCHEMA = pa.schema([*MESSAGE_SCHEMA, *ARRIVAL_SCHEMA])
#: The message, its number in the outbox, and the reason code.
REFUSED_SCHEMA = OUTBOX_SCHEMA.append(pa.field("number", pa.int64())).append(pa.field("reason", pa.int16()))

#: For a batch without messages, or its end.
NO_MESSAGES = pa.RecordBatch.from_pylist([], schema=MESSAGE_SCHEMA)
