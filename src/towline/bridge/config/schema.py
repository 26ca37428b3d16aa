"""The bridge file as JSON Schema (2020-12), for editors: made of the models that read it, with what these say in words.

An editor shows what `towline check` would tell of the file's structure: unknown and missing keys, wrong types, numbers
out of range. What contradicts itself only `check` finds. A text with ``${NAME}`` stands for any number or word.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

from pydantic import create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from towline.bridge.config.tables import LINES, BridgeTable
from towline.bridge.profiles import shipped

__all__ = ["bridge_schema"]

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
#: Text that names a variable of the environment is replaced before types are looked at.
_VARIABLE: Final = {
    "type": "string",
    "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*\}",
    "description": "The value of an environment variable: ${NAME}.",
}
_SIZE: Final = {"type": "string", "pattern": r"^\s*\d+(\.\d+)? ?[kKmMgGtT]?i?[bB]?\s*$"}
_SETTING: Final = {
    "anyOf": [
        {"type": ["string", "boolean", "number"]},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/Setting"}},
    ]
}
_ENUMERATED: Final = ("enum", "pattern")
#: ``name: what it is`` of a docstring, with further lines that are indented more.
_ATTRIBUTE: Final = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
_ANNOTATIONS: Final = ("title", "description", "default")


def attributes(cls: type) -> dict[str, str]:
    """What the docstrings of a class and those it is made of say under ``Attributes:``."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        section = inspect.cleandoc(one.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
        pairs = _ATTRIBUTE.findall(section.partition("\n\n")[0])
        found |= {name: " ".join(text.split()) for name, text in pairs}
    return found


def bridge_schema() -> dict[str, Any]:
    """The schema of a bridge file."""
    tables: dict[str, Any] = {one.file.table: (one.parameters, one.parameters()) for one in shipped()}
    about = "".join(f"    {one.file.table}: {one.file.about}\n" for one in shipped())
    about = f"A bridge file of Towline.\n\nAttributes:\n{about}"
    whole = create_model("BridgeTable", __base__=BridgeTable, __doc__=about, **tables)
    made = whole.model_json_schema(schema_generator=_Generator)
    defs: dict[str, Any] = made.pop("$defs")
    _other_ways(defs)
    _lines_need(defs)
    made |= _brokers()
    defs |= {"Variable": _VARIABLE, "Setting": _SETTING}
    for one in defs.values():
        one.pop("title", None)
    made["title"] = "A bridge file of Towline"
    schema = {"$schema": _DIALECT, **made, "$defs": dict(sorted(defs.items()))}
    return {key: _with_variables(value) for key, value in schema.items()}


# -- in words --------------------------------------------------------------------------------------------------------


class _Generator(GenerateJsonSchema):
    """Schemas as TOML has them: no null, no titles that repeat a key, and descriptions from the docstrings."""

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        made, default = self.generate_inner(schema["schema"]), schema.get("default")
        plain = isinstance(default, str | int | float) and default not in ("", None)
        return {**made, "default": default} if plain and "$ref" not in made else made

    def field_title_should_be_set(self, _: Any) -> bool:
        return False

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        return _described(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        return _described(super().dataclass_schema(schema), schema["cls"])


def _described(made: JsonSchemaValue, cls: type) -> JsonSchemaValue:
    made["description"] = _words((cls.__doc__ or "").partition("\n\n")[0])
    words = attributes(cls)
    for name, one in made.get("properties", {}).items():
        text = one.get("description") or words.get(name) or words.get(f"{name}_")
        if text and ("$ref" not in one or len(one) == 1):
            one["description"] = _words(text)
    return made


def _words(text: str) -> str:
    """For a reader of TOML: no marks of Python's documentation, and no None."""
    text = re.sub(r"`+", "`", " ".join(text.split()))
    text = re.sub(r" \((?:design )?section \d+\)| \[I\d+\]", "", text)
    text = re.sub(r"\bNone for\b", "without it", text)
    return re.sub(r"\bNone (?=when|where)", "left out ", text)


# -- what TOML and the loader allow ----------------------------------------------------------------------------------


def _other_ways(defs: dict[str, Any]) -> None:
    """A size may have a unit, as `towline.bridge.config.document` reads it, and names of protocols be one text."""
    for properties in (one.get("properties", {}) for one in defs.values()):
        for key, one in properties.items():
            if "_bytes" in key or key == "alpn":
                about = {word: one.pop(word) for word in _ANNOTATIONS if word in one}
                properties[key] = {"anyOf": [one, _SIZE if "_bytes" in key else {"type": "string"}], **about}
    for name, key in (("KafkaSection", "settings"), ("SparkSection", "conf")):  # dotted names may be tables
        defs[name]["properties"][key]["additionalProperties"] = {"$ref": "#/$defs/Setting"}


def _lines_need(defs: dict[str, Any]) -> None:
    """What a profile says need not be said; its name is one of the package's, or the path of another."""
    for kind, needed in zip(LINES, ("route", "from"), strict=True):
        table = defs[f"{kind.capitalize()}Table"]
        names = [line.name for one in shipped() for line in getattr(one.file, kind)]
        profile = table["properties"]["profile"]
        profile |= {"anyOf": [{"enum": names, "type": "string"}, {"type": "string", "pattern": r"\.toml(#.+)?$"}]}
        del profile["type"]
        table["anyOf"] = [{"required": [needed]}, {"required": ["profile"]}]
    defs["DownlinkTable"]["required"].remove("from")


def _brokers() -> dict[str, Any]:
    """At least one line; and brokers in [mqtt], or in each line that does not read gateways elsewhere."""
    brokers = {"required": ["mqtt"], "properties": {"mqtt": {"required": ["brokers"]}}}
    lines = {"properties": {kind: {"items": {"anyOf": [brokers, {"required": ["gateways"]}]}} for kind in LINES}}
    return {"allOf": [{"anyOf": [{"required": [kind]} for kind in LINES]}, {"anyOf": [brokers, lines]}]}


def _with_variables(schema: Any) -> Any:
    """Let a text with ``${NAME}`` stand where a number, a word of several or a text of some form is wanted."""
    if isinstance(schema, list):
        return [_with_variables(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema in (_VARIABLE, _SETTING) or "const" in schema:
        return schema
    kind = schema.get("type")
    if kind in ("integer", "number", "boolean") or (kind == "string" and any(word in schema for word in _ENUMERATED)):
        about = {word: schema[word] for word in _ANNOTATIONS if word in schema}
        plain = {word: value for word, value in schema.items() if word not in about}
        return {"anyOf": [plain, {"$ref": "#/$defs/Variable"}], **about}
    return {key: value if key in _ANNOTATIONS else _with_variables(value) for key, value in schema.items()}
