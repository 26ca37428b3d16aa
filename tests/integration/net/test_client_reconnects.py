"""What a new connection means for messages on their way, against a scripted server: each packet where it hurts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from mqtt5 import (
    DisconnectPacket,
    Packet,
    PubAckPacket,
    PubCompPacket,
    PublishPacket,
    PubRecPacket,
    PubRelPacket,
    QoS,
)

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.net.scripted import Line, Scripted
from tests.integration.net.test_client import take
from towline import Client, ClientSettings
from towline.errors import BrokerError

ONE, TWO = QoS.AT_LEAST_ONCE, QoS.EXACTLY_ONCE


def message(payload: bytes, packet_id: int, qos: QoS = ONE, *, again: bool = False) -> PublishPacket:
    return PublishPacket("t", payload, qos=qos, packet_id=packet_id, duplicate=again)


def until(cut: threading.Event, *packets: Packet) -> Callable[[Line], None]:
    """Send these on the first connection, and break it at `cut`."""

    def script(line: Line) -> None:
        line.welcome()
        line.send(*packets)
        assert cut.wait(60)

    return script


def resumed(*packets: Packet, answers: list[Packet], kept: bool = True) -> Callable[[Line], None]:
    """Send these on the second connection and expect the answers, then the goodbye."""

    def script(line: Line) -> None:
        line.welcome(session_present=kept)
        line.send(*packets)
        for wanted in answers:
            got = line.receive()
            assert got == wanted, got
            if isinstance(got, PubRecPacket):
                line.send(PubRelPacket(got.packet_id))
        assert isinstance(line.receive(), DisconnectPacket)
        assert line.closed()

    return script


def test_qos_1_that_nobody_had_taken_is_handed_out_once() -> None:
    cut = threading.Event()
    again = [message(b"a", 1, again=True), message(b"b", 2, again=True), message(b"c", 3)]
    answers: list[Packet] = [PubAckPacket(1), PubAckPacket(2), PubAckPacket(3)]
    first = until(cut, message(b"a", 1), message(b"b", 2))
    with Scripted(first, resumed(*again, answers=answers)) as server, Client(server.uri, client_id="x") as client:
        wait_until(lambda: len(client._receive_queue.messages) == 2)
        cut.set()
        wait_until(
            lambda: (
                client._driver.connection_count == 2
                and client._receive_queue.messages
                and client._receive_queue.messages[-1].payload == b"c"
            )
        )
        assert [m.payload for m in take(client, 3)] == [b"a", b"b", b"c"]
        assert client.receive(0.1) is None
        wait_until(lambda: client._driver.session.inbound.unacknowledged_count == 0)


def test_qos_2_that_was_taken_is_acknowledged_on_the_next_connection_and_not_handed_out_again() -> None:
    cut = threading.Event()
    again = [message(b"a", 1, TWO, again=True), message(b"b", 2, TWO)]
    answers: list[Packet] = [PubRecPacket(1), PubRecPacket(2), PubCompPacket(1), PubCompPacket(2)]
    script = resumed(*again, answers=answers)
    with Scripted(until(cut, message(b"a", 1, TWO)), script) as server, Client(server.uri, client_id="x") as client:
        (first,) = take(client, 1, ack=False)
        cut.set()
        (second,) = take(client, 1)
        assert second.payload == b"b"
        assert client.receive(0.1) is None
        first.ack()
        wait_until(lambda: not client._driver.session.inbound.unreleased_messages)


def test_a_message_over_a_limit_that_3_1_1_has_no_word_for_stops_no_other(new_mosquitto: NewMosquitto) -> None:
    """The broker ends the connection at it each time it is sent; version 5 would have named a Maximum Packet Size."""
    broker = new_mosquitto(max_packet_size="2000")
    with Client(broker.uri, client_id="x", settings=ClientSettings(protocol="3.1.1")) as client:
        sent = [client.publish("t", bytes(size), qos=2) for size in (10, 5000, 20, 30)]
        for receipt in (sent[0], *sent[2:]):
            assert receipt.wait(60).reason == 0
        with pytest.raises(BrokerError, match=r"ends the connection at this message.*\[TL-M31\]"):
            sent[1].wait(60)
