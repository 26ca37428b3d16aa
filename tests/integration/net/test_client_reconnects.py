"""What a new connection means for messages on their way, against a scripted server: each packet where it hurts."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mqtt5 import DisconnectPacket, Packet, PubAckPacket, PubCompPacket, PublishPacket, PubRecPacket, PubRelPacket, QoS

from tests.helpers import wait_until
from tests.integration.net.scripted import Line, Scripted
from tests.integration.net.test_client import take
from towline import Client

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


def test_qos_1_that_was_taken_and_not_acknowledged_holds_nothing_back_after_a_reconnect() -> None:
    """Its acknowledgement is void; the one of its second copy counts."""
    cut = threading.Event()
    again = [message(b"a", 1, again=True), message(b"b", 2)]
    script = resumed(*again, answers=[PubAckPacket(1), PubAckPacket(2)])
    with Scripted(until(cut, message(b"a", 1)), script) as server, Client(server.uri, client_id="x") as client:
        (old,) = take(client, 1, ack=False)
        cut.set()
        assert [m.payload for m in take(client, 2)] == [b"a", b"b"]
        wait_until(lambda: client._driver.session.inbound.unacknowledged_count == 0)
        old.ack()


def test_a_lost_session_lets_an_old_id_mean_a_new_message() -> None:
    """Also one of the same content."""
    cut = threading.Event()
    script = resumed(message(b"a", 1, TWO), answers=[PubRecPacket(1), PubCompPacket(1)], kept=False)
    with Scripted(until(cut, message(b"a", 1, TWO)), script) as server, Client(server.uri, client_id="x") as client:
        (old,) = take(client, 1, ack=False)
        cut.set()
        (new,) = take(client, 1)
        assert (old.number, new.number) == (0, 1)
        assert client.sessions_lost == 1
        wait_until(lambda: not client._driver.session.inbound.unreleased_messages)
        old.ack()
