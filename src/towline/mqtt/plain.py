"""PUBLISH packets without properties, which most messages are: taken by the thousand as columns, not one by one.

`PlainRuns` finds where the fields of such packets begin and end. It steps from packet to packet by the first bytes of
each, which say how long all its fields are, and remembers what it made of them: devices send few different lengths.
What can't be seen there, a property length that is not 0, a packet id 0 and what is wrong with a topic, whoever makes
the columns looks for (`PlainReader`). Neither refuses anything: an odd packet ends the run, and the codec has its say.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from mqtt5 import PublishPacket

from towline.mqtt.codec3 import PUBLISH_FLAGS
from towline.mqtt.fence import SHAPE_KEY, publish_shape

#: Fields of a packet that `PlainRuns` tells the lengths of: up to the topic's length, topic, packet id and property
#: length, payload.
FIELDS: Final = 4
_PACKED: Final = struct.Struct(f"={FIELDS}i")
#: Lengths remembered; then they are forgotten, because a device may choose them.
_MOST_SHAPES: Final = 10_000
#: For a packet that is not plain.
_ODD: Final = (0, b"")
#: Packets looked at after a try in vain, and the longest pause then, as a power of 2.
_FIRST_STEPS: Final = 200
_LONGEST_PAUSE: Final = 10


class MessageColumns(Protocol):
    """Topics and payloads of a run, in whatever form its reader likes."""

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""

    def topics(self) -> Sequence[str]:
        """The topic of each."""

    def payloads(self) -> Sequence[bytes]:
        """The payload of each."""


@dataclass(frozen=True, slots=True)
class PlainRun:
    """PUBLISH packets without properties in the order of their arrival, with nothing between them.

    Attributes:
        headers: The first byte of each packet, at least one: DUP, QoS and RETAIN as they came.
        packet_ids: The packet id of each; 0 for QoS 0.
        columns: The rest.
    """

    headers: bytes
    packet_ids: array[int]
    columns: MessageColumns

    def __len__(self) -> int:
        return len(self.headers)

    @property
    def topics(self) -> Sequence[str]:
        """The topic of each."""
        return self.columns.topics()

    @property
    def packets(self) -> Sequence[PublishPacket]:
        """The packets one by one."""
        each = zip(self.headers, self.packet_ids, self.columns.topics(), self.columns.payloads(), strict=True)
        return [_packet(*one) for one in each]


def _packet(header: int, packet_id: int, topic: str, payload: bytes) -> PublishPacket:
    flags = PUBLISH_FLAGS[header]
    assert flags is not None, "the walk has seen to it"
    qos, _, duplicate, retain = flags
    return PublishPacket(topic, payload, qos=qos, retain=retain, duplicate=duplicate, packet_id=packet_id or None)


class PlainReader(Protocol):
    """Makes columns of the packets that a walk has found."""

    def __call__(
        self, buffer: bytes, position: int, fields: Sequence[bytes], *, properties: bool
    ) -> tuple[PlainRun, int] | None:
        """The longest run of sound packets from the first on, and where it ends.

        Args:
            buffer: Received bytes.
            position: Where the first packet begins.
            fields: The lengths of each packet's fields, `FIELDS` native 32-bit integers each.
            properties: Whether packets have a property length, which must be 0: MQTT 5.

        Returns:
            None where it would be too short to be worth it.
        """


class PlainRuns:
    """Finds runs of plain PUBLISH packets, and tries less often where there are none.

    Args:
        reader: Makes columns of what is found.
        max_packet_bytes: A longer packet is not plain.
        properties: The protocol has properties: MQTT 5.
    """

    def __init__(self, reader: PlainReader, max_packet_bytes: int, *, properties: bool) -> None:
        self._read = reader
        self._max = max_packet_bytes
        self._properties = properties
        #: First bytes → size of the packet and the packed lengths of its fields; size 0 for one that is not plain.
        self._shapes: dict[bytes, tuple[int, bytes]] = {}
        #: Tries in vain since the last run.
        self._failures = 0
        #: PUBLISH packets to be read one by one before the next try.
        self._pause = 0

    def find(self, buffer: bytes, position: int) -> tuple[PlainRun, int] | None:
        """The run that begins at `position` and where it ends; None if it is too short, and then for some packets more.

        Args:
            buffer: Received bytes.
            position: Where a PUBLISH begins.
        """
        if self._pause:
            self._pause -= 1
            return None
        fields = self._walk(buffer, position, _FIRST_STEPS if self._failures else len(buffer))
        found = self._read(buffer, position, fields, properties=self._properties)
        if found is None:
            self._pause = 1 << min(self._failures, _LONGEST_PAUSE)
            self._failures += 1
        else:
            self._failures = 0
        return found

    def _walk(self, buffer: bytes, position: int, most: int) -> list[bytes]:
        """The lengths of the fields of each whole packet, up to the first that is not plain."""
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.clear()
        found: list[bytes] = []
        add, known, end = found.append, self._shapes, len(buffer)
        for _ in range(most):
            if position >= end:
                break
            key = buffer[position : position + SHAPE_KEY]
            try:
                size, fields = known[key]
            except KeyError:
                size, fields = known[key] = self._shape(key)
            if not size:
                return found
            add(fields)
            position += size
        if position > end:
            found.pop()  # still arriving
        return found

    def _shape(self, key: bytes) -> tuple[int, bytes]:
        size, begin, end, at = publish_shape(key, properties=self._properties)
        if end == begin or size > self._max or PUBLISH_FLAGS[key[0]] is None:
            return _ODD
        middle = at - end + self._properties
        return size, _PACKED.pack(begin, end - begin, middle, size - end - middle)
