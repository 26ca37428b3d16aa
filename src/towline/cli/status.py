"""``towline status``: where every message is."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from towline.cli.screen import command_app, is_live, json_text, plain

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge

__all__ = ["app", "status"]

app = command_app()

#: Seconds between two looks with --watch.
WATCH_S = 1.0


@app.command(epilog="Example:  towline status bridge.toml --watch")
def status(
    file: Annotated[
        Path | None, typer.Argument(help="The bridge file; default bridge.toml.", show_default=False, readable=False)
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="The bridge's state_dir, instead of a file.", readable=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts; null is what is not known.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second until Ctrl-C.")] = False,
    reconcile: Annotated[bool, typer.Option("--reconcile", help="Ask Kafka too: the totals of its markers.")] = False,
) -> None:
    """Show the account: received = in Kafka + left out + waiting, and whether it adds up.

    Asks the gateways themselves, so it works while Spark or Kafka is down. Exit codes: 0 every line runs and adds up,
    1 an account does not add up, or Kafka says otherwise, 3 a line does not run, its account is not known, or Kafka
    does not answer, 4 this user may not look.
    """
    place, bridge = _place(file, state_dir)
    if reconcile:
        _reconcile(place, bridge, as_json=as_json)
    while True:
        current = _look(place, bridge, as_json=as_json, clear=watch and is_live())
        if not watch:
            break
        time.sleep(WATCH_S)
    from towline.bridge.runtime.status import code_of  # noqa: PLC0415 - loaded when it is called

    if code := code_of(current):
        raise typer.Exit(code)


def _reconcile(place: Path, bridge: Bridge | None, *, as_json: bool) -> NoReturn:
    """Look once, at Kafka too."""
    from towline.bridge.runtime.reconciling import reconcile, render_comparisons  # noqa: PLC0415 - loads librdkafka
    from towline.bridge.runtime.status import NOT_KNOWN, WRONG, code_of, render  # noqa: PLC0415
    from towline.errors import ConfigError, KafkaError  # noqa: PLC0415

    if bridge is None:
        do = "Name the bridge file: it says where Kafka is."
        raise ConfigError("TL-C149", "towline status", "--reconcile asks Kafka, and a state_dir does not name it", do)
    current = _collected(place, bridge)
    try:
        found = current["reconciled"] = reconcile(bridge, current)
    except KafkaError as error:
        sys.stdout.write(json_text(current, indent=2) if as_json else plain(render(current)))
        sys.stderr.write(plain(f"{error}\n", sys.stderr))
        raise typer.Exit(NOT_KNOWN) from None
    text = json_text(current, indent=2) if as_json else plain(render(current) + render_comparisons(found))
    sys.stdout.write(text)
    disagree = any(one["agrees"] is False for comparisons in found.values() for one in comparisons)
    raise typer.Exit(WRONG if disagree else code_of(current))


def _place(file: Path | None, state_dir: Path | None) -> tuple[Path, Bridge | None]:
    from towline.bridge.config.file import load  # noqa: PLC0415 - loaded when it is called

    if state_dir is not None and file is None:
        return state_dir, None
    bridge = load(file or Path("bridge.toml"))
    return state_dir or bridge.state_dir, bridge


def _collected(place: Path, bridge: Bridge | None) -> dict[str, Any]:
    from towline.bridge.lines.leftovers import former_topics, left_lines  # noqa: PLC0415 - loaded when it is called
    from towline.bridge.runtime.members import wanted_clients  # noqa: PLC0415
    from towline.bridge.runtime.status import collect  # noqa: PLC0415

    if bridge is None:
        return collect(place)
    bridge = bridge.model_copy(update={"state_dir": place})
    clients = {line.name: wanted_clients(line) for line in bridge.lines}
    told = ("waiting", "sessions", "elsewhere")
    left = [
        {"line": one.directory.name, "text": str(one.error)} | {name: getattr(one, name) for name in told}
        for one in left_lines(bridge)
    ]
    return {**collect(place, [*clients], clients), "left": left, "former_dead_letter_topics": former_topics(bridge)}


def _look(place: Path, bridge: Bridge | None, *, as_json: bool, clear: bool) -> dict[str, Any]:
    from towline.bridge.runtime.status import render  # noqa: PLC0415 - loaded when it is called

    current = _collected(place, bridge)
    text = json_text(current, indent=None if clear else 2) if as_json else plain(render(current))
    sys.stdout.write(("\x1b[H\x1b[2J" if clear else "") + text)
    sys.stdout.flush()
    return current
