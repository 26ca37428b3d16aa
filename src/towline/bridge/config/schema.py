"""JSON Schema (2020-12) of bridge files, for editors: generated from the models that read them and their docstrings.

An editor reports the same structural errors as `towline check`: unknown and missing keys, wrong types, numbers out of
range. Contradictions between keys are found only by `check`. A text with ``${NAME}`` stands for any number or word.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from towline.bridge.config.tables import LINES, BridgeTable
from towline.bridge.profiles import profile_lines

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
#: A reference to an environment variable is replaced before types are checked.
_VARIABLE_SCHEMA: Final = {
    "type": "string",
    "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*\}",
    "description": "The value of an environment variable: ${NAME}.",
}
_SIZE_SCHEMA: Final = {"type": "string", "pattern": r"^\s*\d+(\.\d+)? ?[kKmMgGtT]?i?[bB]?\s*$"}
_SETTING_SCHEMA: Final = {
    "anyOf": [
        {"type": ["string", "boolean", "number"]},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/Setting"}},
    ]
}
_CONSTRAINT_KEYS: Final = ("enum", "pattern")
#: ``name: description`` in a docstring, with further lines indented more.
_ATTRIBUTE_ENTRY: Final = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
_ANNOTATIONS: Final = ("title", "description", "default")


def attribute_texts(cls: type) -> dict[str, str]:
    """Return the descriptions under ``Attributes:`` in the docstrings of a class and its bases, by name."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        attributes_section = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
        pairs = _ATTRIBUTE_ENTRY.findall(attributes_section.partition("\n\n")[0])
        texts |= {name: " ".join(text.split()) for name, text in pairs}
    return texts


def bridge_schema() -> dict[str, Any]:
    """Return the JSON Schema of a bridge file."""
    root = BridgeTable.model_json_schema(schema_generator=_Generator)
    defs: dict[str, Any] = root.pop("$defs")
    _add_alternatives(defs)
    _relax_required(defs)
    root |= _broker_rules()
    defs |= {"Variable": _VARIABLE_SCHEMA, "Setting": _SETTING_SCHEMA}
    for definition in defs.values():
        definition.pop("title", None)
    root["title"] = "A bridge file of Towline"
    schema = {"$schema": _DIALECT, **root, "$defs": dict(sorted(defs.items()))}
    return {key: _with_variables(value) for key, value in schema.items()}


# -- descriptions-----------------------------------------------------------------------------------------------------


class _Generator(GenerateJsonSchema):
    """Schema generator for TOML: no null, no titles that repeat a key, descriptions from the docstrings."""

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        generated, default = self.generate_inner(schema["schema"]), schema.get("default")
        is_scalar = isinstance(default, str | int | float) and default not in ("", None)
        return {**generated, "default": default} if is_scalar and "$ref" not in generated else generated

    def field_title_should_be_set(self, _: Any) -> bool:
        return False

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        return _with_descriptions(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        return _with_descriptions(super().dataclass_schema(schema), schema["cls"])


def _with_descriptions(schema: JsonSchemaValue, cls: type) -> JsonSchemaValue:
    schema["description"] = _plain_text((cls.__doc__ or "").partition("\n\n")[0])
    texts = attribute_texts(cls)
    for name, property_schema in schema.get("properties", {}).items():
        text = property_schema.get("description") or texts.get(name) or texts.get(f"{name}_")
        if text and ("$ref" not in property_schema or len(property_schema) == 1):
            property_schema["description"] = _plain_text(text)
    return schema


def _plain_text(text: str) -> str:
    """Remove Python's markup, and None, from a docstring for readers of TOML."""
    text = re.sub(r"`+", "`", " ".join(text.split()))
    text = re.sub(r" \((?:design )?section \d+\)| \[I\d+\]", "", text)
    text = re.sub(r"\bNone for\b", "without it", text)
    return re.sub(r"\bNone (?=when|where)", "left out ", text)


# -- what TOML and the loader allow ----------------------------------------------------------------------------------


def _add_alternatives(defs: dict[str, Any]) -> None:
    """Allow a size with a unit, as `towline.bridge.config.document` reads it, and one text for a list of protocols."""
    for properties in (definition.get("properties", {}) for definition in defs.values()):
        for key, value in properties.items():
            if "_bytes" in key or key == "alpn":
                notes = {k: value.pop(k) for k in _ANNOTATIONS if k in value}
                properties[key] = {"anyOf": [value, _SIZE_SCHEMA if "_bytes" in key else {"type": "string"}], **notes}
    for name, key in (("KafkaSection", "settings"), ("SparkSection", "conf")):  # dotted names may be tables
        defs[name]["properties"][key]["additionalProperties"] = {"$ref": "#/$defs/Setting"}


def _relax_required(defs: dict[str, Any]) -> None:
    """Make keys optional that a profile sets, and list the names of profiles."""
    for kind, required_key in zip(LINES, ("route", "from"), strict=True):
        table = defs[f"{kind.capitalize()}Table"]
        table["properties"]["profile"]["enum"] = list(profile_lines()[kind])
        table["anyOf"] = [{"required": [required_key]}, {"required": ["profile"]}]
    defs["DownlinkTable"]["required"].remove("from")


def _broker_rules() -> dict[str, Any]:
    """Require at least one line, and brokers in [mqtt] or in each line without remote gateways."""
    brokers = {"required": ["mqtt"], "properties": {"mqtt": {"required": ["brokers"]}}}
    lines = {"properties": {kind: {"items": {"anyOf": [brokers, {"required": ["gateways"]}]}} for kind in LINES}}
    return {"allOf": [{"anyOf": [{"required": [kind]} for kind in LINES]}, {"anyOf": [brokers, lines]}]}


def _with_variables(schema: Any) -> Any:
    """Allow a text with ``${NAME}`` in place of numbers, enumerated words and texts with a pattern."""
    if isinstance(schema, list):
        return [_with_variables(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema in (_VARIABLE_SCHEMA, _SETTING_SCHEMA) or "const" in schema:
        return schema
    type_ = schema.get("type")
    if type_ in ("integer", "number", "boolean") or (type_ == "string" and any(k in schema for k in _CONSTRAINT_KEYS)):
        notes = {k: schema[k] for k in _ANNOTATIONS if k in schema}
        constraints = {k: value for k, value in schema.items() if k not in notes}
        return {"anyOf": [constraints, {"$ref": "#/$defs/Variable"}], **notes}
    return {key: value if key in _ANNOTATIONS else _with_variables(value) for key, value in schema.items()}
