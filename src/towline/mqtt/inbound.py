"""Inbound messages, from PUBLISH to the last acknowledgement.

Every message gets the next number of one sequence, its offset in the journal. Acknowledgements are 32-bit words that
wait here until the watermark passes their number; they are sent in the order of arrival [MQTT-4.6.0-2, -3]. QoS 2 adds
a table of packet ids:

    packet id    event                              effect
    free         PUBLISH                            store the message with its id; PUBREC when acknowledgeable
    unreleased   PUBLISH, the same content          store nothing; PUBREC again               [MQTT-4.3.3-10]
    unreleased   PUBLISH, other content             the broker's fault: store as new, count it
    unreleased   PUBREL                             free the id; PUBCOMP when that is durable [MQTT-4.3.3-11]
    free         PUBREL                             PUBCOMP with 0x92 at once                 [MQTT-4.3.3-11]

QoS 1 has such a table only while an acknowledgement is pending. MQTT 5 sends nothing again within a connection
[MQTT-4.4.0-1]; brokers of 3.1.1 may, and EMQX 4 and VerneMQ do after some seconds without PUBACK:

    packet id    event                              effect
    pending      PUBLISH, DUP, the same content     store nothing; the one PUBACK stays pending [I3]
    pending      PUBLISH, else                      the broker's fault: store as new
    not pending  PUBLISH                            store as new, whatever DUP says           [MQTT-4.3.2-5]

The content is compared by a digest: topic, payload, RETAIN and properties, in order. The digest excludes what may
differ when the same message comes again:

    DUP                        brokers differ in when they set it
    packet id                  is the key of the digest
    topic alias                belongs to a connection; its topic counts [MQTT-3.3.2-7]
    message expiry interval    a server sends the remaining seconds [MQTT-3.3.2-6]
    subscription identifiers   belong to the subscription, which may have changed meanwhile
    QoS                        selects the table

A message and its id are stored in one step, and so is an id that is freed: both are in the same `Deliver` [I3].

The owner may drop duplicates before they get numbers, by a name that their publishers gave them (`DuplicateFilter`).
Such a message is acknowledged in its order like any other. With QoS 2 its packet id is kept in memory only, and freed
without a `Deliver`; after a crash the id is free, and PUBCOMP with 0x92 ends the flow as well.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, compress, takewhile
from operator import attrgetter
from typing import Any, Final, NamedTuple

from mqtt5 import PubCompPacket, PubCompReasonCode

from towline.mqtt.codec import PublishRun
from towline.mqtt.codec3 import QOS_OF_HEADER, RETAIN_OF_HEADER
from towline.mqtt.events import BrokerProtocolError, Deliver, Messages, UnreleasedMessage
from towline.mqtt.plain import PlainRun
from towline.mqtt.truncated import ReceivedPublish

#: PUBACK and PUBREC with reason 0 in their short form, by QoS, before the packet id is added.
_ACK_WORD: Final = {1: 0x40020000, 2: 0x50020000}
_PUBCOMP_WORD: Final = 0x70020000
_ID_NOT_FOUND: Final = PubCompReasonCode.PACKET_ID_NOT_FOUND
#: First byte of a PUBLISH → 1 with QoS 1 and DUP.
_QOS1_DUP_HEADER: Final = bytes(byte & 0b1110 == 0b1010 for byte in range(256))
#: Memory for messages whose digests are not computed yet, in bytes; they wait with ``ack_after = kafka``.
_MAX_UNDIGESTED_BYTES: Final = 16 << 20
#: `UnreleasedMessage._make` in half the time.
_new_unreleased: Final = partial(tuple.__new__, UnreleasedMessage)
#: Properties of the publisher that are part of the content, and their values in a message without them.
_PUBLISHER_PROPERTIES: Final = attrgetter(
    "payload_format_indicator", "content_type", "response_topic", "correlation_data", "user_properties"
)
_NO_PROPERTIES: Final[tuple[Any, ...]] = (0, None, None, None, [])
#: Entry of a QoS 2 duplicate: below every number, as the journal does not have it.
_DUPLICATE_ENTRY: Final = UnreleasedMessage(-1, 0)
#: Byte of `FilterResult.duplicate_flags` → 1 for a message that is stored.
_STORED_FLAG: Final = b"\x01" + bytes(255)
#: `FilterResult.duplicate_flags` without duplicates.
NO_DUPLICATES: Final = b""


class FilterResult(NamedTuple):
    """Result of the owner's duplicate filter.

    Attributes:
        duplicate_flags: One byte a message, 1 for a duplicate, which is not stored; empty for no duplicates.
        tags: One tag a message; returned in `Messages.tags`.
    """

    duplicate_flags: bytes
    tags: Sequence[Any]


#: The owner's check of messages and their topics, with topic aliases resolved.
DuplicateFilter = Callable[[Sequence[ReceivedPublish], Sequence[str]], FilterResult]
#: Result without a filter.
_EMPTY_RESULT: Final = FilterResult(NO_DUPLICATES, ())


@dataclass(slots=True)
class _PendingAcks:
    """Pending acknowledgements of one chunk, and the digests of its messages, which are computed when needed."""

    #: Number of the first message that is stored.
    first_number: int
    compute_digests: Callable[[], Sequence[int]]
    #: Memory for its messages in bytes; 0 once the digests are computed.
    undigested_bytes: int
    computed_digests: Sequence[int] | None = None
    #: One big-endian 32-bit word each: type, length 2, packet id.
    ack_words: array[int] = field(default_factory=lambda: array("I"))
    #: The word is sent when `ack_watermark` is above its number; never descending, as long as `ack_words`.
    message_numbers: Sequence[int] = ()

    @property
    def digests(self) -> Sequence[int]:
        """Digest of each stored message."""
        if self.computed_digests is None:
            self.computed_digests = array("I", self.compute_digests())
            self.compute_digests, self.undigested_bytes = list, 0
        return self.computed_digests


@dataclass(slots=True)
class _Chunk:
    """Messages and packet ids of one read that are not delivered yet."""

    first_number: int
    #: No run is empty.
    runs: list[PublishRun | PlainRun] = field(default_factory=list)
    tags: list[Any] = field(default_factory=list)
    unreleased_messages: dict[int, UnreleasedMessage] = field(default_factory=dict)
    released_ids: list[int] = field(default_factory=list)
    pubcomp_words: list[int] = field(default_factory=list)

    def add_run(self, run: PublishRun | PlainRun, tags: Iterable[Any]) -> None:
        """Add messages to store, perhaps none."""
        if len(run):
            self.runs.append(run)
            self.tags += tags


class Inbound:
    """Receiving half of a session.

    Args:
        next_number: Number of the next message.
        unreleased_messages: Unreleased QoS 2 packet ids in the journal.
        receive_maximum: Unacknowledged messages we allow the broker.
        topic_alias_maximum: Topic aliases we allow the broker.
        has_reason_codes: True for MQTT 5, which has reason codes.
    """

    def __init__(
        self,
        next_number: int = 0,
        unreleased_messages: Mapping[int, UnreleasedMessage] | None = None,
        *,
        receive_maximum: int = 65534,
        topic_alias_maximum: int = 0,
        has_reason_codes: bool = True,
    ) -> None:
        #: Grows by one a message, never goes back.
        self.next_number = next_number
        #: Everything below may be acknowledged. Never above `next_number`, never goes back.
        self.ack_watermark = next_number
        #: QoS 2 packet ids between PUBLISH and PUBREL; they outlive connections and, in the journal, the process. A
        #: number below 0 is that of a duplicate, which the journal does not have.
        self.unreleased_messages: dict[int, UnreleasedMessage] = dict(unreleased_messages or {})
        #: Times the broker had more unacknowledged messages open than Receive Maximum allows [MQTT 5 section 4.9].
        self.window_overruns = 0
        #: QoS 2 packet ids that came with a new message before their release: the broker's fault. The owner resets
        #: this count and the next two when it has added them to its own.
        self.reused_ids = 0
        #: Messages that were not stored: duplicates by the owner's filter, and repeats.
        self.duplicates = 0
        #: QoS > 0 messages of this connection that are not acknowledged.
        self.unacknowledged_count = 0
        #: PUBACKs and PUBRECs sent.
        self.acknowledged_count = 0
        #: The owner's check of messages before they are stored; None for none.
        self.duplicate_filter: DuplicateFilter | None = None
        self._receive_maximum = receive_maximum
        self._alias_maximum = topic_alias_maximum
        self._has_reason_codes = has_reason_codes
        self._topic_aliases: dict[int, str] = {}
        #: In order of arrival; empty while offline.
        self._pending: deque[_PendingAcks] = deque()
        #: Memory for their messages in bytes.
        self._undigested_bytes = 0
        #: PUBCOMPs by the id of the `Deliver` that makes their release durable.
        self._pubcomps: deque[tuple[int, bytes]] = deque()
        self._last_delivery_id = 0
        self._chunk = _Chunk(next_number)

    def take_publishes(self, run: PublishRun | PlainRun) -> None:
        """Take received messages in.

        Raises:
            BrokerProtocolError: A topic alias that is 0, above our maximum, or without a topic yet [MQTT-3.3.2-8, -9].
        """
        qos, packet_ids = run.headers.translate(QOS_OF_HEADER), run.packet_ids
        duplicate_flags, tags = _EMPTY_RESULT
        if isinstance(run, PublishRun):
            run = self._with_resolved_topics(run)
            if self.duplicate_filter is not None:
                duplicate_flags, tags = self.duplicate_filter(run.packets, run.topics)
        elif self.duplicate_filter is not None:  # it goes by properties, and these have none
            tags = [None] * len(run)
        if (b"\x02" in qos and not self._all_ids_free(qos, packet_ids)) or self._may_repeat(run.headers, packet_ids):
            self._take_one_by_one(run, qos, tags, duplicate_flags)
            return
        if duplicate_flags:
            stored_flags = _stored_flags(duplicate_flags)
            run, tags = _select_packets(run, stored_flags), list(compress(tags, stored_flags))
        self._chunk.add_run(run, tags)
        undigested_bytes = run.columns.nbytes if isinstance(run, PlainRun) else _MAX_UNDIGESTED_BYTES + 1
        pending = _PendingAcks(self.next_number, partial(_content_digests, run), undigested_bytes)
        self._take_new(qos, packet_ids, pending, duplicate_flags)

    def take_pubrels(self, packet_ids: Sequence[int]) -> bytes:
        """Handle PUBRELs and return the PUBCOMPs that may be sent at once."""
        unreleased_messages, chunk = self.unreleased_messages, self._chunk
        pubcomps = []
        for packet_id in packet_ids:
            message = unreleased_messages.pop(packet_id, None)
            if message is None or message.number < 0:  # nothing of it is on disk
                reason = PubCompReasonCode.SUCCESS if message or not self._has_reason_codes else _ID_NOT_FOUND
                pubcomps.append(PubCompPacket(packet_id, reason_code=reason).write())
                continue
            # A message that comes and is released within one chunk leaves no packet id in the journal.
            if chunk.unreleased_messages.pop(packet_id, None) is None:
                chunk.released_ids.append(packet_id)
            chunk.pubcomp_words.append(_PUBCOMP_WORD | packet_id)
        return b"".join(pubcomps)

    def next_delivery(self) -> Deliver | None:
        """Return the delivery of the collected messages and packet ids; None for nothing to store."""
        chunk = self._chunk
        self._chunk = _Chunk(self.next_number)
        if not (chunk.runs or chunk.pubcomp_words or chunk.released_ids):
            return None
        self._last_delivery_id += 1
        if chunk.pubcomp_words:
            self._pubcomps.append((self._last_delivery_id, _big_endian(array("I", chunk.pubcomp_words))))
        messages, released_ids = Messages(chunk.runs, chunk.tags), tuple(chunk.released_ids)
        return Deliver(self._last_delivery_id, chunk.first_number, messages, chunk.unreleased_messages, released_ids)

    def raise_ack_watermark(self, end_number: int) -> bytes:
        """Raise the acknowledgement watermark and return the PUBACKs and PUBRECs that may be sent."""
        self.ack_watermark = max(self.ack_watermark, min(end_number, self.next_number))
        acks: list[bytes] = []
        while self._pending and self._pending[0].message_numbers[0] < self.ack_watermark:
            oldest = self._pending[0]
            ready_count = bisect_left(oldest.message_numbers, self.ack_watermark)
            acks.append(_big_endian(oldest.ack_words[:ready_count]))
            self.unacknowledged_count -= ready_count
            self.acknowledged_count += ready_count
            if ready_count == len(oldest.ack_words):
                self._undigested_bytes -= self._pending.popleft().undigested_bytes
            else:
                oldest.ack_words = oldest.ack_words[ready_count:]
                oldest.message_numbers = oldest.message_numbers[ready_count:]
        return b"".join(acks)

    def confirm_stored(self, delivery_id: int) -> bytes:
        """Return the PUBCOMPs that may be sent after the `Deliver` with this id became durable."""
        if self._undigested_bytes > _MAX_UNDIGESTED_BYTES:
            undigested = list(takewhile(lambda pending: pending.computed_digests is None, reversed(self._pending)))
            for pending in sorted(undigested, key=lambda pending: pending.undigested_bytes, reverse=True):
                if self._undigested_bytes > _MAX_UNDIGESTED_BYTES:
                    self._undigested_bytes -= pending.undigested_bytes
                    _ = pending.digests
        pubcomps: list[bytes] = []
        while self._pubcomps and self._pubcomps[0][0] <= delivery_id:
            pubcomps.append(self._pubcomps.popleft()[1])
        return b"".join(pubcomps)

    def drop_connection_state(self) -> None:
        """Drop pending acknowledgements and topic aliases with the connection; the broker sends the messages again."""
        self._pending.clear()
        self._undigested_bytes = 0
        self._pubcomps.clear()
        self._topic_aliases.clear()
        self.unacknowledged_count = 0

    def drop_session_state(self) -> int | None:
        """Drop all packet ids of a session that the broker has lost [MQTT-3.2.2-5].

        Returns:
            Id of the next delivery, which frees them; None if there are none.
        """
        self._chunk.released_ids += [i for i, message in self.unreleased_messages.items() if message.number >= 0]
        self.unreleased_messages.clear()
        return self._last_delivery_id + 1 if self._chunk.released_ids else None

    def _all_ids_free(self, qos: bytes, ids: Sequence[int]) -> bool:
        """Return whether these are only QoS 2 messages with free packet ids: the case that must be fast."""
        return qos.count(2) == len(ids) == len(set(ids)) and self.unreleased_messages.keys().isdisjoint(ids)

    def _may_repeat(self, headers: bytes, packet_ids: Sequence[int]) -> bool:
        """Return whether a QoS 1 message with DUP has the packet id of an unacknowledged one."""
        dup_flags = headers.translate(_QOS1_DUP_HEADER)
        if 1 not in dup_flags:
            return False
        ack_words = {_ACK_WORD[1] | packet_id for packet_id in compress(packet_ids, dup_flags)}
        ids = list(filter(None, packet_ids))
        return len(set(ids)) < len(ids) or any(not ack_words.isdisjoint(p.ack_words) for p in self._pending)

    def _pending_qos1_digests(self) -> dict[int, int]:
        """Return packet id → content digest of each unacknowledged QoS 1 message."""
        digests_by_id: dict[int, int] = {}
        for pending in self._pending:
            digests, first_number = pending.digests, pending.first_number
            for ack_word, number in zip(pending.ack_words, pending.message_numbers, strict=True):
                if ack_word >> 16 == _ACK_WORD[1] >> 16 and number >= first_number:
                    digests_by_id[ack_word & 0xFFFF] = digests[number - first_number]
        self._undigested_bytes = 0
        return digests_by_id

    def _take_new(self, qos: bytes, ids: Sequence[int], pending: _PendingAcks, duplicates: bytes) -> None:
        """Number new messages, register the QoS 2 ids, and add their pending acknowledgements."""
        first_number = self.next_number
        numbers: Sequence[int] = range(first_number, first_number + len(ids))
        stored_ids = ids
        if duplicates:
            numbers = _message_numbers(first_number, duplicates)
            stored_ids = list(compress(ids, _stored_flags(duplicates)))
            self.duplicates += len(ids) - len(stored_ids)
        self.next_number += len(stored_ids)
        if b"\x02" in qos:
            number_digest_pairs = zip(range(first_number, self.next_number), pending.digests, strict=True)
            unreleased_by_id = dict(zip(stored_ids, map(_new_unreleased, number_digest_pairs), strict=True))
            if duplicates:
                self.unreleased_messages.update(dict.fromkeys(ids, _DUPLICATE_ENTRY))
            self.unreleased_messages.update(unreleased_by_id)
            self._chunk.unreleased_messages.update(unreleased_by_id)
        ack_type = _ACK_WORD[2 if b"\x02" in qos else 1]
        if b"\x00" not in qos:
            self._add_pending_acks(list(map(ack_type.__or__, ids)), numbers, pending)
        else:
            acks = [(ack_type | packet_id, number) for packet_id, number in zip(ids, numbers, strict=True) if packet_id]
            self._add_pending_acks([word for word, _ in acks], [number for _, number in acks], pending)

    def _take_one_by_one(self, run: PublishRun | PlainRun, qos: bytes, tags: Sequence[Any], duplicates: bytes) -> None:
        """Take messages that may contain repeats."""
        packet_ids, digests = run.packet_ids, _content_digests(run)
        dup_flags = run.headers.translate(_QOS1_DUP_HEADER)
        pending = self._pending_qos1_digests() if 1 in dup_flags else {}
        first_number, stored_flags = self.next_number, bytearray(len(run))
        ack_words: list[int] = []
        message_numbers: list[int] = []
        for index, level in enumerate(qos):
            packet_id = packet_ids[index]
            is_duplicate = bool(duplicates and duplicates[index])
            if dup_flags[index] and packet_id in pending and (is_duplicate or pending[packet_id] == digests[index]):
                self.duplicates += 1
                continue
            if is_duplicate:
                self.duplicates += 1
                if level == 2:
                    self.unreleased_messages.setdefault(packet_id, _DUPLICATE_ENTRY)
            elif level < 2 or not self._is_repeat(packet_id, digests[index]):
                stored_flags[index] = 1
                self.next_number += 1
            if level == 1:
                pending[packet_id] = digests[index]
            if level:
                ack_words.append(_ACK_WORD[level] | packet_id)
                # A repeat waits for everything that came before it.
                message_numbers.append(self.next_number - 1)
        self._chunk.add_run(_select_packets(run, stored_flags), compress(tags, stored_flags))
        stored_digests = list(compress(digests, stored_flags))
        self._add_pending_acks(ack_words, message_numbers, _PendingAcks(first_number, lambda: stored_digests, 0))

    def _is_repeat(self, packet_id: int, digest: int) -> bool:
        """Return whether a QoS 2 message is a repeat; if not, register it under the next number."""
        earlier_message = self.unreleased_messages.get(packet_id)
        if earlier_message is not None and earlier_message.number >= 0:
            if earlier_message.digest == digest:
                self.duplicates += 1
                return True
            self.reused_ids += 1
            if packet_id not in self._chunk.unreleased_messages:
                self._chunk.released_ids.append(packet_id)  # a PUBREL of this chunk must find nothing of the older one
        message = UnreleasedMessage(self.next_number, digest)
        self.unreleased_messages[packet_id] = self._chunk.unreleased_messages[packet_id] = message
        return False

    def _add_pending_acks(self, ack_words: Sequence[int], numbers: Sequence[int], pending: _PendingAcks) -> None:
        if not ack_words:
            return
        pending.ack_words, pending.message_numbers = array("I", ack_words), numbers
        self._pending.append(pending)
        self._undigested_bytes += pending.undigested_bytes
        self.unacknowledged_count += len(ack_words)
        if self.unacknowledged_count > self._receive_maximum:
            self.window_overruns += 1

    def _with_resolved_topics(self, run: PublishRun) -> PublishRun:
        """Return the run with topic aliases replaced by their topics."""
        aliases = [packet.topic_alias for packet in run.packets]
        if aliases.count(None) == len(aliases):
            return run
        return replace(run, topics=list(map(self._resolve_topic, aliases, run.topics)))

    def _resolve_topic(self, alias: int | None, topic: str) -> str:
        if alias is None:
            return topic
        if not 0 < alias <= self._alias_maximum:
            raise BrokerProtocolError(f"used topic alias {alias}, we allow {self._alias_maximum} [MQTT-3.3.2-9]", 0x94)
        if topic:
            self._topic_aliases[alias] = topic
        elif alias not in self._topic_aliases:
            raise BrokerProtocolError(f"used topic alias {alias} before it gave it a topic", 0x94)
        return self._topic_aliases[alias]


def _select_packets(run: PublishRun | PlainRun, flags: bytes | bytearray) -> PublishRun:
    """Return the packets with a 1 in `flags`, perhaps none."""
    selected = PublishRun.from_packets(list(compress(run.packets, flags)), bytes(compress(run.headers, flags)))
    return replace(selected, topics=list(compress(run.topics, flags)))


def _content_digests(run: PublishRun | PlainRun) -> list[int]:
    topics, retain_flags = run.topics, run.headers.translate(RETAIN_OF_HEADER)
    seeds = {topic: zlib.crc32(topic.encode()) for topic in set(topics)}
    if isinstance(run, PlainRun):
        contents, properties = run.columns.payloads(), [_NO_PROPERTIES] * len(run)
    else:
        # A truncated message has facts in place of a payload; the packet in it may differ the next time.
        contents = [p.comparable_facts if p.payload is None else p.payload for p in run.packets]
        properties = list(map(_PUBLISHER_PROPERTIES, run.packets))
    digests = list(map(zlib.crc32, contents, map(seeds.__getitem__, topics)))
    if 1 not in retain_flags and properties.count(_NO_PROPERTIES) == len(properties):
        return digests
    rows = zip(run.packets, retain_flags, properties, digests, strict=True)
    return [d if p.payload is None else zlib.crc32(_encode_properties(r, *values), d) for p, r, values, d in rows]


def _encode_properties(
    retain: int,
    payload_format: int,
    content_type: str | None,
    response_topic: str | None,
    correlation_data: bytes | None,
    user_properties: list[tuple[str, str]],
) -> bytes:
    """Encode RETAIN and properties without ambiguity; empty for a message with none of them."""
    optional_fields = (content_type, response_topic, correlation_data)
    if not (retain or payload_format or user_properties) and optional_fields == (None, None, None):
        return b""
    texts = (*optional_fields, *chain.from_iterable(user_properties))
    encoded_fields = [text.encode() if isinstance(text, str) else text for text in texts]
    lengths = b",".join(b"-" if field is None else b"%d" % len(field) for field in encoded_fields)
    return b"%d %d %b " % (retain, payload_format, lengths) + b"".join(field or b"" for field in encoded_fields)


def _message_numbers(first_number: int, duplicate_flags: bytes) -> list[int]:
    """Return the number that each acknowledgement waits for; a duplicate waits for the stored message before it."""
    return list(accumulate(_stored_flags(duplicate_flags), initial=first_number - 1))[1:]


def _stored_flags(duplicate_flags: bytes) -> bytes:
    """Return 1 for each message to store, 0 for each duplicate."""
    return duplicate_flags.translate(_STORED_FLAG)


def _big_endian(ack_words: array[int]) -> bytes:
    if sys.byteorder == "little":
        ack_words = ack_words[:]
        ack_words.byteswap()
    return ack_words.tobytes()
