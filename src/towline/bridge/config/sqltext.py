"""Text in Spark SQL: constants, names of fields, and what a user has written."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Final

#: Names that begin with towline_ are columns of ours.
_FIELD: Final = re.compile(r"(?!towline_)[a-z][a-z0-9_]*")
_BRACES: Final = re.compile(r"\{([A-Za-z_][\w.\[\]-]*)\}")
_SAFE: Final = re.compile(r"[A-Za-z0-9 _./:,;=@{}\[\]\"-]*")


def literal(text: str) -> str:
    """A SQL string constant.

    In hexadecimal where the parser could read more in it: quotes, ``${...}``, and escapes, which mean nothing with
    ``spark.sql.parser.escapedStringLiterals``.
    """
    return f"'{text}'" if _SAFE.fullmatch(text) else f"CAST(X'{text.encode().hex()}' AS STRING)"


def names_a_field(name: str, taken: Container[str]) -> bool:
    """Whether a field of the user's may have this name: it is a column for what comes after it."""
    return name not in taken and _FIELD.fullmatch(name) is not None


def check_sql(name: str, text: str, column: Callable[[str], str | None]) -> None:
    """Refuse SQL without a word, or with a field in braces, which would be the text of its name.

    Args:
        name: The key.
        text: What it says.
        column: The column behind a field of templates; None for another name.

    Raises:
        ValueError: What is wrong, and what to do.
    """
    if not text.strip():
        kind = "a condition" if name == "where" else "an expression"
        raise ValueError(f"{name} is empty; give {kind} in Spark SQL, or remove it")
    for field in _BRACES.findall(text):
        if (behind := column(field)) is not None:
            raise ValueError(
                f"{name} names {{{field}}}, which SQL takes for text; write the column {behind}, without braces"
            )
