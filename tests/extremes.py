"""Messages and records with the extremes of every field and size, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from mqtt5 import PublishPacket, QoS

Headers = list[tuple[str, bytes | None]]

#: Longest string or binary value of MQTT [MQTT 5 section 1.5.4].
LONGEST = 65_535

TEXTS = ["", "a", "é🚀" * 50, "x" * LONGEST, "\u202e\u2028", "'\"\\${x}{key}%s", "a/b", "+", "#", " "]
BINARIES = [b"", b"\0", b"\xff\xfe\xc3", bytes(range(256)), b"\1" * LONGEST]
SIZES = [0, 1, 150, 65_536, 999_000, 1_048_576, 3_000_000]
EXPIRIES = [60, 3600, 0x7FFFFFFF, 0xFFFFFFFF]
PAIRS: list[list[tuple[str, str]]] = [
    [],
    [("", "")],
    [("a", "1"), ("b", ""), ("a", "2")],
    [("k" * LONGEST, "v" * LONGEST)],
    [(f"n{n}", "x") for n in range(900)],
    [("towline-id", "x"), ("towline-n", "1.5.3")],
    [("mqtt.topic", "no"), ("towline.dlq.reason", "no"), ("towline-reason", "packet_too_large")],
]


def messages(seed: int, more: int = 20) -> Iterator[PublishPacket]:
    """What a device may send: each extreme once beside plain values, then mixtures; the topic begins with the number.

    Args:
        seed: Of the mixtures.
        more: How many of them.
    """
    names = ("tail", "size", "content_type", "response_topic", "correlation_data", "user_properties", "expiry")
    tails = ["", "/", "//x", "/é🚀", "/" + "y" * 60_000, "/" + "/".join("z" * 100)]
    legal = [text for text in TEXTS if text and "#" not in text and "+" not in text]
    choices: list[Sequence[Any]] = [tails, SIZES, TEXTS, legal, BINARIES, PAIRS, EXPIRIES]
    plain = [{}, *({name: value} for name, values in zip(names, choices, strict=True) for value in values)]
    rng = random.Random(seed)
    mixed = [{n: rng.choice(v) for n, v in zip(names, choices, strict=True) if rng.random() < 0.5} for _ in range(more)]
    for number, fields in enumerate([*plain, *mixed]):
        yield _message(number, fields, rng)


def _message(number: int, fields: dict[str, Any], rng: random.Random) -> PublishPacket:
    return PublishPacket(
        f"t/{number}{fields.get('tail', '')}",
        rng.randbytes(fields.get("size", 20)),
        qos=QoS.EXACTLY_ONCE,
        packet_id=1,
        retain=rng.random() < 0.1,
        payload_format_indicator=rng.randrange(2),
        message_expiry_interval=fields.get("expiry"),
        content_type=fields.get("content_type"),
        response_topic=fields.get("response_topic"),
        correlation_data=fields.get("correlation_data"),
        user_properties=fields.get("user_properties", []),
    )


NUMBERS = ["", "0", "-1", "4294967295", "4294967296", "9223372036854775807", "99999999999999999999", "1e400", "x", "٣"]
KEYS: list[bytes | None] = [
    None,
    b"",
    b"fine",
    "é🚀".encode(),
    b"\xff\xc3",
    b"a+b",
    b"a/#",
    b"nul\0",
    b"\x01",
    b"tab\tbed",
    "\ufffe".encode(),
    b"k" * 70_000,
    b"/" * 300,
]
VALUES: list[bytes | None] = [None, b"", b"\0", b"\xff" * 10, b"v" * 600_000]


def records(seed: int, more: int = 20) -> Iterator[tuple[bytes | None, bytes | None, Headers]]:
    """What anybody may have put into a Kafka topic: key, value and headers.

    Args:
        seed: Of the mixtures.
        more: How many of them.
    """
    said: dict[str, Sequence[bytes | None]] = {
        "mqtt.message-expiry": [None, *(number.encode() for number in NUMBERS)],
        "mqtt.retain": [None, b"true", b"maybe"],
        "mqtt.payload-format": [None, b"1", b"7", b"\xff"],
        "mqtt.content-type": [None, *(text.encode() for text in TEXTS), b"\xff", b"\1", b"c" * 70_000],
        "mqtt.response-topic": [None, b"fine", b"+", b"\0", b"\xff", b"r" * 70_000],
        "mqtt.correlation-data": [None, *BINARIES, b"d" * 70_000],
        "mqtt.user.": [None, b"", b"\n", b"\xff", b"u" * 70_000],
        "mqtt.qos": [b"3", b"x"],
        "": [None, b"x"],
        "h" * 30_000: [b"x"],
    }
    single: list[Headers] = [[(name, value)] for name, values in said.items() for value in values]
    many: list[Headers] = [[("x", b"1")] * 500, [("mqtt.content-type", b"a"), ("mqtt.content-type", b"b")]]
    plain = [b"fine"] * (len(single) + len(many))
    headers: list[Headers] = [[]] * len(KEYS) + single + many
    values = [*VALUES, *[b"v"] * (len(headers) - len(VALUES))]
    yield from zip([*KEYS, *plain], values, headers, strict=True)
    rng = random.Random(seed)
    for _ in range(more):
        yield rng.choice(KEYS), rng.choice(VALUES), rng.choice(single) + rng.choice(single) + rng.choice(many)


def outbox_rows(seed: int, schema: Any, more: int = 40) -> Any:
    """Rows of an outbox as a disk may hold them, text that is no UTF-8 among them; one record batch.

    Args:
        seed: Of the mixtures.
        schema: `OUTBOX_SCHEMA`.
        more: How many of them.
    """
    extremes: dict[str, Sequence[Any]] = {
        "topic": [None, b"", b"d/+", b"#", b"d/\0", b"d/\xff", b"d/\x01", b"d/" + b"t" * 70_000, "d/é🚀".encode()],
        "payload": [None, b"", b"p" * 3_000_000],
        "qos": [None, -128, -1, 0, 1, 2, 3, 127],
        "retain": [None, True, False],
        "content_type": [None, b"", b"\xff", b"c" * 70_000, b"\0", b"\n"],
        "payload_is_utf8": [None, True, False],
        "response_topic": [None, b"", b"+", b"\xff", b"r" * 70_000],
        "correlation_data": [None, b"", b"d" * 70_000],
        "user_properties": [
            None,
            [],
            [None],
            [(None, None)],
            [(b"\xff", b"v")],
            [(b"k", b"\0")],
            [(b"a", b"b")] * 2000,
        ],
        "message_expiry_seconds": [None, -(2**63), -1, 0, 1, 2**32, 2**63 - 1],
        "arrived_at": [0, -(2**63) + 1, 2**63 - 1],
        "arrived_boottime_us": [None, -(2**63), 2**63 - 1],
        "arrived_boot": [None, -(2**63), 2**63 - 1],
    }
    rng = random.Random(seed)
    chosen = [{}, *({name: value} for name, values in extremes.items() for value in values), {}]
    chosen += [{n: rng.choice(v) for n, v in extremes.items() if rng.random() < 0.3} for _ in range(more)]
    usual = {"topic": b"d/1", "payload": b"p", "qos": 1, "arrived_at": rng.randrange(2**50)}
    rows = [usual | {"payload": b"%d" % number} | fields for number, fields in enumerate(chosen)]
    columns = [_column([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(values: list[Any], kind: Any) -> Any:
    """An array whose texts are whatever bytes they are: Arrow does not look."""
    if pa.types.is_string(kind):
        return pa.array(values, pa.binary()).view(pa.string())
    if pa.types.is_list(kind):
        return _pairs(values, kind)
    return pa.array(values, pa.int64()).view(kind) if pa.types.is_timestamp(kind) else pa.array(values, kind)


def _pairs(values: list[Any], kind: Any) -> Any:
    flat = [pair for pairs in values for pair in pairs or ()]
    parts = [pa.array([pair and pair[n] for pair in flat], pa.binary()).view(pa.string()) for n in (0, 1)]
    fields = list(kind.value_type)
    structs = pa.StructArray.from_arrays(parts, fields=fields, mask=pa.array([pair is None for pair in flat]))
    offsets = [0]
    for pairs in values:
        offsets.append(offsets[-1] + len(pairs or ()))
    starts = [None if pairs is None else at for pairs, at in zip(values, offsets, strict=False)] + [offsets[-1]]
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), structs, type=kind)
