"""TOML document of a bridge file: its values, their lines, environment variables, and the collected errors.

`tomllib` keeps no positions. So each statement is parsed once more as a TOML document of its own, which gives the keys
that begin on its line.
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
from towline.options import parse_path, parse_size
from towline.validation import requirement

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

#: Keys and array indices from the root, as pydantic's ``loc``.
KeyPath = tuple[str | int, ...]

#: Reference to an environment variable; after a second dollar it is literal text.
REFERENCE: Final = re.compile(r"(\$?)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
#: Settings of other programs; their dotted names may also be written as tables.
_DOTTED_TABLES: Final = (("kafka", "settings"), ("spark", "conf"))
#: The last line of a multi-line statement has one of these.
_CLOSING_MARKS: Final = ("]", '"""', "'''")
_QUOTATION: Final = re.compile(r'"([^"]+)"')
#: Named wildcard in a route's ``from``; braces after a dollar sign belong to a variable.
_NAMED_WILDCARD: Final = re.compile(r"(?<![${])\{[^{}]*\}")


class Document:
    """Bridge file parsed as TOML, with the line of each key; ``environ`` has the values of ``${NAME}``.

    Attributes:
        raw: Values with their ``${NAME}`` references.
        values: Values with the references replaced.
        unset: Variables that are not set, by the key path that names them; "x" stands for their values.

    Raises:
        ConfigError: TL-C11, it is not TOML.
    """

    def __init__(self, text: str, file: Path, environ: Mapping[str, str] | None = None) -> None:
        try:
            self.raw: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise _toml_error(str(error), text, file) from error
        for section, key in _DOTTED_TABLES:
            if isinstance(table := self.raw.get(section), dict) and key in table:
                table[key] = _flatten(table[key])
        self.file = file
        self.environ = os.environ if environ is None else environ
        self._lines = dict(reversed([*_key_lines(text)]))
        self.unset: dict[KeyPath, list[str]] = {}
        #: Key path, value and raw text of each value with variables [I12].
        self._references: list[tuple[KeyPath, str, str]] = []
        self.values: dict[str, Any] = self._expand(self.raw, ())

    @classmethod
    def reread(cls, file: Path, displayed_path: Path) -> Document:
        """Read a bridge file once more for the lines of its keys; return an empty document if that fails."""
        try:
            return cls(file.read_text(encoding="utf-8"), displayed_path)
        except (OSError, ValueError, ConfigError):
            return cls("", displayed_path)

    def value(self, path: KeyPath) -> Any:
        """Return the raw value at a key path, references unreplaced; None if there is none."""
        node: Any = self.raw
        for key in path:
            try:
                node = node[key]
            except (KeyError, IndexError, TypeError):
                return None
        return node

    def line(self, path: KeyPath) -> int:
        """Return the line (from 1) of a key or of the nearest table around it; 1 for an absent key."""
        path = _split_keys(path)
        prefixes = (path[:length] for length in range(len(path), 0, -1))
        return next((self._lines[prefix] for prefix in prefixes if prefix in self._lines), 1)

    def location_text(self, path: KeyPath) -> str:
        """Return the location of a key as ``FILE:LINE``."""
        return f"{self.file}:{self.line(path)}"

    def first_location(self, *paths: KeyPath) -> str | None:
        """Return ``FILE:LINE`` of the first of these keys that is set; None if none is."""
        return next((self.location_text(path) for path in paths if self.value(path) is not None), None)

    def table_label(self, path: KeyPath) -> str:
        """Return a label of the table around a key: the line's name and the number of its route, or ``[table]``."""
        if len(path) < 2 or not isinstance(path[0], str):
            return ""
        if not isinstance(index := path[1], int):
            return f"[{path[0]}]"
        table = self.value(path[:2])
        name = table.get("name", index + 1) if isinstance(table, dict) else index + 1
        element = f" {path[2]} {int(path[3]) + 1}" if len(path) > 3 and isinstance(path[3], int) else ""
        return f'{path[0]} "{name}"{element}'

    def table_path(self, kind: str, name: str) -> tuple[str, int]:
        """Return the key path of a line's table; that of the first line if no line has the name."""
        tables = self.values.get(kind)
        names = [table.get("name") for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []
        return kind, names.index(name) if name in names else 0

    # -- variables of the environment

    def _expand(self, raw_value: Any, path: KeyPath) -> Any:
        """Replace the variables in a value, except in secrets of the Kafka client, which are never copied [I12]."""
        if isinstance(raw_value, dict):
            return {key: self._expand(item, _split_keys((*path, key))) for key, item in raw_value.items()}
        if isinstance(raw_value, list):
            return [self._expand(item, (*path, index)) for index, item in enumerate(raw_value)]
        if not isinstance(raw_value, str) or (path[:2] == ("kafka", "settings") and _is_secret(path[2:])):
            return raw_value
        names = [name for escaped, name in REFERENCE.findall(raw_value) if not escaped]
        if unset_names := [name for name in names if name not in self.environ]:
            self.unset[path] = unset_names
        value = replace_references(raw_value, lambda name: self.environ.get(name, "x"))
        if names and not unset_names:
            self._references.append((path, value, raw_value))
            if _last_key(path) == "from":
                self._references.append((path, _NAMED_WILDCARD.sub("+", value), _NAMED_WILDCARD.sub("+", raw_value)))
            elif _last_key(path) == "brokers":
                endpoints, raw_endpoints = value.split(","), raw_value.split(",")
                for endpoint, raw_endpoint in zip(
                    endpoints,
                    raw_endpoints if len(raw_endpoints) == len(endpoints) else [raw_value] * len(endpoints),
                    strict=True,
                ):
                    with contextlib.suppress(ValueError):  # the environment may have changed since
                        self._references.append((path, str(Endpoint.parse(endpoint.strip())), raw_endpoint.strip()))
        return value

    def restore_references(self, value: Any, *keys: str) -> Any:
        """Return texts under ``keys`` with their ``${NAME}`` references restored, so that output shows no secret.

        Each part of a comma-separated list is looked up by itself.
        """
        if isinstance(value, list | tuple):
            return [self.restore_references(item, *keys) for item in value]
        texts = {expanded: written for path, expanded, written in reversed(self._references) if _last_key(path) in keys}
        if value in texts or not isinstance(value, str):
            return texts.get(value, value)
        return re.sub(r"(^|, ?)([^,]+)", lambda m: m[1] + texts.get(m[2], m[2]), value) if texts else value

    def restore_quotations(self, text: str, path: KeyPath) -> str:
        """Restore ``${NAME}`` references in the quotations of a message about a key path.

        A quotation equal to a value is restored wherever the value stands; a part of a value only within the same
        table.
        """
        path = _split_keys(path)

        def restore(quotation: re.Match[str]) -> str:
            for key_path, value, raw_value in self._references:
                same_table = path[: len(key_path) - 1] == key_path[:-1] and quotation[1] != key_path[-1]
                if quotation[1] == value or (same_table and quotation[1] in value):
                    return f'"{raw_value}"'
            return quotation[0]

        return _QUOTATION.sub(restore, text) if self._references else text


def replace_references(text: str, lookup: Callable[[str], str]) -> str:
    """Replace each ``${NAME}`` in a text by the result of ``lookup`` for its name."""
    return REFERENCE.sub(lambda match: match[0][1:] if match[1] else lookup(match[2]), text)


def _last_key(path: KeyPath) -> str:
    """Return the last key of a path, array indices skipped."""
    return next((key for key in reversed(path) if isinstance(key, str)), "")


def _split_keys(path: KeyPath) -> KeyPath:
    """Split dotted keys of a path: ``"a.b"`` in quotes and ``a.b`` name the same setting."""
    return tuple(part for key in path for part in (key.split(".") if isinstance(key, str) else (key,)))


def _flatten(value: Any, prefix: str = "") -> Any:
    """Join nested keys with dots: TOML reads ``security.protocol = "SSL"`` as a table in a table."""
    if not isinstance(value, dict):
        return value
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}{key}.") if isinstance(item, dict) else {prefix + key: item}
    return flat


def _toml_error(message: str, text: str, file: Path) -> ConfigError:
    match = re.search(r"^(.*?) \(at (?:line (\d+), column (\d+)|end of document)\)$", message, re.DOTALL)
    problem, line = (match[1], match[2]) if match else (message, None)
    location = f"{file}:{line or max(1, len(text.splitlines()))}"
    return ConfigError("TL-C11", location, f"not TOML: {problem[:1].lower()}{problem[1:]}", "Correct the line.")


def _key_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield the path of each table and key of a valid TOML text, with the line on which its statement begins."""
    table: KeyPath = ()
    last_index: dict[KeyPath, int] = {}  # of each array of tables
    for line_number, statement, content in _statements(text.replace("\r\n", "\n")):
        if not statement.lstrip().startswith("["):
            yield from (((*table, *path), line_number) for path in _key_paths(content))
            continue
        table, value = (), content
        while value and isinstance(value, dict):
            ((key, value),) = value.items()
            table += _split_keys((key,))
            if isinstance(value, list):
                last_index[table] = last_index.get(table, -1) + 1
            table += (last_index[table],) if table in last_index else ()
        yield table, line_number


def _statements(text: str) -> Iterator[tuple[int, str, Any]]:
    """Yield line number, text and parsed content of each statement: the fewest lines that are valid TOML."""
    lines: list[str] = []
    for line_number, line in enumerate(text.split("\n"), start=1):
        lines.append(line)
        may_end = any(mark in line for mark in _CLOSING_MARKS) and ("#" in line or not line.rstrip().endswith(","))
        if len(lines) > 1 and not may_end:
            continue  # a list of thousands of lines is not read thousands of times
        with contextlib.suppress(tomllib.TOMLDecodeError):
            statement = "\n".join(lines)
            yield line_number - len(lines) + 1, statement, tomllib.loads(statement)
            lines = []


def _key_paths(content: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (key_path := _split_keys((*path, key)))
        yield from _key_paths(value, key_path) if isinstance(value, dict | list) else ()


# -- errors ----------------------------------------------------------------------------------------------------------


class FileErrors:
    """Collected configuration errors of one file."""

    def __init__(self, document: Document) -> None:
        self._document = document
        #: By line and text, so that none is repeated.
        self._errors: dict[tuple[int, str], ConfigError] = {}

    def add(
        self, code: str, path: KeyPath, problem: str, remedy: str | None = None, *, label: str | None = None
    ) -> None:
        """Add an error at a key; the default remedy comes from the explanation of the code.

        The error names the table or line ``label``, by default the one around the key.
        """
        remedy = _remedy_of(code) if remedy is None else remedy
        document = self._document
        label = document.table_label(path) if label is None else label
        location = f"{document.location_text(path)}  {label}" if label else document.location_text(path)
        error = ConfigError(code, *(document.restore_quotations(text, path) for text in (location, problem, remedy)))
        self._errors.setdefault((document.line(path), str(error)), error)

    def add_details(self, details: Iterable[ErrorDetails], model: type[BaseModel], base: KeyPath = ()) -> None:
        """Add pydantic's validation errors of a table at ``base`` that was validated as ``model``."""
        for detail in details:
            loc = tuple(part for part in detail["loc"] if part != "[key]")  # of a table's key, in place of its value
            path = base + loc
            key = _last_key(path)
            if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # of a model, of a dataclass
                keys = [key for table in _tables_at(model, loc) for key in key_types(table)]
                code, problem, remedy = _unknown_key(str(loc[-1]), keys)
            elif detail["type"] == "missing":
                code, problem, remedy = _missing_key(_tables_at(model, loc), key)
            else:
                code, problem, remedy = _explain(detail, key)
            self.add(code, path, problem, remedy)

    def raise_if_any(self) -> None:
        """Raise `ConfigErrors` if any error was added."""
        if self._errors:
            raise ConfigErrors(self.errors())

    def errors(self) -> list[ConfigError]:
        """Return the errors in the order of the file."""
        return [error for _, error in sorted(self._errors.items(), key=lambda item: item[0][0])]


def _remedy_of(code: str) -> str:
    """Return the remedy of a code's explanation, without Markdown."""
    text = re.sub(r"`| ?\(\[.*?\]\(.*?\)\)", "", str(explanations()[code]["do"]))
    return f"{text[:1].upper()}{text[1:]}."


def _tables_at(table_type: type, loc: KeyPath) -> list[type]:
    """Return the types of the table with the last key of ``loc``; indices and branches of unions are skipped."""
    types = [table_type]
    for part in loc[:-1]:
        nested = [t for outer in types if part in (keys := key_types(outer)) for t in _table_types(keys[str(part)])]
        types = nested or [kind for kind in types if kind.__name__ == part] or types
    return types


def key_types(table_type: type) -> dict[str, Any]:
    """Return the keys of a table as written in TOML, each with its type."""
    if issubclass(table_type, BaseModel):
        return {field.alias or name: field.annotation for name, field in table_type.model_fields.items()}
    return get_type_hints(table_type)


def _table_types(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        yield annotation
    for argument in get_args(annotation):
        yield from _table_types(argument)


def _missing_key(tables: Iterable[type], key: str) -> tuple[str, str, str]:
    """Return code, problem and remedy of a missing key or table; the remedy is the field's description."""
    models = (table for table in tables if issubclass(table, BaseModel))
    fields = (field for model in models for name, field in model.model_fields.items() if key in (name, field.alias))
    if (field := next(fields, None)) and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return "TL-C02", f"[{key}] is missing", "Add the table."
    return "TL-C02", f'"{key}" is missing', (field and field.description) or "Add it."


def _unknown_key(key: str, keys: Sequence[str]) -> tuple[str, str, str]:
    if key.lower() in {"password", "passwd", "secret", "token"}:
        problem, name = f'"{key}" would put a secret into this file', f"{key.lower()}_file"
        remedy = f"Write it into a file of mode 0600 and set {name if name in keys else 'password_file'}."
        return "TL-C16", problem, remedy
    return "TL-C01", f'unknown key "{key}"', did_you_mean(key, keys)


def _explain(error: ErrorDetails, key: str) -> tuple[str, str, str]:
    """Turn a pydantic error into code, problem and remedy; the input is never quoted, it may be a secret."""
    error_type = error["type"]
    if error_type == "value_error":
        problem, remedy = problem_and_remedy(error["ctx"]["error"])
        if problem.startswith("must "):  # the type has several keys
            problem, remedy = f'"{key}" {problem}', remedy or "Correct the value."
        return "TL-C12" if problem.startswith("guarantee ") else "TL-C05", problem, remedy
    table = ".".join(part for part in error["loc"] if isinstance(part, str))
    remedy = f"Write a list, and tables as [[{table}]]." if error_type == "tuple_type" else "Correct the value."
    return "TL-C03", f'"{key}" {requirement(error)}', remedy


def problem_and_remedy(error: ValueError | str, default_remedy: str = "") -> tuple[str, str]:
    """Split the message ``problem; remedy`` of an error."""
    problem, _, advice = str(error).partition("; ")
    return problem, f"{advice[:1].upper()}{advice[1:]}." if advice else default_remedy


# -- values ----------------------------------------------------------------------------------------------------------

#: Tables with free keys: the user's, or another program's.
_FREE_TABLES: Final = frozenset({"fields", "headers", "settings", "conf"})
#: Tables with sizes and files.
_TOWLINE_TABLES: Final = frozenset({"mqtt", "kafka", "gateway", "monitor", "spark", "uplink", "downlink"})


class FileValues:
    """Resolver of a file's values: sizes in bytes, and paths relative to the file's directory."""

    def __init__(self, document: Document, errors: FileErrors) -> None:
        self._directory, self._errors = document.file.absolute().parent, errors

    def resolve(self, value: Any, path: KeyPath = ()) -> Any:
        """Resolve a value, tables and lists with all their items."""
        if isinstance(value, dict):
            return {key: self.resolve(item, (*path, *key.split("."))) for key, item in value.items()}
        if isinstance(value, list):
            return [self.resolve(item, (*path, index)) for index, item in enumerate(value)]
        return self._convert(value, path) if isinstance(value, str) else value

    def _convert(self, text: str, path: KeyPath) -> Any:
        key = str(path[-1])
        if path[:2] == ("kafka", "settings"):  # a file of its client, or a directory of certificates
            is_path = key == "location" and text != "probe"
            return self._existing_path(text, path, ".".join(map(str, path[2:]))) if is_path else text
        is_state_dir = path == ("state_dir",)
        if not is_state_dir and (len(path) < 2 or path[0] not in _TOWLINE_TABLES or not _FREE_TABLES.isdisjoint(path)):
            return text
        if is_state_dir or path[-2] in ("gateways", "kafka_jars"):
            is_address = path[0] == "uplink" and "://" in text
            return text if is_address else str(self._absolute_path(text, path) or text)
        if "_bytes" in key:
            return self._size(text, path)
        if not key.endswith("_file"):
            return text
        return self._existing_path(text, path, key, must_be_file=True)

    def _size(self, text: str, path: KeyPath) -> int:
        try:
            return parse_size(text)
        except ValueError as error:
            problem, remedy = problem_and_remedy(error)
            self._errors.add("TL-C03", path, f'"{path[-1]}" {problem}', remedy)
            return 1 << 30

    def _existing_path(self, text: str, path: KeyPath, key: str, *, must_be_file: bool = False) -> str:
        """Return an absolute path that must exist, as a file or also as a directory [design section 10]."""
        absolute_path = self._absolute_path(text, path)
        if absolute_path is not None and not (absolute_path.is_file() or (absolute_path.is_dir() and not must_be_file)):
            self._errors.add("TL-C15", path, f"{key} {absolute_path} does not exist")
        return str(absolute_path or text)

    def _absolute_path(self, text: str, path: KeyPath) -> Path | None:
        """Return a path relative to the file, or to a user's home; None, with an error, if it is none."""
        try:
            parse_path(text)
        except ValueError as error:
            self._errors.add("TL-C15", path, f'"{path[-1]}" {error}', "Correct the path.")
            return None
        return self._directory / Path(text).expanduser()


def _is_secret(setting: KeyPath) -> bool:
    """Return whether a setting of the Kafka client is a secret; only the connecting process replaces its reference."""
    key = ".".join(map(str, setting))
    secret_suffixes = (".pem", ".passphrase", ".extensions", "endpoint.url")
    return "." in key and ("password" in key or "secret" in key or key.endswith(secret_suffixes))
