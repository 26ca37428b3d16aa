"""Base class of settings models, and pydantic's errors in the user's words.

A setting is one field of a model, with its unit, bounds and default. Bridge file, Spark options and Python arguments
are read by the same models; each adds its own names to the text of `requirement`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

_TYPE_WORDS: Final = {
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
_BOUND_WORDS: Final = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_TYPE_ERROR: Final = re.compile(r"([a-z]+)(?:_attributes)?_(?:type|parsing|parsing_size|from_float)")


class SettingsModel(BaseModel):
    """Frozen table of settings: unknown names are errors, and no error quotes a value [I12]."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def requirement(error: Mapping[str, Any]) -> str:
    """Return the requirement in a pydantic error, ``must be at least 5``; never the value itself [I12]."""
    error_type, context = str(error["type"]), error.get("ctx", {})
    if error_type in _BOUND_WORDS:
        bound, words = _BOUND_WORDS[error_type]
        limit = context[bound]
        return f"must be {words} {int(limit) if limit == int(limit) else limit:,}"
    if error_type in ("enum", "literal_error"):
        return f"must be {context['expected']}".replace("'", '"')
    if error_type == "missing":
        return "is missing"
    if error_type in ("too_short", "string_too_short"):
        return "must be something, it is empty"
    if match := _TYPE_ERROR.fullmatch(error_type):
        return f"must be {_TYPE_WORDS.get(match[1], error['msg'])}"
    message = " ".join(str(error["msg"]).split())
    return re.sub(r"^(Input|String) should ", "must ", message.removeprefix("Value error, "))
