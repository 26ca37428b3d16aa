"""A bridge file as TOML, and the line of each of its keys, so that a mistake can name it.

`tomllib` keeps no positions. One pass over the text is enough: it need not judge the file, only find the lines on
which tables and keys begin, because it runs after `tomllib` has accepted the text.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from towline.errors import ConfigError

#: A variable of the environment in a text of the file; after a second dollar it is that text.
REFERENCE: Final = re.compile(r"(\$?)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

#: Keys and array indices from the root, as pydantic's ``loc``.
KeyPath = tuple[str | int, ...]

#: Settings of another program, whose dotted names may be written as tables too.
_SETTINGS: Final = (("kafka", "settings"), ("spark", "conf"))


class Document:
    """A bridge file: what it says, and where.

    Args:
        text: Of the file.
        file: As the user named it.

    Attributes:
        raw: The values.

    Raises:
        ConfigError: TL-C11, it is not TOML.
    """

    def __init__(self, text: str, file: Path) -> None:
        try:
            self.raw: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise _not_toml(str(error), text, file) from error
        for section, key in _SETTINGS:
            if isinstance(table := self.raw.get(section), dict) and key in table:
                table[key] = _flat(table[key])
        self.text, self.file = text, file
        self._places = Places(text)
        self._grafts: dict[KeyPath, tuple[Document, KeyPath]] = {}

    @classmethod
    def again(cls, file: Path, shown: Path) -> Document:
        """The file that a bridge was read from, once more, to tell where its keys stand; empty if that can't be had."""
        try:
            return cls(file.read_text(encoding="utf-8"), shown)
        except (OSError, ValueError, ConfigError):
            return cls("", shown)

    def graft(self, path: KeyPath, document: Document, place: KeyPath) -> None:
        """Have what stands at a key path be told as of a place in another document."""
        self._grafts[path] = document, place

    def _home(self, path: KeyPath) -> tuple[Document, KeyPath]:
        for length in range(len(path), 0, -1):
            if graft := self._grafts.get(path[:length]):
                return graft[0], (*graft[1], *path[length:])
        return self, path

    def value(self, path: KeyPath) -> Any:
        """What the file says at a key, its variables as they are written; None for nothing."""
        document, path = self._home(path)
        here: Any = document.raw
        for part in path:
            try:
                here = here[part]
            except (KeyError, IndexError, TypeError):
                return None
        return here

    def line(self, path: KeyPath) -> int:
        """The line of a key, or of the nearest table around it, from 1."""
        document, path = self._home(path)
        return document._places.line(path)  # noqa: SLF001 - of the same class

    def where(self, path: KeyPath) -> str:
        """The same as ``FILE:LINE``."""
        return f"{self._home(path)[0].file}:{self.line(path)}"

    def subject(self, path: KeyPath) -> str:
        """The table around a key in words: a line with its name and the number of its route, or ``[table]``."""
        if len(path) < 2 or not isinstance(path[0], str):
            return ""
        if not isinstance(number := path[1], int):
            return f"[{path[0]}]"
        table = self.value(path[:2])
        name = table.get("name", number + 1) if isinstance(table, dict) else number + 1
        inner = f" {path[2]} {int(path[3]) + 1}" if len(path) > 3 and isinstance(path[3], int) else ""
        return f'{path[0]} "{name}"{inner}'

    def number(self, kind: str, name: str) -> int | None:
        """The number of a line's table among those of its kind; None where there is none of that name."""
        tables = self.raw.get(kind, [])
        return next((n for n, one in enumerate(tables) if isinstance(one, dict) and one.get("name") == name), None)


def names_variable(said: object) -> bool:
    """Whether a value of the file is a text with a variable of the environment in it."""
    return isinstance(said, str) and any(not found[1] for found in REFERENCE.finditer(said))


def _flat(value: Any, prefix: str = "") -> Any:
    """Dotted keys as one: TOML reads ``security.protocol = "SSL"`` as a table in a table."""
    if not isinstance(value, dict):
        return value
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat


def _not_toml(message: str, text: str, file: Path) -> ConfigError:
    found = re.search(r"^(.*?) \(at (?:line (\d+), column (\d+)|end of document)\)$", message, re.DOTALL)
    what, line = (found[1], found[2]) if found else (message, None)
    where = f"{file}:{line or max(1, len(text.splitlines()))}"
    return ConfigError("TL-C11", where, f"not TOML: {what[:1].lower()}{what[1:]}", "Correct the line.")


_KEY = r'(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|\'[^\']*\')'
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_TABLE = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]\]?")
_ASSIGN = re.compile(rf"\s*({_DOTTED})\s*=")
_QUOTES = re.compile(r'"""|\'\'\'|"|\'')


def plain_path(path: KeyPath) -> KeyPath:
    """The path with its dotted keys taken apart: ``"a.b"`` in quotes and ``a.b`` name the same setting."""
    return tuple(part for key in path for part in (key.split(".") if isinstance(key, str) else (key,)))


class Places:
    """The line of every table and key of a TOML text.

    Args:
        text: A TOML document that `tomllib` accepts.
    """

    def __init__(self, text: str) -> None:
        #: First line (from 1) of a key path; array elements by index.
        self._lines: dict[KeyPath, int] = {}
        #: How many elements each array of tables has so far.
        self._counts: dict[KeyPath, int] = {}
        table: KeyPath = ()
        for number, line in _logical_lines(text):
            if head := _TABLE.match(line):
                table = self._open(_split(head[2]), array=head[1] == "[[")
                self._lines.setdefault(table, number)
            elif assign := _ASSIGN.match(line):
                self._lines.setdefault(table + _split(assign[1]), number)

    def line(self, path: KeyPath) -> int:
        """The line of a key, or of the nearest table around it; 1 for what stands nowhere."""
        path = plain_path(path)
        for length in range(len(path), 0, -1):
            if (found := self._lines.get(path[:length])) is not None:
                return found
        return 1

    def _open(self, keys: KeyPath, *, array: bool) -> KeyPath:
        path: KeyPath = ()
        for position, key in enumerate(keys):
            path += (key,)
            if array and position == len(keys) - 1:
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:
                path += (self._counts[path] - 1,)
        return path


def _split(dotted: str) -> KeyPath:
    return plain_path(tuple(part.strip("\"'") for part in re.findall(_KEY, dotted)))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that begin outside a multi-line string or array, with their numbers."""
    quote, depth = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not quote and depth <= 0:
            depth = 0
            yield number, line
            if _TABLE.match(line):
                continue
        quote, depth = _scan(line, quote, depth)


def _scan(line: str, quote: str, depth: int) -> tuple[str, int]:
    """Carry the open quote and the bracket depth over one line."""
    at = 0
    while at < len(line):
        rest = line[at:]
        if quote:
            if rest.startswith("\\") and quote[0] == '"':
                at += 2
            elif rest.startswith(quote):
                at, quote = at + len(quote), ""
            else:
                at += 1
        elif mark := _QUOTES.match(rest):
            at, quote = at + len(mark[0]), mark[0]
        elif rest[0] == "#":
            break
        else:
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(rest[0], 0)
            at += 1
    return (quote if len(quote) == 3 else ""), depth
