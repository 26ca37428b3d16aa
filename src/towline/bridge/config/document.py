"""A bridge file as TOML: what it says, on which line, and how it is written where a variable of the environment is.

`tomllib` keeps no positions. Each statement of a file is a TOML document by itself, so that it can be asked which keys
begin on which line, once it has accepted the whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from towline.errors import ConfigError
from towline.net.transport import Endpoint

#: Keys and array indices from the root, as pydantic's ``loc``.
KeyPath = tuple[str | int, ...]

#: A variable of the environment in a text of the file; after a second dollar it is that text.
REFERENCE: Final = re.compile(r"(\$?)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
#: Settings of another program, whose dotted names may be written as tables too.
_SETTINGS: Final = (("kafka", "settings"), ("spark", "conf"))
_QUOTED: Final = re.compile(r'"([^"]+)"')
#: A wildcard with a name, of a route's ``from``; braces after a dollar sign are a variable's.
_NAMED: Final = re.compile(r"(?<![${])\{[^{}]*\}")
_TOPICS: Final = ("topic", "fallback_topic", "dead_letter_topic", "from")
#: What is shown under another key than it is written under.
_OTHERS: Final = {
    "filter": ("from",),
    "kafka_topics": _TOPICS,
    "topics": _TOPICS,
    "bootstrap.servers": ("bootstrap_servers",),
}
#: What may be several, with commas between.
_LISTS: Final = ("bootstrap_servers", "bootstrap.servers", "brokers")


class Document:
    """A bridge file.

    Args:
        text: Of the file.
        file: As the user named it.
        environ: For ``${NAME}``; the process's own by default.

    Attributes:
        raw: The values, with variables as they are written.

    Raises:
        ConfigError: TL-C11, it is not TOML.
    """

    def __init__(self, text: str, file: Path, environ: Mapping[str, str] | None = None) -> None:
        try:
            self.raw: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise _not_toml(str(error), text, file) from error
        for section, key in _SETTINGS:
            if isinstance(table := self.raw.get(section), dict) and key in table:
                table[key] = _flat(table[key])
        self.file = file
        self.environ = os.environ if environ is None else environ
        self._lines = dict(reversed([*_places(text)]))
        #: Key path, value and text of what is written with variables [I12].
        self._written = [*self._with_variables(self.raw, ())]
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
        """The line of a key, or of the nearest table around it, from 1; 1 for what stands nowhere."""
        document, path = self._home(path)
        path = _plain(path)
        lines = document._lines  # noqa: SLF001 - of the same class
        return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1)

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

    # -- variables of the environment

    def _with_variables(self, said: object, path: KeyPath) -> Iterator[tuple[KeyPath, str, str]]:
        for key, one in said.items() if isinstance(said, dict) else enumerate(said if isinstance(said, list) else ()):
            yield from self._with_variables(one, _plain((*path, key)))
        if not isinstance(said, str) or not names_variable(said):
            return
        value = filled(said, lambda name: self.environ.get(name, "x"))
        yield path, value, said
        if _key(path) == "from":
            yield path, _NAMED.sub("+", value), _NAMED.sub("+", said)
        elif _key(path) == "brokers":
            with contextlib.suppress(ValueError):  # of another environment than the one that it was read with
                yield path, str(Endpoint.parse(value)), said

    def shown(self, value: Any, key: str = "") -> Any:
        """A value, and all that is in it, as the file writes it; one that the file says without a variable as it is.

        Args:
            value: Text, or JSON values of such.
            key: Of the file, or of a plan, in which the value stands.
        """
        if isinstance(value, dict):
            return {name: self.shown(one, name) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.shown(one, key) for one in value]
        if key in _LISTS and isinstance(value, str) and "," in value:
            return re.sub(r"[^,\s]+", lambda one: str(self.shown(one[0], key)), value)
        keys = _OTHERS.get(key, (key.rpartition(".")[2],))
        return next((said for path, one, said in self._written if one == value and _key(path) in keys), value)

    def quoted(self, text: str, path: KeyPath) -> str:
        """A text about a key path whose quotations are of the file, not of the environment.

        What is quoted whole is a value wherever that stands; a piece is one if the value stands in the same table.
        """
        path = _plain(path)

        def written(quotation: re.Match[str]) -> str:
            for place, value, said in self._written:
                near = path[: len(place) - 1] == place[:-1] and quotation[1] != place[-1]
                if quotation[1] == value or (near and quotation[1] in value):
                    return f'"{said}"'
            return quotation[0]

        return _QUOTED.sub(written, text) if self._written else text


def filled(text: str, value: Callable[[str], str]) -> str:
    """A text with what ``value`` gives for the name of each reference in it."""
    return REFERENCE.sub(lambda found: found[0][1:] if found[1] else value(found[2]), text)


def names_variable(said: object) -> bool:
    """Whether a value of the file is a text with a variable of the environment in it."""
    return isinstance(said, str) and any(not found[1] for found in REFERENCE.finditer(said))


def _key(path: KeyPath) -> str:
    """The key that a value, or a list with it, stands under."""
    return next((part for part in reversed(path) if isinstance(part, str)), "")


def _plain(path: KeyPath) -> KeyPath:
    """The path with its dotted keys taken apart: ``"a.b"`` in quotes and ``a.b`` name the same setting."""
    return tuple(part for key in path for part in (key.split(".") if isinstance(key, str) else (key,)))


def _flat(value: Any, prefix: str = "") -> Any:
    """Dotted keys as one: TOML reads ``security.protocol = "SSL"`` as a table in a table."""
    if not isinstance(value, dict):
        return value
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {prefix + key: item}
    return flat


def _not_toml(message: str, text: str, file: Path) -> ConfigError:
    found = re.search(r"^(.*?) \(at (?:line (\d+), column (\d+)|end of document)\)$", message, re.DOTALL)
    what, line = (found[1], found[2]) if found else (message, None)
    where = f"{file}:{line or max(1, len(text.splitlines()))}"
    return ConfigError("TL-C11", where, f"not TOML: {what[:1].lower()}{what[1:]}", "Correct the line.")


def _places(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Every table and key of a TOML text that `tomllib` accepts, with the line on which its statement begins."""
    table: KeyPath = ()
    last: dict[KeyPath, int] = {}  # number of the last element of each array of tables
    for number, statement, said in _statements(text.replace("\r\n", "\n")):
        if not statement.lstrip().startswith("["):
            yield from (((*table, *path), number) for path in _keys(said))
            continue
        table, inner = (), said
        while inner and isinstance(inner, dict):
            ((key, inner),) = inner.items()
            table += _plain((key,))
            if isinstance(inner, list):
                last[table] = last.get(table, -1) + 1
            table += (last[table],) if table in last else ()
        yield table, number


def _statements(text: str) -> Iterator[tuple[int, str, Any]]:
    """Line, text and meaning of each statement: the fewest lines that are a TOML document."""
    lines: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        lines.append(line)
        with contextlib.suppress(tomllib.TOMLDecodeError):
            statement = "\n".join(lines)
            yield number - len(lines) + 1, statement, tomllib.loads(statement)
            lines = []


def _keys(said: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    for key, inner in said.items() if isinstance(said, dict) else enumerate(said):
        yield (place := _plain((*path, key)))
        yield from _keys(inner, place) if isinstance(inner, dict | list) else ()
