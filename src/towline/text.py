"""Escaping and wrapping of text for terminals and logs.

Devices choose topics, properties and client ids, brokers choose reasons. Printed as they are, they could move the
cursor, set the title or the clipboard (OSC 52), or forge a log line. So all text for people, in output, errors and
logs, passes through here; JSON for programs escapes by itself.
"""

from __future__ import annotations

import shutil
import unicodedata
from textwrap import TextWrapper
from typing import IO, Final

#: Unicode's general categories of what has no shape of its own, or another place than where it stands: control
#: characters (C0, DEL, C1), format characters (bidi overrides, zero width), lone surrogates, line and paragraph
#: separators, private and unassigned characters.
_HIDDEN_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn"})

#: Columns of text that are still read with ease.
_MAX_WIDTH: Final = 100

#: ASCII for terminals that can't show more.
_ASCII_REPLACEMENTS: Final = str.maketrans("→▸✓✗…·≥━▁▂▃▄▅▆▇█░", ">>+x.->=_.:=+*%#-")


def printable(text: str, limit: int | None = None) -> str:
    r"""Return `text` in one line, with every invisible character escaped: ``\x1b``, ``\u202e``.

    For people: backslashes of the text are not escaped, so the result can't be decoded.

    Args:
        text: Any text.
        limit: Maximum length of the result in characters, with an ellipsis if it was cut; None for no limit.
    """
    escaped = text if text.isprintable() else "".join(map(_escape, text if limit is None else text[: limit + 1]))
    return escaped if limit is None or len(escaped) <= limit else escaped[: limit - 1] + "…"


def count_text(number: int, noun: str = "message") -> str:
    """Return a number with its noun: ``1 message``, ``1,000 messages``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """Return a duration: ``0.4 s``, ``1.5 h``, ``4 days``; rounded down, since it is a limit."""
    for unit, size, max_count in (("s", 1.0, 120), ("min", 60.0, 120), ("h", 3600.0, 48), ("days", 86400.0, 1000)):
        if seconds < max_count * size:
            value = seconds / size
            return f"{int(value * 10) / 10:g} {unit}" if value < 10 else f"{int(value)} {unit}"
    return "years"


def lag_text(seconds: float | None) -> str:
    """Return a lag in seconds as text, with tenths below 100 s; None is unknown."""
    return "unknown" if seconds is None else f"{seconds:,.{1 if seconds < 100 else 0}f} s"


def error_text(error: BaseException, limit: int | None = None) -> str:
    """Return an exception's type and first line, of at most `limit` characters."""
    first_line = printable(next(iter(str(error).splitlines()), ""), limit).rstrip(". ")
    return f"{type(error).__name__}{': ' if first_line else ''}{first_line}"


def printable_lines(text: str) -> str:
    """Escape each line with `printable`; for text with our own line feeds."""
    return "\n".join(map(printable, text.split("\n")))


def encodable(text: str, encoding: str | None) -> str:
    """Return `text`, or ASCII of the same length if `encoding` lacks one of its characters; None is ASCII."""
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII_REPLACEMENTS).encode("ascii", "replace").decode("ascii")
    return text


def wrap_line(line: str, width: int) -> list[str]:
    """Wrap a line to rows of `width` columns, with a hanging indent; a longer word exceeds the width."""
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    wrapper = TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(line) or [""]


def fit_terminal(text: str, stream: IO[str]) -> str:
    """Wrap lines to a terminal's width; return them unchanged for a log or a pipe."""
    if not stream.isatty():
        return text
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    return "\n".join(row for line in text.split("\n") for row in wrap_line(line, width))


def _escape(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN_CATEGORIES:
        return character
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
