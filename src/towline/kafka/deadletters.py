"""Dead letters: how a record that can't be written where it belongs is kept, every byte of it, and read back.

A dead letter that fits into one record keeps its key and value as they were, so any Kafka tool shows them. Its headers
are Towline's (docs/exactly-once.md#dead-letters), one for each field of `DeadLetter` that is known, in UTF-8 text, so
Spark SQL can write them too; ``towline.dlq.headers`` is the last of them, and the original ones follow, untouched.

A larger one becomes chunks: key, value and headers as one blob (`pack`), cut into pieces that fit. A chunk has our
headers, and ``towline.dlq.chunk`` = ``ID I/N`` (I from 1) as the last. All chunks of a dead letter are written in one
transaction, with its ID as key, so they stand in order in one partition. `Collector` puts them together.
"""

from __future__ import annotations

import io
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeAlias

#: What every header of ours begins with.
PREFIX: Final = "towline.dlq."
_REASON, _COUNT, _CHUNK = PREFIX + "reason", PREFIX + "headers", PREFIX + "chunk"
#: Fields of a dead letter that have a header of their own; the others are those of its record.
_FIELDS: Final = ("reason", "detail", "topic", "partition", "timestamp", "source")

#: Longest detail kept, in characters: it explains, it must not itself make a record too large.
_DETAIL_LIMIT: Final = 500
#: Bytes a Kafka record needs beside key, value and headers: batch header 61, record header at most 21 (KIP-98), and a
#: varint for each length. And what a header needs beside name and value.
FRAME, A_HEADER = 100, 10
_NUMBER: Final = re.compile(r"-?[0-9]{1,19}")
_PLACE: Final = re.compile(r"(?P<name>[^ ]+) (?P<index>[0-9]{1,9})/(?P<count>[0-9]{1,9})")
#: Longest name kept; Kafka's own limit is 249 (org.apache.kafka.common.internals.Topic), a wrong one may be longer.
_NAME_LIMIT: Final = 1000

Header: TypeAlias = tuple[str, bytes | None]
#: Key, value and headers of a record in the dead-letter topic.
Record: TypeAlias = tuple[bytes | None, bytes | None, list[Header]]


class Reason(StrEnum):
    """Why a record could not go where it belongs."""

    #: Larger than the topic's max.message.bytes, or the client's message.max.bytes.
    TOO_LARGE = "too_large"
    #: The topic does not exist, or this user may not see it.
    TOPIC_MISSING = "topic_missing"
    #: No name Kafka takes (empty, longer than 249, characters beside a-z A-Z 0-9 . _ -).
    TOPIC_ILLEGAL = "topic_illegal"
    #: Outside the list of topics the configuration allows.
    TOPIC_NOT_ALLOWED = "topic_not_allowed"
    #: A name that no message may choose (`reserved`).
    TOPIC_RESERVED = "topic_reserved"
    #: No topic at all.
    TOPIC_ABSENT = "topic_absent"
    #: The topic has no such partition.
    PARTITION = "partition"
    #: Further from now than the topic allows, or before 1970.
    TIMESTAMP = "timestamp"
    #: A compacted topic takes no record without a key.
    KEY_ABSENT = "key_absent"
    #: No route takes the message.
    UNROUTED = "unrouted"
    #: A route takes it, but its key, topic or headers can't be made.
    UNMAPPED = "unmapped"
    #: The line's configuration refuses it, and says why.
    REJECTED = "rejected"
    #: The MQTT packet was larger than the gateway's max_packet_bytes: only facts were kept.
    PACKET_TOO_LARGE = "packet_too_large"
    #: The MQTT message has more properties than the gateway decodes: its packet was kept as it came.
    TOO_MANY_PROPERTIES = "too_many_properties"
    #: MQTT can't carry the record (topic, size, properties): the way down.
    UNDELIVERABLE = "undeliverable"


#: What names of topics begin with that are internal, by Kafka's custom.
INTERNAL: Final = "__"
#: How the name of a marker topic ends; it begins with the sink's prefix and a dot.
MARKERS: Final = ".markers"


def reserved(names: Iterable[str] = (), prefix: str = "towline") -> str:
    """A regular expression, for Python's ``fullmatch`` and for Java, of topics that no message may choose.

    A row's column ``topic``, or a bridge's template, often holds text of a device. It must not reach a marker topic,
    where a record would be taken for a sink's memory, nor what is internal to Kafka (``__consumer_offsets``), nor, in a
    bridge, a dead-letter topic, whose records are carried on later.

    Args:
        names: Further names, such as those of dead-letter topics.
        prefix: What the marker topics of all sinks begin with (``transactionalIdPrefix``).
    """
    markers = f"{re.escape(prefix)}[.].*{re.escape(MARKERS)}"
    return "|".join([f"{INTERNAL}.*", markers, *map(re.escape, sorted(set(names)))])


@dataclass(frozen=True)
class DeadLetter:
    """One record that could not be written, and why.

    Attributes:
        topic: Where it was to go; None if unknown.
        headers: Its own headers, order and repetition kept.
        partition: The partition asked for; None if the partitioner was to choose.
        timestamp: Its own time in ms since 1970; None if it had none.
        detail: Kafka's or our words for the reason, one line.
        source: Who gave up on it: a sink id, the name of a line.
    """

    reason: Reason
    topic: str | None
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] = ()
    partition: int | None = None
    timestamp: int | None = None
    detail: str = ""
    source: str = ""


def to_records(dead_letter: DeadLetter, limit: int) -> list[Record]:
    """The dead letter as one record, or as chunks where one would be larger than ``limit``.

    That is the smaller of the max.message.bytes of the dead-letter topic and of the client.

    Raises:
        ValueError: ``limit`` leaves no room for a chunk beside the headers; nothing below 4,096 does for sure.
    """
    ours, name = _ours(dead_letter), uuid.uuid4().hex
    headers = [*ours, (_COUNT, b"%d" % len(dead_letter.headers)), *dead_letter.headers]
    if record_bytes(dead_letter.key, dead_letter.value, headers) <= limit:
        return [(dead_letter.key, dead_letter.value, headers)]
    room = limit - record_bytes(name.encode(), b"", [*ours, (_CHUNK, b"x" * 64)])
    if room < 1:
        raise ValueError(f"{limit} bytes leave no room for a dead letter")
    blob = pack(dead_letter.key, dead_letter.value, dead_letter.headers)
    parts = [blob[start : start + room] for start in range(0, len(blob), room)]
    return [
        (name.encode(), part, [*ours, (_CHUNK, f"{name} {index}/{len(parts)}".encode())])
        for index, part in enumerate(parts, 1)
    ]


@dataclass
class Collector:
    """Puts dead letters together from the records of one partition, in their order.

    Attributes:
        waiting: Chunks of dead letters that are not complete, by id; empty at the end of a topic, since all chunks of a
            dead letter are written in one transaction.
        left_out: Chunks that were taken and did not become a dead letter, because another one followed.
    """

    waiting: dict[str, list[bytes]] = field(default_factory=dict)
    left_out: int = 0

    def add(self, key: bytes | None, value: bytes | None, headers: Iterable[Header] | None) -> DeadLetter | None:
        """The dead letter this record completes; None while chunks are missing.

        Raises:
            ValueError: `to_records` has not written it, or it is a chunk that does not follow those before; says why.
        """
        found = list(headers or ())
        ours = _known(found)
        if (chunk := ours.get(_CHUNK)) is None:
            count = _number(ours, _COUNT)
            if count is None or not 0 <= count <= len(found):
                raise ValueError(f'no dead letter: header "{_COUNT}" is missing or wrong')
            return _letter(ours, key, value, tuple(found[len(found) - count :]))
        place = _PLACE.fullmatch(chunk)
        if place is None or not 1 <= int(place["index"]) <= int(place["count"]):
            raise ValueError(f'no dead letter: header "{_CHUNK}" is "{chunk}"')
        name, index, count = place["name"], int(place["index"]), int(place["count"])
        if index == 1:
            self.waiting[name] = []  # written again from the start: only the last attempt is whole
        pieces = self.waiting.setdefault(name, [])
        pieces.append(value or b"")
        if index != len(pieces):
            del self.waiting[name]
            self.left_out += len(pieces) - 1
            raise ValueError(f"chunk {index} of dead letter {name} does not follow chunk {len(pieces) - 1}")
        if index < count:
            return None
        del self.waiting[name]
        return _letter(ours, *unpack(b"".join(pieces)))


def _ours(dead_letter: DeadLetter) -> list[Header]:
    topic, detail = dead_letter.topic, " ".join(dead_letter.detail.split())[:_DETAIL_LIMIT]
    short = replace(dead_letter, detail=detail, topic=topic and topic[:_NAME_LIMIT])
    fields = {PREFIX + name: getattr(short, name) for name in _FIELDS}
    return [(name, str(value).encode()) for name, value in fields.items() if value is not None]


def _known(headers: Iterable[Header]) -> dict[str, str]:
    """Our headers by name. The last of ours ends them: an original header may have a name like one of ours."""
    ours: dict[str, str] = {}
    for name, value in headers:
        if name.startswith(PREFIX) and value is not None:
            ours.setdefault(name, value.decode("utf-8", "replace"))
        if name in (_COUNT, _CHUNK):
            break
    return ours


def _letter(ours: dict[str, str], key: bytes | None, value: bytes | None, headers: tuple[Header, ...]) -> DeadLetter:
    reason = ours.get(_REASON)
    if reason is None or reason not in set(Reason):
        raise ValueError(f'no dead letter: header "{_REASON}" is missing or unknown')
    topic, detail, source = (ours.get(PREFIX + name) for name in ("topic", "detail", "source"))
    partition, timestamp = (_number(ours, PREFIX + name) for name in ("partition", "timestamp"))
    return DeadLetter(Reason(reason), topic, key, value, headers, partition, timestamp, detail or "", source or "")


def _number(ours: dict[str, str], name: str) -> int | None:
    text = ours.get(name)
    if text is not None and (not _NUMBER.fullmatch(text) or not -(1 << 63) <= int(text) < 1 << 63):
        raise ValueError(f'no dead letter: header "{name}" is no number of 64 bits')
    return None if text is None else int(text)


def record_bytes(key: bytes | None, value: bytes | None, headers: Iterable[Header]) -> int:
    """An upper bound of the bytes Kafka needs for a record of its own batch."""
    total = FRAME + len(key or b"") + len(value or b"")
    return total + sum(len(name.encode()) + len(content or b"") + A_HEADER for name, content in headers)


#: Bytes of the length before each field of a blob, a big-endian signed integer; and what stands for null, which is not
#: the empty string.
_LENGTH, _NULL = 4, -1


def pack(key: bytes | None, value: bytes | None, headers: Iterable[Header]) -> bytes:
    """Key, value and headers as one blob: each a big-endian int32 length (-1: null) and its bytes."""
    parts = [key, value]
    for name, content in headers:
        parts += [name.encode(), content]
    lengths = (_NULL if part is None else len(part) for part in parts)
    return b"".join(
        length.to_bytes(_LENGTH, "big", signed=True) + (part or b"")
        for length, part in zip(lengths, parts, strict=True)
    )


def unpack(blob: bytes) -> tuple[bytes | None, bytes | None, tuple[Header, ...]]:
    """The reverse of `pack`.

    Raises:
        ValueError: The blob is cut or was not packed here.
    """
    stream, parts = io.BytesIO(blob), list[bytes | None]()
    while head := stream.read(_LENGTH):
        length = int.from_bytes(head, "big", signed=True)
        part = stream.read(max(length, 0))
        if len(head) < _LENGTH or length < _NULL or len(part) < length:
            raise ValueError("the blob of a dead letter is cut")
        parts.append(None if length == _NULL else part)
    if len(parts) < 2 or len(parts) % 2:
        raise ValueError("the blob of a dead letter is cut")
    names = [(name or b"").decode() for name in parts[2::2]]
    return parts[0], parts[1], tuple(zip(names, parts[3::2], strict=True))
