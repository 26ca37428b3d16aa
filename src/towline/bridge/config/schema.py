"""JSON Schema (2020-12) of bridge files, for editors: generated from the models that read them and their docstrings.

An editor reports unknown keys, wrong types and numbers out of range as it goes; missing keys and contradictions between
keys are found by `towline check`. A text with ``${NAME}`` stands for any number or word.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from towline.bridge.config.tables import LINES, BridgeTable
from towline.bridge.profiles import profile_lines

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
#: References to environment variables are replaced before types are checked, and sizes with a unit are read.
_VARIABLE: Final = {"type": "string", "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*\}"}
_SIZE: Final = {"type": "string", "pattern": r"^\s*\d+(\.\d+)? ?[kKmMgGtT]?i?[bB]?\s*$"}
#: Alternatives to a value, by pydantic's type of it.
_ALTERNATIVES: Final = {"int": (_SIZE, _VARIABLE), **dict.fromkeys(("float", "bool", "enum", "literal"), (_VARIABLE,))}
#: A setting of another program: its dotted name may also be written as tables.
_SETTING: Final = {
    "anyOf": [
        {"type": ["string", "boolean", "number"]},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/Setting"}},
    ]
}
#: ``name: description`` in a docstring, with further lines indented more.
_ATTRIBUTE_ENTRY: Final = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


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
    defs: dict[str, Any] = root["$defs"]
    for kind in LINES:
        defs[f"{kind.capitalize()}Table"]["properties"]["profile"]["enum"] = list(profile_lines()[kind])
    for name, key in (("KafkaSection", "settings"), ("SparkSection", "conf")):
        defs[name]["properties"][key]["additionalProperties"] = {"$ref": "#/$defs/Setting"}
    return {"$schema": _DIALECT, **root, "title": "A bridge file of Towline", "$defs": {**defs, "Setting": _SETTING}}


class _Generator(GenerateJsonSchema):
    """Schema generator for TOML: no required keys, which a profile may set; descriptions from docstrings."""

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        generated, alternatives = super().generate_inner(schema), _ALTERNATIVES.get(schema["type"])
        return {"anyOf": [generated, *alternatives]} if alternatives else generated

    def field_is_required(self, field: Any, total: bool) -> bool:  # noqa: ARG002, FBT001 - pydantic's
        return False

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        return _with_descriptions(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        return _with_descriptions(super().dataclass_schema(schema), schema["cls"])


def _with_descriptions(schema: JsonSchemaValue, cls: type) -> JsonSchemaValue:
    texts = {"": (cls.__doc__ or "").partition("\n\n")[0], **attribute_texts(cls)}
    texts = {name.removesuffix("_"): " ".join(text.replace("``", "`").split()) for name, text in texts.items()}
    for name, property_schema in schema.get("properties", {}).items():
        if name in texts:
            property_schema.setdefault("description", texts[name])
    return {**schema, "description": texts[""]}
