"""Mistakes in a configuration file: one line each, all of them at once.

A person mends a file once, not key by key, so reading a file collects every mistake before it gives up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, Final, get_args, get_type_hints

from pydantic import BaseModel

from towline.errors import ConfigError, ConfigErrors, did_you_mean, explanations
from towline.validation import requirement

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from towline.bridge.config.document import Document, KeyPath

#: What pydantic calls a key that a model, or a dataclass, does not have.
UNKNOWN: Final = frozenset({"extra_forbidden", "unexpected_keyword_argument"})


class Mistakes:
    """Collects the mistakes of one file.

    Args:
        document: Where its keys stand.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        #: Line and error, without repetition.
        self._found: dict[tuple[int, str], ConfigError] = {}

    def add(self, code: str, path: KeyPath, what: str, do: str | None = None, *, subject: str | None = None) -> None:
        """Note a mistake at a key path.

        Args:
            code: Such as ``TL-C12``.
            path: Where it is.
            what: What is wrong.
            do: What to do; by default what the explanation of the code says.
            subject: The table or line that it is in; by default that of the path.
        """
        do = _advice(code) if do is None else do
        document = self._document
        subject = document.subject(path) if subject is None else subject
        where = f"{document.where(path)}  {subject}" if subject else document.where(path)
        error = ConfigError(code, *(document.quoted(text, path) for text in (where, what, do)))
        self._found.setdefault((document.line(path), str(error)), error)

    def add_details(
        self, errors: Iterable[ErrorDetails], kind: type[BaseModel], base: KeyPath = (), also: Iterable[str] = ()
    ) -> None:
        """Note pydantic's findings.

        Args:
            errors: Of one table.
            kind: The model that it was to be.
            base: Where the table is.
            also: Keys of the table that are read as tables of their own.
        """
        for error in errors:
            loc = tuple(error["loc"])
            path = base + loc
            key = next((part for part in reversed(path) if isinstance(part, str)), "")
            if error["type"] in UNKNOWN:
                known = _keys_at(kind, loc)
                code, what, do = _unknown(str(loc[-1]), [*known, *also] if len(loc) == 1 else known)
            elif error["type"] == "missing":
                code, what, do = _missing(kind if len(loc) == 1 else None, key)
            else:
                code, what, do = _explain(error, key)
            self.add(code, path, what, do)

    def raise_if_any(self) -> None:
        """Raise what was found.

        Raises:
            ConfigErrors: If anything was noted.
        """
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
        inner = [one for outer in kinds if part in (keys := _keys_of(outer)) for one in _tables_in(keys[str(part)])]
        kinds = inner or [one for one in kinds if one.__name__ == part] or kinds
    return [key for one in kinds for key in _keys_of(one)]


def _keys_of(kind: type) -> dict[str, Any]:
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
    fields = (field for name, field in kind.model_fields.items() if key in (name, field.alias)) if kind else ()
    field = next(iter(fields), None)
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
        return "TL-C05", *sentence(error["ctx"]["error"])
    if kind == "string_pattern_mismatch":
        what = f'"{key}" has letters, digits, dots, - and _, begins with a letter or digit, at most 64'
        return "TL-C03", what, "Rename it."
    return "TL-C03", f'"{key}" {requirement(error)}', "Correct the value."


def sentence(error: ValueError | str, otherwise: str = "") -> tuple[str, str]:
    """What is wrong and what to do, of an error that says ``what; do``."""
    what, _, advice = str(error).partition("; ")
    return what, f"{advice[:1].upper()}{advice[1:]}." if advice else otherwise
