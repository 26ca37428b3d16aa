"""From PUBLISH packets to one Arrow record batch of `ROW_SCHEMA`.

Most messages carry few properties, so a column without a value is made as a whole instead of value by value.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from towline.delivery.receipts.mark import AUTH_KEY, ID_KEY, NUMBER_KEY, unmarked
from towline.mqtt.events import Messages
from towline.mqtt.stubs import Published
from towline.schema import ROW_SCHEMA

__all__ = ["below", "to_rows"]

#: First byte of a PUBLISH → QoS, RETAIN, DUP, for `bytes.translate` [MQTT 5 section 3.3.1].
_QOS: Final = bytes(byte >> 1 & 3 for byte in range(256))
_RETAIN: Final = bytes(byte & 1 for byte in range(256))
_DUPLICATE: Final = bytes(byte >> 3 & 1 for byte in range(256))
_FALSE: Final = pa.scalar(False)
#: Bytes of a payload whose copy would be felt.
_LARGE: Final = 1 << 20


def below(messages: Messages, least: int) -> int:
    """How many came with a lower QoS than `least`."""
    levels = messages.headers.translate(_QOS)
    return sum(levels.count(qos) for qos in range(least))


def to_rows(
    messages: Messages, first: int, received_at_us: int, gateway: str, *, strip_marks: bool = False
) -> pa.RecordBatch:
    """One row a message, in order.

    Args:
        messages: In order.
        first: Offset of the first row.
        received_at_us: Microseconds since 1970 UTC; the same for all, which arrived in one chunk.
        gateway: The gateway's name.
        strip_marks: Leave out the marks of publishers that want receipts: they name a message on this hop alone, and
            a copy that carries them further would be taken for a repeat.
    """
    packets, headers, count = messages.packets, messages.headers, len(messages)
    columns = [
        pa.array(messages.topics, pa.string()),
        _payloads([p.payload for p in packets]),
        pa.Array.from_buffers(pa.int8(), count, [None, pa.py_buffer(headers.translate(_QOS))]),
        _flags(headers.translate(_RETAIN)),
        _flags(headers.translate(_DUPLICATE)),
        _optional([p.content_type for p in packets], "content_type"),
        _payload_format(packets),
        _optional([p.response_topic for p in packets], "response_topic"),
        _optional([p.correlation_data for p in packets], "correlation_data"),
        _user_properties(packets, strip_marks=strip_marks),
        _optional([p.message_expiry_interval for p in packets], "message_expiry_seconds"),
        _lists([p.subscription_ids for p in packets], "subscription_ids"),
        pa.repeat(pa.scalar(received_at_us, pa.timestamp("us", "UTC")), count),
        pa.repeat(gateway, count),
        pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(array("q", range(first, first + count)))]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)


def _payloads(values: list[bytes | None]) -> pa.Array:
    """A large message mostly comes alone, and is used where it lies instead of copied; None is a stub's."""
    alone = values[0] if len(values) == 1 else None
    if alone is not None and len(alone) >= _LARGE:
        ends = pa.py_buffer(array("i", (0, len(alone))))
        return pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(alone)])
    return pa.array(values, pa.binary())


def _flags(values: bytes) -> pa.Array:
    if 1 not in values:
        return pa.repeat(_FALSE, len(values))
    return pa.array([value == 1 for value in values], pa.bool_())


def _optional(values: list[Any], column: str) -> pa.Array:
    kind = ROW_SCHEMA.field(column).type
    if values.count(None) == len(values):
        return pa.nulls(len(values), kind)
    return pa.array(values, kind)


def _payload_format(packets: Sequence[Published]) -> pa.Array:
    """Payload Format Indicator 1 is UTF-8 text; the codec can't tell 0 from absent, so both are null."""
    values = [p.payload_format_indicator for p in packets]
    if 1 not in values:
        return pa.nulls(len(values), pa.bool_())
    return pa.array([True if value else None for value in values], pa.bool_())


def _lists(values: Sequence[Sequence[Any]], column: str) -> pa.Array:
    kind = ROW_SCHEMA.field(column).type
    if not any(values):
        return pa.nulls(len(values), kind)
    return pa.array([value or None for value in values], kind)


def _user_properties(packets: Sequence[Published], *, strip_marks: bool) -> pa.Array:
    """Order and repetition are kept [MQTT-3.3.2-18]."""
    values = [p.user_properties for p in packets]
    if strip_marks and any(values):
        marks = (NUMBER_KEY, ID_KEY, AUTH_KEY)
        values = [unmarked(v) if any(key in marks for key, _ in v) else v for v in values]
    if not any(values):
        return pa.nulls(len(values), ROW_SCHEMA.field("user_properties").type)
    rows = [[{"key": key, "value": value} for key, value in pairs] or None for pairs in values]
    return pa.array(rows, ROW_SCHEMA.field("user_properties").type)
