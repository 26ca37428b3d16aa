"""From PUBLISH packets to one Arrow record batch of `ROW_SCHEMA`.

Most messages carry few properties, so a column without a value is made as a whole instead of value by value, and kept:
what a chunk of ten messages costs is mostly the making of columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import pyarrow as pa

from towline.delivery.plain import ArrowColumns
from towline.delivery.receipts.mark import AUTH_KEY, ID_KEY, NUMBER_KEY, unmarked
from towline.mqtt.codec3 import DUPLICATE_OF, QOS_OF, RETAIN_OF
from towline.mqtt.events import Messages
from towline.mqtt.plain import PlainMessages
from towline.mqtt.stubs import Published
from towline.schema import OPTIONAL, ROW_SCHEMA

__all__ = ["below", "to_rows"]

#: Bytes of a payload whose copy would be felt.
_LARGE: Final = 1 << 20
_FALSE: Final = pa.scalar(False)
_MOMENT: Final = pa.timestamp("us", "UTC")
_KINDS: Final = {field.name: field.type for field in ROW_SCHEMA}
#: Columns of up to so many rows are kept when they are empty: there most of the time goes into making them.
_SMALL: Final = 64


def below(messages: Messages | PlainMessages, least: int) -> int:
    """How many came with a lower QoS than `least`."""
    levels = messages.headers.translate(QOS_OF)
    return sum(levels.count(qos) for qos in range(least))


def to_rows(
    messages: Messages | PlainMessages, first: int, received_at_us: int, gateway: str, *, strip_marks: bool = False
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
    headers, count = messages.headers, len(messages)
    said = _said(messages, strip_marks=strip_marks) if isinstance(messages, Messages) else _plain(messages, count)
    columns = [
        said.topics,
        said.payloads,
        pa.Array.from_buffers(pa.int8(), count, [None, pa.py_buffer(headers.translate(QOS_OF))]),
        _flags(headers.translate(RETAIN_OF)),
        _flags(headers.translate(DUPLICATE_OF)),
        *said.properties,
        pa.repeat(pa.scalar(received_at_us, _MOMENT), count),
        pa.repeat(_text(gateway), count),  # of a bare string Arrow would guess the type
        pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(array("q", range(first, first + count)))]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)


class _Said(NamedTuple):
    """The columns of what publishers said."""

    topics: pa.Array
    payloads: pa.Array
    #: From content_type to subscription_ids.
    properties: Sequence[pa.Array]


def _plain(messages: PlainMessages, count: int) -> _Said:
    """Of messages without properties; as they were cut out where they came so."""
    columns = [run.columns for run in messages.runs]
    cut = [one for one in columns if isinstance(one, ArrowColumns)]
    if len(cut) == len(columns):
        topics, payloads = _joined([one.topic for one in cut]), _joined([one.payload for one in cut])
    else:
        topics = pa.array([topic for one in columns for topic in one.topics()], pa.string())
        payloads = pa.array([payload for one in columns for payload in one.payloads()], pa.binary())
    return _Said(topics, payloads, [_nulls(name, count) for name in OPTIONAL])


def _joined(parts: list[pa.Array]) -> pa.Array:
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _said(messages: Messages, *, strip_marks: bool) -> _Said:
    packets = messages.packets
    properties = [
        _optional([p.content_type for p in packets], "content_type"),
        _payload_format(packets),
        _optional([p.response_topic for p in packets], "response_topic"),
        _optional([p.correlation_data for p in packets], "correlation_data"),
        _user_properties(packets, strip_marks=strip_marks),
        _optional([p.message_expiry_interval for p in packets], "message_expiry_seconds"),
        _lists([p.subscription_ids for p in packets], "subscription_ids"),
    ]
    return _Said(pa.array(messages.topics, pa.string()), _payloads([p.payload for p in packets]), properties)


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
    if values.count(None) == len(values):
        return _nulls(column, len(values))
    return pa.array(values, _KINDS[column])


def _payload_format(packets: Sequence[Published]) -> pa.Array:
    """Payload Format Indicator 1 is UTF-8 text; the codec can't tell 0 from absent, so both are null."""
    values = [p.payload_format_indicator for p in packets]
    if 1 not in values:
        return _nulls("payload_is_utf8", len(values))
    return pa.array([True if value else None for value in values], pa.bool_())


def _lists(values: Sequence[Sequence[Any]], column: str) -> pa.Array:
    if not any(values):
        return _nulls(column, len(values))
    return pa.array([value or None for value in values], _KINDS[column])


def _user_properties(packets: Sequence[Published], *, strip_marks: bool) -> pa.Array:
    """Order and repetition are kept [MQTT-3.3.2-18]."""
    values = [p.user_properties for p in packets]
    if strip_marks and any(values):
        marks = (NUMBER_KEY, ID_KEY, AUTH_KEY)
        values = [unmarked(v) if any(key in marks for key, _ in v) else v for v in values]
    if not any(values):
        return _nulls("user_properties", len(values))
    rows = [[{"key": key, "value": value} for key, value in pairs] or None for pairs in values]
    return pa.array(rows, _KINDS["user_properties"])


def _nulls(column: str, count: int) -> pa.Array:
    return _kept_nulls(column, count) if count <= _SMALL else pa.nulls(count, _KINDS[column])


@lru_cache(maxsize=len(OPTIONAL) * _SMALL)
def _kept_nulls(column: str, count: int) -> pa.Array:
    return pa.nulls(count, _KINDS[column])


@lru_cache(maxsize=8)
def _text(value: str) -> pa.Scalar:
    return pa.scalar(value, pa.string())
