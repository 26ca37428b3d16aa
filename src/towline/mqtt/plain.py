"""Fast path for PUBLISH packets without properties: thousands are read as columns, not one by one.

`PlainRuns` finds the field lengths of such packets. It steps from packet to packet by the first bytes of each, which
determine all field lengths, and caches them: devices send few different lengths. A `PlainReader` checks the rest while
it builds the columns: a property length other than 0, packet id 0 and invalid topics. Neither refuses anything: an
unusual packet ends the run and goes to the codec.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from mqtt5 import PublishPacket

from towline.mqtt.checks import PREFIX_BYTES, publish_offsets
from towline.mqtt.codec3 import PUBLISH_FLAGS

#: Fields whose lengths `PlainRuns` finds: up to the topic's length, topic, packet id and property length, payload.
FIELD_COUNT: Final = 4
_LENGTHS_STRUCT: Final = struct.Struct(f"={FIELD_COUNT}i")
#: Most cached prefixes; then the cache is cleared, because devices choose the lengths.
_MAX_CACHED_PREFIXES: Final = 10_000
#: Entry for a packet that is not plain.
_NOT_PLAIN: Final = (0, b"")
#: Packets searched after a failure, and the longest pause between searches, as a power of 2.
_PACKETS_AFTER_FAILURE: Final = 200
_MAX_PAUSE_EXPONENT: Final = 10


class MessageColumns(Protocol):
    """Columns of topics and payloads of a run, in a form that its reader chooses."""

    @property
    def nbytes(self) -> int:
        """Memory size in bytes."""

    def topics(self) -> Sequence[str]:
        """Return the topic of each message."""

    def payloads(self) -> Sequence[bytes]:
        """Return the payload of each message."""


@dataclass(frozen=True, slots=True)
class PlainRun:
    """PUBLISH packets without properties in the order of their arrival, with nothing between them.

    Attributes:
        headers: The first byte of each packet, at least one: DUP, QoS and RETAIN as received.
        packet_ids: The packet id of each; 0 for QoS 0.
        columns: Topics and payloads.
    """

    headers: bytes
    packet_ids: array[int]
    columns: MessageColumns

    def __len__(self) -> int:
        return len(self.headers)

    @property
    def topics(self) -> Sequence[str]:
        """Topic of each packet."""
        return self.columns.topics()

    @property
    def packets(self) -> Sequence[PublishPacket]:
        """All packets as objects."""
        packet_fields = zip(self.headers, self.packet_ids, self.columns.topics(), self.columns.payloads(), strict=True)
        return [_packet(*fields) for fields in packet_fields]


def _packet(header: int, packet_id: int, topic: str, payload: bytes) -> PublishPacket:
    flags = PUBLISH_FLAGS[header]
    assert flags is not None, "the walk has seen to it"
    qos, _, duplicate, retain = flags
    return PublishPacket(topic, payload, qos=qos, retain=retain, duplicate=duplicate, packet_id=packet_id or None)


#: Builder of columns from packets with known field lengths. Arguments: received bytes, start of the first packet,
#: lengths of each packet's fields (`FIELD_COUNT` native 32-bit integers), and ``properties``: True if packets have a
#: property length, which must be 0 (MQTT 5). Returns the longest run of valid packets from the first one, and its end;
#: None if the run would be too short to be worth it.
PlainReader: TypeAlias = Callable[..., tuple[PlainRun, int] | None]


class PlainRuns:
    """Finder of runs of plain PUBLISH packets; it tries less often after failures.

    Args:
        reader: Builder of the columns.
        max_packet_bytes: A longer packet is not plain.
        properties: True if the protocol has properties: MQTT 5.
    """

    def __init__(self, reader: PlainReader, max_packet_bytes: int, *, properties: bool) -> None:
        self._reader = reader
        self._max_packet_bytes = max_packet_bytes
        self._has_properties = properties
        #: First bytes → size of the packet and the packed lengths of its fields; size 0 for one that is not plain.
        self._cached_lengths: dict[bytes, tuple[int, bytes]] = {}
        #: Failed searches since the last run.
        self._failed_searches = 0
        #: PUBLISH packets to be decoded one by one before the next search.
        self._packets_to_skip = 0

    def find_run(self, buffer: bytes, position: int) -> tuple[PlainRun, int] | None:
        """Return the run that begins at `position`, and its end; None if it is too short, or after recent failures.

        Args:
            buffer: Received bytes.
            position: Start of a PUBLISH.
        """
        if self._packets_to_skip:
            self._packets_to_skip -= 1
            return None
        max_packets = _PACKETS_AFTER_FAILURE if self._failed_searches else len(buffer)
        field_lengths = self._plain_field_lengths(buffer, position, max_packets)
        run_and_end = self._reader(buffer, position, field_lengths, properties=self._has_properties)
        if run_and_end is None:
            self._packets_to_skip = 1 << min(self._failed_searches, _MAX_PAUSE_EXPONENT)
            self._failed_searches += 1
        else:
            self._failed_searches = 0
        return run_and_end

    def _plain_field_lengths(self, buffer: bytes, position: int, max_packets: int) -> list[bytes]:
        """Return the field lengths of each whole packet, up to the first that is not plain."""
        if len(self._cached_lengths) > _MAX_CACHED_PREFIXES:
            self._cached_lengths.clear()
        field_lengths: list[bytes] = []
        append, cached_lengths, buffer_end = field_lengths.append, self._cached_lengths, len(buffer)
        for _ in range(max_packets):
            if position >= buffer_end:
                break
            prefix = buffer[position : position + PREFIX_BYTES]
            try:
                size, lengths = cached_lengths[prefix]
            except KeyError:
                size, lengths = cached_lengths[prefix] = self._field_lengths(prefix)
            if not size:
                return field_lengths
            append(lengths)
            position += size
        if position > buffer_end:
            field_lengths.pop()  # incomplete
        return field_lengths

    def _field_lengths(self, prefix: bytes) -> tuple[int, bytes]:
        size, topic_start, topic_end, properties_at = publish_offsets(prefix, properties=self._has_properties)
        if topic_end == topic_start or size > self._max_packet_bytes or PUBLISH_FLAGS[prefix[0]] is None:
            return _NOT_PLAIN
        middle = properties_at - topic_end + self._has_properties
        return size, _LENGTHS_STRUCT.pack(topic_start, topic_end - topic_start, middle, size - topic_end - middle)
