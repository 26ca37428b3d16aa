"""Patterns of MQTT topics and templates of text, which routes are made of. Pure, and quickly imported by a worker."""

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
#: The payload as text, and what begins the path of a field of a JSON payload.
PAYLOAD = "payload"

#: Kafka: Topic.MAX_NAME_LENGTH and LEGAL_CHARS.
MAX_TOPIC_LENGTH = 249
_LEGAL_TOPIC = re.compile(rf"[a-zA-Z0-9._-]{{1,{MAX_TOPIC_LENGTH}}}")

_CAPTURE = re.compile(r"^\{([A-Za-z_][A-Za-z0-9_]*)\}$")
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
#: A name of a JSON object after a dot, or the index of an array in brackets.
_STEP = re.compile(r"\.([^.\[\]]+)|\[([0-9]{1,9})\]")


#: Text that SQL reads as it is written, between quotes.
_SAFE = re.compile(r"[A-Za-z0-9 _./:,;=@{}\[\]\"-]*")


def literal(text: str) -> str:
    """A SQL string constant.

    In hexadecimal where the parser could read more in it: quotes, ``${...}``, and escapes, which mean nothing with
    ``spark.sql.parser.escapedStringLiterals``.
    """
    return f"'{text}'" if _SAFE.fullmatch(text) else f"CAST(X'{text.encode().hex()}' AS STRING)"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A topic filter with named wildcards: ``telemetry/{tenant}/+/#``.

    Attributes:
        text: As written.
        levels: One entry for each level before a final ``#``: its literal text, or None for a wildcard.
        names: Wildcard name → level.
        deep: Whether it ends with ``#``, which also matches the level above it [MQTT-4.7.1-2].
        share: Group of a shared subscription, or "".
    """

    text: str
    levels: tuple[str | None, ...]
    names: Mapping[str, int]
    deep: bool
    share: str = ""

    @classmethod
    def parse(cls, text: str, *, checked: bool = True) -> Self:
        """Read a filter; ``{{`` and ``}}`` stand for braces. One that has passed MQTT's rules is not `checked` again.

        Raises:
            ValueError: If it is no topic filter, or a name is used twice or does not fill its level.
        """
        share, body = _share(text)
        raw = body.split("/")
        deep = raw[-1] == "#"
        levels: list[str | None] = []
        names: dict[str, int] = {}
        for position, level in enumerate(raw[:-1] if deep else raw):
            if capture := _CAPTURE.match(level):
                if capture[1] in names:
                    raise ValueError(f"the wildcard {{{capture[1]}}} stands twice in from; give each its own name")
                names[capture[1]] = position
            levels.append(None if capture or level == "+" else _unbrace(level))
        pattern = cls(text, tuple(levels), names, deep, share)
        if not checked:
            return pattern
        from towline.mqtt.rules import filter_problem  # noqa: PLC0415 - Spark's workers check nothing, and need no MQTT

        if problem := filter_problem(pattern.filter) or ("" if body else "from must not be empty"):
            raise ValueError(problem)
        return pattern

    @property
    def filter(self) -> str:
        """The MQTT topic filter to subscribe."""
        prefix = f"$share/{self.share}/" if self.share else ""
        return prefix + "/".join([*("+" if level is None else level for level in self.levels), *(["#"] * self.deep)])

    def takes(self, topic: str) -> bool:
        """Whether the topic matches; a leading wildcard takes none that begins with ``$`` [MQTT-4.7.2-1]."""
        parts = topic.split("/")
        if len(parts) < len(self.levels) or (len(parts) > len(self.levels) and not self.deep):
            return False
        if topic.startswith("$") and (not self.levels or self.levels[0] is None):
            return False
        return all(level is None or level == part for level, part in zip(self.levels, parts, strict=False))

    def level_of(self, name: str) -> int | None:
        """The level of a wildcard; None for another name. SQL may name it in any case of letters."""
        folded = name.lower()
        return next((level for one, level in self.names.items() if one == name or one.lower() == folded), None)


def _share(text: str) -> tuple[str, str]:
    if not text.startswith("$share/"):
        return "", text
    _, group, *rest = text.split("/", 2)
    if not group or not rest or not rest[0] or any(c in group for c in "+#{}"):
        raise ValueError("a shared subscription is $share/NAME/FILTER; the name has no +, # or braces")
    return group, rest[0]


_BRACE = re.compile(r"\{\{|\}\}|[{}]")


def _unbrace(level: str) -> str:
    def single(brace: re.Match[str]) -> str:
        if len(brace[0]) == 1:
            raise ValueError(
                f'"{level}" is no level of a filter; a wildcard {{name}} fills a whole level, a brace is written {{{{'
            )
        return brace[0][0]

    return _BRACE.sub(single, level)


@dataclass(frozen=True, slots=True)
class Template:
    """Text with fields in braces: ``telemetry.{tenant}``; ``{{`` and ``}}`` stand for braces.

    Attributes:
        text: As written.
        parts: Literal text at even places, field names at odd ones.
    """

    text: str
    parts: tuple[str, ...]

    @classmethod
    def read(cls, text: str, problem: Callable[[str], str] = lambda _name: "") -> Self:
        """Read a template; `problem` says what is wrong with a field's name, nothing with one that was judged before.

        Raises:
            ValueError: For a lone brace, or a field with a problem.
        """
        parts = [""]
        for piece in _PIECE.finditer(text):
            name = piece[1]
            if name is None:
                if piece[0] in "{}":
                    raise ValueError(f'"{text}" has a lone brace; write {{{{ or }}}} for a brace')
                parts[-1] += {"{{": "{", "}}": "}"}.get(piece[0], piece[0])
                continue
            if wrong := problem(name):
                raise ValueError(f'"{text}" names {{{name}}}, {wrong}')
            parts += [name, ""]
        return cls(text, tuple(parts))

    @property
    def fields(self) -> tuple[str, ...]:
        """The names in braces, in order."""
        return self.parts[1::2]

    @property
    def constant(self) -> str | None:
        """The text if there are no fields, else None."""
        return None if self.fields else self.parts[0]


def column_of(name: str) -> str | None:
    """The column of the source behind a field of every message; None for another name."""
    if name.startswith(USER_PREFIX) and name != USER_PREFIX:
        return "user_properties"
    return PAYLOAD if name == PAYLOAD or payload_path(name) else FIELDS.get(name)


def payload_path(name: str, root: str = PAYLOAD) -> tuple[str | int, ...]:
    """The steps of a field's path in a JSON payload: names of objects and indexes of arrays; none for another field.

    Args:
        name: Such as ``payload.device.id`` or ``payload.readings[0].value``.
        root: What the path begins with.
    """
    rest, steps = name.removeprefix(root), list[str | int]()
    while step := _STEP.match(rest):
        steps.append(step[1] if step[2] is None else int(step[2]))
        rest = rest[step.end() :]
    return () if rest or not name.startswith(root) else tuple(steps)


def kafka_name_problem(name: str) -> str | None:
    """Say why Kafka refuses a topic name, or None [Kafka: Topic.validate]."""
    if _LEGAL_TOPIC.fullmatch(name) and name not in {".", ".."}:
        return None
    return f'"{name}" is no Kafka topic name: 1 to {MAX_TOPIC_LENGTH} letters, digits, dots, _ and -'


def allowed(name: str, globs: Sequence[str]) -> bool:
    """Whether a topic name is on the list of names and globs (``*``, ``?``); an empty list allows all."""
    return not globs or any(fnmatchcase(name, glob) for glob in globs)
