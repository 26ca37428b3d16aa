"""Bytes to packets and back, behind a fence.

MQTT 5 is read by the `mqtt5` codec, which is fast and strict; what it lets pass or dies of is caught by
`towline.mqtt.fence`, and a packet has a largest size before it has arrived; of a PUBLISH beyond it, or with too many
properties, a stub takes the place (`towline.mqtt.stubs`). MQTT 3.1.1 and 3.1 are read by `towline.mqtt.codec3` into the
same packet classes.

Whatever the peer sends, `Decoder.feed` returns items or raises `MalformedPacket`, nothing else. PUBLISH packets that
follow each other come as one `PublishRun`, because a chunk of thousands is the unit everything after this works in, or,
without properties and where their owner can make columns of them, as one `PlainRun`; so do short PUBACKs, PUBRECs,
PUBRELs and PUBCOMPs, as one `AnswerRun`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, Final, Self, TypeAlias, TypeVar

import mqtt5
from mqtt5 import (
    ConnAckReasonCode,
    PubAckPacket,
    PubCompPacket,
    PublishPacket,
    PubRecPacket,
    PubRelPacket,
)

from towline.mqtt import codec3, fence
from towline.mqtt.fence import MAX_PROPERTIES, SHAPE_KEY, UNKNOWN_LENGTH, MalformedPacket
from towline.mqtt.plain import PlainReader, PlainRun, PlainRuns
from towline.mqtt.stubs import Published, Skipping, crowded_stub

#: Any control packet of the codec.
Packet: TypeAlias = mqtt5.Packet

#: Protocol level of MQTT 5 in CONNECT [MQTT-3.1.2-2]; those of 3.x are `codec3.LEVEL_311` and `codec3.LEVEL_31`.
LEVEL_5: Final = 5

_PUBLISH_NIBBLE: Final = 3
#: Longest variable byte integer [MQTT-1.5.5-1].
_MAX_LENGTH_BYTES: Final = 4
#: First byte of CONNACK, its remaining length in 3.x, and where its code stands.
_CONNACK, _CONNACK_3_LENGTH, _CODE_AT = 0x20, 2, 3
#: Reason codes of a "no" begin here; the return codes of 3.x are all below.
_REFUSALS: Final = 0x80
#: PUBLISHes of a chunk larger than this are read without a look at their UTF-8 first, which would cost half as much
#: as reading them; after one panic there is no more trust in this process.
_TRUSTED_CHUNK_BYTES: Final = 16 << 10
#: A PUBLISH may be crowded with properties, or larger than the limit, if the second byte of its remaining length, which
#: counts 128s, is at least this: an identifier takes 2 bytes, so a shorter packet holds no more than is allowed.
_CROWDED_128S: Final = 2 * MAX_PROPERTIES // 128


@dataclass(frozen=True, slots=True)
class PublishRun:
    """PUBLISH packets in the order of their arrival, with nothing between them.

    Attributes:
        packets: At least one.
        headers: The first byte of each packet: DUP, QoS and RETAIN as they came.
        topics: The topic of each, empty where only a topic alias says it.
        packet_ids: The packet id of each; 0 for QoS 0.
    """

    packets: Sequence[Published]
    headers: bytes
    topics: Sequence[str]
    packet_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.packets)

    @classmethod
    def of(cls, packets: Sequence[Published], headers: bytes) -> Self:
        """The run of these packets."""
        return cls(packets, headers, list(map(_TOPIC_OF, packets)), [p.packet_id or 0 for p in packets])


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


_TOPIC_OF: Final = attrgetter("topic")
#: Received bytes, copied or not where a part of them is taken.
_Bytes = TypeVar("_Bytes", bytes, memoryview)

Item: TypeAlias = PublishRun | PlainRun | AnswerRun | Packet

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
        max_packet_bytes: Of a PUBLISH longer than this only a stub is kept; it is not collected. Any other packet
            longer than this is refused (0x95). At least 133.
        version: `LEVEL_5`, `codec3.LEVEL_311` or `codec3.LEVEL_31`.
        plain: Makes columns of packets without properties; None to have every packet as an object.
    """

    #: A panic was seen: its message is on the screen once and not again.
    _distrust: ClassVar[bool] = False

    def __init__(
        self, max_packet_bytes: int = 64 << 20, version: int = LEVEL_5, plain: PlainReader | None = None
    ) -> None:
        self._max = max_packet_bytes
        self._plain = PlainRuns(plain, max_packet_bytes, properties=version == LEVEL_5) if plain else None
        self._version = version
        #: See `_CROWDED_128S`; lower where the limit is.
        self._large_128s = max(1, min(_CROWDED_128S, (max_packet_bytes - 1 - _MAX_LENGTH_BYTES) // 128))
        #: Received and not yet decoded; never holds a whole packet between calls.
        self._chunks: list[bytes] = []
        self._held = 0
        #: Bytes needed before decoding can succeed; 0 when not known.
        self._needed = 0
        #: The packet too large that is passing; nothing is held meanwhile.
        self._skipping: Skipping | None = None

    def feed(self, data: bytes) -> list[Item]:
        """Take what the transport received and return all that is now whole.

        Raises:
            MalformedPacket: The bytes can't be a packet, or are one too large; the connection must end.
        """
        try:
            return self._feed(data)
        except MalformedPacket:
            raise
        except ValueError as error:
            raise MalformedPacket(str(error), fence.reason_of(str(error))) from error
        except BaseException as error:
            if not fence.is_panic(error):
                raise
            Decoder._distrust = True
            raise MalformedPacket("ill-formed UTF-8 [MQTT-1.5.4-1]") from None

    def _feed(self, data: bytes) -> list[Item]:
        items: list[Item] = []
        while True:
            if self._skipping is not None:
                data = self._skipping.feed(data)
                if not self._skipping.done:
                    return items
                _close_run(items, [self._skipping.stub()], bytearray((self._skipping.header,)))
                self._skipping = None
            self._chunks.append(data)
            self._held += len(data)
            if self._held < self._needed:
                return items
            buffer = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks = []  # before it is read: a large packet need not be here a third time
            used = self._walk(buffer, items)
            rest = buffer[used:]
            self._needed, start = _size_of_next(rest, 0) if rest else (0, 0)
            if self._needed <= self._max:
                self._chunks = [rest] if rest else []
                self._held = len(rest)
                return items
            self._skipping = self._past(rest[0], self._needed, self._needed - start)
            self._chunks, self._held, self._needed = [], 0, 0
            data = rest[start:]

    def _past(self, header: int, size: int, left: int) -> Skipping:
        if header >> 4 != _PUBLISH_NIBBLE:
            raise MalformedPacket(f"a packet of {size:,} bytes, more than max_packet_bytes = {self._max:,}", 0x95)
        return Skipping(header, size, left, properties=self._version == LEVEL_5)

    def _walk(self, buffer: bytes, items: list[Item]) -> int:  # noqa: C901  # a call would cost a tenth
        view = memoryview(buffer)
        position, size, read, large = 0, len(buffer), mqtt5.read, self._large_128s
        five, plain = self._version == LEVEL_5, self._plain
        careful = size <= _TRUSTED_CHUNK_BYTES or Decoder._distrust
        # ASCII within the Property Length says nothing of a value that ends behind it.
        quick = 1 if Decoder._distrust else UNKNOWN_LENGTH
        run: list[Published] = []
        headers = bytearray()
        shapes: dict[bytes, fence.Shape] = {}
        topics: dict[bytes, str] = {}
        try:
            while position < size:
                header = buffer[position]
                if header >> 4 != _PUBLISH_NIBBLE:
                    found: tuple[Item, int] | None = _answers(buffer, position) or self._other(buffer, position)
                else:
                    found = plain.find(buffer, position) if plain is not None else None
                if found is not None:
                    _close_run(items, run, headers, checked=not five)
                    run, headers = [], bytearray()
                    items.append(found[0])
                    position = found[1]
                    continue
                key = buffer[position : position + SHAPE_KEY]
                shape = shapes.get(key)
                if shape is None:
                    shape = shapes[key] = fence.publish_shape(key, properties=five)
                _, begin, end, at = shape
                properties = 0 if not five else buffer[position + at] if at else UNKNOWN_LENGTH
                packet: Published
                if not five:
                    packet, length = self._publish_3(buffer, position, shape, topics)
                elif (
                    buffer[position + 1] > 127
                    and buffer[position + 2] >= large
                    and (stub := crowded_stub(whole := self._whole(view, position), properties)) is not None
                ):
                    packet, length = stub, len(whole)
                else:
                    if careful and not (
                        buffer[position + begin : position + end].isascii()
                        and properties < quick
                        and buffer[(behind := position + at + 1) : behind + properties].isascii()
                    ):
                        fence.check_fields(self._whole(buffer, position))
                    packet, length = read(view[position:])  # type: ignore[assignment]  # the nibble says PUBLISH
                if properties and packet.payload is not None:
                    payload = len(packet.payload)
                    if properties >= UNKNOWN_LENGTH or at + 1 + properties + payload != length:
                        fence.check_payload(buffer[position : position + length], payload)
                run.append(packet)
                headers.append(header)
                position += length
        except IndexError:
            pass  # the last packet is still arriving
        _close_run(items, run, headers, checked=not five)
        return position

    def _publish_3(
        self, buffer: bytes, position: int, shape: fence.Shape, topics: dict[bytes, str]
    ) -> tuple[PublishPacket, int]:
        """Read a PUBLISH of MQTT 3.x, and its size; IndexError as `_whole`. `topics` are those read before."""
        size, begin, end, at = shape
        flags = codec3.PUBLISH_FLAGS[buffer[position]]
        if flags is None:
            raise ValueError(codec3.NO_PUBLISH)
        if not size:
            packet = self._whole(buffer, position)
            start = fence.variable_integer(packet, 1)[1]
            head = fence.publish_head(packet, start, packet[0], properties=False)
            if head is None:
                raise ValueError("PUBLISH is too short")
            size, raw, at = len(packet), head.topic, head.at
        elif position + size > len(buffer) or size > self._max:
            raise IndexError("Not enough bytes")
        else:
            raw = buffer[position + begin : position + end]
        topic = topics.get(raw)
        if topic is None:
            topic = topics[raw] = codec3.topic_name(raw)
        qos, has_id, duplicate, retain = flags
        packet_id = None
        at += position
        if has_id:
            packet_id = buffer[at - 2] << 8 | buffer[at - 1]
            if not packet_id:
                raise ValueError("packet id 0 [MQTT-2.3.1-1]")
        payload = buffer[at : position + size]
        return PublishPacket(topic, payload, qos=qos, retain=retain, packet_id=packet_id, duplicate=duplicate), size

    def _other(self, buffer: bytes, position: int) -> tuple[Packet, int]:
        """Read a packet that is no PUBLISH, and where it ends; rare enough to look at every field."""
        data = self._whole(buffer, position)
        end = position + len(data)
        if self._version != LEVEL_5 and not _refuses_in_5(data):
            return codec3.read(data, self._version), end
        said = _in_version_5(data) if data[0] == _CONNACK else data
        fence.check_fields(said)
        return mqtt5.read(memoryview(said))[0], end

    def _whole(self, buffer: _Bytes, position: int) -> _Bytes:
        """The packet at `position`.

        Raises:
            IndexError: It is still arriving, or too large to be waited for.
        """
        length, start = fence.variable_integer(buffer, position + 1)
        end = start + length
        if end > len(buffer) or end - position > self._max:
            raise IndexError("Not enough bytes")
        return buffer[position:end]


def _size_of_next(buffer: bytes, position: int) -> tuple[int, int]:
    """Size of the packet at `position` and of its fixed header, 0 when its length has not arrived."""
    try:
        length, start = fence.variable_integer(buffer, position + 1)
    except IndexError:
        return 0, 0
    return start - position + length, start - position


def encode(packet: Packet, version: int = LEVEL_5) -> bytes:
    """The bytes of a packet.

    Args:
        packet: What to say.
        version: `LEVEL_5`, `codec3.LEVEL_311` or `codec3.LEVEL_31`, which tells what 3.x leaves out.

    Raises:
        ValueError: The packet can't be said in this version, or a peer would have to refuse it.
    """
    if version != LEVEL_5:
        return codec3.write(packet, version)
    fence.check_size(packet)
    try:
        data = packet.write()
    except BaseException as error:
        if not fence.is_panic(error):
            raise
        raise ValueError(f"the codec can't write this {type(packet).__name__}") from None
    check_written(packet, data)
    return data


def _in_version_5(connack: bytes) -> bytes:
    """A CONNACK as MQTT 5 says it, of a server that says it in the words of another version than CONNECT had.

    One of two bytes is of a server that does not know MQTT 5: what it says of us it may have read where MQTT 5 says
    something else, so it is taken for 0x84. Others answer in the form of the CONNECT with a return code of 3.x:
    Moquette does [MQTT 3.1.1 table 3.1].
    """
    if len(connack) <= _CODE_AT:
        return connack
    code = connack[_CODE_AT]
    if connack[1] == _CONNACK_3_LENGTH:
        older = int(ConnAckReasonCode.UNSUPPORTED_PROTOCOL_VERSION)
        return bytes((_CONNACK, 3, 0, code if code >= _REFUSALS else older, 0))
    if 0 < code < len(codec3.CONNACK_CODES):
        return connack[:_CODE_AT] + bytes((int(codec3.CONNACK_CODES[code]),)) + connack[_CODE_AT + 1 :]
    return connack


def _refuses_in_5(packet: bytes) -> bool:
    """Whether this is a CONNACK whose code only MQTT 5 has: its servers may answer 3.x so [MQTT-3.1.2-2]."""
    return packet[0] == _CONNACK and len(packet) > _CODE_AT and packet[_CODE_AT] >= _REFUSALS


def _answers(buffer: bytes, position: int) -> tuple[AnswerRun, int] | None:
    """The run of short answers that begins at `position`, if one does, and where it ends.

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
        return None
    words = array("H", buffer[position:end])
    if sys.byteorder == "little":
        words.byteswap()
    packet_ids = words[1::2]
    if 0 in packet_ids:
        raise ValueError("packet id 0 [MQTT-2.2.1-3]")
    return AnswerRun(kind, packet_ids), end


def _close_run(items: list[Item], run: list[Published], headers: bytearray, *, checked: bool = False) -> None:
    if run:
        publishes = PublishRun.of(run, bytes(headers))
        if not checked:
            check_run(run, publishes.headers, publishes.topics, publishes.packet_ids)
        items.append(publishes)


# What the codec lets pass --------------------------------------------------------------------------------


_DUP: Final = "DUP at QoS 0 [MQTT-3.3.1-2]"
#: First bytes of a PUBLISH with DUP and QoS 0.
_DUP_AT_QOS_0: Final = (b"\x38", b"\x39")
#: What `check_run` looks at, beside what it is given.
_CHECKED: Final = attrgetter("response_topic", "payload_format_indicator", "content_type", "user_properties")


def check_run(run: Sequence[Published], headers: bytes, topics: Sequence[str], packet_ids: Sequence[int]) -> None:
    """Refuse what the codec lets pass in PUBLISH packets.

    Args:
        run: The packets.
        headers: The first byte of each.
        topics: The topic of each.
        packet_ids: The packet id of each, 0 for none.

    Raises:
        MalformedPacket: A wildcard in a topic name or response topic [MQTT-3.3.2-2, -14], a response topic without a
            character [MQTT-4.7.3-1] (0x90); a Payload Format Indicator beyond 1 (0x82); packet id 0, DUP at QoS 0 or
            U+0000.
    """
    if _DUP_AT_QOS_0[0] in headers or _DUP_AT_QOS_0[1] in headers:
        raise MalformedPacket(_DUP)
    if 0 in packet_ids and 0 in [packet.packet_id for packet in run]:
        raise MalformedPacket(fence.ID_ZERO)
    fence.check_topics(topics)
    responses, formats, types, properties = zip(*map(_CHECKED, run), strict=True)
    if responses.count(None) < len(responses):
        if "" in responses:
            raise MalformedPacket("a response topic without a character [MQTT-4.7.3-1]", 0x90)
        fence.check_topics(filter(None, responses))
    if max(formats) > 1:
        raise MalformedPacket("a Payload Format Indicator other than 0 and 1 [MQTT 5 section 3.3.2.3.2]", 0x82)
    texts = list(filter(None, types))
    for pairs in filter(None, properties):
        for pair in pairs:
            texts += pair
    if texts:
        fence.check_null("".join(texts))


def check_written(packet: mqtt5.Packet, data: bytes) -> None:
    """Refuse to say what we would refuse to hear.

    Args:
        packet: What the codec has written.
        data: Its bytes.

    Raises:
        MalformedPacket: As `check_run` and `check_fields`.
    """
    if not isinstance(packet, PublishPacket):
        fence.check_fields(data)
    elif packet.user_properties or packet.response_topic is not None or packet.content_type:
        check_run([packet], data[:1], [packet.topic], [packet.packet_id or 0])
    else:  # the same for what most messages have
        if data[:1] in _DUP_AT_QOS_0:
            raise MalformedPacket(_DUP)
        if packet.packet_id == 0:
            raise MalformedPacket(fence.ID_ZERO)
        fence.check_null(packet.topic)  # wildcards are refused when the packet is built
