"""What the broker sends us, from PUBLISH to the last acknowledgement.

Every message gets the next number of one sequence, the offset it will have in the journal. Acknowledgements are words
of four bytes that wait here until the watermark passes their number, and leave in the order of arrival
[MQTT-4.6.0-2, -3]. QoS 2 adds a table of packet ids:

    packet id   event                              does
    free        PUBLISH                            store the message with its id; PUBREC when it is settled
    held        PUBLISH, the same content          store nothing; PUBREC again               [MQTT-4.3.3-10]
    held        PUBLISH, other content             the broker's fault: store as new, count it
    held        PUBREL                             free the id; PUBCOMP when that is durable [MQTT-4.3.3-11]
    free        PUBREL                             PUBCOMP with 0x92 at once                 [MQTT-4.3.3-11]

QoS 1 has such a table only while an acknowledgement is owed. MQTT 5 sends nothing again within a connection
[MQTT-4.4.0-1]; brokers of 3.1.1 may, and EMQX 4 and VerneMQ do after some seconds without PUBACK:

    packet id   event                              does
    owed        PUBLISH, DUP, the same content     store nothing; the one PUBACK stays owed  [I3]
    owed        PUBLISH, else                      the broker's fault: store as new
    not owed    PUBLISH                            store as new, whatever DUP says           [MQTT-4.3.2-5]

The content is what the publisher sent, as a digest: topic, payload, RETAIN and properties, in order. Left out is what
may differ when the same message comes again:

    DUP                        says nothing: brokers differ in when they set it
    packet id                  is what the digest stands beside
    topic alias                belongs to a connection; the topic it stands for counts [MQTT-3.3.2-7]
    message expiry interval    a server sends what is left of it [MQTT-3.3.2-6]
    subscription identifiers   are the subscription's, which may have changed meanwhile
    QoS                        is the table's

A message and its id are stored in one step, and so is an id that is freed: both travel in the same `Deliver` [I3].

The owner may leave out, before they get numbers, messages that it has stored by a name that their publishers gave them
(`Screen`). Such a message is acknowledged in its place like any other. With QoS 2 its packet id is held in memory, and
freed without a `Deliver`; after a crash the id is free, and PUBCOMP with 0x92 ends it as well.
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
from towline.mqtt.codec3 import QOS_OF, RETAIN_OF
from towline.mqtt.events import Breach, Deliver, Held, Messages
from towline.mqtt.plain import PlainRun
from towline.mqtt.stubs import Published

#: PUBACK and PUBREC with reason 0 in their short form, by QoS, before the packet id is added.
_ACK_WORD: Final = {1: 0x40020000, 2: 0x50020000}
_PUBCOMP_WORD: Final = 0x70020000
_UNKNOWN_ID: Final = PubCompReasonCode.PACKET_ID_NOT_FOUND
#: First byte of a PUBLISH → 1 with QoS 1 and DUP.
_QOS_1_AGAIN: Final = bytes(byte & 0b1110 == 0b1010 for byte in range(256))
#: Bytes of messages that are kept for their digests while they wait: ``ack_after = kafka``, or for a client's user.
_MOST_KEPT: Final = 16 << 20
#: `Held._make` in half the time.
_HELD: Final = partial(tuple.__new__, Held)
#: What the publisher sent beside topic and payload, and the values of a message without any of it.
_PROPERTIES: Final = attrgetter(
    "payload_format_indicator", "content_type", "response_topic", "correlation_data", "user_properties"
)
_NONE: Final[tuple[Any, ...]] = (0, None, None, None, [])
#: Of a QoS 2 message that is left out: below every number, as the journal does not have it.
_LEFT_OUT: Final = Held(-1, 0)
#: 1 for each message that is stored, by its byte of `Screening.left_out`.
_KEPT: Final = b"\x01" + bytes(255)
#: Nothing is left out.
NOTHING: Final = b""


class Screening(NamedTuple):
    """What the owner says of some messages.

    Attributes:
        left_out: One byte a message, 1 for one that is not stored; empty where all are.
        tags: One for each message; they come back in `Messages.tags`.
    """

    left_out: bytes
    tags: Sequence[Any]


#: The owner's word on messages, their topic aliases resolved.
Screen = Callable[[Sequence[Published], Sequence[str]], Screening]
#: Of an owner that says nothing.
_UNSCREENED: Final = Screening(NOTHING, ())


@dataclass(slots=True)
class _Pending:
    """Acknowledgements owed for one chunk, and what tells its messages from others with their packet ids.

    Digests are taken where one may have come again, or where the messages would keep too much in memory meanwhile.
    """

    #: Number of the first message that is stored.
    first: int
    take: Callable[[], Sequence[int]]
    #: Bytes that are kept for it; 0 once the digests are taken.
    kept: int
    taken: Sequence[int] | None = None
    #: One big-endian 32-bit word each: type, length 2, packet id.
    words: array[int] = field(default_factory=lambda: array("I"))
    #: The word leaves when `settled` is above its number; never descending, as long as `words`.
    numbers: Sequence[int] = ()

    @property
    def digests(self) -> Sequence[int]:
        """One for each message that is stored."""
        if self.taken is None:
            self.taken, self.take, self.kept = array("I", self.take()), list, 0
        return self.taken


@dataclass(slots=True)
class _Chunk:
    """What one read brought and is not handed over yet."""

    first: int
    #: None is empty.
    runs: list[PublishRun | PlainRun] = field(default_factory=list)
    tags: list[Any] = field(default_factory=list)
    held: dict[int, Held] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    completions: list[int] = field(default_factory=list)

    def add(self, run: PublishRun | PlainRun, tags: Iterable[Any]) -> None:
        """Take messages that are to be stored, perhaps none."""
        if len(run):
            self.runs.append(run)
            self.tags += tags


class Inbound:
    """The receiving half of a session.

    Args:
        next_number: Number of the next message.
        held: QoS 2 packet ids received and not released, as the journal knows them.
        receive_maximum: Unacknowledged messages we allow the broker.
        topic_alias_maximum: Topic aliases we allow the broker.
        reasons: The protocol has reason codes: MQTT 5.
    """

    def __init__(
        self,
        next_number: int = 0,
        held: Mapping[int, Held] | None = None,
        *,
        receive_maximum: int = 65534,
        topic_alias_maximum: int = 0,
        reasons: bool = True,
    ) -> None:
        #: Grows by one a message, never goes back.
        self.next_number = next_number
        #: Everything below may be acknowledged. Never above `next_number`, never goes back.
        self.settled = next_number
        #: QoS 2 packet ids between PUBLISH and PUBREL; outlives connections and, through the journal, the process. A
        #: number below 0 is that of a message that was left out, which the journal does not have.
        self.held: dict[int, Held] = dict(held or {})
        #: Times the broker had more unacknowledged messages open than Receive Maximum allows [MQTT 5 section 4.9].
        self.overruns = 0
        #: QoS 2 packet ids that came with a new message before their release: the broker's fault. The driver
        #: takes both counts away as it carries them into its ledger.
        self.reused_ids = 0
        #: Messages that were not stored: what the owner left out, and what came again. Taken away as the counts above.
        self.repeats = 0
        #: QoS > 0 messages of this connection that are not acknowledged.
        self.unacknowledged = 0
        #: PUBACKs and PUBRECs that left, of messages that were taken in; taken away as the counts above.
        self.acknowledged = 0
        #: The owner's word on messages before they are taken in; None for none.
        self.screen: Screen | None = None
        self._receive_maximum = receive_maximum
        self._alias_maximum = topic_alias_maximum
        self._reasons = reasons
        self._aliases: dict[int, str] = {}
        #: In order of arrival; empty while offline.
        self._pending: deque[_Pending] = deque()
        #: Bytes that their contents keep.
        self._kept = 0
        #: PUBCOMPs by the ticket of the `Deliver` that makes their release durable.
        self._completions: deque[tuple[int, bytes]] = deque()
        self._ticket = 0
        self._chunk = _Chunk(next_number)

    def publishes(self, run: PublishRun | PlainRun) -> None:
        """Take messages in.

        Raises:
            Breach: A topic alias that is 0, above our maximum, or not yet given a topic [MQTT-3.3.2-8, -9].
        """
        qos, ids = run.headers.translate(QOS_OF), run.packet_ids
        left_out, tags = _UNSCREENED
        if isinstance(run, PublishRun):
            run = self._resolved(run)
            if self.screen is not None:
                left_out, tags = self.screen(run.packets, run.topics)
        elif self.screen is not None:  # what it could say of them stands in properties
            tags = [None] * len(run)
        if (b"\x02" in qos and not self._all_new(qos, ids)) or self._owes_again(run.headers, ids):
            self._one_by_one(run, qos, tags, left_out)
            return
        if left_out:
            stored = _kept(left_out)
            run, tags = _only(run, stored), list(compress(tags, stored))
        self._chunk.add(run, tags)
        kept = run.columns.nbytes if isinstance(run, PlainRun) else _MOST_KEPT + 1
        self._take(qos, ids, _Pending(self.next_number, partial(_digests, run), kept), left_out)

    def release(self, packet_ids: Sequence[int]) -> bytes:
        """Take PUBRELs; return the answers that may leave at once, if any."""
        held, chunk = self.held, self._chunk
        answers = []
        for packet_id in packet_ids:
            entry = held.pop(packet_id, None)
            if entry is None or entry.number < 0:  # nothing of it is on disk
                reason = PubCompReasonCode.SUCCESS if entry or not self._reasons else _UNKNOWN_ID
                answers.append(PubCompPacket(packet_id, reason_code=reason).write())
                continue
            # An id held and released within one chunk never reaches the journal.
            if chunk.held.pop(packet_id, None) is None:
                chunk.released.append(packet_id)
            chunk.completions.append(_PUBCOMP_WORD | packet_id)
        return b"".join(answers)

    def hand_over(self) -> Deliver | None:
        """What the chunk brought that has to be stored, None for nothing."""
        chunk = self._chunk
        self._chunk = _Chunk(self.next_number)
        if not (chunk.runs or chunk.completions or chunk.released):
            return None
        self._ticket += 1
        if chunk.completions:
            self._completions.append((self._ticket, _big_endian(array("I", chunk.completions))))
        messages = Messages(chunk.runs, chunk.tags)
        return Deliver(self._ticket, chunk.first, messages, chunk.held, tuple(chunk.released))

    def settle(self, upto: int) -> bytes:
        """Raise the watermark and return the PUBACKs and PUBRECs that may leave."""
        self.settled = max(self.settled, min(upto, self.next_number))
        acks: list[bytes] = []
        while self._pending and self._pending[0].numbers[0] < self.settled:
            first = self._pending[0]
            ready = bisect_left(first.numbers, self.settled)
            acks.append(_big_endian(first.words[:ready]))
            self.unacknowledged -= ready
            self.acknowledged += ready
            if ready == len(first.words):
                self._kept -= self._pending.popleft().kept
            else:
                first.words, first.numbers = first.words[ready:], first.numbers[ready:]
        return b"".join(acks)

    def stored(self, ticket: int) -> bytes:
        """The `Deliver` with this ticket is durable: return the PUBCOMPs that may leave."""
        if self._kept > _MOST_KEPT:
            new = list(takewhile(lambda pending: pending.taken is None, reversed(self._pending)))
            for pending in sorted(new, key=lambda pending: pending.kept, reverse=True):
                if self._kept > _MOST_KEPT:
                    self._kept -= pending.kept
                    _ = pending.digests
        ready: list[bytes] = []
        while self._completions and self._completions[0][0] <= ticket:
            ready.append(self._completions.popleft()[1])
        return b"".join(ready)

    def disconnect(self) -> None:
        """Forget what ends with the connection: acknowledgements owed, aliases; the broker sends again."""
        self._pending.clear()
        self._kept = 0
        self._completions.clear()
        self._aliases.clear()
        self.unacknowledged = 0

    def forget(self) -> int | None:
        """The broker has no session any more: its packet ids name nothing [MQTT-3.2.2-5].

        Returns:
            The ticket of the next `hand_over`, which frees them; None when there are none.
        """
        self._chunk.released += [packet_id for packet_id, entry in self.held.items() if entry.number >= 0]
        self.held.clear()
        return self._ticket + 1 if self._chunk.released else None

    def validate(self) -> None:
        """Assert every invariant named above; for tests."""
        assert self.settled <= self.next_number
        assert self.unacknowledged == sum(len(p.words) for p in self._pending)
        numbers = [n for p in self._pending for n in p.numbers]
        assert numbers == sorted(numbers)
        assert not numbers or numbers[0] >= self.settled
        assert all(0 < i <= 0xFFFF and h.number < self.next_number for i, h in self.held.items())
        assert list(self._completions) == sorted(self._completions)

    def _all_new(self, qos: bytes, ids: Sequence[int]) -> bool:
        """Whether these are QoS 2 messages whose ids are all free: the case that has to be fast."""
        return qos.count(2) == len(ids) == len(set(ids)) and self.held.keys().isdisjoint(ids)

    def _owes_again(self, headers: bytes, ids: Sequence[int]) -> bool:
        """Whether one of these QoS 1 messages with DUP has the id of one before it that is not acknowledged."""
        again = headers.translate(_QOS_1_AGAIN)
        if 1 not in again:
            return False
        words = {_ACK_WORD[1] | packet_id for packet_id in compress(ids, again)}
        numbered = list(filter(None, ids))
        return len(set(numbered)) < len(numbered) or any(not words.isdisjoint(p.words) for p in self._pending)

    def _owed(self) -> dict[int, int]:
        """Packet id → digest of the content of each QoS 1 message that is not acknowledged."""
        owed: dict[int, int] = {}
        for pending in self._pending:
            digests, first = pending.digests, pending.first
            for word, number in zip(pending.words, pending.numbers, strict=True):
                if word >> 16 == _ACK_WORD[1] >> 16 and number >= first:
                    owed[word & 0xFFFF] = digests[number - first]
        self._kept = 0
        return owed

    def _take(self, qos: bytes, ids: Sequence[int], pending: _Pending, left_out: bytes = NOTHING) -> None:
        """Number messages that are all new, hold the ids of QoS 2, and owe their acknowledgements.

        Args:
            qos: Of each.
            ids: Their packet ids.
            pending: Of those that are stored.
            left_out: As `Screening` has it.
        """
        first = self.next_number
        numbers: Sequence[int] = range(first, first + len(ids))
        stored = ids
        if left_out:
            numbers = _numbers(first, left_out)
            stored = list(compress(ids, _kept(left_out)))
            self.repeats += len(ids) - len(stored)
        self.next_number += len(stored)
        if b"\x02" in qos:
            every = zip(range(first, self.next_number), pending.digests, strict=True)
            new = dict(zip(stored, map(_HELD, every), strict=True))
            if left_out:
                self.held.update(dict.fromkeys(ids, _LEFT_OUT))
            self.held.update(new)
            self._chunk.held.update(new)
        word = _ACK_WORD[2 if b"\x02" in qos else 1]
        if b"\x00" not in qos:
            self._owe(list(map(word.__or__, ids)), numbers, pending)
        else:
            owed = [(word | packet_id, number) for packet_id, number in zip(ids, numbers, strict=True) if packet_id]
            self._owe([one for one, _ in owed], [number for _, number in owed], pending)

    def _one_by_one(
        self, run: PublishRun | PlainRun, qos: bytes, tags: Sequence[Any], left_out: bytes = NOTHING
    ) -> None:
        """Take messages of which some may be repeats."""
        ids, digests = run.packet_ids, _digests(run)
        again = run.headers.translate(_QOS_1_AGAIN)
        owed = self._owed() if 1 in again else {}
        first, stored = self.next_number, bytearray(len(run))
        words: list[int] = []
        numbers: list[int] = []
        for index, level in enumerate(qos):
            packet_id = ids[index]
            left = bool(left_out and left_out[index])
            if again[index] and packet_id in owed and (left or owed[packet_id] == digests[index]):
                self.repeats += 1
                continue
            if left:
                self.repeats += 1
                if level == 2:
                    self.held.setdefault(packet_id, _LEFT_OUT)
            elif level < 2 or not self._is_repeat(packet_id, digests[index]):
                stored[index] = 1
                self.next_number += 1
            if level == 1:
                owed[packet_id] = digests[index]
            if level:
                words.append(_ACK_WORD[level] | packet_id)
                # A repeat waits for everything that came before it.
                numbers.append(self.next_number - 1)
        self._chunk.add(_only(run, stored), compress(tags, stored))
        taken = list(compress(digests, stored))
        self._owe(words, numbers, _Pending(first, lambda: taken, 0))

    def _is_repeat(self, packet_id: int, digest: int) -> bool:
        """Whether a QoS 2 message is held already; if not, hold it under the number it is about to get."""
        known = self.held.get(packet_id)
        if known is not None and known.number >= 0:
            if known.digest == digest:
                self.repeats += 1
                return True
            self.reused_ids += 1
            if packet_id not in self._chunk.held:
                self._chunk.released.append(packet_id)  # a PUBREL of this chunk must find nothing of the older one
        self.held[packet_id] = self._chunk.held[packet_id] = Held(self.next_number, digest)
        return False

    def _owe(self, words: Sequence[int], numbers: Sequence[int], pending: _Pending) -> None:
        if not words:
            return
        pending.words, pending.numbers = array("I", words), numbers
        self._pending.append(pending)
        self._kept += pending.kept
        self.unacknowledged += len(words)
        if self.unacknowledged > self._receive_maximum:
            self.overruns += 1

    def _resolved(self, run: PublishRun) -> PublishRun:
        """The run with the topics that its topic aliases stand for."""
        aliases = [packet.topic_alias for packet in run.packets]
        if aliases.count(None) == len(aliases):
            return run
        return replace(run, topics=list(map(self._resolve, aliases, run.topics)))

    def _resolve(self, alias: int | None, topic: str) -> str:
        if alias is None:
            return topic
        if not 0 < alias <= self._alias_maximum:
            raise Breach(f"used topic alias {alias}, we allow {self._alias_maximum} [MQTT-3.3.2-9]", 0x94)
        if topic:
            self._aliases[alias] = topic
        elif alias not in self._aliases:
            raise Breach(f"used topic alias {alias} before it gave it a topic", 0x94)
        return self._aliases[alias]


def _only(run: PublishRun | PlainRun, kept: bytes | bytearray) -> PublishRun:
    """The packets that have 1 in `kept`, which has 0 for the others; perhaps none."""
    only = PublishRun.of(list(compress(run.packets, kept)), bytes(compress(run.headers, kept)))
    return replace(only, topics=list(compress(run.topics, kept)))


def _digests(run: PublishRun | PlainRun) -> list[int]:
    topics, retained = run.topics, run.headers.translate(RETAIN_OF)
    seeds = {topic: zlib.crc32(topic.encode()) for topic in set(topics)}
    if isinstance(run, PlainRun):
        contents, properties = run.columns.payloads(), [_NONE] * len(run)
    else:
        # A stub has no payload, but the facts of the one that came; the packet it keeps may differ next time.
        contents = [p.facts if p.payload is None else p.payload for p in run.packets]
        properties = list(map(_PROPERTIES, run.packets))
    digests = list(map(zlib.crc32, contents, map(seeds.__getitem__, topics)))
    if 1 not in retained and properties.count(_NONE) == len(properties):
        return digests
    every = zip(run.packets, retained, properties, digests, strict=True)
    return [d if p.payload is None else zlib.crc32(_in_bytes(r, *values), d) for p, r, values, d in every]


def _in_bytes(
    retain: int,
    payload_format: int,
    content_type: str | None,
    response_topic: str | None,
    correlation_data: bytes | None,
    user_properties: list[tuple[str, str]],
) -> bytes:
    """RETAIN and properties so that no two look the same; nothing for a message with none of them."""
    single = (content_type, response_topic, correlation_data)
    if not (retain or payload_format or user_properties) and single == (None, None, None):
        return b""
    texts = (*single, *chain.from_iterable(user_properties))
    data = [text.encode() if isinstance(text, str) else text for text in texts]
    lengths = b",".join(b"-" if one is None else b"%d" % len(one) for one in data)
    return b"%d %d %b " % (retain, payload_format, lengths) + b"".join(one or b"" for one in data)


def _numbers(first: int, left_out: bytes) -> list[int]:
    """The number of each message; one that is left out waits, as a repeat does, for the stored one before it."""
    return list(accumulate(_kept(left_out), initial=first - 1))[1:]


def _kept(left_out: bytes) -> bytes:
    """1 for each message that is stored, 0 for the others."""
    return left_out.translate(_KEPT)


def _big_endian(words: array[int]) -> bytes:
    if sys.byteorder == "little":
        words = words[:]
        words.byteswap()
    return words.tobytes()
