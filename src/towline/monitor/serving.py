"""Whether and where a command serves metrics: what the file or its option says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from towline.bridge.config.model import Bridge
from towline.bridge.runtime.state import BridgeState
from towline.gateway.settings import GatewaySettings


@contextlib.contextmanager
def bridge_endpoint(bridge: Bridge, option: str | None) -> Iterator[Callable[[BridgeState], None]]:
    """Serve the metrics and lines of a bridge meanwhile, where that is asked for; what is yielded takes its state.

    Raises:
        ConfigError: TL-C145 for the option, TL-C146 if the address can't be had, TL-C98 if the tokens can't be used:
            nothing has been started then.
    """
    address = option or bridge.monitor.listen
    if address is None:
        yield lambda _: None
        return
    from towline.monitor.bridge import BridgeMonitor  # noqa: PLC0415 - loaded when it is wanted
    from towline.monitor.server import BridgeLines, serve  # noqa: PLC0415

    names = {line.name: line.gateway.name for line in bridge.lines}
    monitor = BridgeMonitor(bridge.name, names, bridge.monitor.broker_queue_messages)
    with serve(monitor, address, BridgeLines(bridge, monitor).routes()):
        yield monitor.show


@contextlib.contextmanager
def gateway_endpoint(bridge: Bridge, settings: GatewaySettings, option: str | None) -> Iterator[None]:
    """Serve the metrics of one gateway meanwhile, where ``--metrics`` asks for it.

    The file's address is the bridge's, which may run on the same machine.

    Raises:
        ConfigError: As `bridge_endpoint`.
    """
    if option is None:
        yield
        return
    from towline.monitor.gateway import GatewayFacts, GatewayMonitor  # noqa: PLC0415 - loaded when it is wanted
    from towline.monitor.server import serve  # noqa: PLC0415

    line = next(line for line in bridge.lines if settings in (line.gateway, *line.each_gateway))
    facts = GatewayFacts(bridge.name, line.name, settings.name, line.direction)
    with serve(GatewayMonitor(facts, settings.state_dir, bridge.monitor.broker_queue_messages), option):
        yield
