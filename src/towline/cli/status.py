"""``towline status``: shows the account of every message."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from towline.cli.screen import is_terminal, json_text, load_bridge, terminal_text

#: Seconds between two outputs with --watch.
WATCH_S = 1.0


def status(
    file: Annotated[
        Path | None, typer.Argument(help="The bridge file; default bridge.toml.", show_default=False, readable=False)
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="The bridge's state_dir, instead of a file.", readable=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts; null is unknown.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
) -> None:
    """Show the account: received = in Kafka + deduplicated or filtered + waiting, and whether it adds up.

    Asks the gateways, so it works while Spark or Kafka is down. Exit codes: 0 each line runs or is paused, and adds up;
    1 an account does not add up; 3 a line does not run, or its account is unknown; 4 no permission.

    Example:  towline status bridge.toml --watch
    """
    from towline.bridge.runtime import status as bridge_status  # noqa: PLC0415 - loaded when it is called

    bridge = load_bridge(file or Path("bridge.toml")) if file is not None or state_dir is None else None
    if bridge is not None and state_dir is not None:
        bridge = bridge.model_copy(update={"state_dir": state_dir})
    redraw = watch and is_terminal()
    while True:
        if bridge is not None:
            values = bridge_status.collect_bridge_status(bridge)
        else:
            values = bridge_status.collect_status(state_dir or Path())
        text = terminal_text(bridge_status.render(values))
        text = json_text(values, indent=None if redraw else 2) if as_json else text
        sys.stdout.write(("\x1b[H\x1b[2J" if redraw else "") + text)
        sys.stdout.flush()
        if not watch:
            break
        time.sleep(WATCH_S)
    if code := bridge_status.exit_code(values):
        raise typer.Exit(code)
