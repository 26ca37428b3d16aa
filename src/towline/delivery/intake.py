"""From PUBLISH packets to one Arrow record batch of `ROW_SCHEMA`.

Most messages are alike in most columns, so a column of one value is cut off a longer one that is kept: what a chunk of
ten messages costs is mostly the making of columns. Of packets without properties, which come by the thousand, topics
and payloads are cut out of the received bytes, without a Python object for a message: the lengths of all fields, summed
up, are the boundaries of one binary array over the bytes as they came, of which every fourth cell is a topic, every
fourth a payload (`plain_run`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, mul
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from towline.delivery.receipts.mark import unmarked
from towline.mqtt.codec3 import DUPLICATE_OF, QOS_OF, RETAIN_OF
from towline.mqtt.events import Messages
from towline.mqtt.message import LARGE
from towline.mqtt.plain import FIELDS, MessageColumns, PlainRun
from towline.schema import NO_ROWS, OPTIONAL, ROW_SCHEMA

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
