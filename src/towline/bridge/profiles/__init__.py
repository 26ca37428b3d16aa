"""Profiles: named sets of routes and mappings, as data (``docs/hono.md``, "A profile of your own").

A profile is a TOML file with lines as in a bridge file, and with parameters that a table of the bridge file sets, such
as ``[hono]``. The code that reads, checks, runs and counts lines does not depend on profiles.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

from towline.bridge.config.document import REFERENCE, Document, FileErrors, KeyPath, replace_references
from towline.bridge.config.tables import NAME
from towline.bridge.patterns import sql_literal
from towline.errors import ConfigError, did_you_mean
from towline.validation import SettingsModel

_PROFILES_DIRECTORY: Final = Path(__file__).parent
#: Keys with Spark SQL, beside all below ``fields``.
_SQL_KEYS: Final = frozenset({"where", "reject", "sql", "header_map"})
_BASIC_TYPES: Final[Mapping[str, tuple[Any, Any]]] = {
    "text": (str, ""),
    "whole": (Annotated[int, Field(ge=0)], None),
    "value": (str | bool | int | float, None),
}


class Parameter(SettingsModel):
    """Parameter of a profile, or a type for parameters."""

    about: str = ""
    type: str = "text"
    keys: dict[str, Parameter] = Field(default_factory=dict)
    names: str | None = None
    list: bool = False
    one_of: tuple[str, ...] = ()
    refuse: tuple[tuple[re.Pattern[str], str], ...] = ()
    default: Any = None


class DerivedParameter(SettingsModel):
    """Parameter derived from another one by replacements."""

    of: str
    replace: tuple[tuple[re.Pattern[str], str], ...]


class ProfileLine(BaseModel, extra="allow"):
    """Line of a profile; its keys are validated with the bridge file's line."""

    name: str
    common: dict[str, Any] = Field(default_factory=dict)
    route: tuple[dict[str, Any], ...] = ()


class ProfileFile(SettingsModel):
    """Content of a profile's file."""

    table: str = Field(pattern=NAME, description="Name the table of the bridge file that has the parameters.")
    about: str = ""
    types: dict[str, Parameter] = Field(default_factory=dict)
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    derived: dict[str, DerivedParameter] = Field(default_factory=dict)
    uplink: tuple[ProfileLine, ...] = ()
    downlink: tuple[ProfileLine, ...] = ()


class Profile:
    """Profile read from one file: its `content`, and the lines of its keys in `document`.

    Raises:
        ConfigError: TL-C208, it can't be read; TL-C11, it is not TOML; or the errors in its own tables.
    """

    def __init__(self, file: Path) -> None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            remedy = "Correct the path; a relative one begins at the bridge file."
            raise ConfigError("TL-C208", "", f"the profile {file} can't be read", remedy) from None
        self.document = Document(text, file, {})
        try:
            self.content = ProfileFile.model_validate(self.document.raw)
        except ValidationError as error:
            errors = FileErrors(self.document)
            errors.add_details(error.errors(), ProfileFile)
            errors.raise_if_any()

    @cached_property
    def parameter_model(self) -> type[BaseModel]:
        """Model of the table with the parameters.

        Raises:
            ConfigError: TL-C209, unknown type.
        """
        root = Parameter(about=self.content.about, keys=self.content.parameters)
        kind: type[BaseModel] = self._parameter_type(root, self.content.table, ("parameters",))[0]
        return kind

    def _parameter_type(self, param: Parameter, name: str, path: KeyPath) -> tuple[Any, Any]:
        if param.keys:
            fields: dict[str, Any] = {}
            for key, inner_parameter in param.keys.items():
                kind, default = self._parameter_type(inner_parameter, key, (*path, key))
                fields[key] = (kind, Field(default=default, description=inner_parameter.about or None))
            title = "".join(word.capitalize() for word in re.findall(r"[A-Za-z0-9]+", name))
            kind = create_model(title, __base__=SettingsModel, __doc__=param.about, **fields)
            default = kind()
        elif param.type in self.content.types:
            kind, default = self._parameter_type(self.content.types[param.type], param.type, ("types", param.type))
        elif param.type in _BASIC_TYPES:
            kind, default = _BASIC_TYPES[param.type]
        else:
            remedy = did_you_mean(param.type, [*_BASIC_TYPES, *self.content.types])
            raise ConfigError("TL-C209", self.document.location_text(path), f'there is no type "{param.type}"', remedy)
        if param.one_of:
            kind = Literal[param.one_of]
        if param.names is not None:
            keys, _ = self._parameter_type(Parameter(type=param.names), "", path)
            kind, default = GenericAlias(dict, (keys, kind)), {}
        if param.list:
            kind, default = GenericAlias(tuple, (kind, ...)), ()
        if param.refuse:
            kind = Annotated[kind, AfterValidator(partial(_check_refused, param.refuse))]
        return kind, default if param.default is None else param.default

    def parameter_values(self, table: BaseModel) -> dict[str, Any]:
        """Return the parameters by name, derived parameters included, from an instance of `parameter_model`."""
        configured = table.model_dump(mode="json", exclude_none=True, warnings=False)
        values: dict[str, Any] = dict.fromkeys(self.content.parameters) | configured
        for name, rule in self.content.derived.items():
            values[name] = _as_text(values.get(rule.of))
            for pattern, replacement in rule.replace:
                values[name] = pattern.sub(replacement, values[name])
        return values

    def apply(self, kind: str, index: int, line_table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a line's table merged with the profile's line, given the values of the parameters.

        Raises:
            ConfigError: TL-C209, a text names an unknown parameter.
        """
        profile_table = self._expand(self.document.raw[kind][index], (kind, index), values)
        guarantee = {**profile_table, **line_table}.get("guarantee")
        if guarantee != "exactly_once":  # only such a line has routes with a weaker promise
            for table in (profile_table.get("common", {}), *profile_table.get("route", ())):
                table.pop("promise", None)
        return _merge_tables(line_table, profile_table)

    def _expand(self, value: Any, path: KeyPath, values: Mapping[str, Any]) -> Any:
        if isinstance(value, dict) and value.keys() == {"each", "none"}:
            return self._expand_each(value, path, values)
        if isinstance(value, dict):
            return {key: self._expand(item, (*path, key), values) for key, item in value.items()}
        if isinstance(value, list):
            return [self._expand(item, (*path, index), values) for index, item in enumerate(value)]
        return self._fill_text(value, path, values) if isinstance(value, str) else value

    def _expand_each(self, value: Mapping[str, Any], path: KeyPath, values: Mapping[str, Any]) -> Any:
        """Return the text for each entry of the list or table that it names; the ``none`` value without entries."""
        text, names = value["each"], [name for _, name in REFERENCE.findall(value["each"])]
        lists = [name for name in names if isinstance(values.get(name), dict | list)][:1]
        entries = list(values[lists[0]]) if lists else [""]
        texts = [self._fill_text(text, path, {**values, **dict.fromkeys(lists, entry)}) for entry in entries or [""]]
        return texts if entries else self._expand(value["none"], path, values)

    def _fill_text(self, text: str, path: KeyPath, values: Mapping[str, Any]) -> str:
        is_sql = path[-1] in _SQL_KEYS or "fields" in path[-2:-1]

        def lookup(name: str) -> str:
            if name not in values:
                location, problem = self.document.location_text(path), f'the profile has no parameter "{name}"'
                raise ConfigError("TL-C209", location, problem, did_you_mean(name, values))
            if is_sql and isinstance(values[name], str | dict | list):
                return sql_literal(_as_text(values[name]))
            return "NULL" if is_sql and values[name] is None else _as_text(values[name])

        return replace_references(text, lookup)


def _merge_tables(line_table: Mapping[str, Any], profile_table: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a line's table with a profile's line: the line's keys win, its routes come first."""
    merged_table = {key: value for key, value in profile_table.items() if key not in ("name", "common", "route")}
    merged_table |= {key: value for key, value in line_table.items() if key != "profile"}
    common, line_routes = profile_table.get("common", {}), line_table.get("route", [])
    routes = [{**common, **route} for route in profile_table.get("route", [])]
    return merged_table | ({"route": [*line_routes, *routes]} if routes and isinstance(line_routes, list) else {})


def _as_text(value: Any) -> str:
    """Return a parameter as text; tables and lists as JSON."""
    return value or "" if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _check_refused(rules: Sequence[tuple[re.Pattern[str], str]], value: Any) -> Any:
    """Return a text, or a table, unless a rule of the parameter refuses it."""
    texts = [f"{key} = {_as_text(item)}" for key, item in value.items()] if isinstance(value, dict) else [str(value)]
    for text in texts:
        for pattern, problem in rules:
            if match := pattern.search(text):
                raise ValueError(f'"{match[0]}" {problem}')
    return value


@lru_cache(maxsize=1)
def shipped_profiles() -> tuple[Profile, ...]:
    """Return the profiles of the package."""
    return tuple(map(Profile, sorted(_PROFILES_DIRECTORY.glob("*.toml"))))


def find_profile(directory: Path, kind: str, name: str) -> tuple[Profile, int]:
    """Return a profile, and the index of its line.

    Args:
        directory: Directory of the bridge file; relative paths start from it.
        kind: ``uplink`` or ``downlink``.
        name: ``NAME`` of a line of the package's profiles, ``PATH.toml`` for the first line of the kind in a file, or
            ``PATH.toml#NAME``.

    Raises:
        ConfigError: TL-C06, the package has no such line; TL-C208, the file has none; and as `Profile`.
    """
    path, _, line_name = name.partition("#")
    is_path = path.endswith(".toml")
    expanded_path = os.path.expanduser(path)  # noqa: PTH111 - leaves the path of an unknown home as it is
    files = (Profile(directory / expanded_path),) if is_path else shipped_profiles()
    lines = {line.name: (profile, n) for profile in files for n, line in enumerate(getattr(profile.content, kind))}
    wanted_name = line_name or next(iter(lines), "") if is_path else name
    if wanted_name in lines:
        return lines[wanted_name]
    problem = f'{path} has no {kind} "{line_name}"' if is_path else f'there is no profile "{name}"'
    remedy = did_you_mean(wanted_name, lines, f"Known are {', '.join(lines)}." if lines else f"Add a [[{kind}]] to it.")
    raise ConfigError("TL-C208" if is_path else "TL-C06", "", problem, remedy)


def merge_profiles(document: Document, directory: Path) -> None:
    """Merge the profiles of the lines into the document of a bridge file, with the locations of their keys."""
    for kind in ("uplink", "downlink"):
        lines = document.raw.get(kind)
        for index, line_table in enumerate(lines if isinstance(lines, list) else ()):
            if isinstance(line_table, dict) and "profile" in line_table:
                with suppress(ConfigError):  # reported where the file is read
                    profile, profile_index = find_profile(directory, kind, str(line_table["profile"]))
                    document.raw[kind][index] = _merge_tables(line_table, profile.document.value((kind, profile_index)))
                    _include_locations(document, (kind, index), line_table, profile.document, (kind, profile_index))


def _include_locations(
    document: Document, line: KeyPath, line_table: Mapping[str, Any], profile: Document, profile_path: KeyPath
) -> None:
    profile_table, line_routes = profile.value(profile_path), line_table.get("route", [])
    for key in profile_table.keys() - line_table.keys():
        document.include((*line, key), profile, (*profile_path, key))
    for index, route in enumerate(profile_table.get("route", [])):
        route_path = (*line, "route", index + (len(line_routes) if isinstance(line_routes, list) else 0))
        document.include(route_path, profile, (*profile_path, "route", index))
        for key in profile_table.get("common", {}).keys() - route.keys():
            document.include((*route_path, key), profile, (*profile_path, "common", key))
