"""Bytes to packets and back, behind a fence.

MQTT 5 is read by the `mqtt5` codec, which is fast and strict; what it lets pass or dies of is caught by
`towline.mqtt.fence`, and a packet has a largest size before it has arrived. MQTT 3.1.1 and 3.1 are read by
`towline.mqtt.codec3` into the same packet classes.

Whatever the peer sends, `Decoder.feed` returns items or raises `MalformedPacket`, nothing else. PUBLISH packets that
follow each other come as one `PublishRun`, because a gulp of thousands is the unit everything after this works in; so
do short PUBACKs, PUBRECs, PUBRELs and PUBCOMPs, as one `AnswerRun`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

import mqtt5
from mqtt5 import (
    ConnAckPacket,
    ConnAckReasonCode,
    PubAckPacket,
    PubCompPacket,
    PublishPacket,
    PubRecPacket,
    PubRelPacket,
)

from towline.mqtt import codec3, codec3_write, fence

__all__ = [
    "LEVEL_5",
    "Acknowledgement",
    "AnswerRun",
    "Decoder",
    "Item",
    "MalformedPacket",
    "Packet",
    "PublishRun",
    "encode",
]

#: Any control packet of the codec.
Packet: TypeAlias = mqtt5.Packet

#: Protocol level of MQTT 5 in CONNECT [MQTT-3.1.2-2]; those of 3.x are `codec3.LEVEL_311` and `codec3.LEVEL_31`.
LEVEL_5: Final = 5

_PUBLISH_NIBBLE: Final = 3
#: First byte of a PUBLISH → QoS, for `bytes.translate` [MQTT 5 section 3.3.1.2].
_QOS_OF_HEADER: Final = bytes((byte >> 1) & 3 for byte in range(256))
#: Longest variable byte integer [MQTT-1.5.5-1].
_MAX_LENGTH_BYTES: Final = 4
#: A packet up to this size other than PUBLISH has no room for a property with a string: type, length, reason code, the
#: properties' length, a property's identifier and the two bytes of its string's length make seven.
_NO_STRINGS_BYTES: Final = 6
#: CONNACK of a server that speaks only 3.x: the one packet of 3.x it may answer to a CONNECT of version 5.
_OLDER_PROTOCOL: Final = b"\x20\x02\x00\x01"
#: PUBLISHes of a gulp larger than this are read without a look at their UTF-8 first, which would cost half as much
#: as reading them; after one panic there is no more trust in this process.
_TRUSTED_GULP_BYTES: Final = 16 << 10


class MalformedPacket(ValueError):
    """Bytes that are no MQTT packet.

    Attributes:
        reason: Reason code for our DISCONNECT: 0x81 malformed, 0x82 protocol error, 0x90 topic name invalid,
            0x95 packet too large.
    """

    def __init__(self, what: str, reason: int = 0x81) -> None:
        super().__init__(what)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PublishRun:
    """PUBLISH packets in the order of their arrival, with nothing between them.

    Attributes:
        packets: At least one.
        headers: The first byte of each packet: DUP, QoS and RETAIN as they came.
    """

    packets: list[PublishPacket]
    headers: bytes

    def __len__(self) -> int:
        return len(self.packets)

    @property
    def qos(self) -> bytes:
        """The QoS of each packet as one byte each."""
        return self.headers.translate(_QOS_OF_HEADER)


Acknowledgement: TypeAlias = PubAckPacket | PubRecPacket | PubRelPacket | PubCompPacket


@dataclass(frozen=True, slots=True)
class AnswerRun:
    """At least two packets of one kind that follow each other, each nothing but a packet id: reason 0x00.

    Attributes:
        kind: The packets' type.
        packet_ids: In the order of their arrival.
    """

    kind: type[Acknowledgement]
    packet_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.packet_ids)

    @property
    def packets(self) -> Iterator[Acknowledgement]:
        """The packets one by one."""
        return map(self.kind, self.packet_ids)


Item: TypeAlias = PublishRun | AnswerRun | Packet

#: Fixed header of an answer of four bytes, the length included, the same in every version → its type.
_ANSWERS: Final[dict[bytes, type[Acknowledgement]]] = {
    b"\x40\x02": PubAckPacket,
    b"\x50\x02": PubRecPacket,
    b"\x62\x02": PubRelPacket,
    b"\x70\x02": PubCompPacket,
}
_ANSWER_BYTES: Final = 4


class Decoder:
    """Collects received bytes until packets are whole.

    Args:
        max_packet_bytes: A packet longer than this is refused before it is collected (0x95).
        version: `LEVEL_5`, `codec3.LEVEL_311` or `codec3.LEVEL_31`.
    """

    #: A panic was seen: its message is on the screen once and not again.
    _distrust: ClassVar[bool] = False

    def __init__(self, max_packet_bytes: int = 64 << 20, version: int = LEVEL_5) -> None:
        self._max = max_packet_bytes
        self._version = version
        #: Received and not yet decoded; never holds a whole packet between calls.
        self._chunks: list[bytes] = []
        self._held = 0
        #: Bytes needed before decoding can succeed; 0 when not known.
        self._needed = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of a packet that is still arriving."""
        return self._held

    def feed(self, data: bytes) -> list[Item]:
        """Take what the transport received and return all that is now whole.

        Raises:
            MalformedPacket: The bytes can't be a packet, or are one too large; the connection must end.
        """
        self._chunks.append(data)
        self._held += len(data)
        if self._held < self._needed:
            return []
        buffer = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        items, used = self._decode(buffer)
        rest = buffer[used:]
        self._needed = self._size_of_next(rest)
        self._chunks = [rest] if rest else []
        self._held = len(rest)
        return items

    def _decode(self, buffer: bytes) -> tuple[list[Item], int]:
        items: list[Item] = []
        walk = self._walk5 if self._version == LEVEL_5 else self._walk3
        try:
            position = walk(buffer, items)
        except fence.InvalidTopic as error:
            raise MalformedPacket(str(error), 0x90) from error
        except MalformedPacket:
            raise
        except ValueError as error:
            raise MalformedPacket(str(error)) from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            Decoder._distrust = True
            raise MalformedPacket("ill-formed UTF-8 [MQTT-1.5.4-1]") from None
        return items, position

    def _walk5(self, buffer: bytes, items: list[Item]) -> int:
        view = memoryview(buffer)
        position, size, read, largest = 0, len(buffer), mqtt5.read, self._max
        careful = size <= _TRUSTED_GULP_BYTES or Decoder._distrust
        run: list[PublishPacket] = []
        headers = bytearray()
        topics: set[bytes] = set()
        try:
            while position < size:
                header = buffer[position]
                if header >> 4 != _PUBLISH_NIBBLE:
                    _close_run(items, run, headers)
                    run, headers = [], bytearray()
                    answered = _answers(buffer, position, items)
                    if answered:
                        position += answered
                        continue
                    packet, length = self._other5(buffer, view, position)
                    items.append(packet)
                else:
                    if careful and not fence.publish_is_sound(buffer, position, topics):
                        fence.check_fields(self._whole(buffer, position))
                    packet, length = read(view[position:])
                    run.append(packet)  # type: ignore[arg-type]  # the nibble says PUBLISH
                    headers.append(header)
                if length > largest:
                    self._check_size(length)
                position += length
        except IndexError:
            pass  # the last packet is still arriving
        _close_run(items, run, headers)
        return position

    def _other5(self, buffer: bytes, view: memoryview, position: int) -> tuple[Packet, int]:
        """Read a packet that is no PUBLISH; rare enough to look at every field."""
        data = self._whole(buffer, position)
        if data == _OLDER_PROTOCOL:
            return ConnAckPacket(reason_code=ConnAckReasonCode.UNSUPPORTED_PROTOCOL_VERSION), len(data)
        if len(data) > _NO_STRINGS_BYTES:
            fence.check_fields(data)
        packet, length = mqtt5.read(view[position:])
        fence.check_packet(packet)
        return packet, length

    def _whole(self, buffer: bytes, position: int) -> bytes:
        """The packet at `position`, empty when its length is no length; IndexError when it is still arriving."""
        size = self._size_of_next(buffer[position : position + 1 + _MAX_LENGTH_BYTES])
        if position + size > len(buffer):
            raise IndexError("Not enough bytes")
        return buffer[position : position + size]

    def _walk3(self, buffer: bytes, items: list[Item]) -> int:
        view = memoryview(buffer)
        position, size = 0, len(buffer)
        topics: dict[bytes, str] = {}
        while True:
            run: list[PublishPacket] = []
            headers = bytearray()
            position = codec3.read_publishes(buffer, position, run, headers, topics, self._max)
            if run:
                items.append(PublishRun(run, bytes(headers)))
            if position >= size:
                return position
            answered = _answers(buffer, position, items)
            if answered:
                position += answered
                continue
            self._size_of_next(buffer[position : position + 1 + _MAX_LENGTH_BYTES])
            try:
                packet, length = codec3.read(view[position:], self._version)
            except IndexError:
                return position  # the last packet is still arriving
            items.append(packet)
            position += length

    def _size_of_next(self, rest: bytes) -> int:
        """Total size of the packet that `rest` begins, 0 when its length has not arrived."""
        length = shift = 0
        for index, byte in enumerate(rest[1 : 1 + _MAX_LENGTH_BYTES]):
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if not byte and index:
                    raise MalformedPacket("a variable byte integer longer than needed [MQTT-1.5.5-1]")
                total = 2 + index + length
                self._check_size(total)
                return total
        return 0

    def _check_size(self, size: int) -> None:
        if size > self._max:
            raise MalformedPacket(f"a packet of {size:,} bytes, more than max_packet_bytes = {self._max:,}", 0x95)


def encode(packet: Packet, version: int = LEVEL_5) -> bytes:
    """The bytes of a packet.

    Args:
        packet: What to say.
        version: `LEVEL_5`, `codec3.LEVEL_311` or `codec3.LEVEL_31`; `codec3_write` tells what 3.x leaves out.

    Raises:
        ValueError: The packet can't be said in this version, or a peer would have to refuse it.
    """
    if version != LEVEL_5:
        return codec3_write.write(packet, version)
    data = packet.write()
    fence.check_written(packet, data)
    return data


def _answers(buffer: bytes, position: int, items: list[Item]) -> int:
    """Append the run of short answers that begins at `position`, if one does, and return its length in bytes.

    Raises:
        ValueError: Packet id 0 [MQTT-2.2.1-3].
    """
    head = buffer[position : position + 2]
    kind = _ANSWERS.get(head)
    end = position
    if kind is not None:
        while buffer.startswith(head, end):
            end += _ANSWER_BYTES
        end = min(end, position + (len(buffer) - position) // _ANSWER_BYTES * _ANSWER_BYTES)
    if kind is None or end - position < 2 * _ANSWER_BYTES:
        return 0
    words = array("H", buffer[position:end])
    if sys.byteorder == "little":
        words.byteswap()
    packet_ids = words[1::2]
    if 0 in packet_ids:
        raise ValueError("packet id 0 [MQTT-2.2.1-3]")
    items.append(AnswerRun(kind, packet_ids))
    return end - position


def _close_run(items: list[Item], run: list[PublishPacket], headers: bytearray) -> None:
    if run:
        fence.check_run(run, bytes(headers))
        items.append(PublishRun(run, bytes(headers)))
