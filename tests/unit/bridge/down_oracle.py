"""What a Kafka record becomes by docs/kafka.md, read row by row: what `towline.bridge.messages` is held to.

It shares no code with the product: templates are cut by hand, JSON is Python's, texts are looked at by character.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tests.unit.bridge.oracle import Refusal, asked, leaf, rendered

#: Headers of the way up that are no user properties.
OURS = [
    *("topic", "qos", "retain", "content-type", "response-topic", "correlation-data", "message-expiry"),
    *("payload-format", "subscription-id", "received-at", "gateway", "offset", "duplicate"),
]


def becomes(table: Mapping[str, Any], row: Mapping[str, Any], answers: Mapping[str, Any]) -> Any:
    """The message, why a record is a dead letter, or ``filtered`` or ``undecided``.

    Args:
        table: ``[[downlink]]``, and ``limit``, the largest packet.
        row: A record.
        answers: What SQL says of it: ``reject`` and ``where`` (missing: it raised), fields and values by their names.
    """
    if verdict := asked(table, answers):
        return verdict
    try:
        said = values(table, row, answers)
    except Refusal as refusal:
        return str(refusal)
    form = None if table.get("properties") == "none" or "payload" in table else first(row, "mqtt.payload-format")
    message = {
        "topic": text(said["topic"]),
        "payload": in_bytes(said["payload"]),
        "retain": said["retain"] in (b"true", True),
        "content_type": text(said["content_type"]),
        "payload_is_utf8": None if form is None else form == b"1",
        "response_topic": text(said["response_topic"]),
        "correlation_data": in_bytes(said["correlation_data"]),
        "user_properties": users(table.get("properties", "all"), row["headers"]),
        "message_expiry_seconds": seconds(said["expiry"]),
    }
    return fault(table, said, message) or message


def values(table: Mapping[str, Any], row: Mapping[str, Any], answers: Mapping[str, Any]) -> dict[str, Any]:
    """What the line says, or a header; texts may be bytes that are none."""
    none = table.get("properties") == "none"
    defaults = {"content_type": "content-type", "response_topic": "response-topic"}
    defaults |= {"correlation_data": "correlation-data", "expiry": "message-expiry", "retain": "retain"}
    headers = {key: None if none else first(row, f"mqtt.{name}") for key, name in defaults.items()}
    given = {**headers, "payload": row["value"], "topic": text(first(row, "mqtt.topic"))}
    return {name: value(table.get(name), name, row, answers, one) for name, one in given.items()}


def value(said: Any, name: str, row: Mapping[str, Any], answers: Mapping[str, Any], given: bytes | str | None) -> Any:
    if said is None:
        return given
    if isinstance(said, Mapping):
        return answers[name]
    return rendered(said, named, row, answers) if isinstance(said, str) else said


def named(name: str, row: Mapping[str, Any], answers: Mapping[str, Any]) -> Any:
    if name in ("key", "value"):
        return text(row[name])
    if name.startswith("header."):
        return text(first(row, name[len("header.") :]))
    if name == "kafka.timestamp":
        moment: datetime = row["timestamp"].astimezone(UTC).replace(tzinfo=None)
        return re.sub(r"(\.[0-9]*?)0*$", r"\1", str(moment)).removesuffix(".") if moment.microsecond else str(moment)
    if name.startswith("kafka."):
        return str(row[name[len("kafka.") :]])
    if name in answers:
        return answers[name]
    return None if row["value"] is None else leaf("payload" + name[len("value") :], row["value"])


def first(row: Mapping[str, Any], name: str) -> bytes | None:
    return next((one["value"] for one in row["headers"] or () if one["key"] == name), None)


def text(value: Any) -> str | None:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return None


def in_bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def seconds(value: Any) -> int | None:
    if isinstance(value, bytes | str):
        number = re.fullmatch(r"[ \t\n\r\f\v]*([+-]?[0-9]+)[ \t\n\r\f\v]*", text(value) or "")
        value = int(number[1]) if number and -(2**63) <= int(number[1]) < 2**63 else None
    return None if value is None else min(max(value, 0), 2**32 - 1)


def users(chosen: str, headers: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if not headers or chosen == "none":
        return None
    ours, made = [f"mqtt.{name}" for name in OURS], []
    for one in headers:
        name = one["key"]
        if name.startswith("mqtt.user."):
            name = name[len("mqtt.user.") :]
        elif name not in ("traceparent", "tracestate") and (
            chosen == "mqtt" or name in ours or name.startswith("towline.")
        ):
            continue
        made.append({"key": name, "value": "" if one["value"] is None else text(one["value"])})
    return made


def fault(table: Mapping[str, Any], said: Mapping[str, Any], message: Mapping[str, Any]) -> str:
    broken = {
        name: said[name] is not None and message[name] is None for name in ("topic", "content_type", "response_topic")
    }
    if said["topic"] is None:
        return "topic_absent"
    if broken["topic"] or illegal(message["topic"]):
        return "topic_illegal"
    answer, pairs = message["response_topic"], message["user_properties"] or []
    bad = any(broken.values()) or any(one["value"] is None for one in pairs)
    texts = [one for pair in pairs for one in (pair["key"], pair["value"] or "")] + [message["content_type"] or ""]
    bad = bad or any(len(one.encode()) > 65535 or "\0" in one for one in texts)
    bad = bad or len(message["correlation_data"] or b"") > 65535 or (answer is not None and illegal(answer))
    every = "".join([*texts, message["topic"], answer or ""])
    if bad or (table.get("control_characters") != "send" and any(map(control, every))):
        return "undeliverable"
    return ""


def illegal(topic: str) -> bool:
    return not topic or len(topic.encode()) > 65535 or bool(set(topic) & set("+#\0"))


def control(character: str) -> bool:
    return (
        unicodedata.category(character) == "Cc"
        or ord(character) in range(0xFDD0, 0xFDF0)
        or ord(character) & 0xFFFE == 0xFFFE
    )
