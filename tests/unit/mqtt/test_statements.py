"""Statements that MQTT 5.0 and 3.1.1 share, on the session in both versions: bytes in, bytes out."""

from __future__ import annotations

from dataclasses import replace

import mqtt5
import pytest

from tests.helpers import outgoing, publish
from tests.unit.mqtt.sessions import Method, challenge, receive, sent
from towline.mqtt import events
from towline.mqtt.codec import Packet, encode
from towline.mqtt.session import Session

VERSIONS = pytest.mark.parametrize("version", [5, 4])
CONFIG = events.SessionConfig("plant-7", "line")
RECORD = events.SessionRecord("plant-7", established=True)


class Peer:
    """A session and the server's view of it: what it sent, packet by packet."""

    def __init__(
        self,
        version: int,
        config: events.SessionConfig = CONFIG,
        held: dict[int, events.UnreleasedMessage] | None = None,
    ) -> None:
        self.version = version
        self.session = Session(replace(config, protocol=version), RECORD, 10, held)
        self.actions: list[events.Action] = []

    def does(self, event: events.Event) -> list[Packet]:
        self.actions = self.session.handle(event, 0.0)
        return sent(self.actions, self.version)

    def gets(self, *packets: Packet) -> list[Packet]:
        self.actions = receive(self.session, *packets)
        return sent(self.actions, self.version)

    def connects(self, *, kept: bool = True) -> list[Packet]:
        """What leaves after CONNACK."""
        (connect,) = self.does(events.ConnectionOpened())
        assert isinstance(connect, mqtt5.ConnectPacket)
        return self.gets(mqtt5.ConnAckPacket(session_present=kept))

    @property
    def closes(self) -> bool:
        return isinstance(self.actions[-1], events.Close)


def online(version: int, config: events.SessionConfig = CONFIG) -> Peer:
    peer = Peer(version, config)
    assert peer.connects() == []
    return peer


# Publishing


@VERSIONS
@pytest.mark.parametrize("qos", [1, 2])
def test_dup_of_what_was_received_is_not_passed_on(version: int, qos: int) -> None:
    """[MQTT-3.3.1-3], [MQTT-3.3.1-3 of 3.1.1]: whoever hands on a repeated message sends it for the first time."""
    peer = online(version)
    peer.gets(publish(qos=qos, duplicate=True))
    (delivery,) = [action for action in peer.actions if isinstance(action, events.Deliver)]
    (received,) = delivery.messages.packets
    assert isinstance(received, mqtt5.PublishPacket)
    assert received.duplicate
    (packet,) = peer.does(events.Publish(1, outgoing(received)))
    assert isinstance(packet, mqtt5.PublishPacket)
    assert not packet.duplicate


def test_a_message_handed_on_has_no_subscription_identifier() -> None:
    """[MQTT-3.3.4-6]."""
    peer = online(5)
    (packet,) = peer.does(events.Publish(1, outgoing(publish(subscription_ids=[1, 2]))))
    assert isinstance(packet, mqtt5.PublishPacket)
    assert not packet.subscription_ids


# Receiving


@VERSIONS
def test_each_qos_has_its_answer_with_the_same_id_and_a_known_reason(version: int) -> None:
    """[MQTT-3.3.4-1], [MQTT-4.3.2-4], [MQTT-4.3.3-8], [MQTT-2.2.1-5].

    [MQTT-3.4.2-1], [MQTT-3.5.2-1], [MQTT-3.7.2-1], [MQTT-3.3.4-1 of 3.1.1].
    """
    peer = online(version)
    assert peer.gets(publish(qos=0), publish(qos=1, packet_id=77), publish(qos=2, packet_id=78)) == [], (
        "not before it is settled"
    )
    answers = peer.does(events.AckWatermark(13))
    assert answers == [mqtt5.PubAckPacket(77), mqtt5.PubRecPacket(78)]
    assert peer.gets(mqtt5.PubRelPacket(78)) == []
    (delivery,) = peer.actions
    assert isinstance(delivery, events.Deliver)
    assert peer.does(events.DeliveryStored(delivery.delivery_id)) == [mqtt5.PubCompPacket(78)]
    unknown = peer.gets(mqtt5.PubRelPacket(79))
    assert [type(packet) for packet in unknown] == [mqtt5.PubCompPacket]
    assert [int(packet.reason_code) for packet in unknown if isinstance(packet, mqtt5.PubCompPacket)] == [
        0x92 if version == 5 else 0
    ]


@VERSIONS
def test_a_message_to_no_subscription_of_ours_is_taken_and_acknowledged(version: int) -> None:
    """[MQTT-4.5.0-2], [MQTT-4.5.0-2 of 3.1.1]."""
    peer = online(version)
    peer.gets(publish("nobody/asked", packet_id=1), publish("nobody/asked", qos=2, packet_id=2))
    assert peer.does(events.AckWatermark(12)) == [mqtt5.PubAckPacket(1), mqtt5.PubRecPacket(2)]


# The session


@VERSIONS
def test_a_clean_start_begins_with_nothing(version: int) -> None:
    """[MQTT-3.1.2-4], [MQTT-3.1.2-6 of 3.1.1]: no id of before means anything."""
    config = replace(CONFIG, clean_start=True, session_expiry_s=0, durable=False)
    peer = Peer(version, config, held={5: events.UnreleasedMessage(3, 0)})
    (connect,) = peer.does(events.ConnectionOpened())
    assert isinstance(connect, mqtt5.ConnectPacket)
    assert connect.clean_start
    peer.gets(mqtt5.ConnAckPacket(session_present=False))
    assert not peer.session.inbound.unreleased_messages
    (forgotten,) = [action for action in peer.actions if isinstance(action, events.Deliver)]
    assert forgotten.released_ids == (5,), "durably"
    peer.gets(publish(qos=2, packet_id=5, duplicate=True))
    (delivery,) = [action for action in peer.actions if isinstance(action, events.Deliver)]
    assert len(delivery.messages) == 1


@pytest.mark.parametrize("qos", [0, 1, 2])
@VERSIONS
def test_the_wills_qos(version: int, qos: int) -> None:
    """[MQTT-3.1.2-12]: 0, 1 or 2; the codec has no other."""
    will = mqtt5.Will("state", payload=b"gone", qos=mqtt5.QoS(qos))
    (connect,) = Peer(version, replace(CONFIG, will=will)).does(events.ConnectionOpened())
    assert isinstance(connect, mqtt5.ConnectPacket)
    flags = encode(connect, version)[9]
    assert (flags >> 3 & 3, flags >> 2 & 1) == (qos, 1)
    with pytest.raises(ValueError, match="QoS"):
        mqtt5.QoS(3)


# The end


@VERSIONS
def test_nothing_follows_our_disconnect_but_the_end_of_the_connection(version: int) -> None:
    """[MQTT-3.14.4-1], [MQTT-3.14.4-2], [MQTT-3.14.4-1 of 3.1.1], [MQTT-3.14.4-2 of 3.1.1]."""
    peer = online(version)
    peer.gets(publish())
    assert peer.does(events.Stop()) == [mqtt5.DisconnectPacket()]
    assert peer.closes
    for event in (events.AckWatermark(11), events.Publish(1, outgoing(publish())), events.Tick(), events.Stop()):
        assert peer.does(event) == []


@VERSIONS
def test_a_violation_ends_the_connection(version: int) -> None:
    """[MQTT-4.13.2-1], [MQTT-4.8.0-1 of 3.1.1]: with its reason where the version has one."""
    peer = online(version)
    wrong = mqtt5.SubAckPacket(1, [mqtt5.SubAckReasonCode.GRANTED_QOS_AT_MOST_ONCE])
    said = peer.gets(wrong)
    assert peer.closes
    if version == 5:
        assert said == [mqtt5.DisconnectPacket(reason_code=mqtt5.DisconnectReasonCode.PROTOCOL_ERROR)]
    else:
        assert said == []
    assert peer.does(events.Publish(1, outgoing(publish()))) == []


# Authentication


def test_with_a_method_only_auth_leaves_before_connack() -> None:
    """[MQTT-3.1.2-30], [MQTT-3.15.2-1], [MQTT-4.12.0-3]: however much waits to be published."""
    peer = Peer(5, replace(CONFIG, authenticator=Method(), filters=(events.Filter("a"),)))
    peer.does(events.Publish(1, outgoing(publish())))
    (connect,) = peer.does(events.ConnectionOpened())
    assert isinstance(connect, mqtt5.ConnectPacket)
    assert (connect.authentication_method, connect.authentication_data) == ("PLAIN", b"first")
    assert peer.does(events.Publish(2, outgoing(publish(qos=0)))) == []
    for data in (b"2", b"3"):
        assert peer.gets(challenge(data=data)) == [challenge(data=b"to " + data)]
    connack = mqtt5.ConnAckPacket(session_present=True, authentication_method="PLAIN", authentication_data=b"proof")
    kinds = [type(packet) for packet in peer.gets(connack)]
    assert kinds == [mqtt5.PublishPacket, mqtt5.PublishPacket, mqtt5.SubscribePacket]
    assert mqtt5.UnsubscribePacket not in kinds
