"""2,000 messages through the gateway process over each transport, byte for byte, on a real Mosquitto."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NewMosquitto
from tests.integration.conftest import Gateway, NewGateway
from tests.integration.net.conftest import Authority
from tests.integration.net.ways import HttpProxy, SocksProxy
from towline import Client, ClientSettings
from towline.net.endpoint import Tls
from towline_prove.devstack.process import free_port

COUNT = 2000
#: Settings of a Mosquitto that drops nothing.
AMPLE = {"max_queued_messages": "0"}


def contents(longest: int) -> list[bytes]:
    """Numbered payloads, most of them small, some longer than a TLS record, a WebSocket frame or a read."""
    chance = random.Random(4)
    sizes = [chance.choice((0, 7, 150, 900)) for _ in range(COUNT)]
    sizes[100], sizes[700], sizes[1300] = min(70_000, longest), 125, longest
    return [b"%d:" % number + chance.randbytes(size) for number, size in enumerate(sizes)]


def carried(gateway: Gateway, uri: str, **way: Any) -> tuple[list[bytes], list[bytes]]:
    """What was published over a transport, and what the journal of a gateway on the same transport holds."""
    # Mosquitto 2.0 sends 4 KiB of a WebSocket message per turn of its loop, every 0.1 s (its issue #411).
    sent = contents(longest=20_000 if uri.startswith("ws") else 2_500_000)
    gateway.start()
    status = gateway.until(state="online")
    assert status["broker"] == uri
    with Client(uri, client_id="device", settings=ClientSettings(**way)) as client:
        for result in [client.publish("t/1", payload) for payload in sent]:
            result.result(60)
    status = gateway.until(journaled=COUNT)
    assert (status["connects"], status["last_error"]) == (1, None)
    assert gateway.stop() == 0
    return sent, [row["payload"] for row in gateway.rows()]


#: Mosquitto settings of a transport, its URI, and how a client connects.
Listener = tuple[dict[str, str], str, dict[str, Any]]


def listener_of(transport: str, port: int, directory: Path, authority: Authority) -> Listener:
    if transport == "tls":  # with a client certificate
        tls = Tls(authority.ca_file, *authority.issue("gateway.example"), min_version="1.3")
        verify = {"cafile": str(authority.ca_file), "require_certificate": "true"}
        settings = {"listener": f"{port} 127.0.0.1", **authority.listener("localhost"), **verify}
        return settings, f"mqtts://localhost:{port}", {"tls": tls}
    if transport == "wss":
        settings = {"listener": f"{port} 127.0.0.1", "protocol": "websockets", **authority.listener("broker.example")}
        tls = Tls(ca_file=authority.ca_file, server_name="broker.example")
        return settings, f"wss://127.0.0.1:{port}/any/path", {"tls": tls}
    return {
        "tcp": ({"listener": f"{port} 127.0.0.1"}, f"mqtt://127.0.0.1:{port}", {}),
        "ipv6": ({"listener": f"{port} ::1"}, f"mqtt://[::1]:{port}", {}),
        "unix": ({"listener": f"0 {directory}/mqtt.sock"}, f"unix://{directory}/mqtt.sock", {}),
        "ws": ({"listener": f"{port} 127.0.0.1", "protocol": "websockets"}, f"ws://127.0.0.1:{port}/mqtt", {}),
    }[transport]


@pytest.mark.parametrize("transport", ["tcp", "ipv6", "unix", "tls", "ws", "wss"])
def test_a_transport_delivers_byte_for_byte(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, authority: Authority, tmp_path: Path, transport: str
) -> None:
    settings, uri, way = listener_of(transport, free_port(), tmp_path, authority)
    new_mosquitto(**AMPLE, **settings)
    sent, kept = carried(new_gateway(uri, **way), uri, **way)
    assert kept == sent


@pytest.mark.parametrize("kind", [HttpProxy, SocksProxy])
@pytest.mark.parametrize("scheme", ["mqtt", "mqtts", "wss"])
def test_proxy(
    new_mosquitto: NewMosquitto,
    new_gateway: NewGateway,
    authority: Authority,
    tmp_path: Path,
    kind: type[HttpProxy],
    scheme: str,
) -> None:
    """The name of the broker means something to the proxy only, and the certificate is for it."""
    port = free_port()
    security = {} if scheme == "mqtt" else authority.listener("broker.internal")
    web = {"protocol": "websockets"} if scheme == "wss" else {}
    new_mosquitto(**AMPLE, listener=f"{port} 127.0.0.1", **web, **security)
    secret = tmp_path / "proxy-password"
    secret.write_text("opensesame\n")
    uri = f"{scheme}://broker.internal:1" + ("/mqtt" if web else "")
    with kind("me:opensesame", {"broker.internal": ("127.0.0.1", port)}) as proxy:
        through = f"{'http' if kind is HttpProxy else 'socks5'}://me@{proxy.address}"
        way: dict[str, Any] = {"proxy": through, "proxy_password_file": secret, "tls": Tls(ca_file=authority.ca_file)}
        gateway = new_gateway(uri, **way)
        sent, kept = carried(gateway, uri, **way)
        assert kept == sent
        assert proxy.connections == 2
        assert all("broker.internal:1" in request for request in proxy.requests), "the proxy looked the name up"
    log = gateway.log.read_text()
    assert "opensesame" not in log
    assert "me@" not in log
