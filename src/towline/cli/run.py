"""``towline run``: the lines of a bridge file, until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli.screen import BridgeFile, MetricsAddress, is_live, load_bridge

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge


def run(
    file: BridgeFile = Path("bridge.toml"),
    master: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where Spark runs, as spark://HOST:7077, in place of [spark] master.",
            show_default=False,
        ),
    ] = None,
    metrics: MetricsAddress = None,
) -> None:
    """Run the lines of a bridge file and show their account.

    Ctrl-C ends it within 25 s: the batch in work may finish, the broker keeps the session, what waits stays on disk. A
    second Ctrl-C ends at once and loses nothing either. SIGHUP, or towline reload, takes up the changed file.

    Example:  towline run bridge.toml      and from another terminal:  towline status bridge.toml --watch
    """
    from towline.bridge.runtime.screen import make_screen  # noqa: PLC0415
    from towline.bridge.runtime.supervisor import Supervisor  # noqa: PLC0415
    from towline.monitor.serving import bridge_endpoint  # noqa: PLC0415

    def read() -> Bridge:
        return load_bridge(file, master=master)

    bridge = read()
    with bridge_endpoint(bridge, metrics) as observe, make_screen(live=is_live()) as screen:
        code = Supervisor(bridge, screen, observe, read).run()
    raise typer.Exit(code)
