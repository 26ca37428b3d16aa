"""Columns of plain PUBLISH packets, cut out of the received bytes by Arrow: no Python object for a message.

The lengths of all fields, summed up, are the boundaries of one binary array over the bytes as they came: every fourth
cell of it is a topic, every fourth a payload.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from towline.mqtt.codec3 import QOS_OF
from towline.mqtt.plain import FIELDS, PlainRun

__all__ = ["ArrowColumns", "plain_run"]

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
    """The fields of some packets, where they lie.

    Args:
        buffer: Received bytes.
        position: Where the first packet begins.
        fields: The lengths of each packet's fields.
        properties: Whether packets have a property length.
    """

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
