"""From rows of the outbox to messages as the session takes them, and from what a writer brings to such rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, repeat
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pyarrow as pa

from towline.delivery.receipts.mark import Content, unmarked
from towline.mqtt import fence
from towline.mqtt.message import LONGEST_EXPIRY, OutboundMessage
from towline.schema import ARRIVAL, MESSAGE_SCHEMA, OUTBOX_SCHEMA
from towline.timing import Stamp

#: Of a row: the last columns of `MESSAGE_SCHEMA`.
_NO_PROPERTIES: Final = (None,) * 6
#: What a pair costs in memory beside its text.
_PAIR_BYTES: Final = 100
#: Reason codes of a message that MQTT can't say: topic name invalid, packet too large, payload format invalid, QoS not
#: supported.
_TOPIC_INVALID, _TOO_LARGE, _FORMAT_INVALID, _QOS_INVALID = 0x90, 0x95, 0x99, 0x9B


class Outgoing(NamedTuple):
    """A message on its way out of the outbox.

    Attributes:
        size: Bytes of it in memory, about: payload, topic and properties.
        expiry_us: Microseconds after that; None for never.
        content: The message, or the reason code of what MQTT has no way to say.
    """

    number: int
    topic: str
    size: int
    arrived: Stamp
    expiry_us: int | None
    content: OutboundMessage | int


def arrived(rows: pa.RecordBatch, at: Stamp) -> pa.RecordBatch:
    """Rows of `MESSAGE_SCHEMA` as the outbox stores them, with the time of their arrival."""
    stamps = [pa.repeat(pa.scalar(v, field.type), rows.num_rows) for field, v in zip(ARRIVAL, at, strict=True)]
    return pa.RecordBatch.from_arrays([*rows.columns, *stamps], schema=OUTBOX_SCHEMA)


def rows_of(messages: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Messages as rows of `MESSAGE_SCHEMA`; a missing key is null."""
    return pa.RecordBatch.from_pylist(messages, schema=MESSAGE_SCHEMA)


def outgoing(
    rows: pa.RecordBatch,
    first: int,
    mark: Callable[[int, Content], Sequence[tuple[str, str]]] | None = None,
    *,
    again: bool = False,
) -> Iterator[Outgoing]:
    """Messages from rows of `OUTBOX_SCHEMA`, in order; `first` is the number of the first.

    `mark` makes of number and content user properties that are added to the message's own, in place of such as it has.
    What is sent `again` has no RETAIN, or an old value would take the place of a newer one.
    """
    columns, unreadable = _values(rows)
    # A cast of the first would load pyarrow.compute.
    stamps = (rows.column(name).view(pa.int64()).to_pylist() for name in ARRIVAL.names)
    arrivals = map(Stamp._make, zip(*([value or 0 for value in column] for column in stamps), strict=True))
    cells = zip(*(column or repeat(None) for column in columns), strict=False)
    for number, cell, arrival in zip(count(first), cells, arrivals, strict=False):
        topic, payload, qos, retain = cell[0] or "", cell[1] or b"", cell[2] or 0, bool(cell[3]) and not again
        size, expiry_us, reason = len(payload) + len(topic), None, unreadable.get(number - first)
        properties: dict[str, Any] = {}
        if mark is not None or cell[4:] != _NO_PROPERTIES:
            content_type, is_utf8, response_topic, correlation_data, users, expiry = cell[4:]
            pairs = [(pair["key"] or "", pair["value"] or "") for pair in users or () if pair]
            if users and None in users:
                reason = reason or _FORMAT_INVALID
            if mark is not None:
                own = unmarked(pairs)
                content = Content(topic, payload, content_type, bool(is_utf8), response_topic, correlation_data, own)
                pairs = [*own, *mark(number, content)]
            if expiry is not None:
                expiry = min(max(expiry, 0), LONGEST_EXPIRY)  # a column holds more than MQTT has a number for
                expiry_us = expiry * 1_000_000
            properties = {
                "payload_format_indicator": 1 if is_utf8 else 0,
                "message_expiry_interval": expiry,
                "content_type": content_type,
                "response_topic": response_topic,
                "correlation_data": correlation_data,
                "user_properties": pairs,
            }
            size += len(content_type or "") + len(response_topic or "") + len(correlation_data or b"")
            size += sum(_PAIR_BYTES + len(key) + len(value) for key, value in pairs)
        message = reason or message_of(topic, payload, qos, retain=retain, properties=properties)
        yield Outgoing(number, topic, size, arrival, expiry_us, message)


def _values(rows: pa.RecordBatch) -> tuple[list[list[Any] | None], dict[int, int]]:
    """The columns of the message as lists, None for an empty one; and place → reason of rows with text that is none.

    Arrow does not look whether a string is UTF-8, nor does Spark where bytes are cast to one.
    """
    columns: list[list[Any] | None] = []
    unreadable: dict[int, int] = {}
    for field, column in zip(MESSAGE_SCHEMA, rows.columns, strict=False):
        try:
            columns.append(column.to_pylist() if column.null_count < len(column) else None)
        except UnicodeDecodeError:
            columns.append([None] * len(column))
            for at, value in enumerate(column):
                try:
                    columns[-1][at] = value.as_py()  # type: ignore[index]
                except UnicodeDecodeError:
                    unreadable[at] = _TOPIC_INVALID if field.name == "topic" else _FORMAT_INVALID
    return columns, unreadable


def message_of(
    topic: str, payload: bytes, qos: int, *, retain: bool, properties: Mapping[str, Any] = MappingProxyType({})
) -> OutboundMessage | int:
    """A message with the `properties` of `OutboundMessage`, or the reason code of one that MQTT has no way to say."""
    if not topic:
        return _TOPIC_INVALID
    if qos not in {0, 1, 2}:
        return _QOS_INVALID
    try:
        return OutboundMessage(topic, payload, qos=qos, retain=retain, **properties)
    except fence.PacketTooLarge:
        return _TOO_LARGE
    except BaseException as error:  # whatever a row holds, it must not end the process that sends it
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or fence.is_panic(error)):
            raise  # nothing that the row is to blame for
        return _TOPIC_INVALID if any(c in topic for c in "+#\0") or len(topic) > 0x3FFF else _FORMAT_INVALID
