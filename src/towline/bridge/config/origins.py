"""Where each value of a bridge stands in its file, and what the file says there: variables are shown by name [I12]."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.model import DownLine, Line
from towline.bridge.config.places import Document, KeyPath, names_variable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from towline.bridge.config.model import AnyLine, Bridge

__all__ = ["Origins"]

#: A wildcard with a name, of a route's ``from``; braces after a dollar sign are a variable's.
_NAMED: Final = re.compile(r"(?<![${])\{[^{}]*\}")


class Origins:
    """Where the keys of a bridge stand in its file.

    Args:
        bridge: Whose; where its file can't be read, no line is named.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._document = Document.again(bridge.file, Path(bridge.file.name))

    def table(self, line: AnyLine) -> tuple[str, int]:
        """Kind and number of a line's table."""
        return line.kind, [one.name for one in self._bridge.lines if one.kind == line.kind].index(line.name)

    def at(self, *paths: KeyPath) -> str | None:
        """``FILE:LINE`` of the first of these keys that is there; None for none."""
        found = next((path for path in paths if self._document.value(path) is not None), None)
        return None if found is None else self._document.where(found)

    def written(self, value: Any, *paths: KeyPath) -> Any:
        """A value as it is to be shown; a list item by item.

        Args:
            value: What runs.
            paths: Keys that may say it; what the first says that is there is shown if it names a variable.
        """
        said = next((found for path in paths if (found := self._document.value(path)) is not None), None)
        if isinstance(said, list) and isinstance(value, list | tuple) and len(said) == len(value):
            return [text if names_variable(text) else one for one, text in zip(value, said, strict=True)]
        if isinstance(said, list) and any(map(names_variable, said)):
            said = ",".join(map(str, said))
        if not names_variable(said):
            return value
        return [said] if isinstance(value, list | tuple) else said

    def brokers(self, line: AnyLine) -> list[str]:
        """The addresses of a line's brokers as they are to be shown."""
        places = (*self.table(line), "mqtt", "brokers"), ("mqtt", "brokers")
        return list(self.written([str(broker) for broker in line.gateway.brokers], *places))

    def filter(self, line: AnyLine, pattern: str) -> str:
        """A subscribed filter as it is to be shown."""
        for number, route in enumerate(line.routes if isinstance(line, Line) else ()):
            said = self.written(None, (*self.table(line), "route", number, "from"))
            if said is not None and pattern == route.pattern.filter:
                return _NAMED.sub("+", str(said))
        return pattern

    def topics(self, names: Iterable[str]) -> list[str]:
        """Kafka topics as they are to be shown."""
        shown: dict[str, str] = {}
        for line in self._bridge.lines:
            table = self.table(line)
            named: list[tuple[str | None, KeyPath]] = [(line.dead_letter_topic, (*table, "dead_letter_topic"))]
            if isinstance(line, DownLine):
                read = line.section.topics
                shown |= zip(read, self.written(read, (*table, "from")), strict=True)
            for number, route in enumerate(line.routes if isinstance(line, Line) else ()):
                place = (*table, "route", number)
                named.append((route.topic.constant, (*place, "topic")))
                named.append((route.fallback_topic, (*place, "fallback_topic")))
            shown |= {name: self.written(name, path) for name, path in named if name}
        return [shown.get(name, name) for name in names]
