"""Profiles: what a line takes by one word, as data (``docs/hono.md``, "A profile of your own").

A profile is a TOML file with lines as a bridge file has them, and parameters that a table of the bridge file gives,
such as ``[hono]``. All that reads, checks, runs and counts lines knows nothing of profiles.
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

from towline.bridge.config.document import REFERENCE, Document, KeyPath, Mistakes, filled
from towline.bridge.config.tables import NAME
from towline.bridge.patterns import literal
from towline.errors import ConfigError, did_you_mean
from towline.validation import SettingsModel

_FOLDER: Final = Path(__file__).parent
#: Keys whose texts are Spark SQL, beside all below ``fields``.
_SQL: Final = frozenset({"where", "reject", "sql", "header_map"})
_BASIC: Final[Mapping[str, tuple[Any, Any]]] = {
    "text": (str, ""),
    "whole": (Annotated[int, Field(ge=0)], None),
    "value": (str | bool | int | float, None),
}


class Parameter(SettingsModel):
    """A parameter of a profile, or a type that parameters name."""

    about: str = ""
    type: str = "text"
    keys: dict[str, Parameter] = Field(default_factory=dict)
    names: str | None = None
    list: bool = False
    one_of: tuple[str, ...] = ()
    refuse: tuple[tuple[re.Pattern[str], str], ...] = ()
    default: Any = None


class Derived(SettingsModel):
    """A parameter that is made of another."""

    of: str
    replace: tuple[tuple[re.Pattern[str], str], ...]


class ProfileLine(BaseModel, extra="allow"):
    """A line of a profile; what a line of a bridge file may have is judged with that."""

    name: str
    common: dict[str, Any] = Field(default_factory=dict)
    route: tuple[dict[str, Any], ...] = ()


class ProfileFile(SettingsModel):
    """The file of a profile."""

    table: str = Field(pattern=NAME, description="Name the table of the bridge file that has the parameters.")
    about: str = ""
    types: dict[str, Parameter] = Field(default_factory=dict)
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    derived: dict[str, Derived] = Field(default_factory=dict)
    uplink: tuple[ProfileLine, ...] = ()
    downlink: tuple[ProfileLine, ...] = ()


class Profile:
    """One file, with its content in `file`, and the places of its keys in `document`.

    Raises:
        ConfigError: TL-C208, it can't be read; TL-C11, it is no TOML; and the mistakes in its own tables.
    """

    def __init__(self, file: Path) -> None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            do = "Correct the path; a relative one begins at the bridge file."
            raise ConfigError("TL-C208", "", f"the profile {file} can't be read", do) from None
        self.document = Document(text, file, {})
        try:
            self.file = ProfileFile.model_validate(self.document.raw)
        except ValidationError as error:
            mistakes = Mistakes(self.document)
            mistakes.add_details(error.errors(), ProfileFile)
            mistakes.raise_if_any()

    @cached_property
    def parameters(self) -> type[BaseModel]:
        """The model of the table that has the parameters.

        Raises:
            ConfigError: TL-C209, a type is not there.
        """
        whole = Parameter(about=self.file.about, keys=self.file.parameters)
        kind: type[BaseModel] = self._kind(whole, self.file.table, ("parameters",))[0]
        return kind

    def _kind(self, one: Parameter, name: str, place: KeyPath) -> tuple[Any, Any]:
        if one.keys:
            fields: dict[str, Any] = {}
            for key, inner in one.keys.items():
                kind, default = self._kind(inner, key, (*place, key))
                fields[key] = (kind, Field(default=default, description=inner.about or None))
            title = "".join(word.capitalize() for word in re.findall(r"[A-Za-z0-9]+", name))
            kind = create_model(title, __base__=SettingsModel, __doc__=one.about, **fields)
            default = kind()
        elif one.type in self.file.types:
            kind, default = self._kind(self.file.types[one.type], one.type, ("types", one.type))
        elif one.type in _BASIC:
            kind, default = _BASIC[one.type]
        else:
            do = did_you_mean(one.type, [*_BASIC, *self.file.types])
            raise ConfigError("TL-C209", self.document.where(place), f'there is no type "{one.type}"', do)
        if one.one_of:
            kind = Literal[one.one_of]
        if one.names is not None:
            keys, _ = self._kind(Parameter(type=one.names), "", place)
            kind, default = GenericAlias(dict, (keys, kind)), {}
        if one.list:
            kind, default = GenericAlias(tuple, (kind, ...)), ()
        if one.refuse:
            kind = Annotated[kind, AfterValidator(partial(_accepted, one.refuse))]
        return kind, default if one.default is None else one.default

    def values(self, table: BaseModel) -> dict[str, Any]:
        """The parameters by name, of a model of `parameters`, and what is derived of them."""
        plain = table.model_dump(mode="json", exclude_none=True, warnings=False)
        values: dict[str, Any] = dict.fromkeys(self.file.parameters) | plain
        for name, one in self.file.derived.items():
            values[name] = _text(values.get(one.of))
            for pattern, replacement in one.replace:
                values[name] = pattern.sub(replacement, values[name])
        return values

    def applied(self, kind: str, number: int, own: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """A line's own table with all that a line of the profile has beside it, given the values of the parameters.

        Raises:
            ConfigError: TL-C209, a text names a parameter that is not there.
        """
        said = self._expanded(self.document.raw[kind][number], (kind, number), values)
        if {**said, **own}.get("guarantee") != "exactly_once":  # only then a route can promise less than its line
            for table in (said.get("common", {}), *said.get("route", ())):
                table.pop("promise", None)
        return _merged(own, said)

    def _expanded(self, value: Any, place: KeyPath, values: Mapping[str, Any]) -> Any:
        if isinstance(value, dict) and value.keys() == {"each", "none"}:
            return self._each(value, place, values)
        if isinstance(value, dict):
            return {key: self._expanded(one, (*place, key), values) for key, one in value.items()}
        if isinstance(value, list):
            return [self._expanded(one, (*place, at), values) for at, one in enumerate(value)]
        return self._filled(value, place, values) if isinstance(value, str) else value

    def _each(self, value: Mapping[str, Any], place: KeyPath, values: Mapping[str, Any]) -> Any:
        """The text for each entry of the list or table that it names, or what stands for none."""
        text, names = value["each"], [name for _, name in REFERENCE.findall(value["each"])]
        lists = [name for name in names if isinstance(values.get(name), dict | list)][:1]
        entries = list(values[lists[0]]) if lists else [""]
        texts = [self._filled(text, place, {**values, **dict.fromkeys(lists, one)}) for one in entries or [""]]
        return texts if entries else self._expanded(value["none"], place, values)

    def _filled(self, text: str, place: KeyPath, values: Mapping[str, Any]) -> str:
        sql = place[-1] in _SQL or "fields" in place[-2:-1]

        def value(name: str) -> str:
            if name not in values:
                where, what = self.document.where(place), f'the profile has no parameter "{name}"'
                raise ConfigError("TL-C209", where, what, did_you_mean(name, values))
            if sql and isinstance(values[name], str | dict | list):
                return literal(_text(values[name]))
            return "NULL" if sql and values[name] is None else _text(values[name])

        return filled(text, value)


def _merged(own: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """A line's own table with all that a line of a profile says beside it; its routes come behind the line's own."""
    whole = {key: value for key, value in said.items() if key not in ("name", "common", "route")}
    whole |= {key: value for key, value in own.items() if key != "profile"}
    first, routes = own.get("route", []), [{**said.get("common", {}), **route} for route in said.get("route", [])]
    return whole | ({"route": [*first, *routes]} if routes and isinstance(first, list) else {})


def _text(value: Any) -> str:
    """A parameter in a text; tables and lists as JSON."""
    return value or "" if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _accepted(rules: Sequence[tuple[re.Pattern[str], str]], value: Any) -> Any:
    """A text, or a table entry by entry, in which no rule finds a mistake."""
    texts = [f"{key} = {_text(one)}" for key, one in value.items()] if isinstance(value, dict) else [str(value)]
    for text in texts:
        for pattern, sentence in rules:
            if wrong := pattern.search(text):
                raise ValueError(f'"{wrong[0]}" {sentence}')
    return value


@lru_cache(maxsize=1)
def shipped() -> tuple[Profile, ...]:
    """The profiles of the package."""
    return tuple(map(Profile, sorted(_FOLDER.glob("*.toml"))))


def profile_of(directory: Path, kind: str, name: str) -> tuple[Profile, int]:
    """A profile, and the number of its line.

    Args:
        directory: Of the bridge file, which relative paths start from.
        kind: ``uplink`` or ``downlink``.
        name: ``NAME`` of a line of the package's profiles, ``PATH.toml`` for the first line of the kind in a file, or
            ``PATH.toml#NAME``.

    Raises:
        ConfigError: TL-C06, the package has no such line; TL-C208, the file has none; and as `Profile`.
    """
    path, _, part = name.partition("#")
    own = path.endswith(".toml")
    place = os.path.expanduser(path)  # noqa: PTH111 - where a home is not known, the path as it is: it can't be read
    files = (Profile(directory / place),) if own else shipped()
    lines = {line.name: (one, at) for one in files for at, line in enumerate(getattr(one.file, kind))}
    wanted = part or next(iter(lines), "") if own else name
    if wanted in lines:
        return lines[wanted]
    what = f'{path} has no {kind} "{part}"' if own else f'there is no profile "{name}"'
    do = did_you_mean(wanted, lines, f"Known are {', '.join(lines)}." if lines else f"Add a [[{kind}]] to it.")
    raise ConfigError("TL-C208" if own else "TL-C06", "", what, do)


def graft(document: Document, directory: Path) -> None:
    """Have the document of a bridge file say what the profiles of its lines say, and where that stands."""
    for kind in ("uplink", "downlink"):
        lines = document.raw.get(kind)
        for at, own in enumerate(lines if isinstance(lines, list) else ()):
            if isinstance(own, dict) and "profile" in own:
                with suppress(ConfigError):  # it is told where the file is read
                    profile, number = profile_of(directory, kind, str(own["profile"]))
                    document.raw[kind][at] = _merged(own, profile.document.value((kind, number)))
                    _include(document, (kind, at), own, profile.document, (kind, number))


def _include(document: Document, line: KeyPath, own: Mapping[str, Any], profile: Document, home: KeyPath) -> None:
    said, first = profile.value(home), own.get("route", [])
    for key in said.keys() - own.keys():
        document.include((*line, key), profile, (*home, key))
    for number, route in enumerate(said.get("route", [])):
        place = (*line, "route", number + (len(first) if isinstance(first, list) else 0))
        document.include(place, profile, (*home, "route", number))
        for key in said.get("common", {}).keys() - route.keys():
            document.include((*place, key), profile, (*home, "common", key))
