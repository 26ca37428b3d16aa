"""Whether and where a command serves metrics: what the file or its option says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from towline.bridge.config.model import Bridge
from towline.bridge.runtime.state import BridgeState
from towline.gateway.settings import GatewaySettings


@contextlib.contextmanager
def endpoint(
    bridge: Bridge, option: str | None, gateway: GatewaySettings | None = None
) -> Iterator[Callable[[BridgeState], None]]:
    """Serve metrics meanwhile, where that is asked for: of a bridge, or of one `gateway` of its file.

    The file's address is the bridge's, which may run on the same machine as the gateway. What is yielded takes the
    state of a bridge.

    Raises:
        ConfigError: TL-C145 for the option, TL-C146 if the address can't be had, TL-C98 if the tokens can't be used:
            nothing has been started then.
    """
    address = option or (bridge.monitor.listen if gateway is None else None)
    if address is None:
        yield lambda _: None
        return
    from towline.monitor.bridge import BridgeMonitor  # noqa: PLC0415 - loaded when it is wanted
    from towline.monitor.gateway import GatewayFacts, GatewayMonitor  # noqa: PLC0415
    from towline.monitor.server import BridgeLines, serve  # noqa: PLC0415

    queue, names = bridge.monitor.broker_queue_messages, {line.name: line.gateway.name for line in bridge.lines}
    monitor = BridgeMonitor(bridge.name, names, queue)
    if gateway is None:
        serving = serve(monitor, address, BridgeLines(bridge, monitor).routes())
    else:
        places = [(line, {one.state_dir for one in (line.gateway, *line.each_gateway)}) for line in bridge.lines]
        line = next(line for line, directories in places if gateway.state_dir in directories)
        facts = GatewayFacts(bridge.name, line.name, gateway.name, line.direction)
        serving = serve(GatewayMonitor(facts, gateway.state_dir, queue), address)
    with serving:
        yield monitor.show
