"""From PUBLISH packets to one Arrow record batch of `ROW_SCHEMA`.

Most messages are alike in most columns, so a column of one value is cut off a longer one that is kept: what a chunk of
ten messages costs is mostly the making of columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from towline.delivery.plain import ArrowColumns
from towline.delivery.receipts.mark import AUTH_KEY, ID_KEY, NUMBER_KEY, unmarked
from towline.mqtt.codec3 import DUPLICATE_OF, QOS_OF, RETAIN_OF
from towline.mqtt.events import Messages
from towline.mqtt.message import LARGE
from towline.mqtt.plain import PlainMessages
from towline.mqtt.stubs import Published
from towline.schema import NO_ROWS, OPTIONAL, ROW_SCHEMA

__all__ = ["below", "to_rows"]

_MOMENT: Final = pa.timestamp("us", "UTC")
_KINDS: Final = {field.name: field.type for field in ROW_SCHEMA}
#: Name of a column and the one value in it → the longest such column so far; few values are kept, see `_of_one`.
_kept: dict[tuple[str, Any], pa.Array] = {}


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
    if not count:  # a chunk of PUBRELs: of few messages every other one is
        return NO_ROWS
    levels = headers.translate(QOS_OF)
    said = _said(messages, strip_marks=strip_marks) if isinstance(messages, Messages) else _plain(messages, count)
    columns = [
        said.topics,
        said.payloads,
        _levels(levels),
        _flags("retain", headers.translate(RETAIN_OF)),
        _flags("duplicate", headers.translate(DUPLICATE_OF)),
        *said.properties,
        pa.repeat(pa.scalar(received_at_us, _MOMENT), count),
        _of_one("gateway", gateway, count),
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
    return _Said(topics, payloads, [_of_one(name, None, count) for name in OPTIONAL])


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
    if alone is not None and len(alone) >= LARGE:
        ends = pa.py_buffer(array("i", (0, len(alone))))
        return pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(alone)])
    return pa.array(values, pa.binary())


def _levels(values: bytes) -> pa.Array:
    count = len(values)
    if count and values.count(values[0]) == count:
        return _of_one("qos", values[0], count)
    return pa.Array.from_buffers(pa.int8(), count, [None, pa.py_buffer(values)])


def _flags(column: str, values: bytes) -> pa.Array:
    if 1 not in values:
        return _of_one(column, False, len(values))
    return pa.array([value == 1 for value in values], pa.bool_())


def _optional(values: list[Any], column: str) -> pa.Array:
    if values.count(None) == len(values):
        return _of_one(column, None, len(values))
    return pa.array(values, _KINDS[column])


def _payload_format(packets: Sequence[Published]) -> pa.Array:
    """Payload Format Indicator 1 is UTF-8 text; the codec can't tell 0 from absent, so both are null."""
    values = [p.payload_format_indicator for p in packets]
    if 1 not in values:
        return _of_one("payload_is_utf8", None, len(values))
    return pa.array([True if value else None for value in values], pa.bool_())


def _lists(values: Sequence[Sequence[Any]], column: str) -> pa.Array:
    if not any(values):
        return _of_one(column, None, len(values))
    return pa.array([value or None for value in values], _KINDS[column])


def _user_properties(packets: Sequence[Published], *, strip_marks: bool) -> pa.Array:
    """Order and repetition are kept [MQTT-3.3.2-18]."""
    values = [p.user_properties for p in packets]
    if strip_marks and any(values):
        marks = (NUMBER_KEY, ID_KEY, AUTH_KEY)
        values = [unmarked(v) if any(key in marks for key, _ in v) else v for v in values]
    if not any(values):
        return _of_one("user_properties", None, len(values))
    rows = [[{"key": key, "value": value} for key, value in pairs] or None for pairs in values]
    return pa.array(rows, _KINDS["user_properties"])


def _of_one(column: str, value: Any, count: int) -> pa.Array:
    """So many rows of one value, None for null.

    What is kept is bounded: by the largest chunk, and by the values, which are the process's own and the three of QoS.
    """
    known = _kept.get((column, value))
    if known is None or len(known) < count:
        kind = _KINDS[column]
        known = pa.nulls(count, kind) if value is None else pa.repeat(pa.scalar(value, kind), count)
        _kept[column, value] = known
    return known.slice(0, count)
