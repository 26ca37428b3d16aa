"""What is left of a PUBLISH that is not taken in whole: a stub, which has the message's place and not its content.

Two kinds of message would end a line for ever if they were refused, because the broker sends them again: one larger
than the limit on a packet, and one whose thousands of properties cost 50 times their size once they are objects. Of
either a `Stub` stands in its run, with the message's own topic, QoS, packet id and flags, so it is numbered, held,
stored and acknowledged like any other. Its payload is None, which no payload of MQTT can be.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from mqtt5 import PublishPacket, QoS

from towline.mqtt import codec3, fence
from towline.mqtt.fence import MAX_PROPERTIES, SUBSCRIPTION_ID, UNKNOWN_LENGTH, USER_PROPERTY

#: Why there is only a stub: the values of ``towline-reason``.
TOO_LARGE: Final = "packet_too_large"
TOO_MANY: Final = "too_many_properties"
#: Names of the facts of a stub.
REASON, SIZE, DIGEST, COUNT = "towline-reason", "towline-size", "towline-sha256", "towline-properties"


@dataclass(frozen=True, slots=True)
class Stub:
    """A message that is not taken in whole; looks like a `mqtt5.PublishPacket`.

    Attributes:
        topic: Topic name; empty where only the alias says it.
        qos: As it came, and so the next four.
        retain: See above.
        duplicate: See above.
        packet_id: None for QoS 0.
        topic_alias: None for none.
        user_properties: The facts: ``towline-reason`` (`TOO_LARGE` or `TOO_MANY`), ``towline-size`` (bytes of the
            packet), ``towline-sha256`` (of its payload, hex), ``towline-properties`` (its user properties); then the
            message's own whose names begin with ``towline-``: the marks of a publisher that wants receipts.
        correlation_data: The whole packet as it came, None where it was larger than the limit.
    """

    topic: str
    qos: QoS
    retain: bool
    duplicate: bool
    packet_id: int | None
    topic_alias: int | None
    user_properties: list[tuple[str, str]]
    correlation_data: bytes | None

    payload: ClassVar[None] = None
    payload_format_indicator: ClassVar[int] = 0
    message_expiry_interval: ClassVar[None] = None
    content_type: ClassVar[None] = None
    response_topic: ClassVar[None] = None
    subscription_ids: ClassVar[tuple[int, ...]] = ()

    @property
    def facts(self) -> bytes:
        """Tells a repeat from another message, as a payload does.

        Without reason and size: a server may say the same message in another number of bytes the next time, with or
        without a topic alias, and another limit may be set by then.
        """
        return repr([pair for pair in self.user_properties if pair[0] not in (REASON, SIZE)]).encode()

    @property
    def reason(self) -> str:
        """`TOO_LARGE` or `TOO_MANY`."""
        return self.user_properties[0][1]


#: What comes of a PUBLISH.
Published: TypeAlias = PublishPacket | Stub

#: A block of properties up to this many bytes can't hold more: an identifier takes 2.
_SURELY_FEW: Final = 2 * MAX_PROPERTIES
#: Begins the names of the facts of a stub, and of the marks of publishers that want receipts.
_OURS: Final = b"towline-"
_FACTS: Final = frozenset({REASON, SIZE, DIGEST, COUNT})
#: So many of a stub's own properties that begin like that are kept: a mark has two or three.
_MOST_KEPT: Final = 8
#: Properties of PUBLISH beside the user property [MQTT 5 section 3.3.2.3].
_TOPIC_ALIAS: Final = 0x23
_OF_PUBLISH: Final = frozenset({0x01, 0x02, 0x03, 0x08, 0x09, SUBSCRIPTION_ID, _TOPIC_ALIAS})


class Skipping:
    """Reads past one PUBLISH: counts its properties as they arrive, and holds no more than one that is not whole.

    Args:
        header: Its first byte.
        size: Bytes of the whole packet.
        left: Bytes of it behind the fixed header.
        properties: The protocol has properties: MQTT 5.

    Raises:
        ValueError: QoS 3, or DUP at QoS 0.
    """

    def __init__(self, header: int, size: int, left: int, *, properties: bool) -> None:
        flags = codec3.PUBLISH_FLAGS[header]
        if flags is None:
            raise ValueError(codec3.NO_PUBLISH)
        #: First byte of the packet.
        self.header = header
        self._flags = flags
        self._size = size
        self._left = left
        self._properties = properties
        #: What came before the head was whole.
        self._start = bytearray()
        self._head: fence.PublishHead | None = None
        #: Bytes of properties that have not come, and the property of which not all has come.
        self._ahead, self._rest = 0, b""
        self._users = self._identifiers = 0
        self._alias: int | None = None
        #: Properties with a name like ours.
        self._kept: list[tuple[str, str]] = []
        self._digest = hashlib.sha256()

    def feed(self, data: bytes) -> bytes:
        """Take received bytes and return those behind the packet.

        Raises:
            ValueError: They can't be a PUBLISH.
        """
        behind = data[self._left :]
        data = data[: self._left]
        self._left -= len(data)
        if self._head is None:
            self._start += data
            self._head = head = fence.publish_head(self._start, 0, self.header, properties=self._properties)
            if head is None:
                if not self._left:
                    raise ValueError("PUBLISH is too short")
                return b""
            data = bytes(self._start[head.at :])
            self._start.clear()
            if head.length > len(data) + self._left:
                raise ValueError("a property length beyond the end of the packet [MQTT-2.2.2-1]")
            self._ahead = head.length
        if self._ahead:
            block = data[: self._ahead]
            data = data[len(block) :]
            self._count(block)
        self._digest.update(data)
        return behind

    def _count(self, data: bytes) -> None:
        """Take bytes of properties."""
        self._ahead -= len(data)
        buffer = self._rest + data if self._rest else data
        at = begin = users = 0
        size, ours = len(buffer), _OURS in buffer
        try:
            while at < size:  # 13 million times in 64 MiB
                begin = at
                if buffer[at] == USER_PROPERTY:
                    value = at + 3 + (buffer[at + 1] << 8 | buffer[at + 2])
                    at = value + 2 + (buffer[value] << 8 | buffer[value + 1])
                    if at > size:
                        break
                    users += 1
                    if ours and buffer.startswith(_OURS, begin + 3):
                        self._keep(buffer[begin + 3 : value], buffer[value + 2 : at])
                else:
                    at = self._other(buffer[at], buffer, at)
        except IndexError:
            at = size + 1
        self._users += users
        self._rest = buffer[begin:] if at > size else b""
        if self._rest and not self._ahead:
            raise ValueError("a property longer than the property length says [MQTT-2.2.2-1]")

    def _other(self, kind: int, buffer: bytes, at: int) -> int:
        """Step over a property that is no user property, and return where the next begins."""
        if kind not in _OF_PUBLISH:
            raise ValueError(f"property {kind:#x} in PUBLISH [MQTT 5 section 2.2.2.2]")
        end = fence.end_of_value(kind, buffer, at + 1)
        if kind == _TOPIC_ALIAS:
            alias = buffer[at + 1] << 8 | buffer[at + 2]
            if self._alias is not None:
                raise ValueError("two topic aliases [MQTT 5 section 3.3.2.3.4]")
            self._alias = alias
        self._identifiers += kind == SUBSCRIPTION_ID
        return end

    def _keep(self, key: bytes, value: bytes) -> None:
        name, text = str(key, "utf-8"), str(value, "utf-8")
        if name not in _FACTS and len(self._kept) < _MOST_KEPT:
            self._kept.append((name, text))

    @property
    def done(self) -> bool:
        """The packet has passed as a whole."""
        return not self._left

    @property
    def crowded(self) -> bool:
        """More than `MAX_PROPERTIES` of a kind have passed."""
        return max(self._users, self._identifiers) > MAX_PROPERTIES

    def stub(self, reason: str = TOO_LARGE, packet: bytes | None = None) -> Stub:
        """What is left of it, once it is `done`.

        Args:
            reason: `TOO_LARGE` or `TOO_MANY`.
            packet: The whole of it, to be kept.

        Raises:
            ValueError: Its topic is no UTF-8, or empty without an alias.
        """
        head = self._head
        assert head is not None
        if not head.topic and self._alias is None:
            raise ValueError("topic is empty [MQTT-4.7.3-1]")
        qos, _, duplicate, retain = self._flags
        digest = self._digest.hexdigest()
        facts = [(REASON, reason), (SIZE, str(self._size)), (DIGEST, digest), (COUNT, str(self._users))]
        pairs = [*facts, *self._kept]
        return Stub(fence.text(head.topic), qos, retain, duplicate, head.packet_id, self._alias, pairs, packet)


def crowded_stub(packet: memoryview, properties: int) -> Stub | None:
    """A stub for a whole PUBLISH of MQTT 5 with more than `MAX_PROPERTIES`; None for one that may be decoded.

    Args:
        packet: From its first byte to its last.
        properties: Its Property Length, or `UNKNOWN_LENGTH` where that has more than one byte.

    Raises:
        ValueError: Its properties can't be read. Whatever else is wrong is left to the codec.
    """
    if properties < UNKNOWN_LENGTH:
        return None
    header, (_, start) = packet[0], fence.variable_integer(packet, 1)
    head = fence.publish_head(packet, start, header, properties=True)
    if head is None or head.length <= _SURELY_FEW:
        return None
    payload_at = head.at + head.length
    past = Skipping(header, len(packet), len(packet) - start, properties=True)
    past.feed(bytes(packet[start : head.at]))
    past.feed(bytes(packet[head.at : payload_at]))
    if not past.crowded:
        return None
    past.feed(bytes(packet[payload_at:]))
    return past.stub(TOO_MANY, bytes(packet))
