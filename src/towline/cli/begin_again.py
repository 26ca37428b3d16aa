"""``towline begin-again``: have a line begin where its gateway's account stands, without its checkpoint."""

from __future__ import annotations

import typer

from towline.cli.screen import BridgeFile, LineName, command_app, lines_text

__all__ = ["app", "begin_again"]

app = command_app()


@app.command(epilog="Example:  towline begin-again bridge.toml telemetry && towline run bridge.toml")
def begin_again(file: BridgeFile, line: LineName) -> None:
    """Keep a line's checkpoint aside and give it a new name in Kafka; at its next start it begins behind what is done.

    One of the two ways out where a line refuses to start because its state was changed: the error says what it may
    cost. No bridge of the file may run meanwhile.
    """
    from towline.bridge.config.file import load  # noqa: PLC0415 - loaded when it is called
    from towline.bridge.lines.leftovers import known_line  # noqa: PLC0415
    from towline.bridge.lines.recovery import begin_again as begun  # noqa: PLC0415
    from towline.bridge.runtime.supervisor import alone  # noqa: PLC0415

    bridge = load(file)
    with alone(bridge):
        told = begun(known_line(bridge, line))
    typer.echo(lines_text([told]), nl=False)
