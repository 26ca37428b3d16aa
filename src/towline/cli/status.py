"""``towline status``: shows the account of every message."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from towline.cli.screen import is_terminal, json_text, load_bridge, terminal_text
from towline.errors import GatewayError, StateAccessDenied

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge

#: Seconds between two outputs with --watch.
WATCH_S = 1.0


def status(
    file: Annotated[
        Path | None, typer.Argument(help="The bridge file; default bridge.toml.", show_default=False, readable=False)
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="The bridge's state_dir, instead of a file.", readable=False)
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="http://HOST:PORT", help="Ask a bridge's monitor instead.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts; null is unknown.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
) -> None:
    """Show the account: received = in Kafka + deduplicated or filtered + waiting, and whether it adds up.

    Asks the gateways, so it works while Spark or Kafka is down; without permission to read the state directory it asks
    the bridge's monitor. Exit codes: 0 each line runs or is paused, and adds up; 1 an account does not add up; 3 a line
    does not run, its account is unknown, or the monitor does not answer; 4 no permission.

    Example:  towline status bridge.toml --watch
    """
    from towline.bridge.runtime.status import exit_code, render  # noqa: PLC0415 - loaded when it is called

    bridge = None if url or (file is None and state_dir) else load_bridge(file or Path("bridge.toml"))
    if bridge is not None and state_dir is not None:
        bridge = bridge.model_copy(update={"state_dir": state_dir})
    redraw = watch and is_terminal()
    while True:
        status_values = _collect_status(bridge, state_dir, url)
        text = (
            json_text(status_values, indent=None if redraw else 2) if as_json else terminal_text(render(status_values))
        )
        sys.stdout.write(("\x1b[H\x1b[2J" if redraw else "") + text)
        sys.stdout.flush()
        if not watch:
            break
        time.sleep(WATCH_S)
    if code := exit_code(status_values):
        raise typer.Exit(code)


def _collect_status(bridge: Bridge | None, state_dir: Path | None, url: str | None) -> dict[str, Any]:
    from towline.bridge.runtime.status import EXIT_UNKNOWN, collect_bridge_status, collect_status, fetch_status  # noqa: PLC0415 - loaded when it is called

    try:
        if bridge is None:
            return fetch_status(url) if url else collect_status(state_dir or Path())
        return collect_bridge_status(bridge)
    except StateAccessDenied:
        if bridge is not None and bridge.monitor.listen:
            with suppress(GatewayError):  # else raise the error with the directory's owner
                return fetch_status(f"http://{bridge.monitor.listen}")
        raise
    except GatewayError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(EXIT_UNKNOWN) from None
