"""``towline status``: shows the account of every message."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from towline.cli.screen import BridgeFile, is_terminal, json_text, load_bridge, terminal_text


def status(
    file: BridgeFile = Path("bridge.toml"),
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
    from towline.bridge.runtime.screen import LiveScreen  # noqa: PLC0415 - loaded when it is called
    from towline.bridge.runtime.status import collect_bridge_status, collect_status, exit_code, render  # noqa: PLC0415

    screen = LiveScreen(whole=True) if watch and not as_json and is_terminal() else None
    with screen.live if screen else nullcontext():
        while True:
            values = collect_status(state_dir) if state_dir else collect_bridge_status(load_bridge(file))
            if screen:
                screen.draw(values)
            else:
                sys.stdout.write(json_text(values, indent=2) if as_json else terminal_text(render(values)))
                sys.stdout.flush()
            if not watch:
                break
            time.sleep(1 - time.monotonic() % 1)  # at each full second of the sparkline
    if code := exit_code(values):
        raise typer.Exit(code)
