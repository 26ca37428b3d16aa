"""Start of the metrics endpoint, as configured in the bridge file or by ``--metrics``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from towline.bridge.config.model import Bridge
from towline.bridge.runtime.state import BridgeState
from towline.gateway.settings import GatewaySettings

_SetState: TypeAlias = Callable[[BridgeState], None]


@contextlib.contextmanager
def metrics_endpoint(bridge: Bridge, option: str | None, gateway: GatewaySettings | None = None) -> Iterator[_SetState]:
    """Serve metrics of a bridge, or of one `gateway` of its file, while the context is open; no-op if not configured.

    The file's address is for the bridge, which may run on the same machine as the gateway. Yields a callable that takes
    the state of a bridge.

    Raises:
        ConfigError: TL-C145 for the option, TL-C146 if the address can't be bound, TL-C98 if the token file can't be
            used: nothing has been started then.
    """
    address = option or (bridge.monitor.listen if gateway is None else None)
    if address is None:
        yield lambda _: None
        return
    from towline.monitor.bridge import BridgeMonitor  # noqa: PLC0415 - loaded when it is wanted
    from towline.monitor.gateway import GatewayFacts, GatewayMonitor  # noqa: PLC0415
    from towline.monitor.server import BridgeLines, serve  # noqa: PLC0415

    queue, gateway_names = bridge.monitor.broker_queue_messages, {line.name: line.gateway.name for line in bridge.lines}
    monitor = BridgeMonitor(bridge.name, gateway_names, queue)
    if gateway is None:
        server = serve(monitor, address, BridgeLines(bridge, monitor).routes())
    else:
        state_dir = gateway.state_dir
        line = next(x for x in bridge.lines if state_dir in {g.state_dir for g in (x.gateway, *x.all_gateways)})
        facts = GatewayFacts(bridge.name, line.name, gateway.name, line.direction)
        server = serve(GatewayMonitor(facts, state_dir, queue), address)
    with server:
        yield monitor.set_state
