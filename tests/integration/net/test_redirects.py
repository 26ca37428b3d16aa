"""Server Reference [MQTT 5 section 4.11]: shown by default, followed on demand, and never in a circle."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable

import pytest
from mqtt5 import ConnAckPacket, ConnAckReasonCode, ConnectPacket, DisconnectPacket, DisconnectReasonCode

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.gateway.conftest import NewGateway, publish
from tests.integration.net.conftest import Authority
from tests.integration.net.scripted import Line, Scripted
from towline import Client, ClientSettings, Tls
from towline.errors import BrokerRefused, TowlineError, Unreachable
from towline.net.driver import MAX_REDIRECTS
from towline_prove.devstack import Mosquitto

ANOTHER, MOVED = ConnAckReasonCode.USE_ANOTHER_SERVER, ConnAckReasonCode.SERVER_MOVED


def elsewhere(reference: str | None, reason: ConnAckReasonCode = ANOTHER) -> Callable[[Line], None]:
    def script(line: Line) -> None:
        line.expect(ConnectPacket)
        line.send(ConnAckPacket(reason_code=reason, server_reference=reference))
        assert line.closed()

    return script


def ended(reference: str, reason: DisconnectReasonCode, when: threading.Event) -> Callable[[Line], None]:
    """Serve until `when`, then name another server."""

    def script(line: Line) -> None:
        line.welcome()
        when.wait(60)
        line.send(DisconnectPacket(reason_code=reason, server_reference=reference))
        assert line.closed()

    return script


@pytest.mark.parametrize(
    ("reference", "reason", "follow", "error", "words"),
    [
        ("b:1", ANOTHER, False, Unreachable, r"asks us to use another server for now: b:1 \(0x9C\).*TL-M26"),
        ("b:1", MOVED, False, BrokerRefused, r"has moved to another server: b:1 \(0x9D\).*follow_redirects"),
        (None, ANOTHER, True, Unreachable, "and does not say which"),
        ("a\x1b[2Jb\n" + "c" * 500, ANOTHER, True, Unreachable, r"a\\x1b\[2Jb\\x0accc"),
    ],
)
def test_a_redirect_that_is_not_followed_is_one_harmless_line(
    reference: str | None, reason: ConnAckReasonCode, follow: bool, error: type[TowlineError], words: str
) -> None:
    with Scripted(elsewhere(reference, reason)) as server, pytest.raises(error, match=words) as caught:
        Client(server.uri, client_id="x", settings=ClientSettings(follow_redirects=follow))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("reason", [ANOTHER, MOVED])
def test_a_reference_in_connack_is_followed(mosquitto: Mosquitto, reason: ConnAckReasonCode) -> None:
    server = Scripted(elsewhere(f"no_name! 127.0.0.1:{mosquitto.port}", reason))
    with (
        server,
        Client(server.uri, client_id="x", subscribe=["t"], settings=ClientSettings(follow_redirects=True)) as client,
    ):
        assert str(client._driver.endpoint) == mosquitto.uri
        client.publish("t", b"1").wait(60)
        message = client.receive(5)
        assert message is not None


def test_use_another_server_is_forgotten_and_server_moved_is_not(new_mosquitto: NewMosquitto) -> None:
    """0x9C counts for one connection; after 0x9D the old address is not asked again."""
    target = new_mosquitto()
    reference = f"127.0.0.1:{target.port}"
    server = Scripted(elsewhere(reference), elsewhere(reference, MOVED))
    settings = ClientSettings(follow_redirects=True, reconnect_delay_s=4)  # the target is up again before
    with server, Client(server.uri, client_id="x", settings=settings) as client:
        assert (server.connections, str(client._driver.endpoint)) == (1, target.uri)
        for connections in (2, 2):
            target.kill()
            target.start()
            wait_until(lambda: not client.online)
            wait_until(lambda: client.online)
            assert (server.connections, str(client._driver.endpoint)) == (connections, target.uri)


def test_a_reference_in_disconnect_is_followed(mosquitto: Mosquitto) -> None:
    now = threading.Event()
    script = ended(f"127.0.0.1:{mosquitto.port}", DisconnectReasonCode.SERVER_MOVED, now)
    with (
        Scripted(script) as server,
        Client(server.uri, client_id="x", settings=ClientSettings(follow_redirects=True)) as client,
    ):
        assert str(client._driver.endpoint) == server.uri
        waiting = client.publish("t", b"1", qos=1)
        now.set()
        assert waiting.wait(60).reason in (0, 0x10)
        assert str(client._driver.endpoint) == mosquitto.uri


def test_servers_that_send_us_round_are_given_up() -> None:
    ports: list[int] = []

    def there(index: int) -> Callable[[Line], None]:
        def script(line: Line) -> None:
            elsewhere(f"127.0.0.1:{ports[index]}")(line)

        return script

    hops = MAX_REDIRECTS // 2
    with Scripted(*[there(1)] * (hops + 1)) as one, Scripted(*[there(0)] * hops) as other:
        ports += [one.port, other.port]
        with pytest.raises(Unreachable, match=rf"redirected {MAX_REDIRECTS} times.*TL-M27"):
            Client(one.uri, client_id="x", settings=ClientSettings(follow_redirects=True))


def test_the_certificate_of_the_other_server_is_verified(new_mosquitto: NewMosquitto, authority: Authority) -> None:
    """Whoever sends us away can't send us to somebody without a certificate for that name."""
    wrong = new_mosquitto(**authority.listener("other.example"))
    right = new_mosquitto(**authority.listener("127.0.0.1"))
    front = authority.listener("localhost")
    plain = Scripted(elsewhere(f"127.0.0.1:{wrong.port} 127.0.0.1:{right.port}"))
    with plain, TlsFront(plain.port, front) as port:
        tls = Tls(ca_file=authority.ca_file)
        with Client(
            f"mqtts://localhost:{port}", client_id="x", settings=ClientSettings(tls=tls, follow_redirects=True)
        ) as client:
            assert str(client._driver.endpoint) == f"mqtts://127.0.0.1:{right.port}"


class TlsFront:
    """TLS before a plain server, for one connection."""

    def __init__(self, target: int, files: dict[str, str]) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files["certfile"], files["keyfile"])
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self._context = context
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> int:
        self._thread.start()
        return int(self._server.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._thread.join(60)
        self._server.close()

    def _serve(self) -> None:
        sock, _ = self._server.accept()
        plain = socket.create_connection(("127.0.0.1", self._target), 5)
        with self._context.wrap_socket(sock, server_side=True) as line, plain:
            plain.sendall(line.recv(65536))
            line.sendall(plain.recv(65536))
            while line.recv(65536):
                pass


def test_a_gateway_shows_a_reference(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    with Scripted(elsewhere(f"127.0.0.1:{mosquitto.port}", MOVED)) as server:
        assert "TL-M26" in new_gateway(server.uri).fail()


def test_a_gateway_follows_a_reference(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    with Scripted(elsewhere(f"127.0.0.1:{mosquitto.port}")) as server:
        gateway = new_gateway(server.uri, follow_redirects=True)
        gateway.start()
        gateway.until(state="online", broker=mosquitto.uri)
        publish(mosquitto, range(3))
        gateway.until(journaled=3)
        gateway.stop()
    assert "TL-M26" in gateway.log.read_text()
