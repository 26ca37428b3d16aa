"""``towline gateway``: the gateway of one line in the foreground, for a service manager or another host's Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli.screen import BridgeFile, MetricsAddress, load_bridge, print_lines
from towline.errors import ConfigError

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge
    from towline.gateway.settings import GatewaySettings


def gateway(
    file: BridgeFile = Path("bridge.toml"),
    line: Annotated[str | None, typer.Option(help="Name of the line; needed when there are several.")] = None,
    member: Annotated[
        str | None, typer.Option(help="Which of the line's gateways, where they are several.", show_default=False)
    ] = None,
    drain: Annotated[bool, typer.Option("--drain", help="Stop taking, hand on all, leave the line, and end.")] = False,
    idle: Annotated[
        float, typer.Option(min=0, help="With --drain: seconds without a message that end the session.")
    ] = 30.0,
    stop: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="End the detached gateway of a state directory.", show_default=False),
    ] = None,
    metrics: MetricsAddress = None,
) -> None:
    """Run the gateway of one line until Ctrl-C or SIGTERM.

    It receives, journals and acknowledges; messages wait in the journal until a bridge carries them on. Meanwhile
    `towline run` of the same file uses this gateway instead of starting one, and Spark on another machine reaches it
    where [gateway] says listen. With --drain it takes no new message, lets what it has be carried on, and ends its
    session; exit code 0 when it has left. A gateway that runs is ended for it. Started without --drain, it takes part
    again.

    Example:  towline gateway bridge.toml --line telemetry --member g1
    """
    from towline.gateway.launch import end_running  # noqa: PLC0415
    from towline.gateway.process import configure_logging, run  # noqa: PLC0415
    from towline.gateway.sessions import drainable  # noqa: PLC0415
    from towline.monitor.serving import endpoint  # noqa: PLC0415

    if stop is not None:
        print_lines([_stopped(stop)])
        return
    bridge = load_bridge(file)
    settings = _chosen(bridge, file, line, member)
    configure_logging()
    if drain:
        drainable(settings)
        settings = settings.model_copy(update={"drain_s": idle})
        end_running(settings.state_dir)  # now: who starts it again comes later than this process, and finds it
    with endpoint(bridge, metrics, settings):
        code = run(settings)
    if drain and code == 0:
        done = f"{settings.name} is drained: all is committed, and its session at the broker is ended"
        print_lines([done, f'A query over several gateways does without it: removed_gateways = ["{settings.name}"].'])
    raise typer.Exit(code)


def _stopped(state_dir: Path) -> str:
    """End a gateway that a source or sink started with ``gatewayLife = "detached"``; the broker keeps its session."""
    from towline.gateway.endpoint import GatewayEndpoint  # noqa: PLC0415 - loaded when it is called
    from towline.gateway.launch import discover, end_running  # noqa: PLC0415

    running, endpoint = discover(state_dir), GatewayEndpoint.read(state_dir)
    if endpoint is None or endpoint.process.gone():
        raise ConfigError("TL-G63", str(state_dir), "no gateway runs in this directory", "Is it the right stateDir?")
    readers = running.status()["readers"] if running else {}
    user = next((f"process {reader['pid']} reads from it" for reader in readers.values()), None)
    user = f"it ends with process {endpoint.owner_pid}" if endpoint.owner_pid else user
    if user or not endpoint.process.runs_here():
        what = f"its gateway can't be ended like this: {user or f'it runs on {endpoint.host}'}"
        raise ConfigError("TL-G63", str(state_dir), what, "End the query or bridge that it is for, or do it there.")
    end_running(state_dir)
    return f"{endpoint.name} has ended; its session stays at the broker, and what it had taken in on disk"


def _chosen(bridge: Bridge, file: Path, line: str | None, member: str | None) -> GatewaySettings:
    from towline.bridge.config.model import DownLine  # noqa: PLC0415 - loaded when it is called

    if line is None and len(bridge.lines) > 1:
        names = ", ".join(each.name for each in bridge.lines)
        raise ConfigError("TL-C73", str(file), f"there are several lines: {names}", "Name one with --line.")
    chosen = bridge.lines[0] if line is None else bridge.line(line)
    members = () if isinstance(chosen, DownLine) else chosen.members
    if member is not None and not isinstance(chosen, DownLine):
        return chosen.member(member, file)
    if member is not None or members:
        names = ", ".join(one.share.member for one in members if one.share)
        what = f'line "{chosen.name}" has several gateways: {names}' if members else "a downlink has no members"
        do = "Name the one of this machine with --member." if members else "Leave out --member."
        raise ConfigError("TL-C120", str(file), what, do)
    if not isinstance(chosen, DownLine) and chosen.gateways:
        what, do = "it reads gateways that run elsewhere, and has none of its own", "Run it where such a gateway is."
        raise ConfigError("TL-C113", f'{file}: line "{chosen.name}"', what, do)
    return chosen.gateway
