"""``towline run``: the lines of a bridge file, until Ctrl-C; ``reload``, ``pause`` and more: what is asked of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli.screen import BridgeFile, LineName, MetricsAddress, is_live, load_bridge, print_lines

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
    from towline.monitor.serving import endpoint  # noqa: PLC0415

    def read() -> Bridge:
        return load_bridge(file, master=master)

    bridge = read()
    with endpoint(bridge, metrics) as observe, make_screen(live=is_live()) as screen:
        code = Supervisor(bridge, screen, observe, read).run()
    raise typer.Exit(code)


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


def begin_again(file: BridgeFile, line: LineName) -> None:
    """Keep a line's checkpoint aside and give it a new name in Kafka; at its next start it begins behind what is done.

    One of the two ways out where a line refuses to start because its state was changed: the error says what it may
    cost. No bridge of the file may run meanwhile.

    Example:  towline begin-again bridge.toml telemetry && towline run bridge.toml
    """
    from towline.bridge.lines import recovery  # noqa: PLC0415
    from towline.bridge.lines.identity import known_line  # noqa: PLC0415
    from towline.bridge.runtime.supervisor import alone  # noqa: PLC0415

    bridge = load_bridge(file)
    with alone(bridge):
        told = recovery.begin_again(known_line(bridge, line))
    print_lines([told])


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

    Example:  towline retire bridge.toml telemetry
    """
    from towline.bridge.runtime import retiring  # noqa: PLC0415
    from towline.bridge.runtime.screen import make_screen  # noqa: PLC0415
    from towline.gateway.process import configure_logging  # noqa: PLC0415

    configure_logging()
    bridge = load_bridge(file)
    with make_screen(live=is_live()) as screen:
        told = retiring.retire(bridge, line, screen, idle_s=idle, discard=discard)
    print_lines([told])


def _reload(file: Path, line: str = "") -> None:
    from towline.bridge.runtime.state import REFUSED, reload_from_outside  # noqa: PLC0415 - loaded when it is called

    told = reload_from_outside(load_bridge(file), line)
    refused = told["outcome"] == REFUSED
    print_lines(told["texts"], sys.stderr if refused else sys.stdout)
    raise typer.Exit(int(refused))


def _pause(file: Path, line: str, *, pausing: bool) -> None:
    from towline.bridge.runtime.state import carried_out  # noqa: PLC0415 - loaded when it is called

    print_lines([carried_out(load_bridge(file), line, pausing=pausing)])
