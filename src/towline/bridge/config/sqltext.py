"""Text in Spark SQL: constants, names of fields, and what a user has written."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final

__all__ = ["check_sql", "literal", "names_a_field"]

_FIELD: Final = re.compile(r"[a-z][a-z0-9_]*")
_SAFE: Final = re.compile(r"[A-Za-z0-9 _./:,;-]*")


def literal(text: str) -> str:
    """A SQL string constant.

    In hexadecimal where the parser could read more in it: quotes, ``${...}``, and escapes, which mean nothing with
    ``spark.sql.parser.escapedStringLiterals``.
    """
    return f"'{text}'" if _SAFE.fullmatch(text) else f"CAST(X'{text.encode().hex()}' AS STRING)"


def names_a_field(name: str, taken: Container[str]) -> bool:
    """Whether a field of the user's may have this name: it is a column for what comes after it."""
    return name not in taken and _FIELD.fullmatch(name) is not None


def check_sql(name: str, text: str | None) -> None:
    """Refuse SQL without a word.

    Args:
        name: The key.
        text: What it says; None where it is not there.

    Raises:
        ValueError: There is none, and what to do.
    """
    if text is not None and not text.strip():
        what = "a condition" if name == "where" else "an expression"
        raise ValueError(f"{name} is empty; give {what} in Spark SQL, or remove it")
