"""Bytes to packets and back, behind a fence.

The `mqtt5` codec is fast and strict, with three gaps that this module closes:

- ill-formed UTF-8 panics in Rust and surfaces as a ``BaseException`` [MQTT-1.5.4-1];
- a topic name with U+0000 or a wildcard passes [MQTT-1.5.4-2, MQTT-3.3.2-2];
- there is no limit to the size of a packet that is still arriving.

Whatever the peer sends, `Decoder.feed` returns items or raises `MalformedPacket`, nothing else. PUBLISH packets that
follow each other come as one `PublishRun`, because a gulp of thousands is the unit everything after this works in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import mqtt5
from mqtt5 import PublishPacket

__all__ = ["Decoder", "Item", "MalformedPacket", "Packet", "PublishRun"]

#: Any control packet of the codec.
Packet: TypeAlias = mqtt5.Packet

_PUBLISH_NIBBLE: Final = 3
#: First byte of a PUBLISH → QoS, for `bytes.translate` [MQTT 5 section 3.3.1.2].
_QOS_OF_HEADER: Final = bytes((byte >> 1) & 3 for byte in range(256))
#: Longest variable byte integer [MQTT-1.5.5-1].
_MAX_LENGTH_BYTES: Final = 4


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


Item: TypeAlias = PublishRun | Packet


class Decoder:
    """Collects received bytes until packets are whole.

    Args:
        max_packet_bytes: A packet longer than this is refused before it is collected (0x95).
    """

    def __init__(self, max_packet_bytes: int = 64 << 20) -> None:
        self._max = max_packet_bytes
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
        view = memoryview(buffer)
        position, size, read = 0, len(buffer), mqtt5.read
        run: list[PublishPacket] = []
        headers = bytearray()
        try:
            while position < size:
                header = buffer[position]
                packet, length = read(view[position:])
                self._check_size(length)
                if header >> 4 == _PUBLISH_NIBBLE:
                    run.append(packet)  # type: ignore[arg-type]  # the nibble says PUBLISH
                    headers.append(header)
                else:
                    _close_run(items, run, headers)
                    run, headers = [], bytearray()
                    items.append(packet)
                position += length
        except IndexError:
            pass  # the last packet is still arriving
        except MalformedPacket:
            raise
        except ValueError as error:
            raise MalformedPacket(str(error)) from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise MalformedPacket("ill-formed UTF-8") from None
        _close_run(items, run, headers)
        return items, position

    def _size_of_next(self, rest: bytes) -> int:
        """Total size of the packet that `rest` begins, 0 when its length has not arrived."""
        length = shift = 0
        for index, byte in enumerate(rest[1 : 1 + _MAX_LENGTH_BYTES]):
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                total = 2 + index + length
                self._check_size(total)
                return total
        return 0

    def _check_size(self, size: int) -> None:
        if size > self._max:
            raise MalformedPacket(f"a packet of {size:,} bytes, more than max_packet_bytes = {self._max:,}", 0x95)


def _close_run(items: list[Item], run: list[PublishPacket], headers: bytearray) -> None:
    if not run:
        return
    _check_topics(run)
    items.append(PublishRun(run, bytes(headers)))


def _check_topics(run: list[PublishPacket]) -> None:
    joined = "".join([packet.topic for packet in run])
    if "\0" in joined:
        raise MalformedPacket("a topic name with U+0000 [MQTT-1.5.4-2]")
    if "#" in joined or "+" in joined:
        raise MalformedPacket("a topic name with a wildcard [MQTT-3.3.2-2]", 0x90)
