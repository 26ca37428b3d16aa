"""Rules of MQTT and its versions for topics, filters, messages and configurations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from towline.errors import ConfigError
from towline.mqtt.checks import MAX_REMAINING_LENGTH
from towline.mqtt.events import SessionConfig
from towline.mqtt.message import MAX_EXPIRY_S

#: Bytes of a PUBLISH beside texts and payload: topic length, packet id, property length, payload format indicator,
#: message expiry interval, topic alias, each with its identifier.
_FIXED_FIELDS_BYTES: Final = 2 + 2 + 4 + 2 + 5 + 3
#: Longest text with its length and identifier.
_MAX_TEXT_BYTES: Final = 0xFFFF + 5
#: Characters that never exceed 65,535 bytes.
_SAFE_CHARACTERS: Final = 0xFFFF // 4


#: Problem and remedy for QoS 2 with brokers that don't share sessions: a packet id that one of them has not released
#: may be assigned to another message there, which it would drop.
QOS2_NEEDS_SHARED_SESSIONS: Final = (
    "QoS 2 with several brokers needs them to share sessions",
    "Set brokers_share_sessions=True if they are one cluster that does, or give one broker, or use QoS 1.",
)


def filter_problem(value: str) -> str | None:
    """Return the error in a topic filter; None if valid [MQTT-4.7.1-1, -2, MQTT-1.5.4-2, MQTT-4.8.2-1, -2]."""
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
    """Return the error in a topic name; None if valid [MQTT-3.3.2-2, MQTT-4.7.3-1, -2, -3]."""
    if not value or (len(value) > _SAFE_CHARACTERS and len(value.encode(errors="replace")) > 0xFFFF):
        return "a topic has 1 to 65,535 bytes"
    if "+" in value or "#" in value or "\0" in value:
        return "a topic has no +, no # and no U+0000"
    return None


def message_problem(
    topic: object, payload: object, qos: object, reserved_bytes: int = 0, **properties: object
) -> str | None:
    """Return the error in a message to publish; None if valid. Called before it is stored or sent.

    Args:
        topic: Topic name.
        payload: Bytes, or text for UTF-8.
        qos: 0, 1 or 2.
        reserved_bytes: Bytes reserved for properties that are added later.
        properties: ``content_type``, ``response_topic``, ``correlation_data``, ``expiry_s``, and ``user_properties``
            as pairs; None, or missing, for none.
    """
    if problem := _type_problem(topic, payload, qos):
        return problem
    assert isinstance(topic, str)
    assert isinstance(payload, bytes | bytearray | memoryview | str)
    if problem := topic_problem(topic) or _text_problem("the topic", topic):
        return problem
    if isinstance(payload, str) and not _is_utf8(payload):
        return "the payload is text that UTF-8 can't encode"
    for name, value in properties.items():
        if value is not None and (problem := _property_problem(name, value)):
            return problem
    return _size_problem(topic, payload, properties, reserved_bytes)


def _type_problem(topic: object, payload: object, qos: object) -> str | None:
    if not isinstance(topic, str):
        return f"a topic is text, not {_type_name(topic)}"
    if not isinstance(payload, bytes | bytearray | memoryview | str):
        return f"a payload is bytes or text, not {_type_name(payload)}; json.dumps() makes text of most"
    return None if _is_integer(qos) and qos in (0, 1, 2) else f"QoS is 0, 1 or 2, not {qos!r}"


def _type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a surrogate [MQTT-1.5.4-1]
        return False
    return True


def _text_problem(name: str, value: object) -> str | None:
    if not isinstance(value, str):
        return f"{name} is text, not {_type_name(value)}"
    if value.isascii() and len(value) <= _SAFE_CHARACTERS and "\0" not in value:
        return None
    if not _is_utf8(value) or "\0" in value:
        return f"{name} has a surrogate or U+0000 [MQTT-1.5.4-1, -2]"
    return f"{name} has more than 65,535 bytes" if len(value.encode()) > 0xFFFF else None


def _property_problem(name: str, value: object) -> str | None:
    """Return the error in one property of a message; None if valid."""
    if name == "user_properties":
        return _user_properties_problem(value)
    if name == "expiry_s":
        is_valid = isinstance(value, int) and _is_integer(value) and 0 <= value <= MAX_EXPIRY_S
        return None if is_valid else f"an expiry is a whole number of seconds from 0 to {MAX_EXPIRY_S:,}, not {value!r}"
    if name == "correlation_data":
        is_valid = isinstance(value, bytes) and len(value) <= 0xFFFF
        return None if is_valid else f"correlation data are bytes, at most 65,535, not {_type_name(value)}"
    if name == "response_topic" and isinstance(value, str) and topic_problem(value):
        return "a response topic has 1 to 65,535 bytes, no +, no # and no U+0000 [MQTT-3.3.2-14]"
    return _text_problem(name, value)


def _user_properties_problem(value: object) -> str | None:
    if isinstance(value, Mapping):
        return "user properties are a list of pairs, not a dict, as a name may come twice; list(d.items()) makes one"
    for pair in value if isinstance(value, list | tuple) else (None,):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return 'user properties are a list of pairs of text: [("name", "value")]'
        if problem := _text_problem("a user property", pair[0]) or _text_problem("a user property", pair[1]):
            return problem
    return None


def _size_problem(
    topic: str, payload: bytes | bytearray | memoryview | str, properties: Any, reserved_bytes: int
) -> str | None:
    """Return the error of a PUBLISH above the maximum remaining length [MQTT-1.5.5-1]; None if it fits."""
    user_properties = properties.get("user_properties") or ()
    if _byte_length(payload) + 2 * (len(user_properties) + 2) * _MAX_TEXT_BYTES + reserved_bytes < MAX_REMAINING_LENGTH:
        return None  # surely, as nearly always
    size = _byte_length(payload) + _byte_length(topic) + _FIXED_FIELDS_BYTES + reserved_bytes
    texts = [properties.get(name) for name in ("content_type", "response_topic", "correlation_data")]
    size += sum(_byte_length(text) + 3 for text in texts if text is not None)
    size += sum(_byte_length(key) + _byte_length(value) + 5 for key, value in user_properties)
    return f"it has {size:,} bytes, MQTT ends at {MAX_REMAINING_LENGTH:,}" if size > MAX_REMAINING_LENGTH else None


def _byte_length(value: bytes | bytearray | memoryview | str) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode())
    return value.nbytes if isinstance(value, memoryview) else len(value)


def check_config(config: SessionConfig) -> None:
    """Refuse settings that MQTT, or the protocol version, can't express; `towline.net.settings` has the bounds.

    Raises:
        ConfigError: TL-C51 for a value by itself, TL-C50 for a conflict with the protocol version.
    """
    if problem := _text_setting_problem(config):
        raise ConfigError("TL-C51", *problem, "Change it.")
    if rule := version_problem(config):
        raise ConfigError("TL-C50", config.location, f"not possible with this protocol version: {rule}", "Change one.")


def version_problem(config: SessionConfig) -> str | None:
    """Return the conflict between a configuration and its protocol version; None for none."""
    filters = config.filters
    identifier_invalid = any(f.identifier is not None and not 0 < f.identifier <= MAX_REMAINING_LENGTH for f in filters)
    rules = [
        (any(f.no_local and f.is_shared for f in filters), "no_local with a shared subscription [MQTT-3.8.3-4]"),
        (identifier_invalid, "a subscription identifier is a number from 1 to 268,435,455"),
        *(_mqtt3_rules(config) if config.protocol < 5 else ()),
    ]
    return next((rule for broken, rule in rules if broken), None)


def _text_setting_problem(config: SessionConfig) -> tuple[str, str] | None:
    """Return the setting that MQTT can't carry and its error; None if all are valid."""
    for name in ("client_id", "username"):
        text = getattr(config, name)
        if text is not None and (problem := _text_problem("it", text)):
            return name, problem
    return None if len(config.password or b"") <= 0xFFFF else ("password", "it has more than 65,535 bytes")


def _mqtt3_rules(config: SessionConfig) -> Iterable[tuple[bool, str]]:
    will, filters = config.will, config.filters
    yield config.password is not None and config.username is None, "a password needs a username"
    yield not config.client_id and config.session_expiry_s > 0, "a persistent session needs a client id"
    yield any(f.no_local or f.retain_handling for f in filters), "no_local and retain_handling need MQTT 5"
    yield any(f.identifier is not None for f in filters), "a subscription identifier needs MQTT 5"
    has_shared = any(f.is_shared for f in filters)
    yield has_shared, "a shared subscription ($share) needs MQTT 5, in 3.x it is an ordinary filter"
    yield will is not None and bool(will.will_delay_interval), "a will's delay needs MQTT 5"
    yield config.clean_start and config.session_expiry_s > 0, "a clean start ends with the connection (expiry 0)"
    yield config.authenticator is not None, "enhanced authentication needs MQTT 5"
    client_id_invalid = config.protocol == 3 and not 0 < len(config.client_id) <= 23
    yield client_id_invalid, "MQTT 3.1 takes client ids of 1 to 23 characters"
