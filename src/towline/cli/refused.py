"""``towline refused``: shows messages that a broker refused, sends them again or drops them."""

from __future__ import annotations

import base64
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from towline.cli import screen
from towline.cli.screen import AsJson, command_app, load_bridge, print_result
from towline.errors import ConfigError
from towline.text import printable
from towline.timing import local_time

app = command_app(
    name="refused",
    help="Messages the broker refused: show them, send them again, or drop them.",
    epilog="Example:  towline refused show bridge.toml && towline refused replay bridge.toml --line commands",
    no_args_is_help=True,
)

#: Characters of a topic on the screen; ``--json`` has all of it.
_MAX_TOPIC_CHARS = 120
#: Calls ``page``, ``message``, ``replay`` or ``drop`` of `towline.delivery.refused.RefusedMessages` with an offset.
_RefusedCall = Callable[[str, int], dict[str, Any]]

Place = Annotated[
    Path, typer.Argument(help="The bridge file, or the state directory of a line or a Publisher.", readable=False)
]
Line = Annotated[str | None, typer.Option(help="Only those of this line of the bridge file.", show_default=False)]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the oldest so many of a line.", show_default=False)]


@app.command(epilog="Example:  towline refused show bridge.toml --limit 5")
def show(
    place: Place = Path("bridge.toml"),
    line: Line = None,
    limit: Annotated[int, typer.Option(min=0, help="List so many of them; all are counted.")] = 20,
    at: Annotated[
        int | None, typer.Option(min=0, help="Show the one at this offset whole.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count the refused messages by line and reason, and list the oldest ones without payload; or show one whole."""
    if at is not None:
        message = _read_message(place, line, at)
        lines = screen.message_lines(message | {"arrived_at": local_time(message["arrived_at"] / 1e6)})
        print_result(message, lines, as_json=as_json)
        return
    counts: Counter[tuple[str, int, str]] = Counter()
    first_messages: list[dict[str, Any]] = []
    for name, directory in _state_dirs(place, line):
        with _open_refused(directory) as call_refused:
            for row in _refused_rows(call_refused):
                counts[name, row["reason"], row["words"]] += 1
                if len(first_messages) < limit:
                    first_messages.append({"line": name, **row})
    rows = [{"line": n, "reason": r, "words": w, "messages": c} for (n, r, w), c in sorted(counts.items())]
    print_result({"kept": rows, "first": first_messages}, _show_lines(rows, first_messages), as_json=as_json)


@app.command(epilog="Example:  towline refused replay bridge.toml --line commands")
def replay(place: Place = Path("bridge.toml"), line: Line = None, limit: Limit = None, as_json: AsJson = False) -> None:
    """Send the refused messages again, each once; they go to the end of the outbox.

    First fix the broker's reason to refuse them (rights, limits). Works with or without a running gateway; a Publisher
    has to be closed.
    """
    _move("replay", _state_dirs(place, line), limit, as_json=as_json)


@app.command(epilog="Example:  towline refused drop bridge.toml --line commands --limit 1")
def drop(
    place: Place = Path("bridge.toml"),
    line: Line = None,
    limit: Limit = None,
    is_confirmed: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the refused messages for good."""
    if not is_confirmed:
        typer.confirm("Delete these messages for good?", abort=True, err=True)
    _move("drop", _state_dirs(place, line), limit, as_json=as_json)


def _move(operation: str, state_dirs: Iterator[tuple[str, Path]], limit: int | None, *, as_json: bool) -> None:
    moved_counts = Counter[str]()
    for name, directory in state_dirs:
        with _open_refused(directory) as call_refused:
            page = call_refused("page", 0)
            offset = page["rows"][0]["offset"] if page["rows"] else page["end"]
            end_offset = page["end"] if limit is None else min(page["end"], offset + limit)
            while offset < end_offset:  # page by page; messages refused again meanwhile stay
                answer = call_refused(operation, end_offset)
                moved_counts[name] += answer["moved"]
                offset = answer["next"]
    result_text = "back in the outbox" if operation == "replay" else "dropped"
    lines = [f"{count:>10,}  {result_text}   {name}" for name, count in moved_counts.items() if count]
    print_result({operation: moved_counts}, lines or ["no refused messages"], as_json=as_json)


def _refused_rows(call_refused: _RefusedCall) -> Iterator[dict[str, Any]]:
    """Yield all refused messages, each once."""
    offset, seen_keys = 0, set()
    while True:
        page = call_refused("page", offset)
        for row in page["rows"]:
            if (key := (row["number"], row["arrived_at"])) not in seen_keys:
                seen_keys.add(key)
                yield row
        offset = page["next"]
        if offset >= page["end"]:
            return


def _read_message(place: Path, line: str | None, offset: int) -> dict[str, Any]:
    """Return one refused message as JSON values; raises TL-C73, TL-C76."""
    state_dirs = dict(_state_dirs(place, line))
    if len(state_dirs) > 1:
        problem = f"there are several lines: {', '.join(state_dirs)}"
        raise ConfigError("TL-C73", str(place), problem, "Name one with --line.")
    for name, directory in state_dirs.items():
        with _open_refused(directory) as call_refused:
            for row in call_refused("message", offset)["rows"]:
                headers = screen.header_values((key, base64.b64decode(value)) for key, value in row["properties"])
                payload = screen.payload_values(base64.b64decode(row["payload"]), row["bytes"])
                return {"line": name, **row, "properties": headers, "payload": payload}
    raise ConfigError("TL-C76", f"--at {offset}", "no such message is there", "towline refused show lists them.")


def _state_dirs(path: Path, line: str | None) -> Iterator[tuple[str, Path]]:
    """Yield name and state directory of each line, or of the one given directory."""
    from towline.gateway.endpoint import read_state_file  # noqa: PLC0415

    read_state_file(path)
    if path.is_dir():
        if line is not None:
            problem, remedy = "a state directory has no lines", "Name the bridge file, or leave out --line."
            raise ConfigError("TL-C94", str(path), problem, remedy)
        if not any((path / name).is_dir() for name in ("outbox", "refused")):
            problem = "no gateway or Publisher has sent from here: there is neither outbox/ nor refused/"
            remedy = "Name the bridge file, the state directory of a line in it, or that of a Publisher."
            raise ConfigError("TL-C93", str(path), problem, remedy)
        yield path.resolve().name, path
        return
    bridge = load_bridge(path)
    for downlink in (bridge.line(line),) if line is not None else bridge.downlinks:
        yield downlink.name, downlink.gateway.state_dir


@contextlib.contextmanager
def _open_refused(directory: Path) -> Iterator[_RefusedCall]:
    """Access the refused messages of a state directory, through its running gateway or on disk."""
    from towline.delivery.refused import RefusedMessages  # noqa: PLC0415 - loaded when it is called
    from towline.gateway.launch import find_running  # noqa: PLC0415
    from towline.journal import Limits, Outbox  # noqa: PLC0415
    from towline.schema import OUTBOX_SCHEMA  # noqa: PLC0415

    if client := find_running(directory):
        with client:
            yield client.refused_messages
        return
    if not (directory / "refused").is_dir():
        yield lambda _operation, _offset: {"rows": [], "moved": 0, "next": 0, "end": 0}
        return
    limits, outbox_dir = Limits(min_free_bytes=64 << 20), directory / "outbox"
    with Outbox.open(outbox_dir, schema=OUTBOX_SCHEMA, limits=limits) as outbox:
        refused = RefusedMessages(directory / "refused", outbox)
        with contextlib.closing(refused):
            yield lambda operation, offset: getattr(refused, operation)(offset)


def _show_lines(reason_counts: list[dict[str, Any]], first_messages: list[dict[str, Any]]) -> Iterator[str]:
    if not reason_counts:
        yield "no refused messages"
    for row in reason_counts:
        yield f"{row['messages']:>10,}  {row['words']} (0x{row['reason']:02X})   {row['line']}"
    for row in first_messages:
        yield (
            f"{local_time(row['arrived_at'] / 1e6)}  {row['offset']}  → {printable(row['topic'], _MAX_TOPIC_CHARS)}  "
            f"QoS {row['qos']}  {row['bytes']:,} B  {row['words']}"
        )
