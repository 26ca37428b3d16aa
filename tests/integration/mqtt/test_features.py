"""What MQTT 5 offers a client beside messages: on a real Mosquitto where it can do it, else on a scripted socket."""

from __future__ import annotations

import mqtt5
import pytest

from tests.integration.conftest import NewGateway
from tests.integration.net.scripted import Line, Scripted
from tests.integration.net.test_client import take
from towline import Client, Filter
from towline_prove.devstack import Mosquitto

AT_LEAST_ONCE, EXACTLY_ONCE = mqtt5.QoS.AT_LEAST_ONCE, mqtt5.QoS.EXACTLY_ONCE


# Subscription options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("handling", "first", "second"), [(0, 1, 1), (1, 1, 0), (2, 0, 0)])
def test_retain_handling(mosquitto: Mosquitto, handling: int, first: int, second: int) -> None:
    """Retained messages always, only for a new subscription, never; a changed option subscribes again."""
    with Client(mosquitto.uri, client_id="device") as device:
        device.publish("t/kept", b"kept", retain=True).result(60)
    for qos, expected in ((1, first), (2, second)):
        filters = [Filter("t/#", qos, retain_handling=handling)]
        with Client(mosquitto.uri, client_id="reader", subscribe=filters) as reader:
            reader.publish("t/mark", b"mark").result(60)
            taken = take(reader, expected + 1)
        assert [(m.payload, m.retain) for m in taken] == [(b"kept", True)] * expected + [(b"mark", False)]


def test_several_identifiers_in_one_message_reach_the_column(new_gateway: NewGateway) -> None:
    """In the order they came; the gateway's setting is the SUBSCRIBE's property."""
    asked: list[int | None] = []

    def script(line: Line) -> None:
        line.welcome()
        asked.extend(line.subscribed().subscription_id for _ in range(2))
        line.send(mqtt5.PublishPacket("t/1", b"1", qos=AT_LEAST_ONCE, packet_id=1, subscription_ids=[9, 3]))
        assert line.expect(mqtt5.PubAckPacket).packet_id == 1
        assert line.closed()

    subscriptions = [{"pattern": "t/#", "identifier": 3}, {"pattern": "t/1", "identifier": 9}]
    with Scripted(script) as server:
        gateway = new_gateway(server.uri, subscriptions=subscriptions)
        gateway.start()
        gateway.until(journaled=1)
        gateway.stop()
    assert asked == [3, 9]
    assert [row["subscription_ids"] for row in gateway.rows()] == [[9, 3]]


# Shared subscriptions -------------------------------------------------------------------------------------------------


def test_members_of_a_group_share_the_messages(mosquitto: Mosquitto) -> None:
    """Each message goes to one of them; an ordinary subscriber gets all."""
    shared = ["$share/group/t/#"]
    with (
        Client(mosquitto.uri, client_id="a", subscribe=shared) as first,
        Client(mosquitto.uri, client_id="b", subscribe=shared) as second,
        Client(mosquitto.uri, client_id="c", subscribe=["t/#"]) as everything,
    ):
        for number in range(100):
            everything.publish(f"t/{number}", b"%d" % number)
        got = {id(client): take(client, 50) for client in (first, second)}
        numbers = sorted(int(m.payload or b"") for taken in got.values() for m in taken)
        assert numbers == list(range(100))
        assert len(take(everything, 100)) == 100


# Limits of the server -------------------------------------------------------------------------------------------------


def sent(line: Line, count: int) -> list[mqtt5.PublishPacket]:
    return [line.expect(mqtt5.PublishPacket) for _ in range(count)]


def test_the_servers_receive_maximum_bounds_what_is_open() -> None:
    """[MQTT-4.9.0-2, -3], [MQTT-3.3.4-7], [MQTT-3.3.4-8]: with no quota left all but PUBLISH still leaves."""

    def script(line: Line) -> None:
        line.welcome(receive_max=2, server_keep_alive=3)
        line.subscribed()
        first, second = sent(line, 2)
        line.send(mqtt5.PublishPacket("t", b"1", qos=AT_LEAST_ONCE, packet_id=1))
        line.send(mqtt5.PublishPacket("t", b"2", qos=EXACTLY_ONCE, packet_id=2))
        assert isinstance(line.receive(), mqtt5.PubAckPacket)
        assert isinstance(line.receive(), mqtt5.PubRecPacket)
        assert isinstance(line.receive(), mqtt5.PingReqPacket), "and no third PUBLISH"
        line.send(mqtt5.PingRespPacket(), mqtt5.PubRelPacket(2))
        assert isinstance(line.receive(), mqtt5.PubCompPacket)
        line.send(mqtt5.PubAckPacket(first.packet_id or 0))
        (third,) = sent(line, 1)
        line.send(mqtt5.PubAckPacket(second.packet_id or 0), mqtt5.PubAckPacket(third.packet_id or 0))
        assert isinstance(line.receive(), mqtt5.DisconnectPacket)

    with Scripted(script) as server, Client(server.uri, client_id="x", subscribe=[Filter("t", 2)]) as client:
        receipts = [client.publish("u", b"%d" % number) for number in range(3)]
        take(client, 2)
        assert [receipt.result(60).reason for receipt in receipts] == [0] * 3
