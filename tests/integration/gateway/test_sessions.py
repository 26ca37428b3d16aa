"""What a gateway does to the broker's session when something goes wrong around CONNECT."""

from __future__ import annotations

import signal
import threading

from mqtt5 import (
    DisconnectPacket,
    DisconnectReasonCode,
    PubAckPacket,
    PublishPacket,
    PubRecPacket,
    QoS,
    SubscribePacket,
)

from tests.conftest import NewMosquitto
from tests.integration.conftest import NewGateway
from tests.integration.net.scripted import Line, Scripted
from towline import Client


def test_a_kill_at_the_first_subscribe_of_a_new_session_loses_no_message_with_an_old_id(
    new_gateway: NewGateway,
) -> None:
    """The broker lost the session while id 1 was held; the new one gives it to a message of the same content."""
    message = PublishPacket("t/1", b"1", qos=QoS.EXACTLY_ONCE, packet_id=1)

    def held(line: Line) -> None:
        line.welcome()
        line.subscribed()
        line.send(message)
        line.expect(PubRecPacket)

    def lost(line: Line) -> None:
        line.welcome()
        line.expect(SubscribePacket)
        gateway.stop(signal.SIGKILL)
        killed.set()

    def again(line: Line) -> None:
        line.welcome(session_present=True)
        line.subscribed()
        line.send(message)
        line.expect(PubRecPacket)
        assert line.closed()

    killed = threading.Event()
    with Scripted(held, lost, again) as server:
        gateway = new_gateway(server.uri, qos=2)
        gateway.spawn()
        assert killed.wait(60)
        gateway.start()
        status = gateway.until(journaled=2)
        assert (status["sessions_lost"], status["deduplicated"], status["packet_ids_reused"]) == (1, 0, 0)
        gateway.stop()


# Several brokers that share no sessions -------------------------------------------------------------------------------


def test_a_filter_added_while_the_broker_was_another_one_is_asked_for_on_the_way_back(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway
) -> None:
    """One broker in the settings each time: the first one's session is kept, and of before the filter."""
    first, second = (new_mosquitto(persistence="true") for _ in range(2))
    wider = [{"pattern": "t/#", "qos": 1}, {"pattern": "u", "qos": 1}]
    for broker, subscriptions in ((first, wider[:1]), (second, wider), (first, wider)):
        gateway = new_gateway(broker, subscriptions=subscriptions).connect()
        if subscriptions is wider and broker is first:
            break
        gateway.stop()
    with Client(first.uri, client_id="device") as client:
        client.publish("u", b"1").result(60)
    gateway.until(journaled=1)
    gateway.stop()


def test_a_repeat_is_stored_once_and_a_damaged_message_never(new_gateway: NewGateway) -> None:
    """What a gateway makes of a broker that sends again by a timer, and of a line that damages a packet [I3]."""
    payload = b'{"temperature":21.5}'
    # Property Length 2, and a Message Expiry Interval of four bytes: three of the payload are its own.
    damaged = b"\x34\x1d\x00\x03t/3\x00\x07\x02\x02" + payload

    def again(line: Line) -> None:
        line.welcome()
        line.subscribed()
        first, second = (PublishPacket(f"t/{i}", b"%d" % i, qos=QoS.AT_LEAST_ONCE, packet_id=i) for i in (1, 2))
        repeat = PublishPacket("t/1", b"1", qos=QoS.AT_LEAST_ONCE, packet_id=1, duplicate=True)
        line.send(first, repeat, second, repeat)
        assert [line.expect(PubAckPacket).packet_id for _ in range(2)] == [1, 2]
        line.sock.sendall(damaged)
        assert line.expect(DisconnectPacket).reason_code == DisconnectReasonCode.MALFORMED_PACKET
        assert line.closed()

    def sound(line: Line) -> None:
        line.welcome(session_present=True)
        line.send(PublishPacket("t/3", payload, qos=QoS.EXACTLY_ONCE, packet_id=7, duplicate=True))
        line.expect(PubRecPacket)
        assert line.closed()

    with Scripted(again, sound) as server:
        gateway = new_gateway(server.uri, qos=2)
        gateway.start()
        gateway.until(journaled=3, deduplicated=2)
        gateway.stop()
    assert [(row["topic"], row["payload"]) for row in gateway.rows()] == [
        ("t/1", b"1"),
        ("t/2", b"2"),
        ("t/3", payload),
    ]
    assert "TL-M30" in gateway.log.read_text()


def test_a_repeat_while_kafka_is_waited_for_is_stored_once_and_acknowledged_once(new_gateway: NewGateway) -> None:
    """With ``ack_after = kafka`` a PUBACK is owed for longer than a broker's timer [I3]."""
    started, committed = threading.Event(), threading.Event()
    first, repeat = (PublishPacket("t", b"1", qos=QoS(1), packet_id=1, duplicate=again) for again in (False, True))

    def again(line: Line) -> None:
        line.welcome()
        line.subscribed()
        assert started.wait(60)
        line.send(first)
        gateway.until(journaled=1)
        line.send(repeat)
        gateway.until(deduplicated=1)
        line.send(repeat, PublishPacket("t", b"2", qos=QoS(1), packet_id=2))
        assert committed.wait(60)
        assert [line.expect(PubAckPacket).packet_id for _ in range(2)] == [1, 2]
        line.send(PublishPacket("t", b"3", qos=QoS(1), packet_id=1))  # the id is free, and no PUBACK on its way
        assert line.closed()

    with Scripted(again) as server:
        gateway = new_gateway(server.uri, ack_after="kafka")
        gateway.start()
        started.set()
        gateway.until(journaled=2, deduplicated=2)
        gateway.commit()
        committed.set()
        gateway.until(journaled=3, deduplicated=2)
        gateway.stop()
