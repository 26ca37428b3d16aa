"""MQTT 5 as we write it: bytes from chapter 3 of the standard, and what never leaves."""

from __future__ import annotations

from collections.abc import Callable

import mqtt5
import pytest

from towline.mqtt.codec import Decoder, PublishRun, encode

WILL = mqtt5.Will("w", payload=b"gone", qos=mqtt5.QoS(1), retain=True, will_delay_interval=5)
FILTER = mqtt5.TopicFilter("a/b", max_qos=mqtt5.QoS(1), no_local=True, retain_handling=mqtt5.RetainHandling(2))


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        # Fields in order [MQTT-3.1.3-1, -3]; will, user name and password as their flags say [MQTT-3.1.2-9, -17, -19].
        (
            mqtt5.ConnectPacket("c", username="u", password=b"\x00\xff", clean_start=True, keep_alive=10, will=WILL),
            "10 24 0004 4D515454 05 EE 000A 00 0001 63 05 1800000005 0001 77 0004 676F6E65 0001 75 0002 00FF",
        ),
        # No will, no will QoS and retain [MQTT-3.1.2-11, -13]; no user name, no password [MQTT-3.1.2-16, -18].
        (mqtt5.ConnectPacket("c", receive_max=20), "10 11 0004 4D515454 05 00 0000 03 210014 0001 63"),
        (
            mqtt5.ConnectPacket("c", will=mqtt5.Will("w", payload=b"", qos=mqtt5.QoS(2))),
            "10 14 0004 4D515454 05 14 0000 00 0001 63 00 0001 77 0000",
        ),
        (mqtt5.PublishPacket("a", b"x", retain=True), "31 05 0001 61 00 78"),  # no packet id [MQTT-2.2.1-2]
        (mqtt5.PublishPacket("a", b"x", qos=mqtt5.QoS(2), packet_id=258, duplicate=True), "3C 07 0001 61 0102 00 78"),
        (mqtt5.SubscribePacket(10, [FILTER]), "82 09 000A 00 0003 612F62 2D"),  # [MQTT-3.8.3-2]
        (mqtt5.UnsubscribePacket(10, ["a/b", "c"]), "A2 0B 000A 00 0003 612F62 0001 63"),  # [MQTT-3.10.3-2]
        (mqtt5.DisconnectPacket(), "E0 00"),
        (mqtt5.DisconnectPacket(reason_code=mqtt5.DisconnectReasonCode(0x82)), "E0 01 82"),  # [MQTT-3.14.2-1]
    ],
)
def test_what_we_write_is_what_the_standard_says(packet: mqtt5.Packet, text: str) -> None:
    data = bytes.fromhex(text)
    assert encode(packet) == data
    (item,) = Decoder().feed(data)
    assert (item.packets[0] if isinstance(item, PublishRun) else item) == packet


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (mqtt5.PublishPacket("a", b"", content_type="\0"), "U\\+0000"),
        (mqtt5.PublishPacket("a", b"", user_properties=[("a", "\0")]), "U\\+0000"),
        (mqtt5.PublishPacket("a", b"", duplicate=True), "DUP"),  # [MQTT-3.3.1-2, MQTT-4.3.1-1]
        (mqtt5.PublishPacket("a", b"", duplicate=True, content_type="t"), "DUP"),
        (mqtt5.PublishPacket("a", b"", qos=mqtt5.QoS(1), packet_id=0), "packet id 0"),  # [MQTT-2.2.1-3]
        (mqtt5.PublishPacket("a", b"", qos=mqtt5.QoS(1), packet_id=0, response_topic="r"), "packet id 0"),
        (mqtt5.PublishPacket("a", b"", response_topic=""), "response topic without a character"),  # [MQTT-4.7.3-1]
        (mqtt5.SubscribePacket(0, [mqtt5.TopicFilter("a")]), "packet id 0"),
    ],
)
def test_what_a_peer_would_have_to_refuse_does_not_leave(packet: mqtt5.Packet, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        encode(packet)


@pytest.mark.parametrize("version", [5, 4])
@pytest.mark.parametrize("text", ["\ud800", "a\0b", "t" * 65_536], ids=["surrogate", "null", "too long"])
@pytest.mark.parametrize(
    "build",
    [
        lambda text: mqtt5.ConnectPacket(text, clean_start=True),
        lambda text: mqtt5.ConnectPacket("c", will=mqtt5.Will(text)),
        lambda text: mqtt5.ConnectPacket("c", username=text),
        lambda text: mqtt5.PublishPacket(text, b""),
        lambda text: mqtt5.SubscribePacket(1, [mqtt5.TopicFilter(text)]),
        lambda text: mqtt5.UnsubscribePacket(1, [text]),
    ],
)
def test_no_string_leaves_that_is_not_sound_utf8(build: Callable[[str], mqtt5.Packet], text: str, version: int) -> None:
    """[MQTT-1.5.4-1, -2, MQTT-4.7.3-2, -3, MQTT-3.1.3-4, -11, -12, MQTT-3.3.2-1, MQTT-3.8.3-1, MQTT-3.10.3-1].

    [MQTT-1.5.3-1 of 3.1.1, MQTT-1.5.3-2 of 3.1.1, MQTT-4.7.3-2 of 3.1.1, MQTT-4.7.3-3 of 3.1.1],
    [MQTT-3.1.3-4 of 3.1.1, MQTT-3.1.3-10 of 3.1.1, MQTT-3.1.3-11 of 3.1.1, MQTT-3.3.2-1 of 3.1.1],
    [MQTT-3.8.3-1 of 3.1.1, MQTT-3.10.3-1 of 3.1.1].
    """
    with pytest.raises(ValueError, match=r"surrogates|U\+0000|bytes|Invalid"):
        encode(build(text), version)


@pytest.mark.parametrize("topic", ["a/#", "+", "", "a\0"])
def test_no_topic_name_leaves_with_a_wildcard_or_empty(topic: str) -> None:
    """[MQTT-3.3.2-2, MQTT-4.7.0-1, MQTT-4.7.3-1]."""
    with pytest.raises(ValueError, match=r"topic|alias|U"):
        encode(mqtt5.PublishPacket(topic, b""))


#: The longest string or binary field [MQTT-1.5.4, 1.5.6].
LONGEST = "x" * 65_535
FITS = 268_435_455


def test_a_packet_of_3_x_beyond_the_largest_is_an_error() -> None:
    with pytest.raises(ValueError, match="268,435,45"):
        encode(mqtt5.PublishPacket("topic", bytes(FITS - 6)), 4)


def test_the_largest_packet_with_every_property_is_known_to_the_byte() -> None:
    """[MQTT-1.5.5-1]: a length has four bytes. The codec would panic, on stderr, whatever the caller does."""
    pairs = [(LONGEST, "ä" * 30_000), ("", "")]

    def packet(payload: bytes) -> mqtt5.PublishPacket:
        return mqtt5.PublishPacket(
            "tä",
            payload,
            qos=mqtt5.QoS(1),
            packet_id=1,
            payload_format_indicator=1,
            message_expiry_interval=0,
            content_type=LONGEST,
            response_topic="r",
            correlation_data=bytes(65_535),
            subscription_ids=[1, 200, 20_000, 268_435_455],
            topic_alias=1,
            user_properties=pairs,
        )

    beside = len(encode(packet(b""))) - 4  # the type, and a length of three bytes
    payload = bytes(FITS + 1 - beside)
    assert len(encode(packet(payload[:-1]))) == FITS + 5
    with pytest.raises(ValueError, match="MQTT ends at"):
        encode(packet(payload))
    with pytest.raises(ValueError, match="MQTT ends at"):
        encode(mqtt5.PublishPacket("topic", bytes(FITS + 1 - 8)))


def test_a_panic_of_the_codec_is_an_error_of_the_packet(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="MQTT ends at"):
        encode(mqtt5.PublishPacket("t", b"", user_properties=[(LONGEST, LONGEST)] * 2_049))
    assert capfd.readouterr().err == "", "none of a PUBLISH"
    with pytest.raises(ValueError, match="can't write this UnsubscribePacket"):
        encode(mqtt5.UnsubscribePacket(1, [LONGEST] * 4_097))
