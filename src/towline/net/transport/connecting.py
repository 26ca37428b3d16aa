"""Opening a connection: socket, proxy, TLS and WebSocket, one on the other, within one time limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from socket import socket

from towline.errors import ConfigError, Unreachable
from towline.net.transport.endpoint import Endpoint
from towline.net.transport.patience import Patience
from towline.net.transport.proxy import Proxy, connect_through
from towline.net.transport.sockets import connect_tcp, connect_unix, tune
from towline.net.transport.stream import Transport, WebSocketTransport
from towline.net.transport.tls import Tls, handshake
from towline.net.transport.websocket import Framing

__all__ = ["connect"]


def connect(
    endpoint: Endpoint,
    *,
    tls: Tls | None = None,
    proxy: Proxy | None = None,
    timeout_s: float = 10.0,
    keep_alive_s: int = 60,
    cancelled: Callable[[], bool] = lambda: False,
    headers: Sequence[tuple[str, str]] = (),
    query: str = "",
) -> Transport:
    """Open a connection; its answer never blocks.

    Args:
        endpoint: The broker.
        tls: How to encrypt where the endpoint is ``mqtts`` or ``wss``; None for the defaults.
        proxy: The way there; None for the straight one.
        timeout_s: Seconds for all of it, the look-up of the name and all its addresses too.
        keep_alive_s: A peer that answers nothing on the TCP level for 1.5 times as long is given up; from 1.
        cancelled: Asked while waiting; True gives up at once.
        headers: Further ones of the request that opens a WebSocket.
        query: Of that request, in place of the endpoint's.

    Raises:
        Unreachable: With the reason: TL-M01 no connection, TL-M02 no TLS, TL-M07 the broker's certificate, TL-M09
            ours, TL-M14 no WebSocket, TL-M15 the proxy.
        ConfigError: The files under tls (TL-C30) or the proxy's password (TL-C31) can't be used, python-socks is
            missing (TL-C34), or a Unix socket is to be reached through a proxy (TL-C35).
    """
    patience = Patience(timeout_s, cancelled)
    where = str(endpoint)
    security = (tls or Tls()) if endpoint.tls else None
    context = security.context() if security else None  # its files first: what is wrong there, no broker mends
    sock = _reach(endpoint, proxy, keep_alive_s, patience)
    if security and context:
        sock = handshake(sock, security, context, endpoint.host, where, patience)
    if not endpoint.websocket:
        return Transport(sock, where, security)
    framing = Framing(replace(endpoint, query=query or endpoint.query), headers)
    return _opened(WebSocketTransport(sock, where, security, framing), where, patience)


def _reach(endpoint: Endpoint, proxy: Proxy | None, keep_alive_s: int, patience: Patience) -> socket:
    if endpoint.scheme == "unix":
        if proxy:
            what = "a Unix socket is on this machine, and not reached through a proxy"
            raise ConfigError("TL-C35", str(endpoint), what, "Remove one of the two.")
        return connect_unix(endpoint, patience)
    if proxy:
        sock = connect_through(proxy, endpoint, patience)
    else:
        sock = connect_tcp(endpoint.host, endpoint.port, str(endpoint), patience)
    tune(sock, keep_alive_s)
    return sock


def _opened(transport: WebSocketTransport, where: str, patience: Patience) -> WebSocketTransport:
    try:
        transport.open(patience)
    except OSError as error:
        transport.close()
        what, advice = f"no answer to the WebSocket's opening ({error})", "Is this port a WebSocket listener?"
        raise Unreachable("TL-M14", where, what, advice) from error
    except BaseException:
        transport.close()
        raise
    return transport
