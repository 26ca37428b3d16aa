"""What the codec of MQTT 5 lets pass or dies of never gets through the decoder, and its panic is seen once at most."""

from __future__ import annotations

from collections.abc import Iterator

import mqtt5
import pytest

from tests.unit.mqtt import strict
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import Decoder

# A panic inside the codec leaves an exception that nothing can catch; the fence is about the one it raises.
panics = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _trust_again() -> Iterator[None]:
    yield
    Decoder._codec_panicked = False


@panics
@pytest.mark.parametrize("topic", [b"a\xff\xfe", b"a\0b"])
def test_a_large_chunk_is_judged_the_same_and_panics_once_at_most(
    topic: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    good = mqtt5.PublishPacket("topic", bytes(100)).write() * 400
    bad = mqtt5.PublishPacket("ST1", b"").write().replace(b"ST1", topic)
    for _ in range(5):
        with pytest.raises(MalformedPacket):
            Decoder().feed(good + bad + good)
    assert capfd.readouterr().err.count("panicked") <= 1


@pytest.mark.parametrize("session_present", [0, 1])
@pytest.mark.parametrize("code", range(6))
def test_a_server_that_answers_in_3_x_does_not_speak_5(code: int, session_present: int) -> None:
    """[MQTT-3.1.2-2 of 3.1.1]. Whatever it says, it has read our CONNECT as one of 3.x."""
    (packet,) = Decoder().feed(bytes((0x20, 2, session_present, code)))
    assert packet == mqtt5.ConnAckPacket(reason_code=mqtt5.ConnAckReasonCode.UNSUPPORTED_PROTOCOL_VERSION)


#: Return code of 3.x → what it means [MQTT 3.1.1 table 3.1].
MEANT = {
    1: mqtt5.ConnAckReasonCode.UNSUPPORTED_PROTOCOL_VERSION,
    2: mqtt5.ConnAckReasonCode.CLIENT_ID_NOT_VALID,
    3: mqtt5.ConnAckReasonCode.SERVER_UNAVAILABLE,
    4: mqtt5.ConnAckReasonCode.BAD_USER_NAME_OR_PASSWORD,
    5: mqtt5.ConnAckReasonCode.NOT_AUTHORIZED,
}


@pytest.mark.parametrize("rest", [b"\0", b"\x04\x1f\0\1a"], ids=["no properties", "a reason string"])
@pytest.mark.parametrize("code", MEANT)
def test_a_refusal_of_3_x_in_the_form_of_5_is_understood(code: int, rest: bytes) -> None:
    """Moquette 0.17 answers ``20 03 00 01 00`` to any CONNECT of version 5 (taken from it)."""
    packet, _ = Decoder().feed(bytes((0x20, 2 + len(rest), 0, code)) + rest + b"\xd0\0")
    assert isinstance(packet, mqtt5.ConnAckPacket)
    assert (packet.reason_code, packet.reason_str) == (MEANT[code], "a" if rest != b"\0" else None)


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("form", ["20 02 00 {:02X}", "20 03 00 {:02X} 00", "20 07 00 {:02X} 04 1F 0001 61"])
@pytest.mark.parametrize("code", sorted(strict.REASONS[2] - {0}), ids=hex)
def test_a_refusal_of_5_is_understood_in_each_form_and_version(
    code: mqtt5.ConnAckReasonCode, form: str, version: int
) -> None:
    """MQTT 5 section 3.1.2.2: a server that speaks only version 5 answers 3.x with 0x84, as it knows to say it."""
    data = bytes.fromhex(form.format(code))
    (packet,) = Decoder(version=version).feed(data)
    assert isinstance(packet, mqtt5.ConnAckPacket)
    assert int(packet.reason_code) == code
    decoder, found = Decoder(version=version), list[object]()
    for index in range(len(data)):
        found += decoder.feed(data[index : index + 1])
    assert found == [packet]


@pytest.mark.parametrize(
    "data", ["20 01 00", "20 03 00 00 00", "20 03 00 06 00", "20 02 00 06", "20 02 00 7F", "20 02 00 C0"]
)
def test_what_no_version_says_is_refused_in_3_x(data: str) -> None:
    with pytest.raises(MalformedPacket):
        Decoder(version=4).feed(bytes.fromhex(data) + b"\xd0\0")


def test_a_payload_format_that_does_not_exist_ends_the_connection_alone_and_among_many() -> None:
    good = mqtt5.PublishPacket("t", b"x", payload_format_indicator=1).write()
    for packets in (1, 50):
        with pytest.raises(MalformedPacket, match="Payload Format") as caught:
            Decoder().feed(good * (packets - 1) + good.replace(b"\x02\x01\x01", b"\x02\x01\x02"))
        assert caught.value.reason == 0x82
