"""``towline gateway``: runs one line's gateway in the foreground, for a service manager or Spark on another host."""

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
        str | None, typer.Option(help="Member of the line, if it has several gateways.", show_default=False)
    ] = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="Receive no more, wait until all is committed, end the session, and stop.")
    ] = False,
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

    It receives, journals and acknowledges; messages wait in the journal until a bridge delivers them. Meanwhile
    `towline run` of the same file uses this gateway instead of starting one, and Spark on another machine reaches it if
    [gateway] sets listen. With --drain it stops a running gateway of the line, receives no new messages, waits until
    all are committed, and ends its session; exit code 0 when that is done. Started without --drain, it takes part
    again.

    Example:  towline gateway bridge.toml --line telemetry --member g1
    """
    from towline.gateway.launch import stop_running  # noqa: PLC0415
    from towline.gateway.process import configure_logging, run  # noqa: PLC0415
    from towline.gateway.sessions import check_drainable  # noqa: PLC0415
    from towline.monitor.serving import gateway_endpoint  # noqa: PLC0415

    if stop is not None:
        print_lines([_stop_detached(stop)])
        return
    bridge = load_bridge(file)
    settings = _select_gateway(bridge, file, line, member)
    configure_logging()
    if drain:
        check_drainable(settings)
        settings = settings.model_copy(update={"drain_s": idle})
        stop_running(settings.state_dir)  # now: a supervisor that restarts it finds this process
    with gateway_endpoint(bridge, metrics, settings):
        code = run(settings)
    if drain and code == 0:
        report = f"{settings.name} is drained: all is committed, and its session at the broker is ended"
        print_lines([report, f'Remove it from a query over several gateways: removed_gateways = ["{settings.name}"].'])
    raise typer.Exit(code)


def _stop_detached(state_dir: Path) -> str:
    """Stop a gateway that a source or sink started with ``gatewayDetached``; the broker keeps its session."""
    from towline.gateway.endpoint import GatewayEndpoint  # noqa: PLC0415 - loaded when it is called
    from towline.gateway.launch import find_running, stop_running  # noqa: PLC0415

    client, endpoint = find_running(state_dir), GatewayEndpoint.read(state_dir)
    if endpoint is None or endpoint.process.has_ended():
        raise ConfigError("TL-G63", str(state_dir), "no gateway runs in this directory", "Is it the right stateDir?")
    readers = client.status()["readers"] if client else {}
    user_text = next((f"process {reader['pid']} reads from it" for reader in readers.values()), None)
    user_text = f"it ends with process {endpoint.owner_pid}" if endpoint.owner_pid else user_text
    if user_text or not endpoint.process.is_running():
        problem = f"its gateway can't be ended like this: {user_text or f'it runs on {endpoint.host}'}"
        raise ConfigError("TL-G63", str(state_dir), problem, "End the query or bridge that it is for, or do it there.")
    stop_running(state_dir)
    return f"{endpoint.name} has ended; its session stays at the broker, and its received messages on disk"


def _select_gateway(bridge: Bridge, file: Path, line: str | None, member: str | None) -> GatewaySettings:
    from towline.bridge.config.model import Downlink  # noqa: PLC0415 - loaded when it is called

    if line is None and len(bridge.lines) > 1:
        names = ", ".join(other_line.name for other_line in bridge.lines)
        raise ConfigError("TL-C73", str(file), f"there are several lines: {names}", "Name one with --line.")
    selected_line = bridge.lines[0] if line is None else bridge.line(line)
    if isinstance(selected_line, Downlink):
        if member is not None:
            raise ConfigError("TL-C120", str(file), "a downlink has no members", "Leave out --member.")
        return selected_line.gateway
    if member is not None:
        return selected_line.member_settings(member, file)
    if names := ", ".join(share.member for settings in selected_line.members if (share := settings.share)):
        problem = f'line "{selected_line.name}" has several gateways: {names}'
        raise ConfigError("TL-C120", str(file), problem, "Name the one of this machine with --member.")
    if selected_line.gateways:
        location, problem = f'{file}: line "{selected_line.name}"', "it reads remote gateways, and has none of its own"
        raise ConfigError("TL-C113", location, problem, "Run it where such a gateway is.")
    return selected_line.gateway
