"""What the commands share: typer's settings, and marks the terminal can show."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["BridgeFile", "command_app", "is_live", "plain"]

#: A bridge file as an argument; its absence is told by the reader, in one line like every other mistake.
BridgeFile = Annotated[Path, typer.Argument(help="The bridge file (TOML).", show_default=True)]


def command_app(**settings: Any) -> typer.Typer:
    """A typer application of one command: plain help on one screen, ``-h`` too, no tracebacks of its own."""
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


def is_live() -> bool:
    """Whether standard output is a terminal that can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


#: ASCII for terminals that can't show more.
_PLAIN = str.maketrans({"→": ">", "▸": ">", "✓": "+", "✗": "x", "…": ".", "·": "-", "≥": ">", "━": "="})


def plain(text: str) -> str:
    """The text with what standard output's encoding can't show replaced."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
    return text
