"""Options of a data source or sink: the settings of its models, read from a map of texts.

Spark gives names in lower case and values as text, so names are compared without case. An option is a field of a model:
its name is the setting's in camel case, its bounds are the field's. Every mistake is one line that names the option as
the user writes it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin, get_type_hints

from towline.errors import ConfigError, ConfigErrors, did_you_mean
from towline.text import printable

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = [
    "SPARKS",
    "Format",
    "Given",
    "Option",
    "OptionText",
    "directory",
    "host_port",
    "label",
    "options_of",
    "parts",
    "path",
    "size",
]

#: What Spark itself adds to the options of a sink.
SPARKS: Final = frozenset({"checkpointlocation", "queryname"})
#: What begins an option among the properties of a table (`TableCatalog.OPTION_PREFIX`).
_OF_TABLE: Final = "option."


@dataclass(frozen=True, slots=True)
class OptionText:
    """How the option of a setting is written, where its name and type do not tell: metadata of a model's field.

    Attributes:
        name: Of the option; "" for the setting's in camel case, without a unit of seconds.
        read: Makes of the text what the setting takes; its ValueError says what the option takes, and after "; " what
            to do. None by the type.
        hidden: It may hold a password, where a user put one; its text is never shown [I12].
    """

    name: str = ""
    read: Callable[[str], object] | None = None
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: As the documentation spells it.
        path: Where its value goes: the name of the setting, behind those of the tables it is in.
        kind: Type of the setting, with its bounds.
        read: Makes of a text what the setting takes.
    """

    name: str
    path: tuple[str, ...]
    kind: Any = str
    read: Callable[[str], object] = str
    hidden: bool = False

    def value(self, text: str) -> Any:
        """The value that a text stands for.

        Raises:
            ValueError: It stands for none; the message says what the option takes.
        """
        from pydantic import ValidationError  # noqa: PLC0415 - the workers of Spark import this module, and read nothing

        from towline.validation import requirement  # noqa: PLC0415 - as above

        try:
            return _adapter(self.kind).validate_python(self.read(text))
        except ValidationError as error:
            raise ValueError(requirement(error.errors(include_url=False)[0])) from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - as in `Option.value`

    return TypeAdapter(kind)


def options_of(model: type, *tables: str, leave_out: Container[str] = ()) -> Iterator[Option]:
    """An option for each setting of a pydantic model or a dataclass, in these tables, and of the models in it.

    Settings that are no options are left out by their names with those of their tables, as ``journal.max_bytes``.
    """
    for name, kind in get_type_hints(model, include_extras=True).items():
        setting = ".".join((*tables, name))
        if setting in leave_out or name.startswith(("_", "model_")):
            continue
        text = next(_texts_in(kind), None)
        table = next((one for one in (kind, *get_args(kind)) if _is_model(one)), None)
        if table is not None and text is None:
            yield from options_of(table, *tables, name, leave_out=leave_out)
            continue
        text = text or OptionText()
        read = text.read or _reader_of(setting, kind)
        yield Option(text.name or _name_of(setting), (*tables, name), kind, read, text.hidden)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "model_fields"))


def _texts_in(kind: Any) -> Iterator[OptionText]:
    yield from (one for one in getattr(kind, "__metadata__", ()) if isinstance(one, OptionText))
    for inner in get_args(kind):
        yield from _texts_in(inner)


def _name_of(setting: str) -> str:
    """``tls.ca_file`` is ``tlsCaFile``; seconds are left out."""
    words = setting.removesuffix("_s").replace("websocket", "web_socket").replace(".", "_").split("_")
    return words[0] + "".join(word.capitalize() for word in words[1:])


def _reader_of(setting: str, kind: Any) -> Callable[[str], object]:
    """Reads a size, a path, or a word in any case; other texts pydantic reads."""
    kinds = {kind, *get_args(kind)}
    if setting.endswith("_bytes"):
        return size
    if Path in kinds:
        return path
    words = any(get_origin(one) is Literal or (isinstance(one, type) and hasattr(one, "__members__")) for one in kinds)
    return str.lower if words else str


@dataclass(frozen=True, slots=True)
class Format:
    """What one ``format(...)`` takes, and how it says that it was given something else.

    Attributes:
        where: Begins every error.
        hint: What to do about an unknown name that is like no other; ``{}`` stands for all names.
        refused: Names in lower case that get an error of their own: its code, where, what and do.
        ignored: Names in lower case that are somebody else's.
        also: Names that a misspelt one may have meant, besides those of the options.
    """

    where: str
    options: tuple[Option, ...]
    hint: str = "The options are {}."
    refused: Mapping[str, tuple[str, str, str, str]] = field(default_factory=lambda: MappingProxyType({}))
    ignored: frozenset[str] = frozenset()
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every option, as users write it."""
        return tuple(option.name for option in self.options)

    def read(self, texts: Mapping[str, str]) -> Given:
        """Find the option of each name; values are read when they are asked for.

        Raises:
            ConfigError: TL-C01 for an unknown name, or as ``refused`` says.
        """
        texts = without_properties(texts)
        spelling = {name.lower(): name for name in self.names}
        known = {spelling[key.lower()]: str(text).strip() for key, text in texts.items() if key.lower() in spelling}
        ConfigErrors.check(self._unknown(key) for key in texts if key.lower() not in {*spelling, *self.ignored})
        return Given(self, known)

    def _unknown(self, key: str) -> ConfigError:
        if refused := self.refused.get(key.lower()):
            return ConfigError(*refused)
        hint = did_you_mean(key, (*self.names, *self.also), self.hint.format(", ".join(self.names)))
        return ConfigError("TL-C01", self.where, f'unknown option "{" ".join(key.split())[:200]}"', hint)


class Given:
    """The options that a user gave to a format."""

    def __init__(self, form: Format, texts: Mapping[str, str]) -> None:
        self._options = {option.name: option for option in form.options}
        self._where = form.where
        self._texts = texts

    def __contains__(self, name: str) -> bool:
        return name in self._texts

    def text(self, name: str) -> str:
        """The text of an option; "" where it is not given."""
        return self._texts.get(name, "")

    def value(self, name: str, default: object = None) -> Any:
        """What an option says; the default where it is not given.

        Raises:
            ConfigError: TL-C21, the text stands for no value.
        """
        if name not in self._texts:
            return default
        try:
            return self._options[name].value(self._texts[name])
        except ValueError as error:
            raise self.wrong(name, str(error)) from None

    def values(self, options: Iterable[Option]) -> dict[str, Any]:
        """The values of those options that are given, each where its path puts it.

        Raises:
            ConfigError: As `value`.
        """
        values: dict[str, Any] = {}
        errors: list[ConfigError] = []
        for option in options:
            if option.name in self:
                *tables, last = option.path
                table = values
                for name in tables:
                    table = table.setdefault(name, {})
                try:
                    table[last] = self.value(option.name)
                except ConfigError as error:
                    errors.append(error)
        ConfigErrors.check(errors)
        return values

    def wrong(self, name: str, problem: str) -> ConfigError:
        """The error TL-C21 for an option whose text can't be; it shows the text, but for one that may be a secret."""
        text, (what, _, do) = self.text(name), problem.partition("; ")
        shown = f' = "{printable(text, 60)}"' if text and not self._options[name].hidden else ""
        return ConfigError(
            "TL-C21", f'{self._where} option "{name}"{shown}', what, f"{do[:1].upper()}{do[1:]}." if do else ""
        )


def without_properties(texts: Mapping[str, str]) -> dict[str, str]:
    """The options alone: at ``CREATE TABLE`` Spark gives the table's properties too, such as its owner and provider."""
    named = {key.lower(): str(text) for key, text in texts.items()}
    if "provider" not in named:
        return dict(texts)
    return {key.removeprefix(_OF_TABLE): text for key, text in named.items() if key.startswith(_OF_TABLE)}


def parts(text: str, of: str, example: str, kinds: Any = str) -> list[Any]:
    """Read what stands between commas, or a JSON list, for parts with a comma in them.

    Raises:
        ValueError: It begins as a list and is none, or one of other kinds.
    """
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(part, kinds) for part in value):
        raise ValueError(f"must be {of} with a comma between them, or a JSON list such as {example}")
    return value


def size(text: str) -> int:
    """Read bytes: ``1048576``, ``20 GB`` (powers of 1000), ``20 GiB``, or ``20g`` as Spark's own sizes (of 1024)."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?) ?([kmgt]?)(i?b?)", text.strip().lower())
    if not match:
        raise ValueError('must be a size; write bytes as a number, or as "20 GB", "512 MiB" or 512m')
    return int(float(match[1]) * (1000 if match[3] == "b" else 1024) ** " kmgt".index(match[2] or " "))


def host_port(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT`` to listen on, an address of IP version 6 in brackets, or a port of 127.0.0.1 alone."""
    match = re.fullmatch(r"(?:(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):)?([0-9]{1,5})", text.strip())
    if not match or int(match[2]) > 0xFFFF:
        raise ValueError('it is no address to listen on; write it as "127.0.0.1:9464"')
    return (match[1] or "127.0.0.1").strip("[]"), int(match[2])


def path(text: str) -> str:
    """Read the path of a file or directory, from here or from the user's home."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise ValueError("must be a path on a disk of this machine, not a URI")
    try:
        return str(Path(text).expanduser().absolute())
    except RuntimeError:
        raise ValueError("it names the home of a user who is not known here") from None


def directory(text: str) -> str:
    """Read the absolute path of a directory: another working directory would make it another one."""
    place = path(text)
    if not Path(text).expanduser().is_absolute():
        raise ValueError(f"must be an absolute path; here it would be {place}")
    return place


def label(text: str) -> str:
    """Read a name that may stand in file names and metric labels."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text):
        raise ValueError("must be 1 to 64 letters, digits, dots, dashes or underscores, the first a letter or digit")
    return text
