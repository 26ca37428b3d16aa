"""Conversion between rows of the outbox and messages of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, repeat
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pyarrow as pa

from towline.delivery.receipts.mark import Content, strip_mark
from towline.mqtt import checks
from towline.mqtt.message import MAX_EXPIRY_S, OutboundMessage
from towline.schema import ARRIVAL_SCHEMA, MESSAGE_SCHEMA, OUTBOX_SCHEMA
from towline.timing import Timestamp

#: Null values of the last columns of `MESSAGE_SCHEMA`.
_NO_PROPERTIES: Final = (None,) * 6
#: Memory of a pair beside its text.
_PAIR_BYTES: Final = 100
#: Reason codes of a row that MQTT can't express.
_TOPIC_INVALID, _TOO_LARGE, _FORMAT_INVALID, _QOS_INVALID = 0x90, 0x95, 0x99, 0x9B


class OutgoingMessage(NamedTuple):
    """Message of the outbox, ready to send.

    Attributes:
        number: Number of its row.
        size: Approximate bytes in memory: payload, topic and properties.
        arrived_at: Time of its arrival in the outbox.
        expiry_us: Microseconds from arrival to expiry; None for never.
        content_or_reason: The message, or the reason code of a row that MQTT can't express.
    """

    number: int
    topic: str
    size: int
    arrived_at: Timestamp
    expiry_us: int | None
    content_or_reason: OutboundMessage | int


def add_arrival(rows: pa.RecordBatch, arrival: Timestamp) -> pa.RecordBatch:
    """Return rows of `MESSAGE_SCHEMA` as rows of `OUTBOX_SCHEMA`, with their arrival time."""
    scalars = map(pa.scalar, arrival, ARRIVAL_SCHEMA.types)
    stamps = [pa.repeat(scalar, rows.num_rows) for scalar in scalars]
    return pa.RecordBatch.from_arrays([*rows.columns, *stamps], schema=OUTBOX_SCHEMA)


def rows_from_messages(messages: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Return messages as rows of `MESSAGE_SCHEMA`; a missing key is null."""
    return pa.RecordBatch.from_pylist(messages, schema=MESSAGE_SCHEMA)


def outgoing_messages(
    rows: pa.RecordBatch,
    first_number: int,
    mark: Callable[[int, Content], Sequence[tuple[str, str]]] | None = None,
    *,
    is_resent: bool = False,
) -> Iterator[OutgoingMessage]:
    """Yield messages from rows of `OUTBOX_SCHEMA`, in order; `first_number` is the number of the first.

    `mark` returns, for number and content, user properties that replace those of the same name. A message that
    `is_resent` has no RETAIN, or an old value would replace a newer one.
    """
    columns, invalid_rows = _column_values(rows)
    # A cast of the first column would load pyarrow.compute.
    stamps = (rows.column(name).view(pa.int64()).to_pylist() for name in ARRIVAL_SCHEMA.names)
    arrivals = map(Timestamp._make, zip(*([value or 0 for value in column] for column in stamps), strict=True))
    rows_of_cells = zip(*(column or repeat(None) for column in columns), strict=False)
    for number, cell, arrival in zip(count(first_number), rows_of_cells, arrivals, strict=False):
        topic, payload, qos, retain = cell[0] or "", cell[1] or b"", cell[2] or 0, bool(cell[3]) and not is_resent
        size, expiry_us, reason = len(payload) + len(topic), None, invalid_rows.get(number - first_number)
        properties: dict[str, Any] = {}
        if mark is not None or cell[4:] != _NO_PROPERTIES:
            content_type, is_utf8, response_topic, correlation_data, user_properties, expiry = cell[4:]
            pairs = [(pair["key"] or "", pair["value"] or "") for pair in user_properties or () if pair]
            if user_properties and None in user_properties:
                reason = reason or _FORMAT_INVALID
            if mark is not None:
                pairs = strip_mark(pairs)
                content = Content(topic, payload, content_type, bool(is_utf8), response_topic, correlation_data, pairs)
                pairs = [*pairs, *mark(number, content)]
            if expiry is not None:
                expiry = min(max(expiry, 0), MAX_EXPIRY_S)  # the column's type holds larger values than MQTT
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
        content_or_reason = reason or build_message(topic, payload, qos, retain=retain, properties=properties)
        yield OutgoingMessage(number, topic, size, arrival, expiry_us, content_or_reason)


def _column_values(rows: pa.RecordBatch) -> tuple[list[list[Any] | None], dict[int, int]]:
    """Return the message columns as lists, None for an empty one; and the reason codes of rows with invalid UTF-8."""
    columns: list[list[Any] | None] = []
    invalid_rows: dict[int, int] = {}
    for field, column in zip(MESSAGE_SCHEMA, rows.columns, strict=False):
        try:
            columns.append(column.to_pylist() if column.null_count < len(column) else None)
        except UnicodeDecodeError:  # neither Arrow nor Spark's cast of bytes to a string validates UTF-8
            columns.append([None] * len(column))
            for row_index, value in enumerate(column):
                try:
                    columns[-1][row_index] = value.as_py()  # type: ignore[index]
                except UnicodeDecodeError:
                    invalid_rows[row_index] = _TOPIC_INVALID if field.name == "topic" else _FORMAT_INVALID
    return columns, invalid_rows


def build_message(
    topic: str, payload: bytes, qos: int, *, retain: bool, properties: Mapping[str, Any] = MappingProxyType({})
) -> OutboundMessage | int:
    """Return a message with the `properties` of `OutboundMessage`, or the reason code of a row MQTT can't express."""
    if not topic:
        return _TOPIC_INVALID
    if qos not in {0, 1, 2}:
        return _QOS_INVALID
    try:
        return OutboundMessage(topic, payload, qos=qos, retain=retain, **properties)
    except checks.PacketTooLarge:
        return _TOO_LARGE
    except BaseException as error:  # no content of a row may end the sending process
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or checks.is_panic(error)):
            raise  # not the row's fault
        return _TOPIC_INVALID if any(c in topic for c in "+#\0") or len(topic) > 0x3FFF else _FORMAT_INVALID
