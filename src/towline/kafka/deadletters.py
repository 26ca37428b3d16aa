"""Format of dead letters: records that can't be written to their topic, with every byte and a reason.

A dead letter that fits into one record keeps its key and value as they were, so any Kafka tool shows them. Towline adds
headers (docs/exactly-once.md#dead-letters), one for each field of `DeadLetter` that is known, in UTF-8 text, so Spark
SQL can write them too; ``towline.dlq.headers`` is the last of them, and the original headers follow, unchanged.

A larger one becomes chunks: key, value and headers as one blob (`pack`), cut into pieces that fit. A chunk has
Towline's headers, and ``towline.dlq.chunk`` = ``ID I/N`` (I from 1) as the last. All chunks of a dead letter are
written in one transaction, with its ID as key, so they stand in order in one partition. `ChunkAssembler` joins them.
"""

from __future__ import annotations

import io
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeAlias

PREFIX: Final = "towline.dlq."  #: Prefix of Towline's headers.
_REASON, _COUNT, _CHUNK = PREFIX + "reason", PREFIX + "headers", PREFIX + "chunk"
#: Fields of a dead letter that are stored in headers; the others are stored in its record.
_HEADER_FIELDS: Final = ("reason", "detail", "topic", "partition", "timestamp", "source")

#: Longest detail kept, in characters: it explains, it must not itself make a record too large.
_DETAIL_LIMIT: Final = 500
#: Bytes a Kafka record needs beside key, value and headers: batch header 61, record header at most 21 (KIP-98), and a
#: varint for each length. And the bytes a header needs beside name and value.
RECORD_OVERHEAD, HEADER_OVERHEAD = 100, 10
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
_CHUNK_NUMBER: Final = re.compile(r"(?P<name>[^ ]+) (?P<index>[0-9]{1,9})/(?P<count>[0-9]{1,9})")
#: Longest name kept; Kafka's own limit is 249 (org.apache.kafka.common.internals.Topic), a wrong one may be longer.
_NAME_LIMIT: Final = 1000

Header: TypeAlias = tuple[str, bytes | None]
#: Key, value and headers of a record in the dead-letter topic.
Record: TypeAlias = tuple[bytes | None, bytes | None, list[Header]]


class Reason(StrEnum):
    """Reason of a dead letter."""

    TOO_LARGE = "too_large"  #: Larger than the topic's max.message.bytes, or the client's message.max.bytes.
    TOPIC_MISSING = "topic_missing"  #: The topic does not exist, or this user may not see it.
    #: No name Kafka takes (empty, longer than 249, characters beside a-z A-Z 0-9 . _ -).
    TOPIC_ILLEGAL = "topic_illegal"
    TOPIC_NOT_ALLOWED = "topic_not_allowed"  #: Outside the list of topics the configuration allows.
    TOPIC_RESERVED = "topic_reserved"  #: A reserved name (`reserved_topics_pattern`).
    TOPIC_ABSENT = "topic_absent"  #: No topic at all.
    PARTITION = "partition"  #: The topic has no such partition.
    TIMESTAMP = "timestamp"  #: Further from now than the topic allows, or before 1970.
    KEY_ABSENT = "key_absent"  #: A compacted topic takes no record without a key.
    UNROUTED = "unrouted"  #: No route takes the message.
    UNMAPPED = "unmapped"  #: A route takes it, but its key, topic or headers can't be rendered.
    REJECTED = "rejected"  #: The line's configuration refuses it, with a reason.
    #: The MQTT packet was larger than the gateway's max_packet_bytes: only its metadata was kept.
    PACKET_TOO_LARGE = "packet_too_large"
    #: The MQTT message has more properties than the gateway decodes: its packet was kept as it came.
    TOO_MANY_PROPERTIES = "too_many_properties"
    UNDELIVERABLE = "undeliverable"  #: Downlink: MQTT can't carry the record (topic, size, properties).


INTERNAL_PREFIX: Final = "__"  #: Prefix of internal topics, by Kafka's convention.
#: Suffix of a marker topic's name, which begins with the sink's prefix and a dot.
MARKER_TOPIC_SUFFIX: Final = ".markers"


def reserved_topics_pattern(extra_topics: Iterable[str] = (), prefix: str = "towline") -> str:
    """Return a regular expression of the reserved topics, which no message may choose, for Python and for Java.

    A row's column ``topic``, or a bridge's template, often holds text of a device. It must not name a marker topic,
    whose records are read as batch markers, an internal topic of Kafka (``__consumer_offsets``), nor, in a bridge, a
    dead-letter topic, whose records are replayed later. Match the whole name (``fullmatch``).

    Args:
        extra_topics: Further reserved names, such as those of dead-letter topics.
        prefix: Prefix of the marker topics of all sinks (``transactionalIdPrefix``).
    """
    marker_topics = f"{re.escape(prefix)}[.].*{re.escape(MARKER_TOPIC_SUFFIX)}"
    return "|".join([f"{INTERNAL_PREFIX}.*", marker_topics, *map(re.escape, sorted(set(extra_topics)))])


@dataclass(frozen=True)
class DeadLetter:
    """Record that could not be written to its topic, with the reason.

    Attributes:
        topic: Its destination topic; None if unknown.
        headers: Its original headers, in order, with duplicates.
        partition: The partition requested; None for the partitioner's choice.
        timestamp: Its timestamp in ms since 1970; None if it had none.
        detail: Explanation of the reason, one line.
        source: Sink id or line that wrote the dead letter.
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
    """Encode a dead letter as one record, or as chunks where one record would be larger than ``limit`` bytes.

    The limit is the lower one of the max.message.bytes of the dead-letter topic and of the client.

    Raises:
        ValueError: ``limit`` leaves no room for a chunk beside the headers; 4,096 is always enough.
    """
    towline_headers, letter_id = _towline_headers(dead_letter), uuid.uuid4().hex
    headers = [*towline_headers, (_COUNT, b"%d" % len(dead_letter.headers)), *dead_letter.headers]
    if record_bytes(dead_letter.key, dead_letter.value, headers) <= limit:
        return [(dead_letter.key, dead_letter.value, headers)]
    chunk_bytes = limit - record_bytes(letter_id.encode(), b"", [*towline_headers, (_CHUNK, b"x" * 64)])
    if chunk_bytes < 1:
        raise ValueError(f"{limit} bytes leave no room for a dead letter")
    blob = pack(dead_letter.key, dead_letter.value, dead_letter.headers)
    chunks = [blob[start : start + chunk_bytes] for start in range(0, len(blob), chunk_bytes)]
    return [
        (letter_id.encode(), chunk, [*towline_headers, (_CHUNK, f"{letter_id} {index}/{len(chunks)}".encode())])
        for index, chunk in enumerate(chunks, 1)
    ]


@dataclass
class ChunkAssembler:
    """Assembler of dead letters from the records of one partition, in order.

    Attributes:
        incomplete: Chunks of dead letters that are not complete, by id; empty at the end of a topic, since all chunks
            of a dead letter are written in one transaction.
    """

    incomplete: dict[str, list[bytes]] = field(default_factory=dict)

    def add(self, key: bytes | None, value: bytes | None, headers: Iterable[Header] | None) -> DeadLetter | None:
        """Add a record; return the dead letter that it completes, None while chunks are missing.

        Raises:
            ValueError: The record is no dead letter of `to_records`, or a chunk out of order; has the cause.
        """
        all_headers = list(headers or ())
        towline_headers = _parse_towline_headers(all_headers)
        if (chunk := towline_headers.get(_CHUNK)) is None:
            count = _integer_header(towline_headers, _COUNT)
            if count is None or not 0 <= count <= len(all_headers):
                raise ValueError(f'no dead letter: header "{_COUNT}" is missing or wrong')
            return _to_dead_letter(towline_headers, key, value, tuple(all_headers[len(all_headers) - count :]))
        chunk_number = _CHUNK_NUMBER.fullmatch(chunk)
        if chunk_number is None or not 1 <= int(chunk_number["index"]) <= int(chunk_number["count"]):
            raise ValueError(f'no dead letter: header "{_CHUNK}" is "{chunk}"')
        letter_id, index, count = chunk_number["name"], int(chunk_number["index"]), int(chunk_number["count"])
        if index == 1:
            self.incomplete[letter_id] = []  # written again from the start: only the last attempt is complete
        pieces = self.incomplete.setdefault(letter_id, [])
        pieces.append(value or b"")
        if index != len(pieces):
            del self.incomplete[letter_id]
            raise ValueError(f"chunk {index} of dead letter {letter_id} does not follow chunk {len(pieces) - 1}")
        if index < count:
            return None
        del self.incomplete[letter_id]
        return _to_dead_letter(towline_headers, *unpack(b"".join(pieces)))


def _towline_headers(dead_letter: DeadLetter) -> list[Header]:
    topic, detail = dead_letter.topic, " ".join(dead_letter.detail.split())[:_DETAIL_LIMIT]
    truncated_letter = replace(dead_letter, detail=detail, topic=topic and topic[:_NAME_LIMIT])
    fields = {PREFIX + name: getattr(truncated_letter, name) for name in _HEADER_FIELDS}
    return [(name, str(value).encode()) for name, value in fields.items() if value is not None]


def _parse_towline_headers(headers: Iterable[Header]) -> dict[str, str]:
    """Return Towline's headers by name, up to the last one: an original header may have the same name."""
    towline_headers: dict[str, str] = {}
    for name, value in headers:
        if name.startswith(PREFIX) and value is not None:
            towline_headers.setdefault(name, value.decode("utf-8", "replace"))
        if name in (_COUNT, _CHUNK):
            break
    return towline_headers


def _to_dead_letter(
    texts: dict[str, str], key: bytes | None, value: bytes | None, headers: tuple[Header, ...]
) -> DeadLetter:
    reason = texts.get(_REASON)
    if reason is None or reason not in set(Reason):
        raise ValueError(f'no dead letter: header "{_REASON}" is missing or unknown')
    topic, detail, source = (texts.get(PREFIX + name) for name in ("topic", "detail", "source"))
    partition, timestamp = (_integer_header(texts, PREFIX + name) for name in ("partition", "timestamp"))
    return DeadLetter(Reason(reason), topic, key, value, headers, partition, timestamp, detail or "", source or "")


def _integer_header(towline_headers: dict[str, str], name: str) -> int | None:
    text = towline_headers.get(name)
    if text is not None and (not _INTEGER.fullmatch(text) or not -(1 << 63) <= int(text) < 1 << 63):
        raise ValueError(f'no dead letter: header "{name}" is no number of 64 bits')
    return None if text is None else int(text)


def record_bytes(key: bytes | None, value: bytes | None, headers: Iterable[Header]) -> int:
    """Return an upper bound of the bytes of a record, alone in its batch."""
    total = RECORD_OVERHEAD + len(key or b"") + len(value or b"")
    return total + sum(len(name.encode()) + len(content or b"") + HEADER_OVERHEAD for name, content in headers)


#: Bytes of the length before each field of a blob, a big-endian signed integer; and the length of null, which is not
#: the empty string.
_LENGTH, _NULL = 4, -1


def pack(key: bytes | None, value: bytes | None, headers: Iterable[Header]) -> bytes:
    """Encode key, value and headers as one blob: each a big-endian int32 length (-1: null) and its bytes."""
    parts = [key, value]
    for name, content in headers:
        parts += [name.encode(), content]
    lengths = (_NULL if part is None else len(part) for part in parts)
    heads = (length.to_bytes(_LENGTH, "big", signed=True) for length in lengths)
    return b"".join(head + (part or b"") for head, part in zip(heads, parts, strict=True))


def unpack(blob: bytes) -> tuple[bytes | None, bytes | None, tuple[Header, ...]]:
    """Decode the blob of `pack` to key, value and headers.

    Raises:
        ValueError: The blob is truncated or has another format.
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
