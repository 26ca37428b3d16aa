"""``towline retire``: end a line for good, with all that it holds where it was to go."""

from __future__ import annotations

from typing import Annotated

import typer

from towline.cli.screen import BridgeFile, LineName, command_app, is_live, lines_text

__all__ = ["app", "retire"]

app = command_app()


@app.command(epilog="Example:  towline retire bridge.toml telemetry")
def retire(
    file: BridgeFile,
    line: LineName,
    discard: Annotated[
        bool, typer.Option("--discard", help="Give up what waits here and in its session, instead.")
    ] = False,
    idle: Annotated[float, typer.Option(min=0, help="Seconds without a message that end the session.")] = 30.0,
) -> None:
    """End a line: carry on all that it holds, end its session at the broker, remove its state.

    An uplink's messages go to Kafka, a downlink's to its broker, by what the line was when it was started last. No
    bridge of the file may run meanwhile. What can't be carried on is refused, and nothing removed; the same command
    goes on after a kill. Exit code 0 when the line is gone.
    """
    from towline.bridge.config.file import load  # noqa: PLC0415 - loaded when it is called
    from towline.bridge.runtime.retiring import retire as ended  # noqa: PLC0415
    from towline.bridge.runtime.screen import make_screen  # noqa: PLC0415
    from towline.gateway.process import configure_logging  # noqa: PLC0415

    configure_logging()
    bridge = load(file)
    with make_screen(live=is_live()) as screen:
        told = ended(bridge, line, screen, idle_s=idle, discard=discard)
    typer.echo(lines_text([told]), nl=False)
