"""Which broker of the list is in use, and how soon a dead line is noticed."""

from __future__ import annotations

import socket
import time

import pytest
from mqtt5 import ConnAckPacket, ConnectPacket, DisconnectPacket, PingReqPacket

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.conftest import NewGateway, publish
from tests.integration.net.scripted import Line, Scripted
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import Decoder
from towline_prove.devstack import Mosquitto
from towline_prove.proxy import FaultProxy


def test_failover_and_return(new_mosquitto: NewMosquitto, new_gateway: NewGateway) -> None:
    """After a failover every reconnect begins at the first broker of the list."""
    first, second = new_mosquitto(), new_mosquitto()
    gateway = new_gateway(f"{first.uri},{second.uri}").connect(broker=first.uri)
    first.kill()
    gateway.until(state="online", broker=second.uri)
    publish(second, range(3))
    gateway.until(journaled=3)
    first.start()
    assert gateway.status()["broker"] == second.uri, "a working connection is left alone"
    second.restart()
    gateway.until(state="online", broker=first.uri)
    publish(first, range(3, 6))
    gateway.until(journaled=6)
    gateway.stop()
    assert [int(row["payload"]) for row in gateway.rows()] == list(range(6))


def test_mosquitto_hands_on_nothing_that_we_would_end_a_connection_for(mosquitto: Mosquitto) -> None:
    """So no device stops a line by it: each of these is refused where it is published (docs/guarantees.md) [I13]."""
    broken = {
        "Payload Format Indicator 2": b"\1\2",
        "a response topic without a character": b"\x08\0\0",
        "a response topic with a wildcard": b"\x08\0\1#",
        "U+0000": b"\x26\0\1\0\0\1a",
        "ill-formed UTF-8": b"\x26\0\1\xff\0\1a",
        "a property twice": b"\3\0\1a\3\0\1b",
        "a value that ends in the payload": b"\2\0",
    }
    for name, properties in broken.items():
        body = b"\0\1t\0\7" + bytes((len(properties),)) + properties + b"payload"
        with pytest.raises(MalformedPacket):
            Decoder().feed(bytes((0x32, len(body))) + body)
        with socket.create_connection(("127.0.0.1", mosquitto.port), 10) as device:
            line = Line(device)
            line.send(ConnectPacket("device"))
            line.expect(ConnAckPacket)
            device.sendall(bytes((0x32, len(body))) + body)
            answer = line.receive()
            assert answer is None or isinstance(answer, DisconnectPacket), f"{name}: {answer}"


def takes_us_in_and_hangs_up(line: Line) -> None:
    line.welcome()
    line.subscribed()


def test_a_first_broker_that_hangs_up_each_time_does_not_hold_up_the_second(
    mosquitto: Mosquitto, new_gateway: NewGateway
) -> None:
    """It comes online there every time, and never gets a message."""
    with Scripted(*[takes_us_in_and_hangs_up] * 5) as flapping:
        uris = [flapping.uri, mosquitto.uri]
        gateway = new_gateway(",".join(uris)).connect(broker=mosquitto.uri)
        publish(mosquitto, range(3))
        gateway.until(journaled=3)
        gateway.stop()
        assert flapping.connections == 5


def test_a_half_open_line_is_found_within_one_and_a_half_keep_alives(
    mosquitto: Mosquitto, new_gateway: NewGateway
) -> None:
    """The proxy goes on acknowledging on the TCP level, so only the unanswered ping tells."""
    with FaultProxy(mosquitto.port) as line:
        gateway = new_gateway(f"mqtt://127.0.0.1:{line.port}", keep_alive_s=5).connect()
        publish(mosquitto, range(5))
        gateway.until(journaled=5)
        line.hang()
        began = time.monotonic()
        publish(mosquitto, range(5, 10))  # on its way into the hole
        wait_until(lambda: gateway.status()["state"] != "online", what="the word")
        took = time.monotonic() - began
        line.forward()
        gateway.until(state="online", connects=2)
        assert took < 1.5 * 5 + 1.5, f"{took:.1f} s"
        gateway.until(journaled=10)
        gateway.stop()
    assert [int(row["payload"]) for row in gateway.rows()] == list(range(10))
    assert "no answer to PINGREQ within 3.75 s" in gateway.log.read_text()


def test_a_server_that_wants_no_keep_alive_is_pinged_all_the_same(new_gateway: NewGateway) -> None:
    """Server Keep Alive 0, and then it says nothing any more: the line would be "online" for ever."""

    def script(line: Line) -> None:
        line.welcome(server_keep_alive=0, session_expiry_interval=7200)
        line.subscribed()
        line.expect(PingReqPacket)
        assert line.closed()

    def again(line: Line) -> None:
        line.expect(ConnectPacket)
        line.send(ConnAckPacket(session_present=True))
        assert line.closed()

    with Scripted(script, again) as server:
        gateway = new_gateway(server.uri, keep_alive_s=5).connect(session_kept_s=7200)
        gateway.until(state="online", connects=2, session_kept_s=0xFFFFFFFF)
        gateway.stop()
    log = gateway.log.read_text()
    assert "no answer to PINGREQ within 3.75 s" in log
    assert log.count("TL-M36") == 1, "the first connection keeps the session for 7,200 s only"
