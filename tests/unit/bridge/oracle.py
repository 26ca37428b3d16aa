"""What a message becomes by docs/options.md, read row by row: the slow reading that `towline.bridge.routes` is held to.

It shares no code with the product: filters are regular expressions here, templates are cut by hand, JSON is Python's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

COLUMNS = {
    "mqtt.topic": "topic",
    "mqtt.qos": "qos",
    "mqtt.retain": "retain",
    "mqtt.content_type": "content_type",
    "mqtt.response_topic": "response_topic",
    "mqtt.message_expiry": "message_expiry_seconds",
    "mqtt.gateway": "gateway",
    "mqtt.offset": "offset",
}


class Refusal(Exception):
    """A message is a dead letter."""


def becomes(
    tables: Sequence[Mapping[str, Any]],
    row: Mapping[str, Any],
    answers: Mapping[str, Any] | None = None,
    dead_letter_topics: Sequence[str] = (),
) -> Any:
    """``(topic, value, key, milliseconds, headers)`` of a record, why a message is a dead letter, or ``left out``.

    Args:
        tables: ``[[uplink.route]]``.
        row: A message.
        answers: What SQL says of it: ``reject`` and ``where`` (missing: it raised), fields by their names, and
            ``more``: names and texts of ``header_map``.
        dead_letter_topics: Of the bridge.
    """
    if row["payload"] is None:
        users = {pair["key"]: pair["value"] for pair in reversed(row["user_properties"] or [])}
        many = users.get("towline-reason") == "too_many_properties"
        return "too_many_properties" if many else "packet_too_large"
    if (number := taker(tables, row["topic"])) is None:
        return "unrouted"
    route, answers = tables[number], answers or {}
    if verdict := asked(route, answers):
        return verdict
    own: dict[str, str | None] = {**(captured(route["from"], row["topic"]) or {})}
    own |= {name: answers.get(name) for name in route.get("fields", {})}
    try:
        *made, headers = record(route, own, row, dead_letter_topics)
    except Refusal as refusal:
        return str(refusal)
    more = (answers.get("more") or {}) if "header_map" in route else {}
    return (*made, [*headers, *((name, text.encode()) for name, text in more.items())])


def taker(tables: Sequence[Mapping[str, Any]], topic: str) -> int | None:
    """The number of the route that takes a topic."""
    return next((n for n, one in enumerate(tables) if captured(one["from"], topic) is not None), None)


def asked(route: Mapping[str, Any], answers: Mapping[str, Any]) -> str:
    """What ``reject`` and then ``where`` make of a message, or of a record on the way down; "" for one that goes on."""
    for key in ("reject", "where"):
        if key in route and key not in answers:
            return "unmapped"
        if key == "reject" and key in route and answers[key] is not None:
            return "rejected"
    if "where" in route and not answers["where"]:
        return "undecided" if answers["where"] is None else "filtered"
    return ""


def record(route: Mapping[str, Any], own: Mapping[str, str | None], row: Mapping[str, Any], dead: Sequence[str]) -> Any:
    said = {name: text for name in ("topic", "key", "value", "timestamp") if (text := route.get(name)) is not None}
    texts = {name: rendered(text, field, own, row) for name, text in said.items()}
    headers = [(name, rendered(template, field, own, row)) for name, template in route.get("headers", {}).items()]
    topic = texts["topic"]
    if fields_of(route["topic"]) and (problem := wrong_topic(topic, route, dead)):
        raise Refusal(problem)
    if route.get("key_required") and texts.get("key") is None:
        raise Refusal("key_absent")
    if "value" in route and texts["value"] is None:
        raise Refusal("unmapped")
    moment = int(row["received_at"].timestamp() * 1000)
    if (text := texts.get("timestamp")) is not None:
        if not re.fullmatch("[0-9]{1,15}", text) or int(text) > 253402300799999:
            raise Refusal("timestamp")
        moment = int(text) or 1
    own_headers = [(name, encoded(value)) for name, value in headers if value is not None]
    value = encoded(texts["value"]) if "value" in route else row["payload"]
    message = [] if route.get("properties") == "none" else properties(row)
    return topic, value, encoded(texts.get("key")), moment, [*message, *own_headers]


def captured(text: str, topic: str) -> dict[str, str] | None:
    """The wildcards of a filter in a topic; None where it does not match."""
    levels = re.sub(r"^\$share/[^/]+/", "", text).split("/")
    wild = levels[0] in ("#", "+") or re.fullmatch(r"\{\w+\}", levels[0])
    if topic.startswith("$") and wild:
        return None
    made = []
    for level in levels:
        if level == "#":
            continue
        if re.fullmatch(r"\{\w+\}", level):
            made.append(f"(?P<{level[1:-1]}>[^/]*)")
        else:
            made.append("[^/]*" if level == "+" else re.escape(level.replace("{{", "{").replace("}}", "}")))
    deep = r"(?:/.*)?" if levels[-1] == "#" else ""
    found = re.fullmatch("/".join(made) + deep if made else ".*", topic, re.DOTALL)
    return None if found is None else found.groupdict()


def fields_of(text: str) -> list[str]:
    return re.findall(r"\{([^{}]+)\}", text.replace("{{", "").replace("}}", ""))


def rendered(text: str, field: Callable[..., str | None], *of: Any) -> str | None:
    """A template with the fields `of` a row; None where it lacks one."""
    out = ""
    for literal, name in re.findall(r"((?:\{\{|\}\}|[^{}])+)|\{([^{}]+)\}", text):
        if literal:
            out += literal.replace("{{", "{").replace("}}", "}")
            continue
        value = field(name, *of)
        if value is None:
            return None
        out += value
    return out


def field(name: str, own: Mapping[str, str | None], row: Mapping[str, Any]) -> str | None:
    users = {f"mqtt.user.{pair['key']}": pair["value"] for pair in reversed(row["user_properties"] or [])}
    values = {key: row[column] for key, column in COLUMNS.items()}
    values |= {"mqtt.received_at": micros(row), "payload": utf8(row["payload"]), **own}
    if name in values or name.startswith("mqtt.user."):
        value = values[name] if name in values else users.get(name)
        return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return leaf(name, row["payload"])


def utf8(payload: bytes) -> str | None:
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return None


def leaf(name: str, payload: bytes) -> str | None:
    try:
        here = json.loads(payload.decode(), parse_constant=refuse)
    except (ValueError, RecursionError):
        raise Refusal("unmapped") from None
    for step in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", name[len("payload") :]):
        if step[0]:
            here = here.get(step[0]) if isinstance(here, dict) else None
        else:
            here = here[int(step[1])] if isinstance(here, list) and int(step[1]) < len(here) else None
    if here is None or isinstance(here, str):
        return here
    if isinstance(here, bool | dict | list) or here in (float("inf"), float("-inf")):
        raise Refusal("unmapped")
    return str(here)


def refuse(word: str) -> None:
    raise ValueError(word)


def wrong_topic(name: str | None, route: Mapping[str, Any], dead: Sequence[str]) -> str:
    if name is None:
        return "topic_absent"
    if name.startswith("__") or re.fullmatch(r"towline\..*\.markers", name) or name in dead:
        return "topic_reserved"
    if not re.fullmatch("[a-zA-Z0-9._-]{1,249}", name) or name in (".", ".."):
        return "topic_illegal"
    listed = route.get("allowed_topics") or ["*"]
    return "" if any(fnmatchcase(name, glob) for glob in listed) else "topic_not_allowed"


def encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def micros(row: Mapping[str, Any]) -> int:
    moment: datetime = row["received_at"]
    return int(moment.replace(microsecond=0).timestamp()) * 1_000_000 + moment.microsecond


def properties(row: Mapping[str, Any]) -> list[tuple[str, bytes | None]]:
    made: list[tuple[str, Any]] = [("mqtt.topic", row["topic"]), ("mqtt.qos", row["qos"])]
    made += [("mqtt.retain", "true")] if row["retain"] else []
    names = {
        "mqtt.content-type": "content_type",
        "mqtt.response-topic": "response_topic",
        "mqtt.correlation-data": "correlation_data",
        "mqtt.message-expiry": "message_expiry_seconds",
    }
    made += [(name, row[column]) for name, column in names.items() if row[column] is not None]
    made += [] if row["payload_is_utf8"] is None else [("mqtt.payload-format", int(row["payload_is_utf8"]))]
    made += [("mqtt.subscription-id", one) for one in row["subscription_ids"] or ()]
    made.append(("mqtt.received-at", micros(row)))
    for pair in row["user_properties"] or ():
        plain = pair["key"] in ("traceparent", "tracestate")
        made.append((pair["key"] if plain else f"mqtt.user.{pair['key']}", pair["value"]))
    return [(name, value if isinstance(value, bytes) else str(value).encode()) for name, value in made]
