"""A bridge file with all that it includes and the environment that goes over it: one document, and where each key is.

Tables of several files are one table, lines of several files come one after the other, and any other key stands in one
file only. What an environment says goes over what all files together say.
"""

from __future__ import annotations

import glob
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from towline import files
from towline.bridge.config.places import KeyPath, Places, plain_path
from towline.errors import ConfigError, did_you_mean

__all__ = ["ENVIRONMENT", "INCLUDE", "LINES", "VARIABLE", "KeyPlace", "Misfit", "Sources", "compose"]

#: The key that names further files.
INCLUDE: Final = "include"
#: The table of environments.
ENVIRONMENT: Final = "environment"
#: Names an environment where no option does.
VARIABLE: Final = "TOWLINE_ENVIRONMENT"
#: Arrays of tables that several files fill together.
LINES: Final = ("uplink", "downlink")
#: Settings of another program, whose dotted names may be written as tables too.
_DOTTED: Final = (("kafka", "settings"), ("spark", "conf"))


class KeyPlace(NamedTuple):
    """Where a key stands.

    Attributes:
        order: Of the file; 0 is the one that the command named.
        line: From 1.
        file: As a user would name it.
    """

    order: int
    line: int
    file: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Misfit(NamedTuple):
    """What does not go together, as `towline.bridge.config.mistakes.Mistakes` notes it.

    Attributes:
        code: ``TL-C...``.
        place: Where.
        subject: The table in words.
        what: What is wrong.
        do: What to do.
    """

    code: str
    place: KeyPlace
    subject: str
    what: str
    do: str


@dataclass(frozen=True, slots=True)
class _File:
    """One file that was read: where it is, how a user names it, and its lines."""

    path: Path
    shown: Path
    text: str
    places: Places


@dataclass(slots=True)
class _Index:
    """Which file says what."""

    files: list[_File] = field(default_factory=list)
    #: Key path of the document → the file that says it, and the key path there; what is below an entry is below it.
    owners: dict[KeyPath, tuple[int, KeyPath]] = field(default_factory=dict)

    def owner(self, path: KeyPath) -> tuple[int, KeyPath]:
        path = plain_path(path)
        for length in range(len(path), 0, -1):
            if (found := self.owners.get(path[:length])) is not None:
                return found[0], found[1] + path[length:]
        return 0, path

    def own(self, path: KeyPath, value: Any, order: int, local: KeyPath) -> None:
        self.owners[plain_path(path)] = (order, local)
        if isinstance(value, dict):
            for key, item in value.items():
                self.own((*path, key), item, order, (*local, key))

    def disown(self, path: KeyPath) -> None:
        path = plain_path(path)
        for below in [one for one in self.owners if one[: len(path)] == path]:
            del self.owners[below]

    def placed(self, order: int, local: KeyPath) -> KeyPlace:
        file = self.files[order]
        return KeyPlace(order, file.places.line(local), str(file.shown))


@dataclass(frozen=True, slots=True)
class Sources:
    """What the files say together.

    Attributes:
        raw: The document, without includes and environments.
        environment: The one that was chosen; "" for none.
        environments: What each says.
        misfits: What does not go together; `raw` has what came first.
        index: Which file says what.
    """

    raw: dict[str, Any]
    environment: str
    environments: Mapping[str, Mapping[str, Any]]
    misfits: tuple[Misfit, ...]
    index: _Index

    @classmethod
    def unread(cls, shown: Path) -> Sources:
        """For a file that can't be read: every key stands in its first line."""
        return cls({}, "", {}, (), _Index([_File(shown, shown, "", Places(""))]))

    @classmethod
    def again(cls, file: Path, environment: str, shown: Path) -> Sources:
        """What a bridge was read from, once more, to tell where its keys stand; unread where that can't be had now."""
        try:
            return compose(file.read_text(encoding="utf-8"), file, environment, shown=shown)
        except (OSError, ValueError, ConfigError):
            return cls.unread(shown)

    def number(self, kind: str, name: str) -> int | None:
        """The number of a line's table among those of its kind; None where there is none of that name."""
        tables = self.raw.get(kind, [])
        return next((n for n, one in enumerate(tables) if isinstance(one, dict) and one.get("name") == name), None)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that was read; the one that the command named is the first."""
        return tuple(one.path.absolute() for one in self.index.files)

    @property
    def texts(self) -> tuple[str, ...]:
        """What stands in them."""
        return tuple(one.text for one in self.index.files)

    def place(self, path: KeyPath) -> KeyPlace:
        """Where a key stands, or the nearest table around it."""
        return self.index.placed(*self.index.owner(path))

    def directory(self, path: KeyPath) -> Path:
        """What a relative path in this value is relative to: the directory of the file that says it."""
        return self.index.files[self.index.owner(path)[0]].path.absolute().parent

    def said_by(self, path: KeyPath) -> tuple[str, ...]:
        """Environments that were not chosen and say something at a key path, sorted."""
        if self.environment:
            return ()
        return tuple(sorted(name for name, table in self.environments.items() if _at(table, path) is not None))


def _at(table: Any, path: KeyPath) -> Any:
    for key in path:
        table = table.get(key) if isinstance(table, dict) else None
    return table


def compose(text: str, file: Path, environment: str = "", *, shown: Path | None = None) -> Sources:
    """Read what a file includes, put it together and lay an environment over it.

    Args:
        text: Of the file.
        file: Where it is.
        environment: Name of the one that is wanted; "" for none.
        shown: The file as the user wrote it; by default `file`.

    Raises:
        ConfigError: TL-C11, a file is not TOML; TL-C160, there is no such environment.
    """
    files_ = _Joined()
    files_.take(_File(file, shown or file, text, Places(text)), chain=())
    tables = files_.environments()
    if environment and environment not in tables:
        raise _no_environment(shown or file, environment, sorted(tables))
    overlay = _Overlay(files_, environment)
    for name, table in tables.items():
        overlay.lay(name, table)
    return Sources(files_.raw, environment, tables, tuple(files_.misfits), files_.index)


class _Joined:
    """One document of several files."""

    def __init__(self) -> None:
        self.raw: dict[str, Any] = {}
        self.index = _Index()
        self.misfits: list[Misfit] = []
        #: Files that were read, by what they are.
        self._seen: set[Path] = set()

    def take(self, file: _File, chain: tuple[Path, ...]) -> None:
        """Add a file, and after it what it includes.

        Args:
            file: Its text.
            chain: The files that include it, from the first one on.
        """
        raw = _parsed(file)
        order, identity = len(self.index.files), file.path.resolve()
        self.index.files.append(file)
        self._seen.add(identity)
        patterns = raw.pop(INCLUDE, [])
        self._merge(self.raw, raw, (), order)
        for pattern in self._patterns(patterns, order):
            self._include(pattern, order, (*chain, identity))

    def note(self, code: str, place: KeyPlace, subject: str, what: str, do: str) -> None:
        """Note what does not go together."""
        self.misfits.append(Misfit(code, place, subject, what, do))

    def environments(self) -> dict[str, dict[str, Any]]:
        """Take the tables of environments out of the document."""
        said = self.raw.pop(ENVIRONMENT, {})
        tables = said if isinstance(said, dict) else {}
        for name in tables if isinstance(said, dict) else ("",):
            if not isinstance(tables.get(name), dict):
                path = (ENVIRONMENT, name) if name else (ENVIRONMENT,)
                do = f"Write [{ENVIRONMENT}.NAME.kafka], or another table, with what is different there."
                self.note("TL-C161", self._place(path), "", f'"{path[-1]}" must be a table', do)
        return {name: table for name, table in tables.items() if isinstance(table, dict)}

    def _place(self, path: KeyPath) -> KeyPlace:
        return self.index.placed(*self.index.owner(path))

    def _patterns(self, said: Any, order: int) -> list[str]:
        patterns = [said] if isinstance(said, str) else said
        if isinstance(patterns, list) and all(isinstance(one, str) and one for one in patterns):
            return patterns
        what, do = f'"{INCLUDE}" must be a list of files in [ ]', f'Write it as {INCLUDE} = ["lines/*.toml"].'
        self.note("TL-C03", self.index.placed(order, (INCLUDE,)), "", what, do)
        return []

    def _include(self, pattern: str, order: int, chain: tuple[Path, ...]) -> None:
        home, here = self.index.files[order], self.index.placed(order, (INCLUDE,))
        directory = home.path.absolute().parent
        wanted = str(Path(pattern).expanduser())
        names = sorted(glob.glob(wanted, root_dir=directory, recursive=True))  # noqa: PTH207 - hidden files stay out
        found = [name for name in names if not (directory / name).is_dir()]
        if not found:
            what = f'{INCLUDE} "{pattern}" names no file, and what it should say would be missing'
            self.note("TL-C157", here, "", what, f"Correct it; it is relative to {home.shown.parent}.")
        for name in found:
            file = home.shown.parent / name
            identity = (directory / name).resolve()
            if identity in chain:
                what = f"{INCLUDE} goes in a circle: {file} leads here, or is this file"
                self.note("TL-C158", here, "", what, "Let one file include the others, and none of them that one.")
            elif identity not in self._seen:
                self._read(directory / name, file, here, chain)

    def _read(self, path: Path, shown: Path, here: KeyPlace, chain: tuple[Path, ...]) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError("TL-C11", str(shown), "the file is not UTF-8 text", "Save it as UTF-8.") from error
        except OSError as error:
            what = f"{INCLUDE}: {shown} can't be read ({files.why(error)})"
            self.note("TL-C157", here, "", what, "Let this user read it, or leave it out.")
        else:
            self.take(_File(path, shown, text, Places(text)), chain)

    def _merge(self, into: dict[str, Any], table: Mapping[str, Any], path: KeyPath, order: int) -> None:
        """Add what a file says at a path, which is the same in the file and in the document."""
        for key, value in table.items():
            here, present = (*path, key), into.get(key)
            if not path and key in LINES and isinstance(value, list) and isinstance(present, list | None):
                self._append(key, value, order)
            elif key not in into:
                into[key] = value
                self.index.own(here, value, order, here)
            elif isinstance(present, dict) and isinstance(value, dict):
                self._merge(present, value, here, order)
            else:
                what = f'"{key}" is set in {self._place(here)} too, and one of the two would not count'
                subject = f"[{path[0]}]" if path else ""
                self.note("TL-C159", self.index.placed(order, here), subject, what, "Keep one of them.")

    def _append(self, kind: str, lines: list[Any], order: int) -> None:
        known = self.raw.setdefault(kind, [])
        self.index.owners.setdefault((kind,), (order, (kind,)))
        for index, line in enumerate(lines):
            self.index.owners[kind, len(known)] = (order, (kind, index))
            known.append(line)


class _Overlay:
    """Lays one environment over a document, and sees of the others that they could be.

    Args:
        joined: The document.
        chosen: Name of the environment.
    """

    def __init__(self, joined: _Joined, chosen: str) -> None:
        self._joined = joined
        self._index = joined.index
        self._raw = joined.raw
        self._chosen = chosen

    def lay(self, name: str, table: Mapping[str, Any]) -> None:
        """One environment."""
        base = (ENVIRONMENT, name)
        for key, value in table.items():
            if key in (INCLUDE, ENVIRONMENT):
                what = f'"{key}" belongs to the file, not to one of its environments'
                self._misplaced((*base, key), what, "Move it to the head of the file.")
            elif key in LINES:
                self._lines(name, key, value)
            elif name == self._chosen:
                self._replace(self._raw, key, value, (), base)

    def _lines(self, name: str, kind: str, said: Any) -> None:
        base = (ENVIRONMENT, name, kind)
        if not isinstance(said, dict):
            do = f"Write [{ENVIRONMENT}.{name}.{kind}.NAME] with what is different for the line NAME."
            self._misplaced(base, f'"{kind}" must be a table for each line', do)
            return
        known = self._raw.get(kind)
        lines = enumerate(known if isinstance(known, list) else ())
        places = {str(line.get("name")): index for index, line in lines if isinstance(line, dict)}
        for line, table in said.items():
            if line not in places:
                do = did_you_mean(line, places) if places else f"Add it as [[{kind}]] first."
                self._misplaced((*base, line), f'there is no {kind} "{line}"', do)
            elif not isinstance(table, dict):
                self._misplaced((*base, line), f'"{line}" must be a table', "Write what is different for this line.")
            elif name == self._chosen:
                for key, value in table.items():
                    self._replace(self._raw[kind][places[line]], key, value, (kind, places[line]), (*base, line))

    def _replace(self, into: dict[str, Any], key: str, value: Any, path: KeyPath, said: KeyPath) -> None:
        """Give a key the value of an environment; of a table only the keys that it says.

        Args:
            into: Where the key belongs.
            key: Its name.
            value: What the environment says.
            path: Of `into`.
            said: Of the table that has the value.
        """
        here, there, present = (*path, key), (*said, key), into.get(key)
        if isinstance(present, dict) and isinstance(value, dict):
            for inner, item in value.items():
                self._replace(present, inner, item, here, there)
            return
        order, local = self._index.owner(there)
        self._index.disown(here)
        into[key] = value
        self._index.own(here, value, order, local)

    def _misplaced(self, path: KeyPath, what: str, do: str) -> None:
        place = self._index.placed(*self._index.owner(path))
        self._joined.note("TL-C161", place, f"[{ENVIRONMENT}.{path[1]}]", what, do)


def _no_environment(file: Path, wanted: str, names: list[str]) -> ConfigError:
    what = f'there is no environment "{wanted}"'
    if names:
        do = f"There {'is' if len(names) == 1 else 'are'} {', '.join(names)}; choose with --environment or {VARIABLE}."
    else:
        do = f"Leave out --environment and {VARIABLE}, or add [{ENVIRONMENT}.{wanted}]."
    return ConfigError("TL-C160", str(file), what, do)


def _parsed(file: _File) -> dict[str, Any]:
    try:
        raw = tomllib.loads(file.text)
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(str(error), file.text, file.shown) from error
    said = raw.get(ENVIRONMENT)
    for table in (raw, *(said.values() if isinstance(said, dict) else ())):
        for section, key in _DOTTED:
            if isinstance(one := _at(table, (section,)), dict) and key in one:
                one[key] = _flat(one[key])
    return raw


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
