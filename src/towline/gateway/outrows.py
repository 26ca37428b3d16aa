"""The row that a message to be sent is: one Arrow schema from Spark and the `Publisher` to the outbox.

`MESSAGE_SCHEMA` is what a writer brings; the outbox adds when each came, because a message's expiry counts from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from mqtt5 import PublishPacket, QoS

from towline.gateway.rows import ROW_SCHEMA

__all__ = ["MESSAGE_SCHEMA", "OUTBOX_SCHEMA", "REFUSED_SCHEMA", "Outgoing", "arrived", "outgoing", "packet", "rows_of"]

#: What a received message has and a message to be sent has too: what came up can be sent down as it is.
_COLUMNS: Final = (
    "topic",
    "payload",
    "qos",
    "retain",
    "content_type",
    "payload_is_utf8",
    "response_topic",
    "correlation_data",
    "user_properties",
    "message_expiry_seconds",
)
MESSAGE_SCHEMA: Final = pa.schema([ROW_SCHEMA.field(name) for name in _COLUMNS])
OUTBOX_SCHEMA: Final = MESSAGE_SCHEMA.append(pa.field("arrived_at", pa.timestamp("us", "UTC")))
#: What the broker did not take, kept aside: the message, its number in the outbox, and the reason code.
REFUSED_SCHEMA: Final = OUTBOX_SCHEMA.append(pa.field("number", pa.int64())).append(pa.field("reason", pa.int16()))

_QOS: Final = {0: QoS.AT_MOST_ONCE, 1: QoS.AT_LEAST_ONCE, 2: QoS.EXACTLY_ONCE}
#: Message Expiry Interval is a four byte integer [MQTT 5 section 3.3.2.3.3].
_LONGEST_EXPIRY: Final = 0xFFFFFFFF
#: Reason codes of a message that MQTT can't say: topic name invalid, payload format invalid.
_TOPIC_INVALID, _FORMAT_INVALID = 0x90, 0x99


class Outgoing(NamedTuple):
    """A message on its way out of the outbox.

    Attributes:
        number: Its offset in the outbox.
        topic: Where it goes.
        qos: 0, 1 or 2.
        size: Bytes of its payload.
        arrived_at_us: Microseconds since 1970 UTC.
        expires_at_us: The same, None for never.
        content: The packet, or the reason code of what MQTT has no way to say.
    """

    number: int
    topic: str
    qos: int
    size: int
    arrived_at_us: int
    expires_at_us: int | None
    content: PublishPacket | int


def arrived(rows: pa.RecordBatch, now_us: int) -> pa.RecordBatch:
    """Rows of `MESSAGE_SCHEMA` as the outbox stores them, with the time of their arrival."""
    stamps = pa.repeat(pa.scalar(now_us, pa.timestamp("us", "UTC")), rows.num_rows)
    return pa.RecordBatch.from_arrays([*rows.columns, stamps], schema=OUTBOX_SCHEMA)


def rows_of(messages: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """One message or more as rows of `MESSAGE_SCHEMA`; a missing key is null, an empty column is made as a whole."""
    names, columns = MESSAGE_SCHEMA.names, []
    rows = (map(message.get, names) for message in messages)
    for field, values in zip(MESSAGE_SCHEMA, zip(*rows, strict=True), strict=True):
        empty = values.count(None) == len(values)
        columns.append(pa.nulls(len(values), field.type) if empty else pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA)


def outgoing(
    rows: pa.RecordBatch,
    first: int,
    mark: Callable[[int], Sequence[tuple[str, str]]] | None = None,
    *,
    again: bool = False,
) -> Iterator[Outgoing]:
    """Messages of the outbox, in order.

    Args:
        rows: Of `OUTBOX_SCHEMA`.
        first: Number of the first.
        mark: Number → user properties that are added to the message's own.
        again: Sent before: without RETAIN, or an old value would take the place of a newer one.
    """
    columns = [column.to_pylist() if column.null_count < len(column) else None for column in rows.columns[:-1]]
    topics, payloads, qos, retain, *rest = columns
    stamps = rows.column("arrived_at").view(pa.int64()).to_pylist()  # a cast would load pyarrow.compute
    plain = not any(rest)
    for at in range(rows.num_rows):
        topic = (topics[at] if topics else None) or ""
        payload = (payloads[at] if payloads else None) or b""
        level = (qos[at] if qos else None) or 0
        extra = () if plain else tuple(column[at] if column else None for column in rest)
        expiry = extra[5] if extra else None
        if mark is not None:
            extra = extra or (None,) * 6
            own = [{"key": key, "value": value} for key, value in mark(first + at)]
            extra = (*extra[:4], [*(extra[4] or ()), *own], extra[5])
        yield Outgoing(
            first + at,
            topic,
            level,
            len(payload),
            stamps[at],
            None if expiry is None else stamps[at] + max(0, expiry) * 1_000_000,
            packet(topic, payload, level, bool(retain and retain[at]) and not again, *extra),
        )


def packet(
    topic: str,
    payload: bytes,
    qos: int,
    retain: bool,  # noqa: FBT001 - a column, in the order of the schema
    content_type: str | None = None,
    payload_is_utf8: bool | None = None,  # noqa: FBT001 - see above
    response_topic: str | None = None,
    correlation_data: bytes | None = None,
    user_properties: Sequence[Mapping[str, str]] | None = None,
    message_expiry_seconds: int | None = None,
) -> PublishPacket | int:
    """The PUBLISH of a row, or the reason code of one that MQTT has no way to say; its packet id is not meant."""
    if not topic:
        return _TOPIC_INVALID
    try:
        return PublishPacket(
            topic,
            payload,
            qos=_QOS[qos],
            retain=retain,
            packet_id=1 if qos else None,
            payload_format_indicator=1 if payload_is_utf8 else 0,
            message_expiry_interval=None
            if message_expiry_seconds is None
            else min(max(message_expiry_seconds, 0), _LONGEST_EXPIRY),
            content_type=content_type,
            response_topic=response_topic,
            correlation_data=correlation_data,
            user_properties=[(p["key"] or "", p["value"] or "") for p in user_properties or ()],
        )
    except (ValueError, TypeError, OverflowError, KeyError):
        return _TOPIC_INVALID if any(c in topic for c in "+#\0") or len(topic) > 0x3FFF else _FORMAT_INVALID
