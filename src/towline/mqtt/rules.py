"""What MQTT, and each of its versions, can say: topics, filters, messages and configurations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from towline.errors import ConfigError
from towline.mqtt.events import SessionConfig
from towline.mqtt.fence import MAX_REMAINING_LENGTH
from towline.mqtt.message import LONGEST_EXPIRY

#: Of a PUBLISH beside texts and payload: length of the topic, packet id, property length, payload format indicator,
#: message expiry interval, topic alias, each with its identifier.
_FIXED_PARTS: Final = 2 + 2 + 4 + 2 + 5 + 3
#: A text with what stands before it.
_MOST_OF_A_TEXT: Final = 0xFFFF + 5
#: Characters that are no more than 65,535 bytes, whichever they are.
_SURELY_SHORT: Final = 0xFFFF // 4


#: Why nothing is published with QoS 2 to brokers of which each has its own session, and what to do: the packet id of a
#: message that one took and has not released may be given to another message there, and that would be dropped.
NO_QOS_2: Final = (
    "QoS 2 with several brokers needs them to share sessions",
    "Set brokers_share_sessions=True if they are one cluster that does, or give one broker, or use QoS 1.",
)


def filter_problem(value: str) -> str | None:
    """Say what is wrong with a topic filter, or None [MQTT-4.7.1-1, -2, MQTT-1.5.4-2, MQTT-4.8.2-1, -2]."""
    if "\0" in value:
        return "a topic filter has no U+0000"
    levels = value.split("/")
    if levels[0] == "$share":
        if len(levels) < 3 or not levels[1] or any(c in levels[1] for c in "+#") or not "/".join(levels[2:]):
            return "a shared subscription is $share/NAME/FILTER, the name without + and #"
        levels = levels[2:]
    if any("#" in level and level != "#" for level in levels) or "#" in levels[:-1]:
        return "# stands alone and last in a topic filter"
    if any("+" in level and level != "+" for level in levels):
        return "+ stands alone between two / in a topic filter"
    return None


def topic_problem(value: str) -> str | None:
    """Say what is wrong with a topic name, or None [MQTT-3.3.2-2, MQTT-4.7.3-1, -2, -3]."""
    if not value or (len(value) > _SURELY_SHORT and len(value.encode(errors="replace")) > 0xFFFF):
        return "a topic has 1 to 65,535 bytes"
    if "+" in value or "#" in value or "\0" in value:
        return "a topic has no +, no # and no U+0000"
    return None


def message_problem(topic: object, payload: object, qos: object, room: int = 0, **properties: object) -> str | None:
    """Say what is wrong with a message to be published, or None, before anything is stored or sent.

    Args:
        topic: Topic name.
        payload: Bytes, or text for UTF-8.
        qos: 0, 1 or 2.
        room: Bytes that are left free, for properties that are added on the way.
        properties: ``content_type``, ``response_topic``, ``correlation_data``, ``expiry_s``, and ``user_properties``
            as pairs; None, or missing, for none.
    """
    if problem := _kind_problem(topic, payload, qos):
        return problem
    assert isinstance(topic, str)
    assert isinstance(payload, bytes | bytearray | memoryview | str)
    if problem := topic_problem(topic) or _text_problem("the topic", topic):
        return problem
    if isinstance(payload, str) and not _is_utf8(payload):
        return "the payload is no text that UTF-8 can say"
    for name, value in properties.items():
        if value is not None and (problem := _property_problem(name, value)):
            return problem
    return _size_problem(topic, payload, properties, room)


def _kind_problem(topic: object, payload: object, qos: object) -> str | None:
    if not isinstance(topic, str):
        return f"a topic is text, not {_kind(topic)}"
    if not isinstance(payload, bytes | bytearray | memoryview | str):
        return f"a payload is bytes or text, not {_kind(payload)}; json.dumps() makes text of most"
    return None if _is_whole(qos) and qos in (0, 1, 2) else f"QoS is 0, 1 or 2, not {qos!r}"


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a surrogate [MQTT-1.5.4-1]
        return False
    return True


def _text_problem(name: str, value: object) -> str | None:
    if not isinstance(value, str):
        return f"{name} is text, not {_kind(value)}"
    if value.isascii() and len(value) <= _SURELY_SHORT and "\0" not in value:
        return None
    if not _is_utf8(value) or "\0" in value:
        return f"{name} has a surrogate or U+0000 [MQTT-1.5.4-1, -2]"
    return f"{name} has more than 65,535 bytes" if len(value.encode()) > 0xFFFF else None


def _property_problem(name: str, value: object) -> str | None:
    """Say what is wrong with one property of a message, which is there."""
    if name == "user_properties":
        return _pairs_problem(value)
    if name == "expiry_s":
        fine = isinstance(value, int) and _is_whole(value) and 0 <= value <= LONGEST_EXPIRY
        return None if fine else f"an expiry is a whole number of seconds from 0 to {LONGEST_EXPIRY:,}, not {value!r}"
    if name == "correlation_data":
        fine = isinstance(value, bytes) and len(value) <= 0xFFFF
        return None if fine else f"correlation data are bytes, at most 65,535, not {_kind(value)}"
    if name == "response_topic" and isinstance(value, str) and topic_problem(value):
        return "a response topic has 1 to 65,535 bytes, no +, no # and no U+0000 [MQTT-3.3.2-14]"
    return _text_problem(name, value)


def _pairs_problem(value: object) -> str | None:
    if isinstance(value, Mapping):
        return "user properties are a list of pairs, not a dict, as a name may come twice; list(d.items()) makes one"
    for pair in value if isinstance(value, list | tuple) else (None,):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return 'user properties are a list of pairs of text: [("name", "value")]'
        if problem := _text_problem("a user property", pair[0]) or _text_problem("a user property", pair[1]):
            return problem
    return None


def _size_problem(topic: str, payload: bytes | bytearray | memoryview | str, given: Any, room: int) -> str | None:
    """Say that a PUBLISH is larger than its remaining length can say [MQTT-1.5.5-1]."""
    pairs = given.get("user_properties") or ()
    if _bytes(payload) + 2 * (len(pairs) + 2) * _MOST_OF_A_TEXT + room < MAX_REMAINING_LENGTH:
        return None  # surely, as nearly always
    size = _bytes(payload) + _bytes(topic) + _FIXED_PARTS + room
    texts = [given.get(name) for name in ("content_type", "response_topic", "correlation_data")]
    size += sum(_bytes(text) + 3 for text in texts if text is not None)
    size += sum(_bytes(key) + _bytes(value) + 5 for key, value in pairs)
    return f"it has {size:,} bytes, MQTT ends at {MAX_REMAINING_LENGTH:,}" if size > MAX_REMAINING_LENGTH else None


def _bytes(value: bytes | bytearray | memoryview | str) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode())
    return value.nbytes if isinstance(value, memoryview) else len(value)


def check_config(config: SessionConfig) -> None:
    """Refuse what the standard, or the protocol version, has no way to say; `towline.net.settings` has the bounds.

    Raises:
        ConfigError: TL-C51 for a value by itself, TL-C50 for what the version can't say.
    """
    if problem := _text_setting_problem(config):
        raise ConfigError("TL-C51", *problem, "Change it.")
    if rule := version_problem(config):
        raise ConfigError("TL-C50", config.where, f"not possible with this protocol version: {rule}", "Change one.")


def version_problem(config: SessionConfig) -> str | None:
    """Say what of a configuration its protocol version has no way to say, or None."""
    filters = config.filters
    wrong = any(f.identifier is not None and not 0 < f.identifier <= MAX_REMAINING_LENGTH for f in filters)
    rules = [
        (any(f.no_local and f.shared for f in filters), "no_local with a shared subscription [MQTT-3.8.3-4]"),
        (wrong, "a subscription identifier is a number from 1 to 268,435,455"),
        *(_before_5(config) if config.protocol < 5 else ()),
    ]
    return next((rule for broken, rule in rules if broken), None)


def _text_setting_problem(config: SessionConfig) -> tuple[str, str] | None:
    """The setting that MQTT can't carry, and what is wrong with it."""
    for name in ("client_id", "username"):
        text = getattr(config, name)
        if text is not None and (problem := _text_problem("it", text)):
            return name, problem
    return None if len(config.password or b"") <= 0xFFFF else ("password", "it has more than 65,535 bytes")


def _before_5(config: SessionConfig) -> Iterable[tuple[bool, str]]:
    will, filters = config.will, config.filters
    yield config.password is not None and config.username is None, "a password needs a username"
    yield not config.client_id and config.session_expiry_s > 0, "a session that is kept needs a client id"
    yield any(f.no_local or f.retain_handling for f in filters), "no_local and retain_handling need MQTT 5"
    yield any(f.identifier is not None for f in filters), "a subscription identifier needs MQTT 5"
    yield (
        any(f.shared for f in filters),
        "a shared subscription ($share) needs MQTT 5, to 3.x it is a filter as any other",
    )
    yield will is not None and bool(will.will_delay_interval), "a will's delay needs MQTT 5"
    yield config.clean_start and config.session_expiry_s > 0, "a clean start ends with the connection (expiry 0)"
    yield config.authenticator is not None, "enhanced authentication needs MQTT 5"
    too_long = config.protocol == 3 and not 0 < len(config.client_id) <= 23
    yield too_long, "MQTT 3.1 takes client ids of 1 to 23 characters"
