"""``towline reload``, ``pause``, ``resume``, ``restart``: what a bridge that runs is asked for, line by line."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from towline.cli.screen import BridgeFile, LineName, lines_text

__all__ = ["pause", "reload", "restart", "resume"]


def reload(file: BridgeFile = Path("bridge.toml")) -> None:
    """Have the bridge that runs take up its changed file: lines that changed, and new ones; the others go on.

    All of it or nothing: a file with a mistake, or with a change that needs a new start, changes nothing. Exit code 0
    when the file is what runs, 1 when the bridge refused it or none runs, 2 and a line for each mistake, 4 when this
    user may not look whether a bridge runs.

    Example:  towline reload bridge.toml      the same as SIGHUP to towline run, and it waits
    """
    _reload(file)


def restart(file: BridgeFile, line: LineName) -> None:
    """Start a line again, by the file as it is now: its gateway and its query, and no other line.

    A line that was given up begins again. Exit code 1 where the bridge refused it and goes on as before, or none runs.

    Example:  towline restart bridge.toml telemetry
    """
    _reload(file, line)


def pause(file: BridgeFile, line: LineName) -> None:
    """Stop carrying a line's messages until towline resume; its gateway goes on, and it is said for how long it can.

    The pause outlives every restart, and may be asked for while no bridge runs. Exit code 1 where the batch in work
    takes longer than 30 s: the line is paused when that ends.

    Example:  towline pause bridge.toml telemetry
    """
    _pause(file, line, pausing=True)


def resume(file: BridgeFile, line: LineName) -> None:
    """Carry on a line that was paused, with all that came meanwhile.

    Example:  towline resume bridge.toml telemetry
    """
    _pause(file, line, pausing=False)


def _reload(file: Path, line: str = "") -> None:
    from towline.bridge.config.file import load  # noqa: PLC0415 - loaded when it is called
    from towline.bridge.runtime.reloading import REFUSED, reload_from_outside  # noqa: PLC0415

    told = reload_from_outside(load(file), line)
    refused = told["outcome"] == REFUSED
    typer.echo(lines_text(told["texts"], sys.stderr if refused else sys.stdout), nl=False, err=refused)
    raise typer.Exit(int(refused))


def _pause(file: Path, line: str, *, pausing: bool) -> None:
    from towline.bridge.config.file import load  # noqa: PLC0415 - loaded when it is called
    from towline.bridge.runtime.line_requests import carried_out  # noqa: PLC0415

    typer.echo(lines_text([carried_out(load(file), line, pausing=pausing)]), nl=False)
