"""Text from outside, cleaned before it is printed.

A device chooses its topics, properties and client id; a broker its reasons. Written to a terminal as they are, they
could move the cursor, set the title or the clipboard (OSC 52), or forge a line of a log. So whatever is shown to a
person, in the output of a command, an error or a log, passes through here. For programs there is JSON, which escapes
by itself. What goes to a terminal is wrapped here too.
"""

from __future__ import annotations

import re
import shutil
import unicodedata
from textwrap import TextWrapper
from typing import IO, Final

#: Unicode's general categories of what has no shape of its own, or another place than where it stands: control
#: characters (C0, DEL, C1), format characters (bidi overrides, zero width), lone surrogates, line and paragraph
#: separators, private and unassigned characters.
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn"})

#: What a row begins with, its text stands behind: indented a mark, or words with a gap behind them; or a time.
_HEAD: Final = re.compile(r" +(?:[!?✓✗] |\S.*? {2,})|\d[\d:-]+\d(?: [\d:]{8})? {2,}|")
#: What parts the facts of a row.
_GAP: Final = "   "
#: Stands for a space at which no row ends.
_HARD: Final = "\0"
#: Columns of text that are still read with ease.
_WIDEST: Final = 100


def printable(text: str, limit: int | None = None) -> str:
    r"""``text`` in one line, with every character that is not shown as itself escaped: ``\x1b``, ``\u202e``.

    For people: a backslash of the text stays as it is, so the escapes can't be turned back.

    Args:
        text: From wherever.
        limit: Characters of the result at most, the ellipsis at its end included; None for all.
    """
    shown = text if text.isprintable() else "".join(map(_shown, text if limit is None else text[: limit + 1]))
    return shown if limit is None or len(shown) <= limit else shown[: limit - 1] + "…"


def counted(number: int, noun: str = "message") -> str:
    """``1 message``, ``1,000 messages``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def span(seconds: float) -> str:
    """``0.4 s``, ``5 s``, ``1.5 h``, ``27 h``, ``4 days``; rounded down, because it is a limit."""
    for unit, size, most in (("s", 1.0, 120), ("min", 60.0, 120), ("h", 3600.0, 48), ("days", 86400.0, 1000)):
        if seconds < most * size:
            value = seconds / size
            return f"{int(value * 10) / 10:g} {unit}" if value < 10 else f"{int(value)} {unit}"
    return "years"


def cause(error: BaseException, limit: int | None = None) -> str:
    """An error of a program's own: its type, and the first line of its text, of `limit` characters at most."""
    first = printable(next(iter(str(error).splitlines()), ""), limit).rstrip(". ")
    return f"{type(error).__name__}{': ' if first else ''}{first}"


def printable_lines(text: str) -> str:
    """`printable` line by line; for text whose line feeds are ours."""
    return "\n".join(map(printable, text.split("\n")))


def wrapped(line: str, width: int) -> list[str]:
    """A line in rows of `width` columns, the later ones below the text of the first; a longer word goes beyond.

    What stands between three spaces is one fact, and stays whole where a row has room for it.
    """
    head = _HEAD.match(line)[0]  # type: ignore[index]  # it matches nothing at least
    head = head if len(head) <= width // 2 else ""
    indent = " " * (len(head) or 2)
    facts = line[len(head) :].split(_GAP)
    whole = (fact.replace(" ", _HARD) if len(indent + fact) <= width else fact for fact in facts)
    fill = TextWrapper(width, head, indent, break_long_words=False, break_on_hyphens=False)
    return [row.replace(_HARD, " ").rstrip() for row in fill.wrap(_GAP.join(whole)) or [head]]


def fitted(text: str, stream: IO[str]) -> str:
    """Lines as `stream` shows them best: on a terminal `wrapped`, elsewhere each in one line, for logs and grep."""
    if not stream.isatty():
        return text
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    return "\n".join(row for line in text.split("\n") for row in wrapped(line, width))


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
