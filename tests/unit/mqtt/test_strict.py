"""The decoder against a reader that follows the standard to the letter: generated packets, and each fault by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mqtt5 import PublishPacket

from tests.helpers import packets_in
from tests.unit.mqtt import strict
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import Decoder

CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH = 2, 3, 4, 5, 6, 7, 9, 11, 14, 15
#: Values of a property, the first of them sound in every place where the property may stand.
VALUES: Final[dict[int, tuple[bytes, ...]]] = {
    identifier: values
    for identifiers, values in (
        ((0x01, 0x17, 0x19, 0x24, 0x25, 0x28, 0x29, 0x2A), (b"\1", b"\0", b"\2", b"\xff")),
        ((0x02, 0x11, 0x18, 0x27), (b"\0\0\0\1", b"\0\0\0\0", b"\xff\xff\xff\xff")),
        ((0x13, 0x21, 0x22, 0x23), (b"\0\1", b"\0\0", b"\xff\xff")),
        ((0x03, 0x08, 0x12, 0x15, 0x1A, 0x1C, 0x1F), (b"\0\1a", b"\0\0", b"\0\1\0", b"\0\1+", b"\0\1\xff")),
        ((0x09, 0x16), (b"\0\1a", b"\0\0", b"\0\2\0\xff")),
        ((0x0B,), (b"\1", b"\0", b"\x80\1", b"\x80\0", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff\1")),
        ((0x26,), (b"\0\1a\0\1b", b"\0\0\0\0", b"\0\1\xff\0\0")),
    )
    for identifier in identifiers
}
#: What stands before and behind the properties of each type, and its first byte.
SOUND: Final[dict[int, tuple[int, bytes, bytes]]] = {
    CONNACK: (0x20, b"\0\0", b""),
    PUBLISH: (0x32, b"\0\1t\0\7", b"\2" * 20),
    PUBACK: (0x40, b"\0\7\0", b""),
    PUBREC: (0x50, b"\0\7\0", b""),
    PUBREL: (0x62, b"\0\7\0", b""),
    PUBCOMP: (0x70, b"\0\7\0", b""),
    SUBACK: (0x90, b"\0\7", b"\1" * 8),
    UNSUBACK: (0xB0, b"\0\7", b"\0" * 8),
    DISCONNECT: (0xE0, b"\x82", b""),
    AUTH: (0xF0, b"\x18", b""),
}
#: What the decoder leaves to the session: answers that answer nothing (0x82), and refusals that say no in other words.
TOLERATED: Final = {
    "no reason codes",
    "no Authentication Method",
    "Session Present in a refusal [MQTT-3.2.2-6]",
    "a CONNACK of 3.x",
}


@pytest.fixture(autouse=True)
def _closely() -> Iterator[None]:
    """Where a value ends in the payload, text is hidden from the quick look: the codec would print its panic."""
    Decoder._codec_panicked = True
    yield
    Decoder._codec_panicked = False


def varint(value: int) -> bytes:
    return bytes((value,)) if value < 128 else bytes((value & 127 | 128,)) + varint(value >> 7)


def packet(kind: int, block: bytes, length: int | None = None) -> bytes:
    """One of this type with these properties, and a Property Length of its own."""
    header, before, behind = SOUND[kind]
    body = before + varint(len(block) if length is None else length) + block + behind
    return bytes((header,)) + varint(len(body)) + body


def taken(data: bytes) -> list[Any] | int:
    """The packets of these bytes, or the reason code of our DISCONNECT."""
    try:
        items = Decoder().feed(data + b"\xd0\0")
    except MalformedPacket as error:
        return error.reason
    packets = list(itertools.chain.from_iterable(map(packets_in, items)))
    assert len(packets) == 2, "the decoder waits for more of a whole packet"
    return packets


# Each fault by itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOUND)
def test_no_property_ends_behind_the_property_length(kind: int) -> None:
    """[MQTT-4.13.1-1]: it would take bytes of the payload, of reason codes, or of nothing; 0x81 says so."""
    for identifier in strict.ALLOWED[kind]:
        block = bytes((identifier,)) + VALUES[identifier][0]
        assert not isinstance(taken(packet(kind, block)), int), f"{identifier:#x} is sound"
        for length in range(kind == PUBLISH, len(block)):  # with 0 they are the payload of a PUBLISH
            assert taken(packet(kind, block, length)) == 0x81, f"{identifier:#x} with Property Length {length}"
        assert taken(packet(kind, block + b"\x26", len(block) + 1)) == 0x81


@pytest.mark.parametrize("filler", [b"", b"\x26\0\1k\0\xc8" + b"v" * 200, "\x26\0\2ü\0\0".encode()])
@pytest.mark.parametrize("payload", [b"\2" * 20, b"\2" * 20_000], ids=["small", "large"])
def test_no_payload_is_cut_by_a_property(payload: bytes, filler: bytes) -> None:
    """In chunks that are looked at closely and in those that are not, with properties of any length before it."""
    for header in (0x30, 0x32, 0x34):
        for identifier in strict.ALLOWED[PUBLISH]:
            block = filler + bytes((identifier,)) + VALUES[identifier][0]
            for short in range(len(VALUES[identifier][0]) + 1):
                body = b"\0\1t" + b"\0\7" * bool(header & 6) + varint(len(block) - short) + block + payload
                result = taken(bytes((header,)) + varint(len(body)) + body)
                if short:
                    assert result == 0x81, f"{identifier:#x} {short} bytes short"
                else:
                    assert not isinstance(result, int)
                    assert result[0].payload == payload


@pytest.mark.parametrize("kind", SOUND)
def test_a_property_twice_is_a_protocol_error(kind: int) -> None:
    for identifier in strict.ALLOWED[kind]:
        one = bytes((identifier,)) + VALUES[identifier][0]
        twice = taken(packet(kind, one + one))
        assert twice == 0x82 if identifier not in {0x0B, 0x26} else not isinstance(twice, int)


@pytest.mark.parametrize("kind", SOUND)
def test_properties_of_other_packets_are_malformed(kind: int) -> None:
    for identifier in set(range(128)) - set(strict.ALLOWED[kind]):
        block = bytes((identifier,)) + VALUES.get(identifier, (b"",))[0]
        assert taken(packet(kind, block)) == 0x81, f"{identifier:#x}"


@pytest.mark.parametrize("kind", SOUND)
def test_each_value_is_judged_as_the_standard_does(kind: int) -> None:
    """0x82 for what is no value of a property, 0x90 for a topic that is none, 0x94 for the alias 0."""
    for identifier in strict.ALLOWED[kind]:
        for value in VALUES[identifier]:
            data = packet(kind, bytes((identifier,)) + value)
            result = taken(data)
            assert (result if isinstance(result, int) else None) == wanted(data), data.hex(" ")


@pytest.mark.parametrize("kind", strict.REASONS)
def test_only_the_reason_codes_of_a_packet_are_its(kind: int) -> None:
    header, before, _ = SOUND[kind]
    for code in range(256):
        if kind == CONNACK and 0 < code < 6:
            continue  # those of 3.x, see test_checks
        if kind in {SUBACK, UNSUBACK}:
            data = bytes((header, 4)) + before + bytes((0, code))
        else:
            data = bytes((header, len(before) + 1)) + before[:-1] + bytes((code, 0))
        assert isinstance(taken(data), int) is (code not in strict.REASONS[kind]), data.hex(" ")


def wanted(data: bytes) -> int | None:
    try:
        strict.read(data)
    except strict.Broken as error:
        return None if str(error) in TOLERATED else error.reason
    return None


# Generated -----------------------------------------------------------------------------------------------------------


@st.composite
def packets(draw: st.DrawFn) -> bytes:
    """Packets of a server, of which many have a fault or two."""
    kind = draw(st.sampled_from(list(SOUND)))
    header, before, behind = SOUND[kind]
    block = b""
    for _ in range(draw(st.integers(0, 3))):
        some = strict.ALLOWED[kind] if draw(st.integers(0, 9)) else list(strict.PROPERTIES)
        identifier = draw(st.sampled_from(some))
        values = VALUES[identifier]
        block += bytes((identifier,)) + (values[0] if draw(st.booleans()) else draw(st.sampled_from(values)))
    if kind in strict.REASONS and kind not in {SUBACK, UNSUBACK}:
        codes = st.sampled_from(sorted(strict.REASONS[kind])) if draw(st.integers(0, 9)) else st.integers(0, 255)
        before = before[:-1] + bytes((draw(codes),))
    if kind == PUBLISH:
        header = draw(st.sampled_from(range(0x30, 0x40)))
        topic = draw(st.sampled_from([b"t", b"", b"#", "ü".encode(), b"a\0", b"\xff", b"t" * 130]))
        before = len(topic).to_bytes(2) + topic + b"\0\7" * bool(header & 6)
        behind = draw(st.sampled_from([b"", b"\2" * 20, b"\0" * 20, b"x" * 140]))
    length = len(block) + draw(st.sampled_from([0] * 6 + [-3, -2, -1, 1, 2, 10]))
    body = before + varint(max(0, length)) + block + behind
    body = body[: len(body) + draw(st.sampled_from([0] * 9 + [-1, -2]))] + draw(st.sampled_from([b""] * 9 + [b"\0"]))
    if body and draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(body) - 1))
        body = body[:at] + bytes((draw(st.integers(0, 255)),)) + body[at + 1 :]
    return bytes((header,)) + varint(len(body)) + body


@settings(max_examples=40 * settings().max_examples)
@given(data=packets())
def test_the_decoder_takes_what_the_standard_allows_and_nothing_else(data: bytes) -> None:
    result = taken(data)
    try:
        read = strict.read(data)
    except strict.Broken as error:
        broken = str(error)
    else:
        broken = ""
    if broken:
        assert isinstance(result, int) or broken in TOLERATED, f"{data.hex(' ')}: {broken}"
        return
    assert not isinstance(result, int), f"{data.hex(' ')} is sound"
    if isinstance(result[0], PublishPacket):
        _, topic, packet_id, payload = read.fields
        assert (result[0].topic, result[0].packet_id, result[0].payload) == (topic, packet_id, payload)
        users = [value for identifier, value in read.properties if identifier == 0x26]
        assert result[0].user_properties == users
