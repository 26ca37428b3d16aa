"""``towline refused``: the messages that a broker would not take, and their way on."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from towline.cli.screen import AsJson, command_app, load_bridge, print_result
from towline.errors import ConfigError
from towline.text import printable
from towline.timing import local_time

app = command_app(
    name="refused",
    help="Messages the broker would not take: show them, send them again, or drop them.",
    epilog="Example:  towline refused show bridge.toml && towline refused replay bridge.toml --line commands",
    no_args_is_help=True,
)

#: Characters of a topic on the screen; ``--json`` has all of it.
_TOPIC = 120
#: Does ``page``, ``replay`` or ``drop`` with an offset: see `towline.delivery.refused.Refused`.
_Ask = Callable[[str, int], dict[str, Any]]

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
    as_json: AsJson = False,
) -> None:
    """Count the refused messages by line and reason, and list the oldest ones. No payload is shown."""
    counts: Counter[tuple[str, int, str]] = Counter()
    first: list[dict[str, Any]] = []
    for name, directory in _places(place, line):
        with _reached(directory) as ask:
            for row in _rows(ask):
                counts[name, row["reason"], row["words"]] += 1
                if len(first) < limit:
                    first.append({"line": name, **row})
    kept = [{"line": n, "reason": r, "words": w, "messages": c} for (n, r, w), c in sorted(counts.items())]
    print_result({"kept": kept, "first": first}, _shown(kept, first), as_json=as_json)


@app.command(epilog="Example:  towline refused replay bridge.toml --line commands")
def replay(
    place: Place = Path("bridge.toml"),
    line: Line = None,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Send the refused messages again, each once: they enter the outbox behind what waits there.

    Mend first what the broker refused (rights, limits): it would refuse them once more. With or without a gateway
    running; a Publisher has to be closed.
    """
    _move("replay", _places(place, line), limit, as_json=as_json)


@app.command(epilog="Example:  towline refused drop bridge.toml --line commands --limit 1")
def drop(
    place: Place = Path("bridge.toml"),
    line: Line = None,
    limit: Limit = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget the refused messages, for good."""
    if not yes:
        typer.confirm("Forget these messages for good?", abort=True, err=True)
    _move("drop", _places(place, line), limit, as_json=as_json)


def _move(what: str, places: Iterator[tuple[str, Path]], limit: int | None, *, as_json: bool) -> None:
    moved = Counter[str]()
    for name, directory in places:
        with _reached(directory) as ask:
            page = ask("page", 0)
            at = page["rows"][0]["offset"] if page["rows"] else page["end"]
            upto = page["end"] if limit is None else min(page["end"], at + limit)
            while at < upto:  # part by part; what is refused again meanwhile stays
                done = ask(what, upto)
                moved[name] += done["moved"]
                at = done["next"]
    word = "back in the outbox" if what == "replay" else "dropped"
    lines = [f"{count:>10,}  {word}   {name}" for name, count in moved.items() if count]
    print_result({what: moved}, lines or ["no refused messages"], as_json=as_json)


def _rows(ask: _Ask) -> Iterator[dict[str, Any]]:
    """All that is kept, each message once."""
    at, seen = 0, set()
    while True:
        page = ask("page", at)
        for row in page["rows"]:
            if (key := (row["number"], row["arrived_at"])) not in seen:
                seen.add(key)
                yield row
        at = page["next"]
        if at >= page["end"]:
            return


def _places(place: Path, line: str | None) -> Iterator[tuple[str, Path]]:
    """Name and state directory of what is meant."""
    from towline.gateway.endpoint import text_of  # noqa: PLC0415

    text_of(place)
    if place.is_dir():
        if line is not None:
            what, do = "a state directory has no lines", "Name the bridge file, or leave out --line."
            raise ConfigError("TL-C94", str(place), what, do)
        if not any((place / name).is_dir() for name in ("outbox", "refused")):
            what = "no gateway or Publisher has sent from here: there is neither outbox/ nor refused/"
            do = "Name the bridge file, the state directory of a line in it, or that of a Publisher."
            raise ConfigError("TL-C93", str(place), what, do)
        yield place.resolve().name, place
        return
    bridge = load_bridge(place)
    for found in (bridge.line(line),) if line is not None else bridge.downlinks:
        yield found.name, found.gateway.state_dir


@contextlib.contextmanager
def _reached(directory: Path) -> Iterator[_Ask]:
    """The refused messages of a state directory: through the gateway that runs there, or from the disk."""
    from towline.delivery.refused import RefusedMessages  # noqa: PLC0415 - loaded when it is called
    from towline.gateway.launch import discover  # noqa: PLC0415
    from towline.journal import Limits, Outbox  # noqa: PLC0415
    from towline.schema import OUTBOX_SCHEMA  # noqa: PLC0415

    if client := discover(directory):
        with client:
            yield client.refused
        return
    if not (directory / "refused").is_dir():
        yield lambda _do, _at: {"rows": [], "moved": 0, "next": 0, "end": 0}
        return
    with contextlib.ExitStack() as open_ones:
        outbox = Outbox.open(directory / "outbox", schema=OUTBOX_SCHEMA, limits=Limits(min_free_bytes=64 << 20))
        open_ones.callback(outbox.close)
        refused = RefusedMessages(directory / "refused", outbox)
        open_ones.callback(refused.close)
        yield lambda do, at: getattr(refused, do)(at)


def _shown(kept: list[dict[str, Any]], first: list[dict[str, Any]]) -> Iterator[str]:
    if not kept:
        yield "no refused messages"
    for row in kept:
        yield f"{row['messages']:>10,}  {row['words']} (0x{row['reason']:02X})   {row['line']}"
    for row in first:
        yield (
            f"{local_time(row['arrived_at'] / 1e6)}  {row['number']:,}  → {printable(row['topic'], _TOPIC)}  "
            f"QoS {row['qos']}  {row['bytes']:,} B  {row['words']}"
        )
