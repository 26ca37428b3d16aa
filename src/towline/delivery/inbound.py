"""Inbox writer: stores the messages of an MQTT session in the inbox, then lets the session acknowledge them.

It belongs to the pump's thread. Without free space a delivery waits here, in order, and stops further reads [I7]. Each
delivery becomes one record batch of `ROW_SCHEMA` (`to_rows`). Most messages have equal values in most columns, so a
constant column is a slice of a longer cached one: the cost of a chunk of ten messages is mostly that of its columns.
Most packets have no properties. Their topics and payloads are slices of the received bytes, without a Python object for
each message (`plain_run`): the running sum of all field lengths gives the offsets of one binary array over these bytes,
in which every fourth value is a topic and every fourth a payload.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, mul
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from towline.delivery.receipts.ledger import ReceiptLedger
from towline.delivery.receipts.mark import Mark, strip_mark
from towline.errors import JournalFull
from towline.guarantee import AckAfter
from towline.journal import Journal, max_frame_bytes
from towline.journal.segment import split_batch
from towline.mqtt.codec3 import DUPLICATE_OF_HEADER, QOS_OF_HEADER, RETAIN_OF_HEADER
from towline.mqtt.events import AckWatermark, Deliver, DeliveryStored, Event, Messages, UnreleasedMessage
from towline.mqtt.inbound import Inbound
from towline.mqtt.message import LARGE_PAYLOAD_BYTES
from towline.mqtt.plain import FIELD_COUNT, MessageColumns, PlainRun
from towline.mqtt.truncated import PACKET_TOO_LARGE, TOO_MANY_PROPERTIES, TruncatedMessage
from towline.schema import NO_ROWS, OPTIONAL_COLUMNS, ROW_SCHEMA

#: Seconds between two tries to write to a full journal.
_FULL_RETRY_S: Final = 0.5
#: Reason of a truncation → counter of the ledger.
TRUNCATION_COUNTERS: Final = {PACKET_TOO_LARGE: "packets_too_large", TOO_MANY_PROPERTIES: "too_many_properties"}


class _PendingFrame(NamedTuple):
    """Journal frame that is not written yet: rows, and the packet ids that are held or released with them."""

    rows: pa.RecordBatch
    held_ids: Mapping[int, UnreleasedMessage]
    released_ids: tuple[int, ...]
    #: Id of a delivery that ends with this frame; 0 if more of it follows.
    ticket: int
    #: Marks of publishers with receipts.
    marks: tuple[Mark, ...] = ()


class InboxWriter:
    """Writer of one session's deliveries to the inbox.

    Args:
        name: Name of the gateway, for rows and logs.
        acks: Step after which messages are acknowledged.
        least_qos: Messages with a lower QoS are counted: a publisher's QoS may be lower than the subscription's.
        handle_event: Passes an event to the session.
        on_rows: Called after rows were stored.
        on_full: Called with the error when there is no free space.
        receipt_ledger: State of the publishers with receipts; None without receipts.

    Attributes:
        received_count: Messages received over the journal's life, including deduplicated ones.
        acknowledged_count: Acknowledgements sent by this process in sessions before the current one.
        redelivered_count: Messages with DUP received by this process; they are stored all the same.
        retry_at: Time of the next try to store pending messages, on `time.monotonic`.
    """

    def __init__(
        self,
        inbox: Journal,
        *,
        name: str,
        acks: AckAfter,
        least_qos: int = 0,
        handle_event: Callable[[Event], None],
        on_rows: Callable[[], None],
        on_full: Callable[[JournalFull], None],
        receipt_ledger: ReceiptLedger | None = None,
    ) -> None:
        self._name, self._acks, self._least_qos = name, acks, least_qos
        self._inbox = inbox
        self._handle_event = handle_event
        self._on_rows = on_rows
        self._on_full = on_full
        self._receipt_ledger = receipt_ledger
        self._log = structlog.get_logger("towline.gateway").bind(line=name)
        #: Frames that are not stored yet, in order; more than one only without free space.
        self._pending_frames: deque[_PendingFrame] = deque()
        #: A larger chunk is stored in several frames; one packet is never split.
        self._max_frame_bytes = max_frame_bytes(inbox.limits.max_bytes)
        self.retry_at = 0.0
        self.acknowledged_count = self.redelivered_count = 0
        self.received_count = inbox.end + inbox.ledger.get("deduplicated", 0)

    @property
    def is_full(self) -> bool:
        """Whether frames wait for free space: no bytes may be read then, nor may a new session reuse their numbers."""
        return bool(self._pending_frames)

    def deliver(self, action: Deliver, inbound: Inbound) -> None:
        """Store a delivery, or queue it until there is free space."""
        if self._acks is AckAfter.RECEIVED:
            self.allow_acknowledgements(inbound, action.first_number + len(action.messages))
        now_us, strip_marks = time.time_ns() // 1000, self._receipt_ledger is not None
        batch = to_rows(action.messages, action.first_number, now_us, self._name, strip_marks=strip_marks)
        self.received_count += batch.num_rows
        self.redelivered_count += batch.column("duplicate").true_count
        levels = action.messages.headers.translate(QOS_OF_HEADER)
        if lower_qos_count := sum(map(levels.count, range(self._least_qos))):
            self._inbox.count(lower_qos=lower_qos_count)
        if batch.column("payload").null_count:
            truncated = (packet for packet in action.messages.packets if isinstance(packet, TruncatedMessage))
            self._inbox.count(**Counter(TRUNCATION_COUNTERS[packet.reason] for packet in truncated))
        self._pending_frames += _split_delivery(batch, action, self._max_frame_bytes)
        self.store_pending()

    def retry_when_due(self, now: float) -> None:
        """Store the pending frames, if it is time to try again."""
        if self._pending_frames and now >= self.retry_at:
            self.store_pending()

    def store_pending(self) -> None:
        """Append pending frames to the inbox, in order; each is durable before its acknowledgements are sent [I2]."""
        try:
            while self._pending_frames:
                frame = self._pending_frames[0]
                notes = {} if self._receipt_ledger is None else self._receipt_ledger.notes_for_frame(frame.marks)
                end = self._inbox.append(
                    frame.rows, held_ids=frame.held_ids, released_ids=frame.released_ids, notes=notes
                )
                self._pending_frames.popleft()
                if self._receipt_ledger is not None:
                    self._receipt_ledger.frame_stored(frame.marks, end)
                self._on_rows()
                if self._acks is AckAfter.JOURNAL:
                    self._handle_event(AckWatermark(end))
                if frame.ticket:
                    self._handle_event(DeliveryStored(frame.ticket))
        except JournalFull as error:
            self.retry_at = time.monotonic() + _FULL_RETRY_S
            self._on_full(error)

    def allow_acknowledgements(self, inbound: Inbound, offset: int) -> None:
        """Let the session acknowledge the messages below `offset` [I1]."""
        if offset > inbound.ack_watermark:
            self._handle_event(AckWatermark(offset))

    @property
    def pending_marks(self) -> list[Mark]:
        """Marks of the messages that wait for free space."""
        return [mark for frame in self._pending_frames for mark in frame.marks]

    def count_duplicates(self, inbound: Inbound, broker: str) -> None:
        """Add the session's duplicates and reused packet ids to the ledger of the inbox [I11]."""
        reused_count, inbound.reused_ids = inbound.reused_ids, 0
        self.acknowledged_count += inbound.acknowledged_count
        inbound.acknowledged_count = 0
        if duplicate_count := inbound.duplicates:
            self.received_count += duplicate_count
            self._inbox.count(deduplicated=duplicate_count)
            inbound.duplicates = 0
        if reused_count:
            self._inbox.count(packet_ids_reused=reused_count)
            event = "the broker reused QoS 2 packet ids before their release; stored as new messages"
            self._log.warning(event, code="TL-M24", broker=broker, count=reused_count)


def _split_delivery(rows: pa.RecordBatch, delivery: Deliver, max_bytes: int) -> list[_PendingFrame]:
    """Split a delivery into frames of at most `max_bytes` or one packet; each packet id stays with its row [I3]."""
    marks: Sequence[Mark | None] = delivery.messages.tags
    batches = split_batch(rows, rows.num_rows, max_bytes) if rows.num_rows else [rows]
    if len(batches) == 1:
        held, released, ticket = delivery.unreleased_messages, delivery.released_ids, delivery.delivery_id
        return [_PendingFrame(rows, held, released, ticket, tuple(filter(None, marks)))]
    frames, end_row = list[_PendingFrame](), 0
    for batch in batches:
        start_row, end_row = end_row, end_row + batch.num_rows
        offsets = range(delivery.first_number + start_row, delivery.first_number + end_row)
        held = {i: message for i, message in delivery.unreleased_messages.items() if message.number in offsets}
        ticket = delivery.delivery_id if end_row == rows.num_rows else 0
        released = () if start_row else delivery.released_ids
        frames.append(_PendingFrame(batch, held, released, ticket, tuple(filter(None, marks[start_row:end_row]))))
    return frames


_TIMESTAMP: Final = pa.timestamp("us", "UTC")
_COLUMN_TYPES: Final = {field.name: field.type for field in ROW_SCHEMA}
#: Column names with their constant values → the longest such columns so far; see `_constant_columns` for the bound.
_constant_column_cache: dict[tuple[tuple[str, Any], ...], list[pa.Array]] = {}
#: First byte of a PUBLISH → its flag columns.
_FLAGS_BY_HEADER: Final = tuple(
    (
        ("qos", QOS_OF_HEADER[header]),
        ("retain", bool(RETAIN_OF_HEADER[header])),
        ("duplicate", bool(DUPLICATE_OF_HEADER[header])),
    )
    for header in range(256)
)
_NULL_PROPERTIES: Final = tuple((name, None) for name in OPTIONAL_COLUMNS)
#: Fields of a packet: payload, and the columns of `OPTIONAL_COLUMNS`, in their order.
_PACKET_FIELDS: Final = attrgetter(
    "payload",
    "content_type",
    "payload_format_indicator",
    "response_topic",
    "correlation_data",
    "user_properties",
    "message_expiry_interval",
    "subscription_ids",
)
#: Absent values of a packet's fields, in the order of `OPTIONAL_COLUMNS`.
_ABSENT_VALUES: Final[tuple[Any, ...]] = (None, 0, None, None, [], None, [])
#: Column → converter of a packet's values, where they differ. Payload Format Indicator 1 is UTF-8 text; the codec
#: can't distinguish 0 from absent, so both are null. User properties keep order and repeats [MQTT-3.3.2-18].
_CELL_CONVERTERS: Final[dict[str, Callable[[Sequence[Any]], list[Any]]]] = {
    "payload_is_utf8": lambda values: [value == 1 or None for value in values],
    "user_properties": lambda values: [[{"key": k, "value": v} for k, v in pairs] or None for pairs in values],
    "subscription_ids": lambda values: [value or None for value in values],
}


def to_rows(
    messages: Messages, first_offset: int, received_at_us: int, gateway: str, *, strip_marks: bool = False
) -> pa.RecordBatch:
    """Return one row per message, in order, from offset `first_offset` on; all were received in one chunk, at one time.

    With `strip_marks`, rows omit the marks of publishers with receipts. A mark identifies a message on this hop only: a
    forwarded copy with the mark would be taken for a repeat.
    """
    headers = messages.headers
    count = len(headers)
    if not count:  # a chunk of PUBRELs: every other one at a low rate
        return NO_ROWS
    plain_columns = [run.columns for run in messages.runs if isinstance(run, PlainRun)]
    if len(plain_columns) == len(messages.runs):
        topics, payloads, properties = _plain_columns(plain_columns, count)
    else:
        topics, payloads, properties = _packet_columns(messages, count, strip_marks=strip_marks)
    constant_flags = _FLAGS_BY_HEADER[headers[0]] if headers.count(headers[0]) == count else ()
    *flags, gateways = _constant_columns((*constant_flags, ("gateway", gateway)), count)
    offsets = pa.py_buffer(array("q", range(first_offset, first_offset + count)))
    columns = [
        topics,
        payloads,
        *(flags or _flag_columns(headers)),
        *properties,
        pa.repeat(pa.scalar(received_at_us, _TIMESTAMP), count),
        gateways,
        pa.Array.from_buffers(pa.int64(), count, [None, offsets]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)


#: Topics, payloads, and the columns of `OPTIONAL_COLUMNS`.
_MessageColumns: TypeAlias = tuple[pa.Array, pa.Array, Sequence[pa.Array]]


def _plain_columns(columns: Sequence[MessageColumns], count: int) -> _MessageColumns:
    """Return the columns of messages without properties; Arrow columns are used without a copy."""
    arrow_columns = [run for run in columns if isinstance(run, ArrowColumns)]
    if len(arrow_columns) == len(columns):
        topics = _join_arrays([run.topic for run in arrow_columns])
        payloads = _join_arrays([run.payload for run in arrow_columns])
    else:
        topics = pa.array([topic for run in columns for topic in run.topics()], pa.string())
        payloads = pa.array([payload for run in columns for payload in run.payloads()], pa.binary())
    return topics, payloads, _constant_columns(_NULL_PROPERTIES, count)


def _join_arrays(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _packet_columns(messages: Messages, count: int, *, strip_marks: bool) -> _MessageColumns:
    payloads, *field_values = zip(*map(_PACKET_FIELDS, messages.packets), strict=True)
    if strip_marks:
        field_values[4] = tuple(map(strip_mark, field_values[4]))
    absent_counts = list(map(tuple.count, field_values, _ABSENT_VALUES))
    if absent_counts == [count] * len(field_values):
        properties = _constant_columns(_NULL_PROPERTIES, count)
    else:
        properties = list(map(_optional_column, OPTIONAL_COLUMNS, field_values, absent_counts))
    return _column_of(messages.topics, "topic"), _payload_column(payloads), properties


def _optional_column(column: str, values: Sequence[Any], absent_count: int) -> pa.Array:
    """Return one column of `OPTIONAL_COLUMNS`, of whose values `absent_count` are absent."""
    if absent_count == len(values):
        return _constant_columns(((column, None),), absent_count)[0]
    return pa.array(_CELL_CONVERTERS[column](values) if column in _CELL_CONVERTERS else values, _COLUMN_TYPES[column])


def _column_of(values: Sequence[Any], column: str) -> pa.Array:
    """Return values as a column; a single value avoids Arrow's search for pandas, which costs more than the column."""
    column_type = _COLUMN_TYPES[column]
    return pa.repeat(pa.scalar(values[0], column_type), 1) if len(values) == 1 else pa.array(values, column_type)


def _payload_column(values: Sequence[bytes | None]) -> pa.Array:
    """Return the payload column: a single large payload without a copy; None for a truncated message."""
    only_payload = values[0] if len(values) == 1 else None
    if only_payload is not None and len(only_payload) >= LARGE_PAYLOAD_BYTES:
        ends = pa.py_buffer(array("i", (0, len(only_payload))))
        return pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(only_payload)])
    return _column_of(values, "payload")


def _flag_columns(headers: bytes) -> list[pa.Array]:
    """Return the columns QoS, RETAIN and DUP of messages with different flags."""
    levels = pa.Array.from_buffers(pa.int8(), len(headers), [None, pa.py_buffer(headers.translate(QOS_OF_HEADER))])
    flags = (headers.translate(RETAIN_OF_HEADER), headers.translate(DUPLICATE_OF_HEADER))
    return [levels, *(pa.array([flag == 1 for flag in each], pa.bool_()) for each in flags)]


def _constant_columns(values: tuple[tuple[str, Any], ...], count: int) -> list[pa.Array]:
    """Return columns with `count` times the same value, None for null.

    The cache is bounded by the largest chunk and by the values: those of this process, and 256 first bytes.
    """
    columns = _constant_column_cache.get(values)
    if columns is None or len(columns[0]) < count:
        types = [(_COLUMN_TYPES[name], value) for name, value in values]
        columns = [pa.nulls(count, k) if v is None else pa.repeat(pa.scalar(v, k), count) for k, v in types]
        _constant_column_cache[values] = columns
    return columns if len(columns[0]) == count else [column.slice(0, count) for column in columns]


#: A shorter run costs less packet by packet: the calls into Arrow take 50 us together.
_MIN_RUN_PACKETS: Final = 50
#: Offsets are 32-bit numbers.
_MAX_BUFFER_BYTES: Final = 1 << 30
#: Indexes of the four fields.
_LEAD, _TOPIC, _MIDDLE, _PAYLOAD = range(FIELD_COUNT)
#: Arrow infers the type of a bare Python number, and looks for pandas each time: 35 us.
_INT32_ONE: Final = pa.scalar(1, pa.int32())
#: 1 for each QoS with packet ids.
_HAS_PACKET_ID: Final = bytes((0, 1, 1)) + bytes(253)
#: Indexes of one field among the fields of many packets; replaced by a longer array when too short.
_field_index_cache: dict[int, Any] = {}


@dataclass(frozen=True, slots=True)
class ArrowColumns:
    """Topics and payloads of a run of packets as Arrow arrays.

    Attributes:
        topic: ``pyarrow.StringArray``.
        payload: ``pyarrow.BinaryArray``.
    """

    topic: Any
    payload: Any

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return int(self.topic.nbytes + self.payload.nbytes)

    def topics(self) -> list[str]:
        """Return the topic of each message."""
        encoded = self.topic.dictionary_encode()  # one str per topic, not per message
        names: list[str] = encoded.dictionary.to_pylist()
        return list(map(names.__getitem__, encoded.indices.to_pylist()))

    def payloads(self) -> list[bytes]:
        """Return the payload of each message."""
        payloads: list[bytes] = self.payload.to_pylist()
        return payloads


def plain_run(
    buffer: bytes, position: int, fields: Sequence[bytes], *, properties: bool, min_packets: int = _MIN_RUN_PACKETS
) -> tuple[PlainRun, int] | None:
    """Return the longest run of valid packets, as `towline.mqtt.plain.PlainReader`; None below `min_packets`."""
    while len(fields) >= min_packets and len(buffer) <= _MAX_BUFFER_BYTES:
        packet_fields = _PacketFields(buffer, position, fields, properties=properties)
        valid_count = min(packet_fields.count_without_properties(), packet_fields.count_with_valid_ids())
        if valid_count == len(fields):
            valid_count = _count_valid_topics(topics := packet_fields.field_values(_TOPIC))
            if valid_count == len(fields):
                topics = topics.view(pa.string())  # no cast: it is UTF-8
                columns = ArrowColumns(topics, packet_fields.field_values(_PAYLOAD))
                return PlainRun(packet_fields.headers, packet_fields.ids, columns), packet_fields.end
        fields = fields[:valid_count]
    return None


class _PacketFields:
    """Fields of several packets as slices of the received bytes."""

    def __init__(self, buffer: bytes, position: int, fields: Sequence[bytes], *, properties: bool) -> None:
        count, data = FIELD_COUNT * len(fields), pa.py_buffer(buffer)
        lengths = pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(b"".join(fields))])
        start = pa.array([position], pa.int32())
        self._bounds = pa.concat_arrays([start, pc.cumulative_sum(lengths, start=pa.scalar(position, pa.int32()))])
        self._bytes = pa.Array.from_buffers(pa.uint8(), len(buffer), [None, data])
        self._cells = pa.Array.from_buffers(pa.binary(), count, [None, self._bounds.buffers()[1], data])
        self._count = len(fields)
        #: Position after the last packet.
        self.end: int = self._bounds[count].as_py()
        #: First byte of each packet.
        self.headers = self._bytes_at(self._field_starts(_LEAD))
        self._levels = self.headers.translate(QOS_OF_HEADER)
        high, low, self._lengths = self._middle_fields(properties=properties)
        pairs = bytearray(2 * self._count)
        pairs[sys.byteorder == "little" :: 2] = high
        pairs[sys.byteorder != "little" :: 2] = low
        #: Packet id of each; 0 for QoS 0.
        self.ids = array("H", bytes(pairs))

    def field_values(self, field_index: int) -> Any:
        """Return one field of every packet."""
        return self._cells.take(self._field_indexes(field_index))

    def count_without_properties(self) -> int:
        """Return the number of leading packets with property length 0."""
        return self._count - len(self._lengths.lstrip(b"\0"))

    def count_with_valid_ids(self) -> int:
        """Return the number of leading packets with a valid packet id, or with QoS 0."""
        if all(self.ids):
            return self._count
        pairs = enumerate(zip(self._levels, self.ids, strict=True))
        return next((at for at, (level, packet_id) in pairs if level and not packet_id), self._count)

    def _middle_fields(self, *, properties: bool) -> tuple[bytes, bytes, bytes]:
        """Return both bytes of the packet ids (0 for QoS 0) and the property lengths, which follow the topics."""
        if 0 not in self._levels:  # all have equal lengths
            fields: bytes = self.field_values(_MIDDLE).buffers()[2].to_pybytes()
            size = 2 + properties
            fields = fields[: size * self._count]
            return fields[::size], fields[1::size], fields[2::size] if properties else b""
        # A packet of QoS 0 has no id, and at the very end no bytes follow.
        starts = pc.min_element_wise(self._field_starts(_MIDDLE), pa.scalar(len(self._bytes) - 2, pa.int32()))
        has_id = self._levels.translate(_HAS_PACKET_ID)
        high, low = (bytes(map(mul, has_id, self._bytes_at(at))) for at in (starts, pc.add(starts, _INT32_ONE)))
        return high, low, self._bytes_at(pc.subtract(self._field_starts(_PAYLOAD), _INT32_ONE)) if properties else b""

    def _field_indexes(self, field_index: int) -> Any:
        indexes = _field_index_cache.get(field_index)
        if indexes is None or len(indexes) < self._count:
            all_indexes = range(field_index, 2 * FIELD_COUNT * self._count, FIELD_COUNT)
            indexes = _field_index_cache[field_index] = pa.array(array("i", all_indexes), pa.int32())
        return indexes.slice(0, self._count)

    def _field_starts(self, field_index: int) -> Any:
        return self._bounds.take(self._field_indexes(field_index))

    def _bytes_at(self, positions: Any) -> bytes:
        values: bytes = self._bytes.take(positions).buffers()[1].to_pybytes()
        return values[: self._count]


def _count_valid_topics(topics: Any) -> int:
    """Return the number of leading topics that are valid [MQTT-1.5.4-1, -2, MQTT-3.3.2-2]."""
    invalid_topics = [topic for topic in topics.unique().to_pylist() if not _is_valid_topic(topic)]
    return min((topics.index(pa.scalar(topic, pa.binary())).as_py() for topic in invalid_topics), default=len(topics))


def _is_valid_topic(topic: bytes) -> bool:
    try:
        text = topic.decode()
    except UnicodeDecodeError:
        return False
    return not ("\0" in text or "#" in text or "+" in text)
