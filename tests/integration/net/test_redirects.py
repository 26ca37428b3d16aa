"""Server Reference [MQTT 5 section 4.11]: shown by default, followed on demand, and never in a circle."""

from __future__ import annotations

from collections.abc import Callable

from mqtt5 import ConnAckPacket, ConnAckReasonCode, ConnectPacket

from tests.integration.conftest import NewGateway, publish
from tests.integration.net.scripted import Line, Scripted
from towline_prove.devstack import Mosquitto

ANOTHER, MOVED = ConnAckReasonCode.USE_ANOTHER_SERVER, ConnAckReasonCode.SERVER_MOVED


def elsewhere(reference: str | None, reason: ConnAckReasonCode = ANOTHER) -> Callable[[Line], None]:
    def script(line: Line) -> None:
        line.expect(ConnectPacket)
        line.send(ConnAckPacket(reason_code=reason, server_reference=reference))
        assert line.closed()

    return script


def test_a_gateway_shows_a_reference(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    with Scripted(elsewhere(f"127.0.0.1:{mosquitto.port}", MOVED)) as server:
        assert "TL-M26" in new_gateway(server.uri).fail()


def test_a_gateway_follows_a_reference(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    with Scripted(elsewhere(f"127.0.0.1:{mosquitto.port}")) as server:
        gateway = new_gateway(server.uri, follow_redirects=True).connect(broker=mosquitto.uri)
        publish(mosquitto, range(3))
        gateway.until(journaled=3)
        gateway.stop()
    assert "TL-M26" in gateway.log.read_text()
