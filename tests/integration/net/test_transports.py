"""2,000 messages through the gateway process over each transport, byte for byte, on a real Mosquitto."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NewMosquitto
from tests.integration.gateway.conftest import Gateway, NewGateway
from tests.integration.net.conftest import Authority
from tests.integration.net.ways import HttpProxy, SocksProxy
from towline import Client, ClientSettings
from towline.net.tls import Tls
from towline_prove.devstack.process import free_port

COUNT = 2000


def contents(longest: int) -> list[bytes]:
    """Numbered payloads, most of them small, some longer than a TLS record, a WebSocket frame or a read."""
    chance = random.Random(4)
    sizes = [chance.choice((0, 7, 150, 900)) for _ in range(COUNT)]
    sizes[100], sizes[700], sizes[1300] = min(70_000, longest), 125, longest
    return [b"%d:" % number + chance.randbytes(size) for number, size in enumerate(sizes)]


def carried(gateway: Gateway, uri: str, *, tls: Tls | None = None, **way: Any) -> tuple[list[bytes], list[bytes]]:
    """What was published over a transport, and what the journal of a gateway on the same transport holds."""
    # Mosquitto 2.0 sends 4 KiB of a WebSocket message per turn of its loop, every 0.1 s (its issue #411).
    sent = contents(longest=20_000 if uri.startswith("ws") else 2_500_000)
    gateway.start()
    status = gateway.until(state="online")
    assert status["broker"] == uri
    with Client(uri, client_id="device", settings=ClientSettings(tls=tls or Tls(), **way)) as client:
        for result in [client.publish("t/1", payload) for payload in sent]:
            result.wait(60)
    status = gateway.until(journaled=COUNT)
    assert (status["connects"], status["last_error"]) == (1, None)
    assert gateway.stop() == 0
    return sent, [row["payload"] for row in gateway.rows()]


@pytest.fixture
def ample(new_mosquitto: NewMosquitto) -> dict[str, str]:
    """Mosquitto's settings for a broker that drops nothing."""
    return {"max_queued_messages": "0"}


def test_tcp(new_mosquitto: NewMosquitto, new_gateway: NewGateway, ample: dict[str, str]) -> None:
    broker = new_mosquitto(**ample)
    sent, kept = carried(new_gateway(broker), broker.uri)
    assert kept == sent


def test_ipv6(new_mosquitto: NewMosquitto, new_gateway: NewGateway, ample: dict[str, str]) -> None:
    port = free_port()
    new_mosquitto(**ample, listener=f"{port} ::1")
    uri = f"mqtt://[::1]:{port}"
    sent, kept = carried(new_gateway(uri), uri)
    assert kept == sent


def test_unix_socket(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, ample: dict[str, str], tmp_path: Path
) -> None:
    new_mosquitto(**ample, listener=f"0 {tmp_path}/mqtt.sock")
    uri = f"unix://{tmp_path}/mqtt.sock"
    sent, kept = carried(new_gateway(uri), uri)
    assert kept == sent


def test_tls_with_a_client_certificate(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, ample: dict[str, str], authority: Authority
) -> None:
    broker = new_mosquitto(
        **ample, **authority.listener("localhost"), cafile=str(authority.ca_file), require_certificate="true"
    )
    cert_file, key_file = authority.issue("gateway.example")
    tls = Tls(authority.ca_file, cert_file, key_file, min_version="1.3")
    uri = f"mqtts://localhost:{broker.port}"
    sent, kept = carried(new_gateway(uri, tls=tls), uri, tls=tls)
    assert kept == sent


def test_websocket(new_mosquitto: NewMosquitto, new_gateway: NewGateway, ample: dict[str, str]) -> None:
    port = free_port()
    new_mosquitto(**ample, listener=f"{port} 127.0.0.1", protocol="websockets")
    uri = f"ws://127.0.0.1:{port}/mqtt"
    sent, kept = carried(new_gateway(uri), uri)
    assert kept == sent


def test_websocket_in_tls(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, ample: dict[str, str], authority: Authority
) -> None:
    port = free_port()
    new_mosquitto(**ample, listener=f"{port} 127.0.0.1", protocol="websockets", **authority.listener("broker.example"))
    tls = Tls(ca_file=authority.ca_file, server_name="broker.example")
    uri = f"wss://127.0.0.1:{port}/any/path"
    sent, kept = carried(new_gateway(uri, tls=tls), uri, tls=tls)
    assert kept == sent


@pytest.mark.parametrize("kind", [HttpProxy, SocksProxy])
@pytest.mark.parametrize("scheme", ["mqtt", "mqtts", "wss"])
def test_proxy(
    new_mosquitto: NewMosquitto,
    new_gateway: NewGateway,
    ample: dict[str, str],
    authority: Authority,
    tmp_path: Path,
    kind: type[HttpProxy],
    scheme: str,
) -> None:
    """The name of the broker means something to the proxy only, and the certificate is for it."""
    port = free_port()
    security = {} if scheme == "mqtt" else authority.listener("broker.internal")
    web = {"protocol": "websockets"} if scheme == "wss" else {}
    new_mosquitto(**ample, listener=f"{port} 127.0.0.1", **web, **security)
    secret = tmp_path / "proxy-password"
    secret.write_text("opensesame\n")
    uri = f"{scheme}://broker.internal:1" + ("/mqtt" if web else "")
    with kind("me:opensesame", {"broker.internal": ("127.0.0.1", port)}) as proxy:
        way = f"{'http' if kind is HttpProxy else 'socks5'}://me@{proxy.address}"
        gateway = new_gateway(uri, proxy=way, proxy_password_file=secret, tls=Tls(ca_file=authority.ca_file))
        sent, kept = carried(gateway, uri, tls=Tls(ca_file=authority.ca_file), proxy=way, proxy_password_file=secret)
        assert kept == sent
        assert proxy.connections == 2
        assert all("broker.internal:1" in request for request in proxy.requests), "the proxy looked the name up"
    log = gateway.log.read_text()
    assert "opensesame" not in log
    assert "me@" not in log


def test_a_name_with_several_addresses_is_tried_through(
    new_mosquitto: NewMosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = new_mosquitto()
    nobody = free_port()
    answers = [("127.0.0.1", nobody), ("127.0.0.2", nobody), ("127.0.0.1", broker.port)]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in answers]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: found)
    with Client("mqtt://many.example", client_id="device") as client:
        client.publish("t/1", b"x").wait(60)
