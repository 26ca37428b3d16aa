"""Encoding and decoding of MQTT packets, with checks around the codec.

MQTT 5 is read by the `mqtt5` codec, which is fast and strict; `towline.mqtt.checks` catches invalid packets that it
accepts or panics at, and the size of a packet is limited before it has arrived. A PUBLISH above that limit, or with too
many properties, becomes a truncated message (`towline.mqtt.truncated`). MQTT 3.1.1 and 3.1 are read by
`towline.mqtt.codec3` into the same packet classes.

Whatever the peer sends, `Decoder.feed` returns items or raises `MalformedPacket`, nothing else. Consecutive PUBLISH
packets are one `PublishRun`, because everything after this works on chunks of thousands. Those without properties are
one `PlainRun` if their owner can build columns of them. Short PUBACKs, PUBRECs, PUBRELs and PUBCOMPs are one `AckRun`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, Final, Self, TypeAlias, TypeVar

import mqtt5
from mqtt5 import ConnAckReasonCode, PubAckPacket, PubCompPacket, PublishPacket, PubRecPacket, PubRelPacket

from towline.mqtt import checks, codec3
from towline.mqtt.checks import MAX_PROPERTIES, PREFIX_BYTES, UNKNOWN_LENGTH, MalformedPacket
from towline.mqtt.plain import PlainReader, PlainRun, PlainRuns
from towline.mqtt.truncated import PublishSkipper, ReceivedPublish, truncate_crowded_publish

#: Any control packet of the codec.
Packet: TypeAlias = mqtt5.Packet

#: Protocol level of MQTT 5 in CONNECT [MQTT-3.1.2-2]; those of 3.x are `codec3.LEVEL_311` and `codec3.LEVEL_31`.
LEVEL_5: Final = 5

_PUBLISH_TYPE: Final = 3
#: Longest variable byte integer [MQTT-1.5.5-1].
_MAX_LENGTH_BYTES: Final = 4
#: First byte of CONNACK, its remaining length in 3.x, and the position of its code.
_CONNACK, _CONNACK_3_LENGTH, _CODE_INDEX = 0x20, 2, 3
#: Lowest reason code of a refusal; the return codes of 3.x are all below.
_FIRST_ERROR_CODE: Final = 0x80
#: PUBLISHes of a larger chunk are decoded without checking their UTF-8 first, which would cost half as much as
#: decoding; after a panic all chunks of this process are checked.
_TRUSTED_CHUNK_BYTES: Final = 16 << 10
#: A PUBLISH may have too many properties, or be larger than the limit, only if the second byte of its remaining length,
#: which counts 128s, is at least this: an identifier takes 2 bytes, so a shorter packet has no more than allowed.
_LARGE_PUBLISH_128S: Final = 2 * MAX_PROPERTIES // 128


@dataclass(frozen=True, slots=True)
class PublishRun:
    """PUBLISH packets in the order of their arrival, with nothing between them.

    Attributes:
        packets: At least one.
        headers: The first byte of each packet: DUP, QoS and RETAIN as received.
        topics: The topic of each, empty if only a topic alias was sent.
        packet_ids: The packet id of each; 0 for QoS 0.
    """

    packets: Sequence[ReceivedPublish]
    headers: bytes
    topics: Sequence[str]
    packet_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.packets)

    @classmethod
    def from_packets(cls, packets: Sequence[ReceivedPublish], headers: bytes) -> Self:
        """Return the run of these packets."""
        return cls(packets, headers, list(map(_TOPIC_OF, packets)), [p.packet_id or 0 for p in packets])


Acknowledgement: TypeAlias = PubAckPacket | PubRecPacket | PubRelPacket | PubCompPacket


@dataclass(frozen=True, slots=True)
class AckRun:
    """At least two consecutive acknowledgements of one type with only a packet id: reason 0x00.

    Attributes:
        packet_type: Class of the packets.
        packet_ids: In the order of their arrival.
    """

    packet_type: type[Acknowledgement]
    packet_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.packet_ids)

    @property
    def packets(self) -> Iterator[Acknowledgement]:
        """All packets as objects."""
        return map(self.packet_type, self.packet_ids)


_TOPIC_OF: Final = attrgetter("topic")
#: Received bytes; a slice of them is a copy or not.
_Bytes = TypeVar("_Bytes", bytes, memoryview)

Item: TypeAlias = PublishRun | PlainRun | AckRun | Packet

#: Fixed header of an acknowledgement with four bytes, the same in every version → its type.
_SHORT_ACK_TYPES: Final[dict[bytes, type[Acknowledgement]]] = {
    b"\x40\x02": PubAckPacket,
    b"\x50\x02": PubRecPacket,
    b"\x62\x02": PubRelPacket,
    b"\x70\x02": PubCompPacket,
}
_SHORT_ACK_BYTES: Final = 4


class Decoder:
    """Decoder that buffers received bytes until packets are complete.

    Args:
        max_packet_bytes: A longer PUBLISH becomes a truncated message and is not buffered. Any other packet longer than
            this is refused (0x95). At least 133.
        version: `LEVEL_5`, `codec3.LEVEL_311` or `codec3.LEVEL_31`.
        plain_reader: Builder of columns from packets without properties; None to get every packet as an object.
    """

    #: The codec has panicked in this process: check all text from now on, so that it prints no second message.
    _codec_panicked: ClassVar[bool] = False

    def __init__(
        self, max_packet_bytes: int = 64 << 20, version: int = LEVEL_5, plain_reader: PlainReader | None = None
    ) -> None:
        self._max_packet_bytes = max_packet_bytes
        self._plain_runs = (
            PlainRuns(plain_reader, max_packet_bytes, properties=version == LEVEL_5) if plain_reader else None
        )
        self._version = version
        #: As `_LARGE_PUBLISH_128S`; lower for a lower limit.
        self._large_128s = max(1, min(_LARGE_PUBLISH_128S, (max_packet_bytes - 1 - _MAX_LENGTH_BYTES) // 128))
        #: Bytes not decoded yet; never a whole packet between calls.
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        #: Bytes needed before decoding can succeed; 0 for unknown.
        self._needed_bytes = 0
        #: Skips a packet that is too large; nothing is buffered meanwhile.
        self._skipper: PublishSkipper | None = None

    def feed(self, data: bytes) -> list[Item]:
        """Decode received bytes and return all complete items.

        Raises:
            MalformedPacket: The bytes can't be a packet, or are one too large; the connection must end.
        """
        try:
            return self._feed(data)
        except MalformedPacket:
            raise
        except ValueError as error:
            raise MalformedPacket(str(error), checks.codec_error_reason(str(error))) from error
        except BaseException as error:
            if not checks.is_panic(error):
                raise
            Decoder._codec_panicked = True
            raise MalformedPacket("ill-formed UTF-8 [MQTT-1.5.4-1]") from None

    def _feed(self, data: bytes) -> list[Item]:
        items: list[Item] = []
        while True:
            if self._skipper is not None:
                data = self._skipper.feed(data)
                if not self._skipper.is_complete:
                    return items
                _append_run(items, [self._skipper.to_truncated()], bytearray((self._skipper.header,)))
                self._skipper = None
            self._chunks.append(data)
            self._buffered_bytes += len(data)
            if self._buffered_bytes < self._needed_bytes:
                return items
            buffer = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks = []  # before decoding, which copies: at most two copies of a large packet
            consumed = self._decode_packets(buffer, items)
            rest = buffer[consumed:]
            self._needed_bytes, header_size = _next_packet_size(rest, 0) if rest else (0, 0)
            if self._needed_bytes <= self._max_packet_bytes:
                self._chunks = [rest] if rest else []
                self._buffered_bytes = len(rest)
                return items
            self._skipper = self._skip_large_publish(rest[0], self._needed_bytes, self._needed_bytes - header_size)
            self._chunks, self._buffered_bytes, self._needed_bytes = [], 0, 0
            data = rest[header_size:]

    def _skip_large_publish(self, header: int, size: int, remaining_bytes: int) -> PublishSkipper:
        if header >> 4 != _PUBLISH_TYPE:
            raise MalformedPacket(
                f"a packet of {size:,} bytes, over max_packet_bytes = {self._max_packet_bytes:,}", 0x95
            )
        return PublishSkipper(header, size, remaining_bytes, has_properties=self._version == LEVEL_5)

    def _decode_packets(self, buffer: bytes, items: list[Item]) -> int:  # noqa: C901  # a call would cost a tenth
        view = memoryview(buffer)
        position, buffer_size, read_packet, large_128s = 0, len(buffer), mqtt5.read, self._large_128s
        is_mqtt5, plain_runs = self._version == LEVEL_5, self._plain_runs
        check_utf8 = buffer_size <= _TRUSTED_CHUNK_BYTES or Decoder._codec_panicked
        # ASCII within the Property Length does not exclude a value that ends behind it.
        ascii_properties_limit = 1 if Decoder._codec_panicked else UNKNOWN_LENGTH
        run: list[ReceivedPublish] = []
        headers = bytearray()
        offsets_cache: dict[bytes, checks.PublishOffsets] = {}
        topic_cache: dict[bytes, str] = {}
        try:
            while position < buffer_size:
                header = buffer[position]
                if header >> 4 != _PUBLISH_TYPE:
                    item_end: tuple[Item, int] | None = _ack_run(buffer, position) or self._read_other(buffer, position)
                else:
                    item_end = plain_runs.find_run(buffer, position) if plain_runs is not None else None
                if item_end is not None:
                    _append_run(items, run, headers, checked=not is_mqtt5)
                    run, headers = [], bytearray()
                    items.append(item_end[0])
                    position = item_end[1]
                    continue
                prefix = buffer[position : position + PREFIX_BYTES]
                offsets = offsets_cache.get(prefix)
                if offsets is None:
                    offsets = offsets_cache[prefix] = checks.publish_offsets(prefix, properties=is_mqtt5)
                _, topic_start, topic_end, properties_at = offsets
                property_length = (
                    0 if not is_mqtt5 else buffer[position + properties_at] if properties_at else UNKNOWN_LENGTH
                )
                packet: ReceivedPublish
                if not is_mqtt5:
                    packet, size = self._read_publish_3(buffer, position, offsets, topic_cache)
                elif (
                    buffer[position + 1] > 127
                    and buffer[position + 2] >= large_128s
                    and (
                        truncated_message := truncate_crowded_publish(
                            packet_view := self._whole_packet(view, position), property_length
                        )
                    )
                    is not None
                ):
                    packet, size = truncated_message, len(packet_view)
                else:
                    if check_utf8 and not (
                        buffer[position + topic_start : position + topic_end].isascii()
                        and property_length < ascii_properties_limit
                        and buffer[
                            (properties_start := position + properties_at + 1) : properties_start + property_length
                        ].isascii()
                    ):
                        checks.check_fields(self._whole_packet(buffer, position))
                    packet, size = read_packet(view[position:])  # type: ignore[assignment]  # the type is PUBLISH
                if property_length and packet.payload is not None:
                    payload_size = len(packet.payload)
                    if property_length >= UNKNOWN_LENGTH or properties_at + 1 + property_length + payload_size != size:
                        checks.check_payload(buffer[position : position + size], payload_size)
                run.append(packet)
                headers.append(header)
                position += size
        except IndexError:
            pass  # the last packet is incomplete
        _append_run(items, run, headers, checked=not is_mqtt5)
        return position

    def _read_publish_3(
        self, buffer: bytes, position: int, offsets: checks.PublishOffsets, topic_cache: dict[bytes, str]
    ) -> tuple[PublishPacket, int]:
        """Read a PUBLISH of MQTT 3.x and its size; IndexError as `_whole_packet`. `topic_cache` has decoded topics."""
        size, topic_start, topic_end, payload_at = offsets
        flags = codec3.PUBLISH_FLAGS[buffer[position]]
        if flags is None:
            raise ValueError(codec3.INVALID_PUBLISH_HEADER)
        if not size:
            packet = self._whole_packet(buffer, position)
            head_at = checks.read_varint(packet, 1)[1]
            head = checks.publish_head(packet, head_at, packet[0], properties=False)
            if head is None:
                raise ValueError("PUBLISH is too short")
            size, raw_topic, payload_at = len(packet), head.topic, head.properties_at
        elif position + size > len(buffer) or size > self._max_packet_bytes:
            raise IndexError("Not enough bytes")
        else:
            raw_topic = buffer[position + topic_start : position + topic_end]
        topic = topic_cache.get(raw_topic)
        if topic is None:
            topic = topic_cache[raw_topic] = codec3.topic_name(raw_topic)
        qos, has_id, duplicate, retain = flags
        packet_id = None
        payload_at += position
        if has_id:
            packet_id = buffer[payload_at - 2] << 8 | buffer[payload_at - 1]
            if not packet_id:
                raise ValueError("packet id 0 [MQTT-2.3.1-1]")
        payload = buffer[payload_at : position + size]
        return PublishPacket(topic, payload, qos=qos, retain=retain, packet_id=packet_id, duplicate=duplicate), size

    def _read_other(self, buffer: bytes, position: int) -> tuple[Packet, int]:
        """Read a packet other than PUBLISH and its end; these are rare, so every field is checked."""
        data = self._whole_packet(buffer, position)
        end = position + len(data)
        if self._version != LEVEL_5 and not _is_mqtt5_refusal(data):
            return codec3.read_packet(data, self._version), end
        mqtt5_data = _connack_as_mqtt5(data) if data[0] == _CONNACK else data
        checks.check_fields(mqtt5_data)
        return mqtt5.read(memoryview(mqtt5_data))[0], end

    def _whole_packet(self, buffer: _Bytes, position: int) -> _Bytes:
        """Return the packet at `position`; raises IndexError if it is incomplete, or larger than the limit."""
        length, body_at = checks.read_varint(buffer, position + 1)
        end = body_at + length
        if end > len(buffer) or end - position > self._max_packet_bytes:
            raise IndexError("Not enough bytes")
        return buffer[position:end]


def _next_packet_size(buffer: bytes, position: int) -> tuple[int, int]:
    """Return the size of the packet at `position` and of its fixed header; 0 if its length is incomplete."""
    try:
        length, body_at = checks.read_varint(buffer, position + 1)
    except IndexError:
        return 0, 0
    return body_at - position + length, body_at - position


def encode(packet: Packet, version: int = LEVEL_5) -> bytes:
    """Return the bytes of a packet.

    Args:
        packet: Packet to encode.
        version: `LEVEL_5`, `codec3.LEVEL_311` or `codec3.LEVEL_31`; see there what 3.x omits.

    Raises:
        ValueError: The packet can't be encoded in this version, or a peer would have to refuse it.
    """
    if version != LEVEL_5:
        return codec3.write_packet(packet, version)
    if isinstance(packet, PublishPacket):
        checks.check_size(packet)
    try:
        data = packet.write()
    except BaseException as error:
        if not checks.is_panic(error):
            raise
        raise ValueError(f"the codec can't write this {type(packet).__name__}") from None
    _check_encoded(packet, data)
    return data


def _connack_as_mqtt5(connack: bytes) -> bytes:
    """Return a CONNACK in MQTT 5 form, of a server that answers in the form of another version."""
    if len(connack) <= _CODE_INDEX:
        return connack
    code = connack[_CODE_INDEX]
    if connack[1] == _CONNACK_3_LENGTH:  # of a server without MQTT 5, which may have misread our CONNECT
        version_unsupported = int(ConnAckReasonCode.UNSUPPORTED_PROTOCOL_VERSION)
        return bytes((_CONNACK, 3, 0, code if code >= _FIRST_ERROR_CODE else version_unsupported, 0))
    if 0 < code < len(codec3.CONNACK_CODES):  # a return code of 3.x: Moquette does [MQTT 3.1.1 table 3.1]
        return connack[:_CODE_INDEX] + bytes((int(codec3.CONNACK_CODES[code]),)) + connack[_CODE_INDEX + 1 :]
    return connack


def _is_mqtt5_refusal(packet: bytes) -> bool:
    """Return whether this is a CONNACK with a code of MQTT 5 only: such servers may answer 3.x so [MQTT-3.1.2-2]."""
    return packet[0] == _CONNACK and len(packet) > _CODE_INDEX and packet[_CODE_INDEX] >= _FIRST_ERROR_CODE


def _ack_run(buffer: bytes, position: int) -> tuple[AckRun, int] | None:
    """Return the run of short acknowledgements at `position` and its end; None if there is none."""
    fixed_header = buffer[position : position + 2]
    packet_type = _SHORT_ACK_TYPES.get(fixed_header)
    end = position
    if packet_type is not None:
        while buffer.startswith(fixed_header, end):
            end += _SHORT_ACK_BYTES
        end = min(end, position + (len(buffer) - position) // _SHORT_ACK_BYTES * _SHORT_ACK_BYTES)
    if packet_type is None or end - position < 2 * _SHORT_ACK_BYTES:
        return None
    half_words = array("H", buffer[position:end])
    if sys.byteorder == "little":
        half_words.byteswap()
    packet_ids = half_words[1::2]
    if 0 in packet_ids:
        raise ValueError("packet id 0 [MQTT-2.2.1-3]")
    return AckRun(packet_type, packet_ids), end


def _append_run(items: list[Item], run: list[ReceivedPublish], headers: bytearray, *, checked: bool = False) -> None:
    if run:
        publish_run = PublishRun.from_packets(run, bytes(headers))
        if not checked:
            check_run(run, publish_run.headers, publish_run.topics, publish_run.packet_ids)
        items.append(publish_run)


# Checks after decoding --------------------------------------------------------------------------------


_DUP_PROBLEM: Final = "DUP at QoS 0 [MQTT-3.3.1-2]"
#: First bytes of a PUBLISH with DUP and QoS 0.
_DUP_QOS0_HEADERS: Final = (b"\x38", b"\x39")
#: Further fields that `check_run` checks.
_CHECKED_FIELDS: Final = attrgetter("response_topic", "payload_format_indicator", "content_type", "user_properties")


def check_run(run: Sequence[ReceivedPublish], headers: bytes, topics: Sequence[str], packet_ids: Sequence[int]) -> None:
    """Refuse invalid PUBLISH packets that the codec accepts.

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
    if _DUP_QOS0_HEADERS[0] in headers or _DUP_QOS0_HEADERS[1] in headers:
        raise MalformedPacket(_DUP_PROBLEM)
    if 0 in packet_ids and 0 in [packet.packet_id for packet in run]:
        raise MalformedPacket(checks.PACKET_ID_ZERO)
    checks.check_topics(topics)
    response_topics, payload_formats, content_types, user_properties = zip(*map(_CHECKED_FIELDS, run), strict=True)
    if response_topics.count(None) < len(response_topics):
        if "" in response_topics:
            raise MalformedPacket("a response topic without a character [MQTT-4.7.3-1]", 0x90)
        checks.check_topics(filter(None, response_topics))
    if max(payload_formats) > 1:
        raise MalformedPacket("a Payload Format Indicator other than 0 and 1 [MQTT 5 section 3.3.2.3.2]", 0x82)
    texts = list(filter(None, content_types))
    for pairs in filter(None, user_properties):
        for pair in pairs:
            texts += pair
    if texts:
        checks.check_null("".join(texts))


def _check_encoded(packet: mqtt5.Packet, data: bytes) -> None:
    """Refuse to send a packet that we would refuse to receive, as `check_run` and `check_fields`."""
    if not isinstance(packet, PublishPacket):
        checks.check_fields(data)
    elif packet.user_properties or packet.response_topic is not None or packet.content_type:
        check_run([packet], data[:1], [packet.topic], [packet.packet_id or 0])
    else:  # the same checks, faster, for most messages
        if data[:1] in _DUP_QOS0_HEADERS:
            raise MalformedPacket(_DUP_PROBLEM)
        if packet.packet_id == 0:
            raise MalformedPacket(checks.PACKET_ID_ZERO)
        checks.check_null(packet.topic)  # wildcards are refused when the packet is built
