"""Base class of settings models, and pydantic's errors in the user's words.

A setting is one field of a model, with its unit, bounds and default. Bridge file, Spark options and Python arguments
are read by the same models; each adds its own names to the text of `requirement`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

#: Requirements by type of error, where pydantic's message has the words of Python.
_REQUIREMENTS: Final = {
    "missing": "is missing",
    **dict.fromkeys(("too_short", "string_too_short"), "must be something, it is empty"),
    **dict.fromkeys(("dict_type", "model_type", "dataclass_type"), "must be a table"),
    "tuple_type": "must be a list",
    "path_type": "must be a path",
    "bytes_type": "must be bytes or text",
}


class SettingsModel(BaseModel):
    """Frozen table of settings: unknown names are errors, and no error quotes a value [I12]."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def requirement(error: Mapping[str, Any]) -> str:
    """Return the requirement in a pydantic error, ``must be less than or equal to 5``; never the value itself [I12]."""
    error_type, message = str(error["type"]), " ".join(str(error["msg"]).split())
    if error_type in ("enum", "literal_error"):
        message = message.replace("'", '"')
    message = re.sub(r"^(Input|String) should ", "must ", message.removeprefix("Value error, "))
    return _REQUIREMENTS.get(error_type, message)
