"""Start of the endpoint with metrics, lines and page, as configured in the bridge file or by ``--metrics``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from towline.bridge.config.model import Bridge
from towline.bridge.runtime.state import BridgeState
from towline.errors import ConfigError
from towline.gateway.settings import GatewaySettings
from towline.options import is_loopback

if TYPE_CHECKING:
    from starlette.routing import Route

    from towline.monitor.server import TlsContext

_SetState: TypeAlias = Callable[[BridgeState], None]


@contextlib.contextmanager
def bridge_endpoint(bridge: Bridge, option: str | None) -> Iterator[_SetState]:
    """Serve metrics, lines and page of a bridge while the context is open, if its file or `option` has an address.

    Yields a callable that takes the state of the bridge, and records its history from then on.

    Raises:
        ConfigError: TL-C145 for the option, TL-C146 if the address can't be bound, TL-C98 or TL-C97 if the token or
            certificate files can't be used: nothing has been started then.
    """
    from towline.monitor.bridge import BridgeMonitor  # noqa: PLC0415 - loaded when it is wanted
    from towline.monitor.history import HistoryRecorder  # noqa: PLC0415

    gateway_names = {line.name: line.gateway.name for line in bridge.lines}
    monitor = BridgeMonitor(bridge.name, gateway_names, bridge.monitor.broker_queue_messages)
    recorder = HistoryRecorder()

    def set_state(state: BridgeState) -> None:
        monitor.set_state(state)
        recorder.start(state, bridge.state_dir)

    def announce(text: str) -> None:
        if monitor.state is not None:
            monitor.state.add_event(text)

    with contextlib.ExitStack() as exit_stack:
        exit_stack.callback(recorder.stop)
        if address := option or bridge.monitor.listen:
            from towline.monitor.server import monitor_routes  # noqa: PLC0415

            routes = monitor_routes(monitor)
            has_page = bridge.monitor.page
            exit_stack.enter_context(serve_bridge(bridge, address, announce, routes=routes, has_page=has_page))
        yield set_state


@contextlib.contextmanager
def serve_bridge(
    bridge: Bridge,
    address: str,
    announce: Callable[[str], object],
    *,
    routes: Sequence[Route] = (),
    has_page: bool = True,
    link_key: str = "",
    actor: str = "[monitor]",
) -> Iterator[int]:
    """Serve the lines of a bridge, and its page, while the context is open; yields the port.

    Off loopback a page is served over TLS only, and to nobody without a token.

    Args:
        bridge: The bridge.
        address: ``HOST:PORT``, or a port of 127.0.0.1.
        announce: As for `towline.monitor.lines.BridgeRoutes`.
        routes: Further routes.
        has_page: Whether the page is served, too.
        link_key: Key in the link of `towline ui`; then nobody reads the page without it.
        actor: As for `towline.monitor.lines.BridgeRoutes`.

    Raises:
        ConfigError: As `bridge_endpoint`; TL-C211, the files of [monitor] don't suffice for it.
    """
    from towline.gateway.access import TokenFile  # noqa: PLC0415 - loaded when it is wanted
    from towline.monitor.lines import BridgeRoutes  # noqa: PLC0415
    from towline.monitor.server import serve  # noqa: PLC0415
    from towline.monitor.sessions import SessionStore  # noqa: PLC0415

    settings, is_local = bridge.monitor, _is_local(address)
    if problem := settings.access_problem(address, has_page=has_page):
        raise ConfigError("TL-C211", f"{bridge.file}: [monitor]", problem, "Add them, or listen on 127.0.0.1.")
    tls = _tls_context(bridge)
    token_file = TokenFile(settings.token_file) if settings.token_file else None
    bridge_routes = BridgeRoutes(
        bridge,
        SessionStore(token_file, link_key, is_tls=tls is not None),
        announce,
        actor=actor,
        has_page=has_page,
        is_open=not link_key and (is_local or not has_page),
        read_only=not is_local if settings.read_only is None else settings.read_only,
    )
    with serve([*routes, *bridge_routes.routes()], address, tls) as port:
        yield port


def _is_local(address: str) -> bool:
    try:
        return is_loopback(address)
    except ValueError as error:
        problem = f'"{address}": {error}'
        raise ConfigError("TL-C145", "--metrics, --listen", problem, "A port alone is one of 127.0.0.1.") from None


def _tls_context(bridge: Bridge) -> TlsContext | None:
    settings = bridge.monitor
    if settings.cert_file is None or settings.key_file is None:
        return None
    from towline.monitor.server import TlsContext  # noqa: PLC0415

    return TlsContext(settings.cert_file, settings.key_file)


@contextlib.contextmanager
def gateway_endpoint(bridge: Bridge, option: str | None, gateway: GatewaySettings) -> Iterator[None]:
    """Serve metrics of one gateway of a bridge file while the context is open, if `option` has an address.

    The file's address is for the bridge, which may run on the same machine as the gateway. Raises as
    `bridge_endpoint`.
    """
    if option is None:
        yield
        return
    from towline.monitor.gateway import GatewayFacts, GatewayMonitor  # noqa: PLC0415
    from towline.monitor.server import monitor_routes, serve  # noqa: PLC0415

    _is_local(option)
    state_dir, queue = gateway.state_dir, bridge.monitor.broker_queue_messages
    line = next(x for x in bridge.lines if state_dir in {g.state_dir for g in (x.gateway, *x.all_gateways)})
    facts = GatewayFacts(bridge.name, line.name, gateway.name, line.direction)
    with serve(monitor_routes(GatewayMonitor(facts, state_dir, queue)), option, _tls_context(bridge)):
        yield
