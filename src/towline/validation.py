"""Models of settings, and what pydantic finds in them, in a user's words.

A setting is written down once: a field of a model, with its unit, bounds and default. Each face (bridge file, options
of Spark, arguments of Python) reads it by the model, and says an error with its own names around `requirement`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

__all__ = ["SettingsModel", "requirement"]

_TYPES: Final = {
    "string": "a string",
    "bytes": "bytes or text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
    "dataclass": "a table",
    "path": "a path",
}
_BOUNDS: Final = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_TYPE_ERROR: Final = re.compile(r"([a-z]+)(?:_attributes)?_(?:type|parsing|parsing_size|from_float)")


class SettingsModel(BaseModel):
    """A table of settings: unknown names are errors, nothing changes afterwards, and no error quotes a value [I12]."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def requirement(error: Mapping[str, Any]) -> str:
    """What a value has to be, from one of pydantic's `errors`: ``must be at least 5``; never the value itself [I12]."""
    kind, context = str(error["type"]), error.get("ctx", {})
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        limit = context[bound]
        return f"must be {words} {int(limit) if limit == int(limit) else limit:,}"
    if kind in ("enum", "literal_error"):
        return f"must be {context['expected']}".replace("'", '"')
    if kind == "missing":
        return "is missing"
    if kind in ("too_short", "string_too_short"):
        return "must be something, it is empty"
    if match := _TYPE_ERROR.fullmatch(kind):
        return f"must be {_TYPES.get(match[1], error['msg'])}"
    message = " ".join(str(error["msg"]).split())
    return re.sub(r"^(Input|String) should ", "must ", message.removeprefix("Value error, "))
