"""What the commands share: typer's settings, and text a terminal can show without being told what to do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from towline.text import fitted, printable, printable_lines

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge

#: A bridge file as an argument; its absence is told by the reader, in one line like every other mistake.
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
    """A typer application of one command: plain help on one screen, ``-h`` too, no tracebacks of its own."""
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


def load_bridge(file: Path, **given: Any) -> Bridge:
    """As `towline.bridge.config.file.load`, which takes `given` too; it is loaded when a command is called."""
    from towline.bridge.config.file import load  # noqa: PLC0415

    return load(file, **given)


def is_live() -> bool:
    """Whether standard output is a terminal that can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


#: ASCII for terminals that can't show more.
_PLAIN = str.maketrans({"→": ">", "▸": ">", "✓": "+", "✗": "x", "…": ".", "·": "-", "≥": ">", "━": "="})


def plain(text: str, stream: TextIO | None = None) -> str:
    """The text with control characters escaped, and replaced what the encoding of `stream` or of standard output lacks.

    Every command prints through this, or through `json_text`. Line feeds stay: whoever joins lines escapes those within
    a value (`towline.text.printable`).
    """
    text = fitted(printable_lines(text), stream or sys.stdout)
    encoding = (stream or sys.stdout).encoding or "ascii"
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
    return text


def json_text(values: Any, *, indent: int | None = None) -> str:
    """JSON and a line feed, in visible ASCII: JSON itself escapes all but DEL."""
    return json.dumps(values, indent=indent).replace("\x7f", "\\u007f") + "\n"


def print_lines(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Print each of ``lines`` in one line, for a terminal, whatever a device or a topic put into it."""
    stream = stream or sys.stdout
    stream.write("".join(plain(printable(line), stream) + "\n" for line in lines))


def print_result(values: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print what a command found: its values as JSON, or the same in lines for a person."""
    if as_json:
        sys.stdout.write(json_text(values, indent=2))
    else:
        print_lines(lines)
