"""Options of a data source or sink: a table of them, and the one reader that judges a map of texts by it.

Spark gives names in lower case and values as text, so names are compared without case. Every mistake is one
`ConfigError` line that names the option as the user writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from towline.errors import ConfigError, did_you_mean
from towline.guarantee import Guarantee

__all__ = [
    "SPARKS",
    "Format",
    "Given",
    "Option",
    "between",
    "directory",
    "label",
    "path",
    "promise",
    "size",
    "truth",
    "whole",
    "without_properties",
    "word",
]

#: What Spark itself adds to the options of a sink.
SPARKS: Final = frozenset({"checkpointlocation", "queryname"})
#: What begins an option among the properties of a table (`TableCatalog.OPTION_PREFIX`).
_OF_TABLE: Final = "option."


@dataclass(frozen=True, slots=True)
class Option:
    """One option: a row of a format's table.

    Attributes:
        name: As the documentation spells it.
        read: Makes a value of the text; its ValueError says what the option takes, and after "; " what to do.
        into: Where the value goes, ``field`` or ``part.field``, which also has the default; "" where only the format
            itself looks at it.
        guarantees: The promises that have it.
        address: It may hold a password, where a user put one; its text is never shown [I12].
    """

    name: str
    read: Callable[[str], object] = str
    into: str = ""
    guarantees: frozenset[Guarantee] = frozenset(Guarantee)
    address: bool = False

    @property
    def place(self) -> tuple[str, ...]:
        """`into`, part by part."""
        return tuple(self.into.split(".")) if self.into else ()


@dataclass(frozen=True, slots=True)
class Format:
    """What one ``format(...)`` takes, and how it says that it was given something else.

    Attributes:
        where: Begins every error.
        options: Its table.
        wrong: Makes the error for a text that can't be, from the row, the text and what `Option.read` says.
        hint: What to do about an unknown name that is like no other; ``{}`` stands for all names.
        refused: Names in lower case that get an error of their own: its code, where, what and do.
        ignored: Names in lower case that are somebody else's.
        also: Names that a misspelt one may have meant, besides those of the table.
    """

    where: str
    options: tuple[Option, ...]
    wrong: Callable[[Option, str, str], ConfigError]
    hint: str = "The options are {}."
    refused: Mapping[str, tuple[str, str, str, str]] = field(default_factory=lambda: MappingProxyType({}))
    ignored: frozenset[str] = frozenset()
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every option, as users write it."""
        return tuple(option.name for option in self.options)

    def read(self, texts: Mapping[str, str]) -> Given:
        """Find each name in the table; values are read when they are asked for.

        Raises:
            ConfigError: TL-C01 for an unknown name, or as ``refused`` says.
        """
        texts = without_properties(texts)
        spelling = {name.lower(): name for name in self.names}
        known: dict[str, str] = {}
        for key, text in texts.items():
            if name := spelling.get(key.lower()):
                known[name] = str(text).strip()
            elif key.lower() not in self.ignored:
                raise self._unknown(key)
        return Given(self, known)

    def _unknown(self, key: str) -> ConfigError:
        if refused := self.refused.get(key.lower()):
            return ConfigError(*refused)
        hint = did_you_mean(key, (*self.names, *self.also), self.hint.format(", ".join(self.names)))
        return ConfigError("TL-C01", self.where, f'unknown option "{" ".join(key.split())[:200]}"', hint)


class Given:
    """The options that a user gave to a format, all of them in its table."""

    def __init__(self, table: Format, texts: Mapping[str, str]) -> None:
        self._rows = {option.name: option for option in table.options}
        self._table = table
        self._texts = texts

    def __contains__(self, name: str) -> bool:
        return name in self._texts

    def text(self, name: str) -> str:
        """The text of an option; "" where it is not given."""
        return self._texts.get(name, "")

    def value(self, name: str, default: object = None) -> Any:
        """What an option says; the default where it is not given.

        Raises:
            ConfigError: As the format's ``wrong`` says.
        """
        if name not in self._texts:
            return default
        try:
            return self._rows[name].read(self._texts[name])
        except ValueError as error:
            raise self.wrong(name, str(error)) from None

    def values(self, options: Iterable[Option]) -> dict[str, Any]:
        """The values of those options that are given, each where its row puts it."""
        values: dict[str, Any] = {}
        for option in options:
            if option.place and option.name in self:
                *parts, last = option.place
                table = values
                for part in parts:
                    table = table.setdefault(part, {})
                table[last] = self.value(option.name)
        return values

    def wrong(self, name: str, problem: str) -> ConfigError:
        """The error for an option whose text can't be."""
        return self._table.wrong(self._rows[name], self.text(name), problem)


def without_properties(texts: Mapping[str, str]) -> dict[str, str]:
    """The options alone: at ``CREATE TABLE`` Spark gives the table's properties too, such as its owner and provider."""
    named = {key.lower(): str(text) for key, text in texts.items()}
    if "provider" not in named:
        return dict(texts)
    return {key.removeprefix(_OF_TABLE): text for key, text in named.items() if key.startswith(_OF_TABLE)}


def truth(text: str) -> bool:
    """Read ``true`` or ``false``."""
    return word("true", "false")(text) == "true"


def word(*words: str) -> Callable[[str], str]:
    """Reads one of these words, in any case."""

    def read(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"it is {', '.join(words[:-1])} or {words[-1]}")
        return text.lower()

    return read


def promise(text: str) -> Guarantee:
    """Read a guarantee."""
    return Guarantee(word(*Guarantee)(text))


def whole(low: int = 0, high: int | None = None) -> Callable[[str], int]:
    """Reads a whole number within these bounds."""

    def read(text: str) -> int:
        value = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else -1
        if value < low or (high is not None and value > high):
            raise ValueError(f"it is a whole number from {low:,}" + (f" to {high:,}" if high is not None else ""))
        return value

    return read


def between(low: float, high: float, meaning: str) -> Callable[[str], float]:
    """Reads a number within these bounds; ``meaning`` ends "it is ..."."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise ValueError(f"it is {meaning}")
        return value

    return read


def size(text: str) -> int:
    """Read a size: ``1048576``, ``512m``, ``2g`` (powers of 1024, as Spark's own sizes)."""
    match = re.fullmatch(r"([0-9]{1,15}) ?([kmgt]?)i?b?", text.lower())
    if not match:
        raise ValueError("it is a size such as 1048576, 512m or 2g")
    return int(match[1]) << (10 * " kmgt".index(match[2] or " "))


def path(text: str) -> str:
    """Read the path of a file or directory, from here or from the user's home."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise ValueError("it is a path on a disk of this machine, not a URI")
    try:
        return str(Path(text).expanduser().absolute())
    except RuntimeError:
        raise ValueError("it names the home of a user who is not known here") from None


def directory(text: str) -> str:
    """Read the absolute path of a directory: another working directory would make it another one."""
    place = path(text)
    if not Path(text).expanduser().is_absolute():
        raise ValueError(f"it is an absolute path; here it would be {place}")
    return place


def label(text: str) -> str:
    """Read a name that may stand in file names and metric labels."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text):
        raise ValueError("it is 1 to 64 letters, digits, dots, dashes or underscores, the first a letter or digit")
    return text
