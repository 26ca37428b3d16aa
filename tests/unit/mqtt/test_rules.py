"""Topic filters and names, messages and configurations: what the standard, a version or a server has no way to say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from mqtt5 import PublishPacket, QoS, Will

from tests.unit.mqtt.sessions import Method
from towline.errors import ConfigError
from towline.mqtt.codec import encode
from towline.mqtt.events import Filter, SessionConfig
from towline.mqtt.rules import check_config, filter_problem, message_problem, version_problem


@pytest.mark.parametrize(
    ("filters", "good"),
    [
        ("# a/# /# + +/a a/+/b /+ a / $SYS/# $share/g/a $share/g/# $share/g//a $share/g/+/b $shared", True),
        ("a# a/#/b #/a ## a/b# +#", False),  # [MQTT-4.7.1-1], [MQTT-4.7.1-2 of 3.1.1]
        ("a+ +a a/b+/c ++ a/+b", False),  # [MQTT-4.7.1-2], [MQTT-4.7.1-3 of 3.1.1]
        ("$share $share/ $share//a", False),  # [MQTT-4.8.2-1]
        ("$share/g $share/g/ $share/g+/a $share/g#/a $share/+/a $share/g/a#", False),  # [MQTT-4.8.2-2]
        ("a/\0", False),  # [MQTT-1.5.4-2]
    ],
)
def test_topic_filters(filters: str, good: bool) -> None:
    for pattern in filters.split(" "):
        assert (filter_problem(pattern) is None) is good, pattern


# Messages


#: (fields that differ from a sound message, words of the refusal; "" for none)
MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"topic": None}, "a topic is text, not None"),
    ({"topic": b"t"}, "a topic is text, not bytes"),
    ({"topic": "a/#"}, "no #"),
    ({"topic": "t\ud800"}, "the topic has a surrogate"),
    *[({"topic": topic}, "") for topic in ("t" * 65_535, "ä" * 32_767 + "a")],
    *[({"topic": topic}, "1 to 65,535 bytes") for topic in ("t" * 65_536, "ä" * 32_768)],
    ({"payload": {"a": 1}}, "not dict; json.dumps"),
    ({"payload": None}, "a payload is bytes or text, not None"),
    *[({"payload": payload}, "") for payload in (b"", bytearray(b"x"), memoryview(b"x"), "grün")],
    ({"payload": "\ud800"}, "text that UTF-8 can't encode"),
    *[({"qos": qos}, "") for qos in (0, 1, 2)],
    *[({"qos": qos}, "QoS is 0, 1 or 2") for qos in (-1, 3, True, 1.0, None, "1")],
    *[({"expiry_s": seconds}, "") for seconds in (None, 0, 0xFFFFFFFF)],
    *[({"expiry_s": seconds}, "an expiry is a whole number") for seconds in (-1, 0x1_0000_0000, 1.5, True)],
    *[({"correlation_data": data}, "") for data in (None, b"", bytes(65_535))],
    *[({"correlation_data": data}, "correlation data are bytes") for data in (bytes(65_536), "text", bytearray(1))],
    *[({"response_topic": topic}, "") for topic in (None, "answers")],
    *[({"response_topic": topic}, "MQTT-3.3.2-14") for topic in ("", "a/#", "+", "\0")],
    ({"response_topic": b"answers"}, "response_topic is text, not bytes"),
    ({"response_topic": "\ud800"}, "response_topic has a surrogate"),
    *[({"content_type": text}, "") for text in (None, "", "text/plain", "x" * 65_535, "ä" * 32_767)],
    *[({"content_type": text}, "more than 65,535 bytes") for text in ("x" * 65_536, "ä" * 32_768)],
    ({"content_type": "\0"}, "U+0000"),
    ({"content_type": "ä\0"}, "U+0000"),
    ({"content_type": 1}, "content_type is text, not int"),
    *[({"user_properties": pairs}, "") for pairs in (None, [], (), [("a", "1"), ("a", "1")], [["", ""]])],
    ({"user_properties": {"a": "1"}}, "not a dict"),
    *[({"user_properties": pairs}, "a list of pairs") for pairs in ("ab", [("a",)], [("a", "b", "c")], ["ab"], 7)],
    *[({"user_properties": [pair]}, "a user property") for pair in (("a", 1), (1, "a"), ("\0", "a"), ("a", "\ud800"))],
]


@pytest.mark.parametrize(("fields", "words"), MESSAGES)
def test_a_message_is_judged_before_anything_is_stored(fields: dict[str, Any], words: str) -> None:
    found = message_problem(**{"topic": "t", "payload": b"x", "qos": 1, **fields}) or ""
    assert (words in found) if words else not found


#: The longest that a remaining length of four bytes can say [MQTT-1.5.5-1].
LONGEST = 268_435_455


@pytest.mark.parametrize("payload", [b"x" * 300, "ü" * 150, memoryview(bytes(300)), memoryview(bytes(304)).cast("I")])
@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"content_type": "text/plain", "response_topic": "größe", "correlation_data": bytes(100), "expiry_s": 5},
        {"user_properties": [("a", "ü"), ("", "x" * 300)] * 20},
        {"content_type": "c" * 65_535, "response_topic": "r" * 65_535, "correlation_data": bytes(65_535)},
    ],
)
def test_a_message_too_large_is_refused_to_some_bytes(payload: Any, properties: dict[str, Any]) -> None:
    """What the longest packet has room for is a matter of its properties; a message beyond it is never taken."""
    said = bytes(payload) if not isinstance(payload, str) else payload.encode()
    packet = PublishPacket(
        "tä",
        said,
        qos=QoS(1),
        packet_id=1,
        payload_format_indicator=1,
        message_expiry_interval=properties.get("expiry_s"),
        **{name: value for name, value in properties.items() if name != "expiry_s"},
    )
    data = encode(packet)
    room = LONGEST - len(data[1:].lstrip(bytes(range(128, 256)))[1:])  # what is behind the remaining length
    assert message_problem("tä", payload, 1, room + 1, **properties), "it would not leave"
    found = message_problem("tä", payload, 1, LONGEST, **properties)
    assert found is not None
    assert "268,435,455" in found
    assert message_problem("tä", payload, 1, room - 16, **properties) is None


# Configurations


CONFIG = SessionConfig("c", "line", (Filter("a"),))


@pytest.mark.parametrize(
    ("setting", "good", "bad"),
    [
        ("username", (None, "", "ü"), ("\0", "u" * 65_536, b"u")),
        ("password", (None, b"", bytes(65_535)), (bytes(65_536),)),
        ("client_id", ("c", "c" * 65_535), ("\ud800", "c" * 65_536)),
    ],
)
def test_a_setting_that_can_not_be_said_is_named(setting: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    for value in good:
        check_config(replace(CONFIG, **{setting: value}))
    for value in bad:
        with pytest.raises(ConfigError, match=rf"{setting}.*TL-C51"):
            check_config(replace(CONFIG, **{setting: value}))


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({}, 3),
        ({"password": b"p"}, 5),  # [MQTT-3.1.2-22 of 3.1.1]
        ({"password": b"p", "username": "u"}, 3),
        ({"filters": (Filter("a"), Filter("b", no_local=True))}, 5),
        ({"filters": (Filter("a"), Filter("b", retain_handling=1))}, 5),
        ({"filters": (Filter("a"), Filter("b", retain_handling=0))}, 3),
        ({"filters": (Filter("a"), Filter("b", identifier=1))}, 5),
        ({"filters": (Filter("a"), Filter("$share/g/a"))}, 5),
        ({"will": Will("w")}, 3),
        ({"will": Will("w", will_delay_interval=1)}, 5),
        ({"clean_start": True}, 5),
        ({"clean_start": True, "session_expiry_s": 0}, 3),
        ({"session_expiry_s": 600}, 3),
        ({"authenticator": Method()}, 5),
        ({"client_id": "c" * 23}, 3),
        ({"client_id": "c" * 24}, 4),
        ({"client_id": ""}, 5),  # [MQTT-3.1.3-7 of 3.1.1]
        ({"client_id": "", "clean_start": True, "session_expiry_s": 0}, 4),
        ({"filters": (Filter("b", no_local=True), Filter("$share/g/a"))}, 5),
        ({"filters": (Filter("a"), Filter("$share/g/a", no_local=True))}, None),  # [MQTT-3.8.3-4]
        ({"filters": (Filter("a", identifier=268_435_455),)}, 5),
        ({"filters": (Filter("a", identifier=268_435_456),)}, None),
        ({"filters": (Filter("a", identifier=0),)}, None),
        ({"filters": (Filter("a", identifier=-1),)}, None),
    ],
)
def test_the_oldest_version_that_can_say_a_configuration(settings: dict[str, Any], least: int | None) -> None:
    for version in (5, 4, 3):
        config = replace(CONFIG, protocol=version, **settings)
        possible = least is not None and version >= least
        assert (version_problem(config) is None) is possible, version
        if possible:
            check_config(config)
        else:
            with pytest.raises(ConfigError, match="TL-C50"):
                check_config(config)
