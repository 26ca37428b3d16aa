"""Options of Spark data sources and sinks, derived from the fields of settings models.

Spark gives option names in lower case and values as text, so names are compared without case. An option's name is its
setting's in camel case, its bounds are the field's. Every error is one line with the option as the user writes it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin, get_type_hints

from towline.errors import ConfigError, ConfigErrors, did_you_mean
from towline.text import printable

if TYPE_CHECKING:
    from pydantic import TypeAdapter

#: What Spark itself adds to options.
_SPARK_OPTIONS: Final = frozenset({"checkpointlocation", "queryname"})
#: What begins an option among the properties of a table (`TableCatalog.OPTION_PREFIX`).
_TABLE_PREFIX: Final = "option."


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a format; as metadata of a model's field, what name and type of the setting don't give.

    Attributes:
        name: Option name as documented; "" for the setting's name in camel case, without a suffix for seconds.
        path: Keys of the setting's value: its tables, then its name.
        value_type: Type of the setting, with its bounds.
        parse: Converts the option's text to the setting's value; its ValueError says what the option accepts, and after
            "; " the remedy. `str` to convert by type.
        secret: The value may hold a password; it is never shown [I12].
    """

    name: str = ""
    path: tuple[str, ...] = ()
    value_type: Any = str
    parse: Callable[[str], object] = str
    secret: bool = False


@functools.cache
def _adapter(value_type: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - as in `OptionValues.value`

    return TypeAdapter(value_type)


def options_of(model: type, *tables: str, exclude: Container[str] = ()) -> Iterator[Option]:
    """Yield an option for each setting of a pydantic model or dataclass, nested models included.

    Args:
        model: The model or dataclass.
        tables: Names of the tables that the model is nested in.
        exclude: Settings that are no options, with their tables: ``journal.max_bytes``.
    """
    for name, value_type in get_type_hints(model, include_extras=True).items():
        setting = ".".join((*tables, name))
        if setting in exclude or name.startswith(("_", "model_")):
            continue
        option = next(_options_in(value_type), None)
        table = next((part for part in (value_type, *get_args(value_type)) if _is_model(part)), None)
        if table is not None and option is None:
            yield from options_of(table, *tables, name, exclude=exclude)
            continue
        option = option or Option()
        parse = _parser_of(setting, value_type) if option.parse is str else option.parse
        path, option_name = (*tables, name), option.name or _option_name(setting)
        yield replace(option, name=option_name, path=path, value_type=value_type, parse=parse)


def _is_model(value_type: Any) -> bool:
    return isinstance(value_type, type) and (is_dataclass(value_type) or hasattr(value_type, "model_fields"))


def _options_in(value_type: Any) -> Iterator[Option]:
    yield from (item for item in getattr(value_type, "__metadata__", ()) if isinstance(item, Option))
    for inner_type in get_args(value_type):
        yield from _options_in(inner_type)


def _option_name(setting: str) -> str:
    """Return the option name of a setting: ``tlsCaFile`` for ``tls.ca_file``, without a suffix for seconds."""
    words = setting.removesuffix("_s").replace("websocket", "web_socket").replace(".", "_").split("_")
    return words[0] + "".join(word.capitalize() for word in words[1:])


def _parser_of(setting: str, value_type: Any) -> Callable[[str], object]:
    """Return the parser for a size, a path or an enumeration; pydantic parses other types."""
    value_types = {value_type, *get_args(value_type)}
    if setting.endswith("_bytes"):
        return parse_size
    if Path in value_types:
        return parse_path
    is_enum = any(get_origin(t) is Literal or (isinstance(t, type) and hasattr(t, "__members__")) for t in value_types)
    return str.lower if is_enum else str


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """Options of one ``format(...)``, and the texts of errors about unknown ones.

    Attributes:
        location: Start of every error text.
        options: Valid options.
        unknown_hint: Remedy for an unknown name that resembles no other; ``{}`` stands for all names.
        rejected: Names in lower case with an error of their own: code, location, problem, remedy.
        similar_names: Further names to suggest for a misspelt one.
    """

    location: str
    options: tuple[Option, ...]
    unknown_hint: str = "The options are {}."
    rejected: Mapping[str, tuple[str, str, str, str]] = field(default_factory=dict)
    similar_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all options, as documented."""
        return tuple(option.name for option in self.options)

    def parse(self, texts: Mapping[str, str]) -> OptionValues:
        """Match the names of a user's options; values are parsed on access.

        Raises:
            ConfigError: TL-C01 for an unknown name, or the error in ``rejected``.
        """
        texts = without_table_properties(texts)
        spelling = {name.lower(): name for name in self.names}
        values = {spelling[key.lower()]: str(text).strip() for key, text in texts.items() if key.lower() in spelling}
        unknown = [key for key in texts if key.lower() not in {*spelling, *_SPARK_OPTIONS}]
        ConfigErrors.raise_any(map(self._unknown_option, unknown))
        return OptionValues(self, values)

    def _unknown_option(self, key: str) -> ConfigError:
        if error_parts := self.rejected.get(key.lower()):
            return ConfigError(*error_parts)
        hint = did_you_mean(key, (*self.names, *self.similar_names), self.unknown_hint.format(", ".join(self.names)))
        return ConfigError("TL-C01", self.location, f'unknown option "{" ".join(key.split())[:200]}"', hint)


class OptionValues:
    """Options of one query, as the user set them."""

    def __init__(self, format_options: FormatOptions, texts: Mapping[str, str]) -> None:
        self._options = {option.name: option for option in format_options.options}
        self._location = format_options.location
        self._texts = texts

    def __contains__(self, name: str) -> bool:
        return name in self._texts

    def text(self, name: str) -> str:
        """Return an option's text; "" if it is not set."""
        return self._texts.get(name, "")

    def value(self, name: str, default: object = None) -> Any:
        """Return an option's value; the default if it is not set.

        Raises:
            ConfigError: TL-C21, the text is invalid.
        """
        if name not in self._texts:
            return default
        from pydantic import ValidationError  # noqa: PLC0415 - the workers of Spark import this module, and read nothing

        from towline.validation import requirement  # noqa: PLC0415 - as above

        option = self._options[name]
        try:
            return _adapter(option.value_type).validate_python(option.parse(self._texts[name]))
        except ValidationError as error:
            raise self.error(name, requirement(error.errors(include_url=False)[0])) from None
        except ValueError as error:
            raise self.error(name, str(error)) from None

    def values(self, options: Iterable[Option]) -> dict[str, Any]:
        """Return the values of the options that are set, nested by their paths.

        Raises:
            ConfigError: As `value`.
        """
        values: dict[str, Any] = {}
        errors: list[ConfigError] = []
        for option in options:
            if option.name in self:
                *tables, name_of_setting = option.path
                table = values
                for name in tables:
                    table = table.setdefault(name, {})
                try:
                    table[name_of_setting] = self.value(option.name)
                except ConfigError as error:
                    errors.append(error)
        ConfigErrors.raise_any(errors)
        return values

    def error(self, name: str, problem: str) -> ConfigError:
        """Return the error TL-C21 of an option; its text is shown unless it may be a secret."""
        text, (requirement, _, remedy) = self.text(name), problem.partition("; ")
        shown_text = f' = "{printable(text, 60)}"' if text and not self._options[name].secret else ""
        return ConfigError(
            "TL-C21",
            f'{self._location} option "{name}"{shown_text}',
            requirement,
            f"{remedy[:1].upper()}{remedy[1:]}." if remedy else "",
        )


def without_table_properties(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the options without the table's properties, which Spark adds at ``CREATE TABLE`` (owner, provider ...)."""
    properties = {key.lower(): str(text) for key, text in texts.items()}
    if "provider" not in properties:
        return dict(texts)
    return {key.removeprefix(_TABLE_PREFIX): text for key, text in properties.items() if key.startswith(_TABLE_PREFIX)}


def parse_list(text: str, items_text: str, example: str, item_types: Any = str) -> list[Any]:
    """Parse a comma-separated list, or a JSON list for items that contain a comma.

    Raises:
        ValueError: The JSON list is invalid, or has items of another type.
    """
    if not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, item_types) for item in value):
        raise ValueError(f"must be {items_text} with a comma between them, or a JSON list such as {example}")
    return value


def parse_size(text: str) -> int:
    """Parse a size in bytes: ``1048576``, ``20 GB`` (powers of 1000), ``20 GiB`` or Spark's ``20g`` (of 1024)."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?) ?([kmgt]?)(i?b?)", text.strip().lower())
    if not match:
        raise ValueError('must be a size; write bytes as a number, or as "20 GB", "512 MiB" or 512m')
    return int(float(match[1]) * (1000 if match[3] == "b" else 1024) ** " kmgt".index(match[2] or " "))


def parse_host_port(text: str) -> tuple[str, int]:
    """Parse a listen address ``HOST:PORT``, with IPv6 in brackets; a port alone means 127.0.0.1."""
    match = re.fullmatch(r"(?:(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):)?([0-9]{1,5})", text.strip())
    if not match or int(match[2]) > 0xFFFF:
        raise ValueError('it is no address to listen on; write it as "127.0.0.1:9464"')
    return (match[1] or "127.0.0.1").strip("[]"), int(match[2])


#: Host names of a loopback address.
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")


def is_loopback(address: str) -> bool:
    """Return whether only clients of this machine reach a listen address; raises ValueError as `parse_host_port`."""
    return parse_host_port(address)[0] in LOOPBACK_HOSTS


def parse_path(text: str) -> str:
    """Parse a path on this machine; ``~`` is the home directory, a relative path becomes absolute."""
    if not text or re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise ValueError("must be a path on a disk of this machine, not a URI")
    try:
        return str(Path(text).expanduser().absolute())
    except RuntimeError:
        raise ValueError("must be a path; it names the home of a user who is not known here") from None


def parse_directory(text: str) -> str:
    """Parse an absolute directory path; a relative one would change with the working directory."""
    absolute_path = parse_path(text)
    if not Path(text).expanduser().is_absolute():
        raise ValueError(f"must be an absolute path; here it would be {absolute_path}")
    return absolute_path


def parse_label(text: str) -> str:
    """Parse a name that is valid in file names and metric labels."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text):
        raise ValueError("must be 1 to 64 letters, digits, dots, dashes or underscores, the first a letter or digit")
    return text
