"""Text as a constant of Spark SQL."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["literal"]

_SAFE: Final = re.compile(r"[A-Za-z0-9 _./:,;-]*")


def literal(text: str) -> str:
    """A SQL string constant.

    In hexadecimal where the parser could read more in it: quotes, ``${...}``, and escapes, which mean nothing with
    ``spark.sql.parser.escapedStringLiterals``.
    """
    return f"'{text}'" if _SAFE.fullmatch(text) else f"CAST(X'{text.encode().hex()}' AS STRING)"
