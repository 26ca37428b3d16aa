"""Publishing: each row of the table, the window, and what leaves again after a lost connection."""

from __future__ import annotations

import pytest
from mqtt5 import (
    ConnAckPacket,
    PubAckPacket,
    PubAckReasonCode,
    PubCompPacket,
    PubCompReasonCode,
    PublishPacket,
    PubRecPacket,
    PubRecReasonCode,
    PubRelPacket,
    QoS,
)

from tests.unit.mqtt.sessions import only_sent, sent
from towline.mqtt.codec import Packet, encode
from towline.mqtt.events import Action, BrokerProtocolError, MessageToken, PublishAcknowledged, SaveInFlight, Send
from towline.mqtt.message import MAX_EXPIRY_S, OutboundMessage
from towline.mqtt.outbound import MAX_PACKET_ID, Outbound, Phase


def connected(window: int = 10, connack: ConnAckPacket | None = None, **options: bool) -> Outbound:
    outbound = Outbound(encode, **options)
    outbound.start_connection(connack or ConnAckPacket(), window, resumed=False)
    return outbound


def reconnect(
    outbound: Outbound, connack: ConnAckPacket | None = None, window: int = 10, *, resumed: bool = True
) -> None:
    outbound.end_connection()
    outbound.start_connection(connack or ConnAckPacket(session_present=resumed), window, resumed=resumed)


def publish(outbound: Outbound, token: int, qos: int = 2, *, retain: bool = False) -> list[Packet]:
    outbound.publish(token, OutboundMessage(f"t/{token}", b"x", qos=qos, retain=retain))
    return sent(outbound.actions())


def done(actions: list[Action]) -> list[tuple[MessageToken, int, bool]]:
    return [(a.token, a.reason, a.qos_degraded) for a in actions if isinstance(a, PublishAcknowledged)]


def answer(outbound: Outbound, packet: PubAckPacket | PubRecPacket | PubCompPacket) -> list[Action]:
    return [*outbound.take_ack(packet), *outbound.actions()]


def first_id(packets: list[Packet]) -> int:
    (packet,) = packets
    assert isinstance(packet, PublishPacket)
    assert packet.packet_id
    return packet.packet_id


def test_a_lost_session_publishes_what_was_not_released_as_new() -> None:
    outbound = connected()
    released = first_id(publish(outbound, 1))
    publish(outbound, 2)
    publish(outbound, 3)
    answer(outbound, PubRecPacket(released))
    reconnect(outbound, resumed=False)
    actions = list(outbound.actions())
    assert done(actions) == [(1, 0, False)]
    again = [(p.topic, p.duplicate) for p in sent(actions) if isinstance(p, PublishPacket)]
    assert again == [("t/2", False), ("t/3", False)]


def test_a_negative_answer_is_final() -> None:
    """[MQTT-4.4.0-2]: never sent again."""
    outbound = connected()
    pubrec = PubRecPacket(first_id(publish(outbound, 1)), reason_code=PubRecReasonCode.UNSPECIFIED_ERROR)
    assert done(answer(outbound, pubrec)) == [(1, 0x80, False)]
    assert outbound.idle


def test_a_stray_pubrec_is_answered_with_0x92_and_other_strays_are_nothing() -> None:
    outbound = connected()
    pubrel = only_sent(answer(outbound, PubRecPacket(9)), PubRelPacket)
    assert int(pubrel.reason_code) == 0x92
    assert answer(outbound, PubAckPacket(9)) == []
    assert answer(outbound, PubCompPacket(9)) == []
    assert answer(outbound, PubRecPacket(9, reason_code=PubRecReasonCode.QUOTA_EXCEEDED)) == []


@pytest.mark.parametrize(("qos", "wrong"), [(1, PubRecPacket), (1, PubCompPacket), (2, PubCompPacket)])
def test_an_answer_out_of_turn_is_a_protocol_error(qos: int, wrong: type[PubRecPacket | PubCompPacket]) -> None:
    outbound = connected()
    packet_id = first_id(publish(outbound, 1, qos))
    with pytest.raises(BrokerProtocolError, match="answered a QoS"):
        list(outbound.take_ack(wrong(packet_id)))


def test_an_answer_before_the_resend_finishes_a_message_that_still_waits_for_the_window() -> None:
    outbound = connected(window=5)
    ids = [first_id(publish(outbound, token, 1)) for token in range(3)]
    reconnect(outbound, window=1)
    assert len(sent(outbound.actions())) == 1
    assert done(answer(outbound, PubAckPacket(ids[2]))) == [(2, 0, False)]
    answer(outbound, PubAckPacket(ids[0]))
    answer(outbound, PubAckPacket(ids[1]))
    assert outbound.idle


@pytest.mark.parametrize(
    ("connack", "qos", "retain", "reason"),
    [
        (ConnAckPacket(max_qos=QoS(1)), 2, False, 0x9B),
        (ConnAckPacket(retain_available=False), 1, True, 0x9A),
        (ConnAckPacket(max_packet_size=8), 1, False, 0x95),
    ],
)
def test_what_the_server_can_not_take_is_not_sent(connack: ConnAckPacket, qos: int, retain: bool, reason: int) -> None:
    """[MQTT-3.2.2-11], [MQTT-3.2.2-14], [MQTT-3.2.2-15]."""
    outbound = connected(connack=connack)
    outbound.publish(1, OutboundMessage("topic", b"x", qos=qos, retain=retain))
    assert list(outbound.actions()) == [PublishAcknowledged(1, reason)]
    assert outbound.idle


def test_packet_ids_go_round_and_skip_those_in_use() -> None:
    """[MQTT-2.2.1-3], [MQTT-2.2.1-4]."""
    outbound = connected(window=MAX_PACKET_ID)
    kept = first_id(publish(outbound, 0, 1))
    outbound.reserved_ids.update(range(kept + 1, MAX_PACKET_ID - 1))
    ids = [first_id(publish(outbound, token, 1)) for token in (1, 2)]
    assert ids == [MAX_PACKET_ID - 1, MAX_PACKET_ID]
    with pytest.raises(AssertionError, match="packet ids"):
        outbound.new_id()
    answer(outbound, PubAckPacket(kept))
    assert outbound.new_id() == kept


@pytest.mark.parametrize("size", [0, 1, 100, 127, 128, 16_383, 70_000])
@pytest.mark.parametrize("topic", ["t", "t/ü/" + "x" * 300])
def test_a_packet_under_another_id_is_the_same_packet(size: int, topic: str) -> None:
    """Whatever it was when it came: without DUP [MQTT-3.3.1-3], [MQTT-3.3.1-3 of 3.1.1] and ids [MQTT-3.3.4-6]."""
    properties = [("a", "1"), ("a", "2")]
    message = OutboundMessage(topic, bytes(size), qos=2, retain=True, user_properties=properties)
    assert message.template is not None
    for packet_id in (1, 255, 256, 65535):
        again = only_sent([Send(message.with_packet_id(encode(message.template), packet_id))], PublishPacket)
        assert again.packet_id == packet_id
        assert (again.topic, again.payload, again.retain, again.qos) == (topic, bytes(size), True, QoS(2))
        assert again.user_properties == properties
        assert (again.duplicate, list(again.subscription_ids)) == (False, [])


def test_what_is_about_to_leave_is_told_first_where_ids_are_durable() -> None:
    """[I10]: assigned before PUBLISH, released before PUBREL, each once; answers of a chunk together."""
    outbound = connected(save_in_flight=True)
    for token in (7, 8):
        outbound.publish(token, OutboundMessage("t", qos=2))
    saved, publishes = list(outbound.actions())
    assert saved == SaveInFlight((), {1: 7, 2: 8}, {})
    assert isinstance(publishes, Send)
    for packet_id in (1, 2):
        assert list(outbound.take_ack(PubRecPacket(packet_id))) == []
    saved, pubrels = list(outbound.actions())
    assert saved == SaveInFlight((), {}, {1: 0, 2: 0})
    assert [type(p) for p in sent([pubrels])] == [PubRelPacket, PubRelPacket]
    reconnect(outbound, resumed=False)
    lost = list(outbound.actions())
    assert [(a.token, a.delivery_unknown) for a in lost if isinstance(a, PublishAcknowledged)] == [(7, True), (8, True)]
    assert lost[-1] == SaveInFlight((1, 2), {}, {})


def test_what_an_earlier_life_had_in_flight_goes_on_under_its_id() -> None:
    outbound = Outbound(encode, save_in_flight=True)
    outbound.restore(5, 50, OutboundMessage("t/5", qos=2), Phase.RELEASED)
    outbound.restore(9, 51, OutboundMessage("t/9", qos=2), Phase.PUBLISHED)
    outbound.start_connection(ConnAckPacket(session_present=True), 10, resumed=True)
    pubrel, again = sent(outbound.actions())
    assert (type(pubrel), type(again)) == (PubRelPacket, PublishPacket)
    assert isinstance(again, PublishPacket)
    assert (again.packet_id, again.duplicate) == (9, True)
    outbound.publish(1, OutboundMessage("new", qos=1))
    assert first_id(sent(outbound.actions())) not in (5, 9)


@pytest.mark.parametrize(
    ("expires_at", "interval"), [(0.0, 1), (99.9, 1), (100.1, 1), (101.5, 2), (160.0, 60), (1e12, MAX_EXPIRY_S)]
)
def test_an_interval_is_what_is_left_rounded_up_within_what_can_be_said(expires_at: float, interval: int) -> None:
    outbound = connected()
    outbound.publish(1, OutboundMessage("t", qos=1, message_expiry_interval=7), expires_at)
    packet = only_sent(outbound.actions(now=100.0), PublishPacket)
    assert packet.message_expiry_interval == interval


def test_a_message_sent_again_says_what_is_left_of_its_expiry_then() -> None:
    outbound = connected()
    outbound.publish(1, OutboundMessage("t", qos=1, message_expiry_interval=60), 160.0)
    list(outbound.actions(now=100.0))
    for resumed in (True, False):
        reconnect(outbound, resumed=resumed)
        again = only_sent(outbound.actions(now=130.0), PublishPacket)
        assert (again.message_expiry_interval, again.duplicate) == (30, resumed)


def test_exactly_once_sends_one_until_the_broker_has_answered_it_with_pubrec() -> None:
    outbound = connected(require_qos2=True)
    assert len(publish(outbound, 1)) == 1
    assert publish(outbound, 2) == []
    reconnect(outbound)
    assert len(sent(outbound.actions())) == 1, "the same one again, of a broker that may be another"
    assert [type(packet) for packet in sent(answer(outbound, PubRecPacket(1)))] == [PubRelPacket, PublishPacket]
    assert len(publish(outbound, 3)) == 1


def test_exactly_once_sends_no_other_after_one_was_taken_as_less() -> None:
    outbound = connected(require_qos2=True)
    publish(outbound, 1)
    publish(outbound, 2)
    assert len(publish(outbound, 3, qos=1)) == 0, "behind one that waits"
    assert done(answer(outbound, PubAckPacket(1))) == [(1, 0, True)]
    reconnect(outbound)
    assert sent(outbound.actions()) == []
    others = connected(require_qos2=True)
    assert [len(publish(others, token, qos)) for token, qos in ((1, 1), (2, 2), (3, 0))] == [1, 1, 1]


@pytest.mark.parametrize(
    ("connack", "reason"), [(ConnAckPacket(max_qos=QoS(1)), 0x9B), (ConnAckPacket(retain_available=False), 0x9A)]
)
@pytest.mark.parametrize("received", [False, True])
def test_what_another_server_can_not_take_again_is_given_up(
    connack: ConnAckPacket, reason: int, received: bool
) -> None:
    """A packet id of QoS 2 is freed all the same; after PUBREC the message is the broker's."""
    outbound = connected()
    packet_id = first_id(publish(outbound, 1, retain=True))
    if received:
        answer(outbound, PubRecPacket(packet_id))
    reconnect(outbound, connack)
    only_sent(outbound.actions(), PubRelPacket)
    assert done(answer(outbound, PubCompPacket(packet_id))) == [(1, 0 if received else reason, False)]
    assert outbound.idle


@pytest.mark.parametrize(
    ("qos", "received", "answers"), [(1, False, [(1, 0x100, False)]), (2, True, [(1, 0, True)]), (2, False, [])]
)
def test_a_message_that_is_given_up(qos: int, received: bool, answers: list[tuple[MessageToken, int, bool]]) -> None:
    outbound = connected()
    packet_id = first_id(publish(outbound, 1, qos))
    if received:
        answer(outbound, PubRecPacket(packet_id))
    outbound.end_connection()
    outbound.drop_message(7, 0x100)
    outbound.drop_message(1, 0x100)
    outbound.start_connection(ConnAckPacket(session_present=True), 10, resumed=True)
    actions = list(outbound.actions())
    assert [(a.token, a.reason, a.delivery_unknown) for a in actions if isinstance(a, PublishAcknowledged)] == answers
    assert [type(packet) for packet in sent(actions)] == ([] if answers else [PubRelPacket])
    if not answers:
        assert done(answer(outbound, PubCompPacket(packet_id))) == [(1, 0x100, False)]


def test_in_order_gives_back_what_would_overtake_a_message_that_is_put_off() -> None:
    """[MQTT-4.6.0-1]: of its topic and QoS; what has left may come before it."""
    outbound = connected(window=2)
    outbound.in_order = True
    for token, topic, qos in ((1, "a", 1), (2, "a", 1), (3, "a", 1), (4, "b", 1), (5, "a", 2), (6, "a", 1)):
        outbound.publish(token, OutboundMessage(topic, qos=qos))
    assert len(sent(outbound.actions())) == 2
    actions = answer(outbound, PubAckPacket(1, reason_code=PubAckReasonCode.QUOTA_EXCEEDED))
    assert done(actions) == [(1, 0x97, False), (3, 0x97, False), (6, 0x97, False)]
    assert [packet.topic for packet in sent(actions) if isinstance(packet, PublishPacket)] == ["b"]
    assert done(answer(outbound, PubAckPacket(2))) == [(2, 0, False)]
    outbound.in_order = False
    outbound.publish(7, OutboundMessage("b", qos=1))
    assert done(answer(outbound, PubAckPacket(3, reason_code=PubAckReasonCode.QUOTA_EXCEEDED))) == [(4, 0x97, False)]


def test_qos_1_is_noted_beside_qos_2_where_ids_are_durable() -> None:
    outbound = connected(save_in_flight=True)
    for token, qos in ((7, 2), (8, 1), (9, 0)):
        outbound.publish(token, OutboundMessage("t", qos=qos))
    saved, publishes, acknowledged = list(outbound.actions())
    assert (saved, acknowledged) == (SaveInFlight((), {1: 7}, {}, {2: 8}), PublishAcknowledged(9, 0))
    assert len(sent([publishes])) == 3
    outbound.publish(10, OutboundMessage("t", qos=0))
    assert not [action for action in outbound.actions() if isinstance(action, SaveInFlight)]


NOBODY = PubRecReasonCode.NO_MATCHING_SUBSCRIBERS


@pytest.mark.parametrize("lost", ["nothing", "connection", "session", "process"])
def test_what_pubrec_said_of_a_message_is_what_became_of_it(lost: str) -> None:
    """PUBCOMP says nothing of it [MQTT 5 section 3.7.2.1]: 0x10, nobody is subscribed, is known for QoS 2, too."""
    outbound = connected(save_in_flight=True)
    packet_id = first_id(publish(outbound, 7))
    actions = answer(outbound, PubRecPacket(packet_id, reason_code=NOBODY))
    assert [a.pubrec_reasons for a in actions if isinstance(a, SaveInFlight)] == [{packet_id: 0x10}]
    if lost == "process":
        outbound = Outbound(encode, save_in_flight=True)
        outbound.restore(packet_id, 7, OutboundMessage("t/7", b"x", qos=2), Phase.RELEASED, pubrec_reason=0x10)
    reconnect(outbound, resumed=lost != "session")
    actions = list(outbound.actions())
    if lost != "session":
        answer(outbound, PubRecPacket(packet_id))  # asked twice, it may see another answer; the first one counts
        actions = answer(outbound, PubCompPacket(packet_id, reason_code=PubCompReasonCode.PACKET_ID_NOT_FOUND))
    assert done(actions) == [(7, 0x10, False)]
