"""``towline run``: runs the lines of a bridge file; ``reload``, ``pause``, ``resume`` and more control them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from towline.cli.screen import BridgeFile, LineName, MetricsAddress, is_terminal, load_bridge, print_lines


def run(
    file: BridgeFile = Path("bridge.toml"),
    metrics: MetricsAddress = None,
) -> None:
    """Run the lines of a bridge file and show their account.

    Ctrl-C stops it within 25 s: the current batch may finish, the broker keeps the session, waiting messages stay on
    disk. A second Ctrl-C stops at once and loses nothing either. towline reload applies the changed file, as does
    SIGHUP to a service.

    Example:  towline run bridge.toml      and from another terminal:  towline status bridge.toml --watch
    """
    from towline.bridge.runtime.screen import make_screen  # noqa: PLC0415
    from towline.bridge.runtime.supervisor import Supervisor  # noqa: PLC0415
    from towline.monitor.serving import bridge_endpoint  # noqa: PLC0415

    bridge = load_bridge(file)
    with bridge_endpoint(bridge, metrics) as observe, make_screen(live=is_terminal()) as screen:
        code = Supervisor(bridge, screen, observe).run()
    raise typer.Exit(code)


def reload(file: BridgeFile = Path("bridge.toml")) -> None:
    """Apply the changed file to the running bridge: changed and new lines start, the others keep running.

    All of it or nothing: a file with an error, or with a change that needs a restart, changes nothing. Exit code 0 when
    the file is applied, 1 when the bridge refused it or none runs, 2 and a line for each error, 4 when this user has no
    permission to see whether a bridge runs.

    Example:  towline reload bridge.toml      the same as SIGHUP to a service, and it waits
    """
    _reload(file)


def restart(file: BridgeFile, line: LineName) -> None:
    """Restart the gateway and the query of one line with the present file; other lines keep running.

    A failed line is started again. Exit code 1 when the bridge refused it and goes on as before, or none runs.

    Example:  towline restart bridge.toml telemetry
    """
    _reload(file, line)


def pause(file: BridgeFile, line: LineName) -> None:
    """Pause the query of a line until towline resume; its gateway keeps receiving, and the output says how long it can.

    The pause survives restarts, and is possible while no bridge runs. Exit code 1 if the current batch takes longer
    than 30 s: the line is paused when the batch ends.

    Example:  towline pause bridge.toml telemetry
    """
    _pause(file, line, pausing=True)


def resume(file: BridgeFile, line: LineName) -> None:
    """Resume a paused line; all messages received meanwhile are delivered.

    Example:  towline resume bridge.toml telemetry
    """
    _pause(file, line, pausing=False)


def reset(file: BridgeFile, line: LineName) -> None:
    """Reset a line: set its checkpoint aside, rename it in Kafka; its next start continues after delivered rows.

    It is one of two remedies when a line refuses to start because its state was changed: the error says what it may
    cost. No bridge of the file may run meanwhile.

    Example:  towline reset bridge.toml telemetry && towline run bridge.toml
    """
    from towline.bridge.lines import recovery  # noqa: PLC0415
    from towline.bridge.lines.identity import current_or_former_line  # noqa: PLC0415
    from towline.bridge.runtime.supervisor import lock_state_directory  # noqa: PLC0415

    bridge = load_bridge(file)
    with lock_state_directory(bridge):
        report = recovery.reset_line(current_or_former_line(bridge, line))
    print_lines([report])


def retire(
    file: BridgeFile,
    line: LineName,
    discard: Annotated[
        bool, typer.Option("--discard", help="Drop what waits here and in its session, instead.")
    ] = False,
    idle: Annotated[float, typer.Option(min=0, help="Seconds without a message that end the session.")] = 30.0,
) -> None:
    """Retire a line: deliver all its messages, end its session at the broker, remove its state.

    An uplink's messages go to Kafka, a downlink's to its broker, with the settings of the line's last start. No bridge
    of the file may run meanwhile. If a message can't be delivered, the command fails and removes nothing; after a kill
    the same command continues. Exit code 0 when the line is removed.

    Example:  towline retire bridge.toml telemetry
    """
    from towline.bridge.runtime import retiring  # noqa: PLC0415
    from towline.bridge.runtime.screen import make_screen  # noqa: PLC0415
    from towline.gateway.process import configure_logging  # noqa: PLC0415

    configure_logging()
    bridge = load_bridge(file)
    with make_screen(live=is_terminal()) as screen:
        report = retiring.retire(bridge, line, screen, idle_s=idle, discard=discard)
    print_lines([report])


def _reload(file: Path, line: str = "") -> None:
    from towline.bridge.runtime.state import REFUSED, request_reload  # noqa: PLC0415 - loaded when it is called

    answer = request_reload(load_bridge(file), line)
    is_refused = answer["outcome"] == REFUSED
    print_lines(answer["texts"], sys.stderr if is_refused else sys.stdout)
    raise typer.Exit(int(is_refused))


def _pause(file: Path, line: str, *, pausing: bool) -> None:
    from towline.bridge.runtime.state import apply_pause  # noqa: PLC0415 - loaded when it is called

    print_lines([apply_pause(load_bridge(file), line, pausing=pausing)])
