"""Shared parts of the commands: arguments, typer settings, and safe output to a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from towline.text import fit_terminal, printable, printable_lines

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge

#: A bridge file as an argument; a missing file is reported by the loader, in one line as every other error.
BridgeFile = Annotated[Path, typer.Argument(help="The bridge file (TOML).", show_default=True, readable=False)]
LineName = Annotated[str, typer.Argument(metavar="LINE", help="Name of the line.")]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]
MetricsAddress = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="Serve /metrics, /healthz and /readyz there; a port alone is one of 127.0.0.1.",
        show_default=False,
    ),
]


def command_app(**settings: Any) -> typer.Typer:
    """Create the typer application of a command: plain help on one screen, ``-h`` too, no tracebacks of its own."""
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


def load_bridge(file: Path) -> Bridge:
    """Load a bridge file as `towline.bridge.config.file.load`, which is imported when called."""
    from towline.bridge.config.file import load  # noqa: PLC0415

    return load(file)


def is_terminal() -> bool:
    """Return True if standard output is a terminal that can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


#: ASCII for terminals that can't show more.
_ASCII_REPLACEMENTS = str.maketrans({"→": ">", "▸": ">", "✓": "+", "✗": "x", "…": ".", "·": "-", "≥": ">", "━": "="})


def terminal_text(text: str, stream: TextIO | None = None) -> str:
    """Escape control characters, and replace characters that the encoding of `stream` (default standard output) lacks.

    Every command prints through this or `json_text`. Line feeds stay: escape those within a value by
    `towline.text.printable`.
    """
    text = fit_terminal(printable_lines(text), stream or sys.stdout)
    encoding = (stream or sys.stdout).encoding or "ascii"
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII_REPLACEMENTS).encode("ascii", "replace").decode("ascii")
    return text


def json_text(values: Any, *, indent: int | None = None) -> str:
    """Return JSON and a line feed, in visible ASCII."""
    return json.dumps(values, indent=indent) + "\n"


def print_lines(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Print each of ``lines`` in one line, with control characters and line feeds escaped."""
    stream = stream or sys.stdout
    stream.write("".join(terminal_text(printable(line), stream) + "\n" for line in lines))


def print_result(values: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print the result of a command: as JSON, or as lines for a person."""
    if as_json:
        sys.stdout.write(json_text(values, indent=2))
    else:
        print_lines(lines)
