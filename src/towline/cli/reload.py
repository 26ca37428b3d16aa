"""``towline reload``: have the bridge that runs take up its changed file, and tell how that went."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from towline.cli.screen import BridgeFile, command_app

__all__ = ["app", "reload"]

app = command_app()


@app.command(epilog="Example:  towline reload bridge.toml      the same as SIGHUP to towline run, and it waits")
def reload(file: BridgeFile = Path("bridge.toml")) -> None:
    """Have the bridge that runs take up its changed file: routes and batches of its uplinks.

    All of it or nothing: a file with a mistake, or with a change that needs a restart, changes nothing. Exit code 0
    when the file is what runs, 1 when the bridge refused it, 2 and a line for each mistake, 4 when this user may not
    look whether a bridge runs.
    """
    from towline.bridge.config.file import load  # noqa: PLC0415 - loaded when it is called
    from towline.bridge.runtime.reloading import REFUSED, reload_from_outside  # noqa: PLC0415
    from towline.cli.screen import lines_text  # noqa: PLC0415

    told = reload_from_outside(load(file))
    refused = told["outcome"] == REFUSED
    typer.echo(lines_text(told["texts"], sys.stderr if refused else sys.stdout), nl=False, err=refused)
    raise typer.Exit(int(refused))
