"""A bridge file as TOML: what it says, on which line, what its values stand for, and the mistakes in it.

`tomllib` keeps no positions. Each statement of a file is a TOML document by itself, so that it can be asked which keys
begin on which line, once it has accepted the whole. A person mends a file once, not key by key, so every mistake is
collected before reading it gives up.
"""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args, get_type_hints

from pydantic import BaseModel

from towline.errors import ConfigError, ConfigErrors, did_you_mean, explanations
from towline.net.endpoint import Endpoint
from towline.options import size
from towline.validation import requirement

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

#: Keys and array indices from the root, as pydantic's ``loc``.
KeyPath = tuple[str | int, ...]

#: A variable of the environment in a text of the file; after a second dollar it is that text.
REFERENCE: Final = re.compile(r"(\$?)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
#: Settings of another program, whose dotted names may be written as tables too.
_SETTINGS: Final = (("kafka", "settings"), ("spark", "conf"))
#: One of these is on the last line of a statement of several.
_CLOSING: Final = ("]", '"""', "'''")
_QUOTED: Final = re.compile(r'"([^"]+)"')
#: A wildcard with a name, of a route's ``from``; braces after a dollar sign are a variable's.
_NAMED: Final = re.compile(r"(?<![${])\{[^{}]*\}")


class Document:
    """A bridge file, as the user named it; ``environ`` is for ``${NAME}``, the process's own by default.

    Attributes:
        raw: What it says, with variables as they are written.
        values: The same with their values.
        unset: Variables that are not set, by the places that name them; another text stands in for their values.

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
        self._places = {path: (file, line) for path, line in reversed([*_places(text)])}
        self.unset: dict[KeyPath, list[str]] = {}
        #: Key path, value and text of what is written with variables [I12].
        self._written: list[tuple[KeyPath, str, str]] = []
        self.values: dict[str, Any] = self._expanded(self.raw, ())

    @classmethod
    def again(cls, file: Path, shown: Path) -> Document:
        """The file that a bridge was read from, once more, to tell where its keys stand; empty if that can't be had."""
        try:
            return cls(file.read_text(encoding="utf-8"), shown)
        except (OSError, ValueError, ConfigError):
            return cls("", shown)

    def include(self, place: KeyPath, document: Document, home: KeyPath) -> None:
        """Have a key, and what is in it, be told where another document has it: a line's profile."""
        size, places = len(home), document._places.items()
        self._places |= {(*place, *path[size:]): where for path, where in places if path[:size] == home}

    def value(self, path: KeyPath) -> Any:
        """What the file says at a key, its variables as they are written; None for nothing."""
        here: Any = self.raw
        for part in path:
            try:
                here = here[part]
            except (KeyError, IndexError, TypeError):
                return None
        return here

    def place(self, path: KeyPath) -> tuple[Path, int]:
        """File and line of a key, or of the nearest table around it, from 1; 1 for what stands nowhere."""
        path = _plain(path)
        ends = (path[:end] for end in range(len(path), 0, -1))
        return next((self._places[end] for end in ends if end in self._places), (self.file, 1))

    def where(self, path: KeyPath) -> str:
        """The same as ``FILE:LINE``."""
        return "{}:{}".format(*self.place(path))

    def at(self, *paths: KeyPath) -> str | None:
        """``FILE:LINE`` of the first of these keys that is there; None for none."""
        return next((self.where(path) for path in paths if self.value(path) is not None), None)

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

    def table(self, kind: str, name: str) -> tuple[str, int]:
        """The place of a line's table; that of the first one where there is none of that name."""
        tables = self.values.get(kind)
        names = [one.get("name") for one in tables if isinstance(one, dict)] if isinstance(tables, list) else []
        return kind, names.index(name) if name in names else 0

    # -- variables of the environment

    def _expanded(self, said: Any, path: KeyPath) -> Any:
        """What is said with its variables replaced, but for secrets of Kafka's client, which never travel [I12]."""
        if isinstance(said, dict):
            return {key: self._expanded(one, _plain((*path, key))) for key, one in said.items()}
        if isinstance(said, list):
            return [self._expanded(one, (*path, at)) for at, one in enumerate(said)]
        if not isinstance(said, str) or (path[:2] == ("kafka", "settings") and _secret(path[2:])):
            return said
        names = [name for escaped, name in REFERENCE.findall(said) if not escaped]
        if unset := [name for name in names if name not in self.environ]:
            self.unset[path] = unset
        value = filled(said, lambda name: self.environ.get(name, "x"))
        if names and not unset:
            self._written.append((path, value, said))
            if _key(path) == "from":
                self._written.append((path, _NAMED.sub("+", value), _NAMED.sub("+", said)))
            elif _key(path) == "brokers":
                parts, texts = value.split(","), said.split(",")
                for one, text in zip(parts, texts if len(texts) == len(parts) else [said] * len(parts), strict=True):
                    with contextlib.suppress(ValueError):  # of another environment than it was read with
                        self._written.append((path, str(Endpoint.parse(one.strip())), text.strip()))
        return value

    def shown(self, value: Any, *keys: str) -> Any:
        """JSON values as the file writes them; one that the file says without a variable as it is.

        A text is said under one of these ``keys``, in a table under its own; of a list with commas each part is.
        """
        if isinstance(value, dict):
            return {name: self.shown(one, name.rpartition(".")[2]) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.shown(one, *keys) for one in value]
        texts = {one: said for path, one, said in reversed(self._written) if _key(path) in keys}
        if value in texts or not isinstance(value, str):
            return texts.get(value, value)
        return re.sub(r"(^|, ?)([^,]+)", lambda part: part[1] + texts.get(part[2], part[2]), value) if texts else value

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
        ends = any(mark in line for mark in _CLOSING) and ("#" in line or not line.rstrip().endswith(","))
        if len(lines) > 1 and not ends:
            continue  # a list of thousands of lines is not read thousands of times
        with contextlib.suppress(tomllib.TOMLDecodeError):
            statement = "\n".join(lines)
            yield number - len(lines) + 1, statement, tomllib.loads(statement)
            lines = []


def _keys(said: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    for key, inner in said.items() if isinstance(said, dict) else enumerate(said):
        yield (place := _plain((*path, key)))
        yield from _keys(inner, place) if isinstance(inner, dict | list) else ()


# -- mistakes --------------------------------------------------------------------------------------------------------

#: What pydantic calls a key that a model, or a dataclass, does not have.
UNKNOWN: Final = frozenset({"extra_forbidden", "unexpected_keyword_argument"})


class Mistakes:
    """Collects the mistakes of one file."""

    def __init__(self, document: Document) -> None:
        self._document = document
        #: Line and error, without repetition.
        self._found: dict[tuple[int, str], ConfigError] = {}

    def add(self, code: str, path: KeyPath, what: str, do: str | None = None, *, subject: str | None = None) -> None:
        """Note a mistake at a key, with its code; what to do is by default what the explanation of that says.

        It is a mistake of the table or line ``subject``, by default of that with the key.
        """
        do = _advice(code) if do is None else do
        document = self._document
        subject = document.subject(path) if subject is None else subject
        where = f"{document.where(path)}  {subject}" if subject else document.where(path)
        error = ConfigError(code, *(document.quoted(text, path) for text in (where, what, do)))
        self._found.setdefault((document.place(path)[1], str(error)), error)

    def add_details(
        self, errors: Iterable[ErrorDetails], kind: type[BaseModel], base: KeyPath = (), also: Iterable[str] = ()
    ) -> None:
        """Note pydantic's findings about a table that was to be of a kind, at ``base``.

        Its keys ``also`` are read as tables of their own.
        """
        for error in errors:
            loc = tuple(error["loc"])
            path = base + loc
            key = _key(path)
            if error["type"] in UNKNOWN:
                known = _keys_at(kind, loc)
                code, what, do = _unknown(str(loc[-1]), [*known, *also] if len(loc) == 1 else known)
            elif error["type"] == "missing":
                code, what, do = _missing(kind if len(loc) == 1 else None, key)
            else:
                code, what, do = _explain(error, key)
            self.add(code, path, what, do)

    def raise_if_any(self) -> None:
        """Raise `ConfigErrors` if anything was noted."""
        if self._found:
            raise ConfigErrors(self.found())

    def found(self) -> list[ConfigError]:
        """What was noted, in the order of the file."""
        return [error for _, error in sorted(self._found.items(), key=lambda item: item[0][0])]


def _advice(code: str) -> str:
    """What the explanation of a code says to do, without the marks of a page."""
    text = re.sub(r"`| ?\(\[.*?\]\(.*?\)\)", "", str(explanations()[code]["do"]))
    return f"{text[:1].upper()}{text[1:]}."


def _keys_at(kind: type, loc: KeyPath) -> list[str]:
    """The keys that are known beside the last one of ``loc``; indices and branches of unions are no keys."""
    kinds = [kind]
    for part in loc[:-1]:
        inner = [one for outer in kinds if part in (keys := keys_of(outer)) for one in _tables_in(keys[str(part)])]
        kinds = inner or [one for one in kinds if one.__name__ == part] or kinds
    return [key for one in kinds for key in keys_of(one)]


def keys_of(kind: type) -> dict[str, Any]:
    """What a table may hold, as users write it, with the type of each."""
    if issubclass(kind, BaseModel):
        return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    return get_type_hints(kind)


def _tables_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        yield annotation
    for inner in get_args(annotation):
        yield from _tables_in(inner)


def _missing(kind: type[BaseModel] | None, key: str) -> tuple[str, str, str]:
    """Absence of a key, or of a table, with the advice that its description gives."""
    fields = {field.alias or name: field for name, field in kind.model_fields.items()} if kind else {}
    field = fields.get(key)
    if field and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return "TL-C02", f"[{key}] is missing", "Add the table."
    return "TL-C02", f'"{key}" is missing', (field and field.description) or "Add it."


def _unknown(key: str, known: Sequence[str]) -> tuple[str, str, str]:
    if key.lower() in {"password", "passwd", "secret", "token"}:
        what, name = f'"{key}" would put a secret into this file', f"{key.lower()}_file"
        do = f"Write it into a file of mode 0600 and name that in {name if name in known else 'password_file'}."
        return "TL-C16", what, do
    return "TL-C01", f'unknown key "{key}"', did_you_mean(key, known)


def _explain(error: ErrorDetails, key: str) -> tuple[str, str, str]:
    """Turn one pydantic finding into code, what and do; its input is never quoted, it may be a secret."""
    kind = error["type"]
    if kind.startswith("TL-"):
        what, _, advice = error["msg"].rpartition("; ")
        return kind, what, sentence(f"; {advice}")[1]
    if kind == "value_error":
        what, do = sentence(error["ctx"]["error"])
        if what.startswith("must "):  # of a type that several keys have
            what, do = f'"{key}" {what}', do or "Correct the value."
        return "TL-C12" if what.startswith("guarantee ") else "TL-C05", what, do
    if kind == "string_pattern_mismatch":
        what = f'"{key}" has letters, digits, dots, - and _, begins with a letter or digit, at most 64'
        return "TL-C03", what, "Rename it."
    return "TL-C03", f'"{key}" {requirement(error)}', "Correct the value."


def sentence(error: ValueError | str, otherwise: str = "") -> tuple[str, str]:
    """What is wrong and what to do, of an error that says ``what; do``."""
    what, _, advice = str(error).partition("; ")
    return what, f"{advice[:1].upper()}{advice[1:]}." if advice else otherwise


# -- values ----------------------------------------------------------------------------------------------------------

#: Tables whose keys are the user's, or another program's.
_OPEN: Final = frozenset({"fields", "headers", "settings", "conf"})
#: Tables whose keys are ours: in those of a profile's parameters nothing is a size or a file.
_OURS: Final = frozenset({"mqtt", "kafka", "gateway", "monitor", "spark", "uplink", "downlink"})
#: What to do where a file is missing, by the end of its key's path; it holds a secret where nothing is said.
_MISSING: Final[dict[KeyPath, str]] = {
    ("gateway", "key_file"): "It is a private key in PEM.",
    ("token_file",): "Make one: openssl rand -hex 32, mode 0600.",
    **{(key,): "It is a file in PEM." for key in ("ca_file", "cert_file")},
}


class FileValues:
    """Reads the values of a file, whose relative paths start from its directory."""

    def __init__(self, document: Document, mistakes: Mistakes) -> None:
        self._document, self._directory, self._mistakes = document, document.file.absolute().parent, mistakes
        for path, names in document.unset.items():
            for name in names:
                do = f"Set it, or write $${{{name}}} for the text itself."
                mistakes.add("TL-C04", path, f"the environment variable {name} is not set", do)

    def read(self, value: Any, path: KeyPath = ()) -> Any:
        """A value, and all that is in it."""
        if isinstance(value, dict):
            return {key: self.read(item, (*path, *key.split("."))) for key, item in value.items()}
        if isinstance(value, list):
            return [self.read(item, (*path, index)) for index, item in enumerate(value)]
        return self._typed(value, path) if isinstance(value, str) and path not in self._document.unset else value

    def _typed(self, text: str, path: KeyPath) -> Any:
        key = str(path[-1])
        if path[:2] == ("kafka", "settings"):  # a file of its client, or a directory of certificates
            name, do = ".".join(map(str, path[2:])), "Name it as from this file, or by its whole path."
            return self._there(text, path, name, do) if key == "location" and text != "probe" else text
        if len(path) < 2 or path[0] not in _OURS or not _OPEN.isdisjoint(path):
            return text
        if path[-2] in ("gateways", "kafka_jars"):
            return text if "://" in text or not text else str(self._at(text, path) or text)
        if "_bytes" in key:
            return self._size(text, path)
        if not key.endswith("_file"):
            return text
        do = next((do for end, do in _MISSING.items() if path[-len(end) :] == end), "")
        return self._there(text, path, key, do or "Write the secret into it, mode 0600.", file=True)

    def _size(self, text: str, path: KeyPath) -> int:
        try:
            return size(text)
        except ValueError as error:
            what, do = sentence(error)
            self._mistakes.add("TL-C03", path, f'"{path[-1]}" {what}', do)
            return 1 << 30

    def _there(self, text: str, path: KeyPath, key: str, do: str, *, file: bool = False) -> str:
        """The path of what must be there, a ``file`` or a directory too [design section 10]."""
        place = self._at(text, path)
        if place is not None and not (place.is_file() or (place.is_dir() and not file)):
            self._mistakes.add("TL-C15", path, f"{key} {place} is not there", do)
        return str(place or text)

    def _at(self, text: str, path: KeyPath) -> Path | None:
        """A path as from the file, or from a user's home; None where that is not known, which is noted."""
        try:
            return self._directory / Path(text).expanduser()
        except RuntimeError:
            what = f'"{text}" names the home of a user who is not known here'
            self._mistakes.add("TL-C15", path, what, "Correct the path, or write it whole.")
            return None


def _secret(setting: KeyPath) -> bool:
    """Whether a setting of Kafka's client is a secret; its reference is left for the process that connects."""
    key = ".".join(map(str, setting))
    ends = (".pem", ".passphrase", ".extensions", "endpoint.url")
    return "." in key and ("password" in key or "secret" in key or key.endswith(ends))
