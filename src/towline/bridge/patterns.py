"""MQTT topic patterns and text templates of routes. Pure, and quick to import in a Spark worker."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from towline.bridge.properties import USER_PREFIX

#: Message fields a template may name, and the row's column behind each; ``mqtt.user.<key>`` is the first such property.
FIELDS = {
    "mqtt.topic": "topic",
    "mqtt.qos": "qos",
    "mqtt.retain": "retain",
    "mqtt.content_type": "content_type",
    "mqtt.response_topic": "response_topic",
    "mqtt.message_expiry": "message_expiry_seconds",
    "mqtt.gateway": "gateway",
    "mqtt.offset": "offset",
    "mqtt.received_at": "received_at",
}
#: The payload as text, and the beginning of the path of a field in a JSON payload.
PAYLOAD = "payload"

#: Kafka: Topic.MAX_NAME_LENGTH and LEGAL_CHARS.
MAX_TOPIC_LENGTH = 249
_LEGAL_TOPIC = re.compile(rf"[a-zA-Z0-9._-]{{1,{MAX_TOPIC_LENGTH}}}")

#: Group of a shared subscription, if it is one, and the filter.
_SHARE = re.compile(r"^(?:\$share/([^/+#{}]+)/(?=.))?(.*)", re.DOTALL)
_CAPTURE = re.compile(r"^\{([A-Za-z_][A-Za-z0-9_]*)\}$")
_TEMPLATE_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
#: A name of a JSON object after a dot, or the index of an array in brackets.
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[([0-9]{1,9})\]")


#: Text that needs no escape in a SQL string literal.
_PLAIN_LITERAL = re.compile(r"[A-Za-z0-9 _./:,;=@{}\[\]\"-]*")


def sql_literal(text: str) -> str:
    """Return a SQL string literal.

    It is hexadecimal if the parser could interpret the text: quotes, ``${...}``, and escapes, which mean nothing with
    ``spark.sql.parser.escapedStringLiterals``.
    """
    return f"'{text}'" if _PLAIN_LITERAL.fullmatch(text) else f"CAST(X'{text.encode().hex()}' AS STRING)"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Topic filter with named wildcards: ``telemetry/{tenant}/+/#``.

    Attributes:
        text: As written.
        levels: One entry for each level before a final ``#``: its literal text, or None for a wildcard.
        wildcards: Index of the level of each named wildcard.
        multi_level: Whether it ends with ``#``, which also matches the level above it [MQTT-4.7.1-2].
        share: Group of a shared subscription, or "".
    """

    text: str
    levels: tuple[str | None, ...]
    wildcards: Mapping[str, int]
    multi_level: bool
    share: str = ""

    @classmethod
    def parse(cls, text: str, *, validate: bool = True) -> Self:
        """Parse a filter; ``{{`` and ``}}`` stand for braces. `validate` applies MQTT's rules, unless done before.

        Raises:
            ValueError: It is no topic filter, or a wildcard's name is used twice or does not fill its level.
        """
        share, body = _SHARE.findall(text)[0]
        if body.startswith("$share/"):
            raise ValueError("a shared subscription is $share/NAME/FILTER; the name has no +, # or braces")
        raw_levels = body.split("/")
        multi_level = raw_levels[-1] == "#"
        levels: list[str | None] = []
        wildcards: dict[str, int] = {}
        for index, level in enumerate(raw_levels[:-1] if multi_level else raw_levels):
            if capture := _CAPTURE.match(level):
                if capture[1] in wildcards:
                    raise ValueError(f"the wildcard {{{capture[1]}}} stands twice in from; give each its own name")
                wildcards[capture[1]] = index
            literal = Template.parse("" if capture else level).constant
            if literal is None:
                raise ValueError(f'"{level}" is no level of a filter; a wildcard {{name}} fills a whole level')
            levels.append(None if capture or level == "+" else literal)
        pattern = cls(text, tuple(levels), wildcards, multi_level, share)
        if not validate:
            return pattern
        from towline.mqtt.rules import filter_problem  # noqa: PLC0415 - Spark's workers check nothing, and need no MQTT

        if problem := filter_problem(pattern.filter) or ("" if body else "from must not be empty"):
            raise ValueError(problem)
        return pattern

    @property
    def filter(self) -> str:
        """MQTT topic filter to subscribe to."""
        prefix = f"$share/{self.share}/" if self.share else ""
        return prefix + "/".join(
            [*("+" if level is None else level for level in self.levels), *(["#"] * self.multi_level)]
        )

    def matches(self, topic: str) -> bool:
        """Return whether the pattern matches a topic; a leading wildcard matches no ``$`` topic [MQTT-4.7.2-1]."""
        parts = topic.split("/")
        if len(parts) < len(self.levels) or (len(parts) > len(self.levels) and not self.multi_level):
            return False
        if topic.startswith("$") and (not self.levels or self.levels[0] is None):
            return False
        return all(level is None or level == part for level, part in zip(self.levels, parts, strict=False))

    def wildcard_level(self, name: str) -> int | None:
        """Return the level of a wildcard, in any case of letters as in SQL; None for an unknown name."""
        folded = name.lower()
        return next((level for key, level in self.wildcards.items() if key == name or key.lower() == folded), None)


@dataclass(frozen=True, slots=True)
class Template:
    """Text with fields in braces: ``telemetry.{tenant}``; ``{{`` and ``}}`` stand for braces.

    Attributes:
        text: As written.
        parts: Literal text at even indices, field names at odd ones.
    """

    text: str
    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, field_problem: Callable[[str], str] = lambda _name: "") -> Self:
        """Parse a template; `field_problem` returns the problem of a field's name, "" for a valid one.

        Raises:
            ValueError: A lone brace, or a field with a problem.
        """
        parts = [""]
        for piece in _TEMPLATE_PIECE.finditer(text):
            name = piece[1]
            if name is None:
                if piece[0] in "{}":
                    raise ValueError(f'"{text}" has a lone brace; write {{{{ or }}}} for a brace')
                parts[-1] += {"{{": "{", "}}": "}"}.get(piece[0], piece[0])
                continue
            if reason := field_problem(name):
                raise ValueError(f'"{text}" names {{{name}}}, {reason}')
            parts += [name, ""]
        return cls(text, tuple(parts))

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, in order."""
        return self.parts[1::2]

    @property
    def constant(self) -> str | None:
        """Text of a template without fields; None with fields."""
        return None if self.fields else self.parts[0]


def source_column(name: str) -> str | None:
    """Return the source column of a message field; None for an unknown name."""
    if name.startswith(USER_PREFIX) and name != USER_PREFIX:
        return "user_properties"
    return PAYLOAD if name == PAYLOAD or payload_path(name) else FIELDS.get(name)


def payload_path(name: str, root: str = PAYLOAD) -> tuple[str | int, ...]:
    """Return the steps of a field's path in a JSON payload, names and array indices; empty for another field.

    Args:
        name: Such as ``payload.device.id`` or ``payload.readings[0].value``.
        root: Beginning of the path.
    """
    rest, steps = name.removeprefix(root), list[str | int]()
    while step := _PATH_STEP.match(rest):
        steps.append(step[1] if step[2] is None else int(step[2]))
        rest = rest[step.end() :]
    return () if rest or not name.startswith(root) else tuple(steps)


def kafka_name_problem(name: str) -> str | None:
    """Return why Kafka refuses a topic name; None if it is legal [Kafka: Topic.validate]."""
    if _LEGAL_TOPIC.fullmatch(name) and name not in {".", ".."}:
        return None
    return f'"{name}" is no Kafka topic name: 1 to {MAX_TOPIC_LENGTH} letters, digits, dots, _ and -'


def is_allowed(name: str, globs: Sequence[str]) -> bool:
    """Return whether a topic name is on the list of names and globs (``*``, ``?``); an empty list allows all."""
    return not globs or any(fnmatchcase(name, glob) for glob in globs)
