"""Shared parts of the commands: arguments, typer settings, and safe output to a terminal."""

from __future__ import annotations

import base64
import codecs
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from towline.text import encodable, fit_terminal, printable, printable_lines

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
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def terminal_text(text: str, stream: TextIO | None = None) -> str:
    """Escape control characters, and replace characters that the encoding of `stream` (default standard output) lacks.

    Every command prints through this or `json_text`. Line feeds stay: escape those within a value by
    `towline.text.printable`.
    """
    stream = stream or sys.stdout
    return encodable(fit_terminal(printable_lines(text), stream), stream.encoding)


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


#: Bytes of a payload in JSON, and on the screen as text and in hexadecimal digits.
_JSON_BYTES, _TEXT_BYTES, _HEX_BYTES = 1 << 20, 64 << 10, 4 << 10


def payload_values(data: bytes | None, size: int | None = None) -> dict[str, Any]:
    """Return a payload as JSON values, at most 1 MiB of it; `data` may be the first part of `size` bytes."""
    size = len(data or b"") if size is None else size
    first_bytes, text = (data or b"")[:_JSON_BYTES], None
    is_whole, encoded = size == len(first_bytes), None if data is None else base64.b64encode(first_bytes).decode()
    with contextlib.suppress(UnicodeDecodeError):  # a cut character at the end of a part is left out
        text = None if data is None else codecs.getincrementaldecoder("utf-8")().decode(first_bytes, is_whole)
    is_json = text is not None and _format_json(text) is not None
    return {"bytes": size, "text": text, "base64": encoded, "is_json": is_json, "truncated": not is_whole}


def header_values(headers: Iterable[tuple[str, bytes | None]]) -> list[tuple[str, str | None, str | None]]:
    """Return headers as JSON values: name, text if it is UTF-8, Base64."""
    return [(name, value["text"], value["base64"]) for name, value in ((n, payload_values(v)) for n, v in headers)]


def message_lines(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield one message for a person: its fields, `header_values` and `payload_values`."""
    for name, value in message.items():
        label = f"{name.replace('_', ' '):<18}"
        if isinstance(value, list):
            yield from (f"{label}{header} = {text or encoded or ''}" for header, text, encoded in value)
        elif isinstance(value, dict):
            yield from _payload_lines(label, value)
        else:
            yield f"{label}{'' if value is None else value}"


def _payload_lines(label: str, payload: Mapping[str, Any]) -> Iterator[str]:
    text, data = payload["text"], base64.b64decode(payload["base64"] or "")
    shown = data[: _HEX_BYTES if text is None else _TEXT_BYTES]
    if text is None:
        rows = [f"{start:06x}  {shown[start : start + 16].hex(' ')}" for start in range(0, len(shown), 16)]
    else:
        json_text = _format_json(text, indent=2) if len(shown) == len(data) else None
        rows = (json_text or shown.decode("utf-8", "ignore")).split("\n")
    cut_text = f", the first {len(shown):,}" if len(shown) < payload["bytes"] else ""
    yield f"{label}{payload['bytes']:,} B{cut_text}" if payload["base64"] is not None else f"{label}none"
    yield from (f"  {row}" for row in rows)


def _format_json(text: str, indent: int | None = None) -> str | None:
    """Format JSON; unchanged if Python would write a number or a name in another way, None if it is no JSON."""
    try:
        formatted = json.dumps(json.loads(text, parse_constant=int), indent=indent, ensure_ascii=False)  # no NaN
    except (ValueError, RecursionError):
        return None
    return formatted if "".join(formatted.split()) == "".join(text.split()) else text
