"""``towline gateway``: the gateway of one line in the foreground, for a service manager or another host's Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from towline.cli.screen import BridgeFile, command_app

__all__ = ["app", "gateway"]

app = command_app()


@app.command(epilog="Example:  towline gateway bridge.toml --line telemetry")
def gateway(
    file: BridgeFile = Path("bridge.toml"),
    line: Annotated[str | None, typer.Option(help="Name of the line; needed when there are several.")] = None,
) -> None:
    """Run the gateway of one line until Ctrl-C or SIGTERM.

    It receives, journals and acknowledges; messages wait in the journal until a bridge carries them on. Meanwhile
    `towline run` of the same file uses this gateway instead of starting one, and Spark on another machine reaches it
    where [gateway] says listen.
    """
    from towline.bridge.config.file import load  # noqa: PLC0415 - loaded when it is called
    from towline.errors import ConfigError  # noqa: PLC0415
    from towline.gateway.process import configure_logging, run  # noqa: PLC0415

    bridge = load(file)
    if line is None and len(bridge.lines) > 1:
        names = ", ".join(each.name for each in bridge.lines)
        raise ConfigError("TL-C73", str(file), f"there are several lines: {names}", "Name one with --line.")
    chosen = bridge.lines[0] if line is None else bridge.line(line)
    if getattr(chosen, "gateways", ()):
        what, do = "it reads gateways that run elsewhere, and has none of its own", "Run it where such a gateway is."
        raise ConfigError("TL-C113", f'{file}: line "{chosen.name}"', what, do)
    configure_logging()
    raise typer.Exit(run(chosen.gateway))
