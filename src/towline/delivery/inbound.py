"""The uplink: brings what the session delivers into the inbox, and tells the session when it is safe.

It belongs to the pump's thread. A delivery that finds no room waits here, in order, and holds the reading back [I7].
What is delivered becomes one record batch of `ROW_SCHEMA` (`to_rows`). Most messages are alike in most columns, so a
column of one value is cut off a longer one that is kept: what a chunk of ten messages costs is mostly the making of
columns. Of packets without properties, which come by the thousand, topics and payloads are cut out of the received
bytes, without a Python object for a message: the lengths of all fields, summed up, are the boundaries of one binary
array over the bytes as they came, of which every fourth cell is a topic, every fourth a payload (`plain_run`).
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

from towline.delivery.receipts.ledger import Ledger
from towline.delivery.receipts.mark import Mark, unmarked
from towline.errors import JournalFull
from towline.guarantee import AckAfter
from towline.journal import Journal, largest_frame
from towline.journal.segment import cut
from towline.mqtt.codec3 import DUPLICATE_OF, QOS_OF, RETAIN_OF
from towline.mqtt.events import Deliver, Event, Held, Messages, Settled, Stored
from towline.mqtt.inbound import Inbound
from towline.mqtt.message import LARGE
from towline.mqtt.plain import FIELDS, MessageColumns, PlainRun
from towline.mqtt.stubs import TOO_LARGE, TOO_MANY, Stub
from towline.schema import NO_ROWS, OPTIONAL, ROW_SCHEMA

#: How often a full journal is tried again, in seconds.
_ROOM_RETRY: Final = 0.5
#: Messages that were not taken in whole are reported once in so many seconds: anybody may send ten thousand of them.
_REPORT_EVERY: Final = 60.0
#: Characters of a topic in the log; a device chose them, so they are escaped there [I13].
_SHOWN: Final = 200
#: Why there is only a stub → the counter in the ledger.
COUNTERS: Final = {TOO_LARGE: "packets_too_large", TOO_MANY: "too_many_properties"}


class _Unstored(NamedTuple):
    """One frame to be: rows with the packet ids that come and go with them."""

    rows: pa.RecordBatch
    held: Mapping[int, Held]
    released: tuple[int, ...]
    #: Of the delivery that is whole with this frame; 0 while more of it follows.
    ticket: int
    #: Of publishers that want receipts.
    marks: tuple[Mark, ...] = ()


class Uplink:
    """Stores one session's deliveries.

    Args:
        name: The gateway's, as rows and log have it.
        max_packet_bytes: Largest packet that is taken in whole, as the log names it.
        least_qos: Messages with less are counted: a publisher's QoS may be lower than the subscription's.
        note: Called when there is no room.
        ledger: Of the publishers that want receipts; None when nobody gets any.

    Attributes:
        received: Messages received over the journal's life, those included that were not stored.
        acknowledged: Of this process, acknowledgements that left in sessions before the one in use.
        redelivered: Of this process, messages that the broker said to have sent before (DUP), stored all the same.
        room_at: When a full inbox is tried again, on `time.monotonic`.
    """

    def __init__(
        self,
        inbox: Journal,
        *,
        name: str,
        acks: AckAfter,
        max_packet_bytes: int,
        least_qos: int = 0,
        handle: Callable[[Event], None],
        on_rows: Callable[[], None],
        note: Callable[[JournalFull], None],
        ledger: Ledger | None = None,
    ) -> None:
        self._name, self._acks, self._max_packet_bytes, self._least_qos = name, acks, max_packet_bytes, least_qos
        self._inbox = inbox
        self._handle = handle
        self._on_rows = on_rows
        self._note = note
        self._ledger = ledger
        self._log = structlog.get_logger("towline.gateway").bind(line=name)
        #: What is not stored yet, in order; longer than one only while there is no room.
        self._waiting: deque[_Unstored] = deque()
        #: A larger chunk is stored in several frames; one packet is never parted.
        self._frame_bytes = largest_frame(inbox.limits.max_bytes)
        self.room_at = 0.0
        #: Stubs that no line of the log has reported, by their counter, and when the next may.
        self._unreported: Counter[str] = Counter()
        self._report_at = 0.0
        self.acknowledged = self.redelivered = 0
        self.received = inbox.end + inbox.ledger.get("deduplicated", 0)

    @property
    def full(self) -> bool:
        """Rows wait for room: nothing may be read, and no session renewed, whose numbers would be theirs."""
        return bool(self._waiting)

    def expect(self, least_qos: int) -> None:
        """Count messages with less than this QoS from now on: other filters are subscribed."""
        self._least_qos = least_qos

    def deliver(self, action: Deliver, inbound: Inbound) -> None:
        """Store a delivery, or keep it until there is room."""
        if self._acks is AckAfter.RECEIVED:
            self.settle(inbound, action.first + len(action.messages))
        batch = to_rows(
            action.messages,
            action.first,
            time.time_ns() // 1000,
            self._name,
            strip_marks=self._ledger is not None,
        )
        self.received += batch.num_rows
        self.redelivered += batch.column("duplicate").true_count
        if lower := below(action.messages, self._least_qos):
            self._inbox.count(lower_qos=lower)
        if batch.column("payload").null_count:
            self._count_stubs(action.messages)
        self._waiting += _frames(batch, action, self._frame_bytes)
        self.store()

    def _count_stubs(self, messages: Messages) -> None:
        """Count what was not taken in whole, and say so once in a while."""
        stubs = Counter(COUNTERS[p.reason] for p in messages.packets if isinstance(p, Stub))
        self._inbox.count(**stubs)
        self._unreported += stubs
        now = time.monotonic()
        if now < self._report_at:
            return
        self._report_at = now + _REPORT_EVERY
        topic = next(t for p, t in zip(messages.packets, messages.topics, strict=True) if isinstance(p, Stub))
        what = "messages not taken in whole; each is stored as a row without payload"
        self._log.warning(
            what, code="TL-M42", topic=repr(topic[:_SHOWN]), limit=self._max_packet_bytes, **self._unreported
        )
        self._unreported.clear()

    def find_room(self, now: float) -> None:
        """Try again what found no room."""
        if self._waiting and now >= self.room_at:
            self.store()

    def store(self) -> None:
        """Append what waits, in order; each batch is durable before its acknowledgements leave [I2]."""
        try:
            while self._waiting:
                frame = self._waiting[0]
                notes = {} if self._ledger is None else self._ledger.storing(frame.marks)
                end = self._inbox.append(frame.rows, held=frame.held, released=frame.released, notes=notes)
                self._waiting.popleft()
                if self._ledger is not None:
                    self._ledger.stored(frame.marks, end)
                self._on_rows()
                if self._acks is AckAfter.JOURNAL:
                    self._handle(Settled(end))
                if frame.ticket:
                    self._handle(Stored(frame.ticket))
        except JournalFull as error:
            self.room_at = time.monotonic() + _ROOM_RETRY
            self._note(error)

    def settle(self, inbound: Inbound, upto: int) -> None:
        """Tell the session that messages below `upto` are as safe as their acknowledgement promises [I1]."""
        if upto > inbound.settled:
            self._handle(Settled(upto))

    @property
    def waiting_marks(self) -> list[Mark]:
        """Of the messages that wait for room."""
        return [mark for frame in self._waiting for mark in frame.marks]

    def count_repeats(self, inbound: Inbound, where: str) -> None:
        """Carry what the session did not have stored, and what it saw of the broker's faults, into the ledger [I11]."""
        reused, inbound.reused_ids = inbound.reused_ids, 0
        self.acknowledged += inbound.acknowledged
        inbound.acknowledged = 0
        if repeats := inbound.repeats:
            self.received += repeats
            self._inbox.count(deduplicated=repeats)
            inbound.repeats = 0
        if reused:
            self._inbox.count(packet_ids_reused=reused)
            what = "the broker used QoS 2 packet ids again before we released them; stored as new messages"
            self._log.warning(what, code="TL-M24", broker=where, count=reused)


def _frames(rows: pa.RecordBatch, delivery: Deliver, most: int) -> list[_Unstored]:
    """Part a delivery into frames of at most `most` bytes or one packet; each packet id stays with its row [I3]."""
    marks: Sequence[Mark | None] = delivery.messages.tags
    parts = cut(rows, rows.num_rows, most) if rows.num_rows else [rows]
    if len(parts) == 1:
        return [_Unstored(rows, delivery.held, delivery.released, delivery.ticket, tuple(filter(None, marks)))]
    frames, at = list[_Unstored](), 0
    for part in parts:
        start, at = at, at + part.num_rows
        first, last = delivery.first + start, delivery.first + at
        held = {packet_id: entry for packet_id, entry in delivery.held.items() if first <= entry.number < last}
        ticket = delivery.ticket if at == rows.num_rows else 0
        released = () if start else delivery.released
        frames.append(_Unstored(part, held, released, ticket, tuple(filter(None, marks[start:at]))))
    return frames


_MOMENT: Final = pa.timestamp("us", "UTC")
_KINDS: Final = {field.name: field.type for field in ROW_SCHEMA}
#: Names of columns, each with the one value in it → the longest such columns so far; few are kept, see `_alike`.
_kept: dict[tuple[tuple[str, Any], ...], list[pa.Array]] = {}
#: First byte of a PUBLISH → the columns that it says.
_FLAGS: Final = tuple(
    (("qos", QOS_OF[header]), ("retain", bool(RETAIN_OF[header])), ("duplicate", bool(DUPLICATE_OF[header])))
    for header in range(256)
)
_NO_PROPERTIES: Final = tuple((name, None) for name in OPTIONAL)
#: Of a packet its payload, and what stands in the columns of `OPTIONAL`, in their order.
_FIELDS_OF: Final = attrgetter(
    "payload",
    "content_type",
    "payload_format_indicator",
    "response_topic",
    "correlation_data",
    "user_properties",
    "message_expiry_interval",
    "subscription_ids",
)
#: What stands in the attribute of a packet when nothing is said, in the order of `OPTIONAL`.
_NOTHING: Final[tuple[Any, ...]] = (None, 0, None, None, [], None, [])
#: Column → its cells from what packets say, where that is not the same. Payload Format Indicator 1 is UTF-8
#: text; the codec can't tell 0 from absent, so both are null. Order and repetition of user properties are kept
#: [MQTT-3.3.2-18].
_CELLS: Final[dict[str, Callable[[Sequence[Any]], list[Any]]]] = {
    "payload_is_utf8": lambda values: [value == 1 or None for value in values],
    "user_properties": lambda values: [[{"key": k, "value": v} for k, v in pairs] or None for pairs in values],
    "subscription_ids": lambda values: [value or None for value in values],
}


def below(messages: Messages, least: int) -> int:
    """How many came with a lower QoS than `least`."""
    levels = messages.headers.translate(QOS_OF)
    return sum(map(levels.count, range(least)))


def to_rows(
    messages: Messages, first: int, received_at_us: int, gateway: str, *, strip_marks: bool = False
) -> pa.RecordBatch:
    """One row a message, in order, from offset `first` on; all arrived in one chunk, at the same time.

    With `strip_marks` without the marks of publishers that want receipts: they name a message on this hop alone, and
    a copy that carries them further would be taken for a repeat.
    """
    headers = messages.headers
    count = len(headers)
    if not count:  # a chunk of PUBRELs: of few messages every other one is
        return NO_ROWS
    plain = [run.columns for run in messages.runs if isinstance(run, PlainRun)]
    topics, payloads, properties = (
        _plain(plain, count) if len(plain) == len(messages.runs) else _said(messages, count, strip_marks=strip_marks)
    )
    same = _FLAGS[headers[0]] if headers.count(headers[0]) == count else ()
    *flags, source = _alike((*same, ("gateway", gateway)), count)
    columns = [
        topics,
        payloads,
        *(flags or _flags(headers)),
        *properties,
        pa.repeat(pa.scalar(received_at_us, _MOMENT), count),
        source,
        pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(array("q", range(first, first + count)))]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)


#: Topics, payloads, and the columns of `OPTIONAL`.
_Said: TypeAlias = tuple[pa.Array, pa.Array, Sequence[pa.Array]]


def _plain(columns: Sequence[MessageColumns], count: int) -> _Said:
    """Of messages without properties; as they were cut out where they came so."""
    cut = [one for one in columns if isinstance(one, ArrowColumns)]
    if len(cut) == len(columns):
        topics, payloads = _joined([one.topic for one in cut]), _joined([one.payload for one in cut])
    else:
        topics = pa.array([topic for one in columns for topic in one.topics()], pa.string())
        payloads = pa.array([payload for one in columns for payload in one.payloads()], pa.binary())
    return topics, payloads, _alike(_NO_PROPERTIES, count)


def _joined(parts: list[pa.Array]) -> pa.Array:
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _said(messages: Messages, count: int, *, strip_marks: bool) -> _Said:
    payloads, *said = zip(*map(_FIELDS_OF, messages.packets), strict=True)
    if strip_marks:
        said[4] = tuple(map(unmarked, said[4]))
    empty = list(map(tuple.count, said, _NOTHING))
    if empty == [count] * len(said):
        properties = _alike(_NO_PROPERTIES, count)
    else:
        properties = list(map(_optional, OPTIONAL, said, empty))
    return _array(messages.topics, "topic"), _payloads(payloads), properties


def _optional(column: str, values: Sequence[Any], empty: int) -> pa.Array:
    """One of the columns of `OPTIONAL`, of which so many values say nothing."""
    if empty == len(values):
        return _alike(((column, None),), empty)[0]
    return pa.array(_CELLS[column](values) if column in _CELLS else values, _KINDS[column])


def _array(values: Sequence[Any], column: str) -> pa.Array:
    """Values as a column; for one of them Arrow need not look for pandas, which costs more than the column."""
    kind = _KINDS[column]
    return pa.repeat(pa.scalar(values[0], kind), 1) if len(values) == 1 else pa.array(values, kind)


def _payloads(values: Sequence[bytes | None]) -> pa.Array:
    """A large message mostly comes alone, and is used where it lies instead of copied; None is a stub's."""
    alone = values[0] if len(values) == 1 else None
    if alone is not None and len(alone) >= LARGE:
        ends = pa.py_buffer(array("i", (0, len(alone))))
        return pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(alone)])
    return _array(values, "payload")


def _flags(headers: bytes) -> list[pa.Array]:
    """QoS, RETAIN and DUP of messages of which not all are alike."""
    levels = pa.Array.from_buffers(pa.int8(), len(headers), [None, pa.py_buffer(headers.translate(QOS_OF))])
    flags = (headers.translate(RETAIN_OF), headers.translate(DUPLICATE_OF))
    return [levels, *(pa.array([flag == 1 for flag in each], pa.bool_()) for each in flags)]


def _alike(values: tuple[tuple[str, Any], ...], count: int) -> list[pa.Array]:
    """So many rows of columns of one value, None for null.

    What is kept is bounded: by the largest chunk, and by the values, which are the process's own and those of a first
    byte.
    """
    columns = _kept.get(values)
    if columns is None or len(columns[0]) < count:
        kinds = [(_KINDS[name], value) for name, value in values]
        columns = [pa.nulls(count, k) if v is None else pa.repeat(pa.scalar(v, k), count) for k, v in kinds]
        _kept[values] = columns
    return columns if len(columns[0]) == count else [column.slice(0, count) for column in columns]


#: A shorter run costs less packet by packet: the calls into Arrow take 50 us together.
_WORTH: Final = 50
#: Boundaries are 32-bit numbers.
_MOST_BYTES: Final = 1 << 30
#: Of the four fields.
_LEAD, _TOPIC, _MIDDLE, _PAYLOAD = range(FIELDS)
#: Arrow guesses the type of a bare Python number, and looks for pandas each time: 35 us.
_ONE: Final = pa.scalar(1, pa.int32())
#: 1 for each QoS that has packet ids.
_ONES: Final = bytes((0, 1, 1)) + bytes(253)
#: Places of one field among the fields of many packets; replaced by a longer array when it is too short.
_places: dict[int, Any] = {}


@dataclass(frozen=True, slots=True)
class ArrowColumns:
    """Topics and payloads of a run.

    Attributes:
        topic: ``pyarrow.StringArray``.
        payload: ``pyarrow.BinaryArray``.
    """

    topic: Any
    payload: Any

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        return int(self.topic.nbytes + self.payload.nbytes)

    def topics(self) -> list[str]:
        """The topic of each."""
        encoded = self.topic.dictionary_encode()  # a text for each topic, not for each message
        names: list[str] = encoded.dictionary.to_pylist()
        return list(map(names.__getitem__, encoded.indices.to_pylist()))

    def payloads(self) -> list[bytes]:
        """The payload of each."""
        payloads: list[bytes] = self.payload.to_pylist()
        return payloads


def plain_run(
    buffer: bytes, position: int, fields: Sequence[bytes], *, properties: bool, worth: int = _WORTH
) -> tuple[PlainRun, int] | None:
    """The longest run of sound packets, as `towline.mqtt.plain.PlainReader` says; None below `worth` packets."""
    while len(fields) >= worth and len(buffer) <= _MOST_BYTES:
        cut = _Cut(buffer, position, fields, properties=properties)
        sound = min(cut.without_properties(), cut.with_ids())
        if sound == len(fields):
            sound = _sound_topics(topic := cut.field(_TOPIC))
            if sound == len(fields):
                columns = ArrowColumns(topic.view(pa.string()), cut.field(_PAYLOAD))  # no cast: it is UTF-8
                return PlainRun(cut.headers, cut.ids, columns), cut.end
        fields = fields[:sound]
    return None


class _Cut:
    """The fields of some packets, where they lie."""

    def __init__(self, buffer: bytes, position: int, fields: Sequence[bytes], *, properties: bool) -> None:
        count, data = FIELDS * len(fields), pa.py_buffer(buffer)
        lengths = pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(b"".join(fields))])
        start = pa.array([position], pa.int32())
        self._bounds = pa.concat_arrays([start, pc.cumulative_sum(lengths, start=pa.scalar(position, pa.int32()))])
        self._bytes = pa.Array.from_buffers(pa.uint8(), len(buffer), [None, data])
        self._cells = pa.Array.from_buffers(pa.binary(), count, [None, self._bounds.buffers()[1], data])
        self._count = len(fields)
        #: Behind the last packet.
        self.end: int = self._bounds[count].as_py()
        #: The first byte of each packet.
        self.headers = self._bytes_at(self._starts(_LEAD))
        self._levels = self.headers.translate(QOS_OF)
        high, low, self._lengths = self._middles(properties=properties)
        pairs = bytearray(2 * self._count)
        pairs[sys.byteorder == "little" :: 2] = high
        pairs[sys.byteorder != "little" :: 2] = low
        #: The packet id of each; 0 for QoS 0.
        self.ids = array("H", bytes(pairs))

    def field(self, which: int) -> Any:
        """One field of every packet."""
        return self._cells.take(self._places(which))

    def without_properties(self) -> int:
        """How many packets from the first on have a property length of 0."""
        return self._count - len(self._lengths.lstrip(b"\0"))

    def with_ids(self) -> int:
        """How many packets from the first on have a packet id that is not 0, or need none."""
        if all(self.ids):
            return self._count
        pairs = enumerate(zip(self._levels, self.ids, strict=True))
        return next((at for at, (level, packet_id) in pairs if level and not packet_id), self._count)

    def _middles(self, *, properties: bool) -> tuple[bytes, bytes, bytes]:
        """What is between topics and payloads: either byte of the packet ids, 0 for QoS 0, and the property lengths."""
        if 0 not in self._levels:  # all are equally long
            middles: bytes = self.field(_MIDDLE).buffers()[2].to_pybytes()
            size = 2 + properties
            middles = middles[: size * self._count]
            return middles[::size], middles[1::size], middles[2::size] if properties else b""
        # Without an id, and at the very end without anything behind it.
        starts = pc.min_element_wise(self._starts(_MIDDLE), pa.scalar(len(self._bytes) - 2, pa.int32()))
        has_id = self._levels.translate(_ONES)
        high, low = (bytes(map(mul, has_id, self._bytes_at(at))) for at in (starts, pc.add(starts, _ONE)))
        return high, low, self._bytes_at(pc.subtract(self._starts(_PAYLOAD), _ONE)) if properties else b""

    def _places(self, which: int) -> Any:
        known = _places.get(which)
        if known is None or len(known) < self._count:
            every = range(which, 2 * FIELDS * self._count, FIELDS)
            known = _places[which] = pa.array(array("i", every), pa.int32())
        return known.slice(0, self._count)

    def _starts(self, which: int) -> Any:
        return self._bounds.take(self._places(which))

    def _bytes_at(self, places: Any) -> bytes:
        values: bytes = self._bytes.take(places).buffers()[1].to_pybytes()
        return values[: self._count]


def _sound_topics(topics: Any) -> int:
    """How many topics from the first on are none that MQTT forbids [MQTT-1.5.4-1, -2, MQTT-3.3.2-2]."""
    wrong = [topic for topic in topics.unique().to_pylist() if not _is_sound(topic)]
    return min((topics.index(pa.scalar(topic, pa.binary())).as_py() for topic in wrong), default=len(topics))


def _is_sound(topic: bytes) -> bool:
    try:
        text = topic.decode()
    except UnicodeDecodeError:
        return False
    return not ("\0" in text or "#" in text or "+" in text)
