"""The session: refusals, servers, limits and messages; what no life of the model shows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import mqtt5
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import outgoing, publish
from tests.unit.mqtt.sessions import (
    CONFIG,
    KNOWN,
    A,
    B,
    Method,
    challenge,
    connect,
    granted,
    online,
    only,
    only_sent,
    receive,
    sent,
    subscribing,
)
from towline.delivery.inbound import plain_run
from towline.errors import BrokerRefused, ProtocolViolation, SessionUnknown
from towline.mqtt import events
from towline.mqtt.codec import Decoder, Packet, encode
from towline.mqtt.session import UNSURE, Session, SessionState, Subscriptions

# Connecting


def test_a_lost_session_is_subscribed_when_its_packet_ids_are_free_on_disk() -> None:
    """[I3]: what the SUBSCRIBE brings may have the same ids; until then nothing is sent."""
    held = {7: events.UnreleasedMessage(3, 1), 9: events.UnreleasedMessage(4, 2)}
    session = Session(CONFIG, KNOWN, 5, held)
    session.handle(events.ConnectionOpened(), 0.0)
    session.handle(events.Publish(1, outgoing(publish(packet_id=1))), 0.5)
    lost, freed = receive(session, mqtt5.ConnAckPacket(session_present=False))
    assert isinstance(lost, events.SessionLost)
    assert isinstance(freed, events.Deliver)
    assert (len(freed.messages), freed.unreleased_messages, freed.released_ids) == (0, {}, (7, 9))
    assert session.deadline() == 45.0, "nobody owes us an answer; the keep alive goes on"
    assert session.handle(events.DeliveryStored(freed.delivery_id - 1), 10.0) == [], "of what came before"
    actions = session.handle(events.DeliveryStored(freed.delivery_id), 20.0)
    assert [type(packet) for packet in sent(actions)] == [mqtt5.PublishPacket, mqtt5.SubscribePacket]
    assert session.deadline() == 20.0 + CONFIG.connect_timeout_s


# Several servers that share no sessions


def at(session: Session, server: str, *, present: bool, alone: bool = False) -> list[events.Action]:
    """Connect there; what comes of CONNACK, and of the disk's answer."""
    session.handle(events.ConnectionLost(), 0.0)
    session.handle(events.ConnectionOpened(server, alone), 0.0)
    actions = receive(session, mqtt5.ConnAckPacket(session_present=present))
    for action in actions[:]:
        if isinstance(action, events.Deliver):
            actions += session.handle(events.DeliveryStored(action.delivery_id), 1.0)
    return actions


def known_at(*servers: str) -> events.SessionRecord:
    return replace(KNOWN, servers=servers)


@pytest.mark.parametrize("present", [False, True])
def test_ids_and_subscriptions_of_another_server_are_not_this_ones(present: bool) -> None:
    """Its session may be of long ago: everything is asked for, and nobody's id makes a message a repeat."""
    session = Session(CONFIG, known_at("a"), 5, {7: events.UnreleasedMessage(3, 1)})
    actions = at(session, "b", present=present)
    assert only(actions, events.Deliver).released_ids == (7,)
    subscribe = only_sent(actions, mqtt5.SubscribePacket)
    assert [f.pattern for f in subscribe.topic_filters] == ["a/#", "b"]
    assert [int(f.retain_handling) for f in subscribe.topic_filters] == [int(present)] * 2
    assert only(actions, events.SaveSessionRecord).record == replace(
        known_at("a", "b"), subscriptions={"a/#": -1, "b": -1}
    )
    assert not session.session_resumed


@pytest.mark.parametrize(
    ("servers", "server", "lost"), [(("a",), "b", 0), (("b", "a"), "b", 1), (("a",), "a", 1), ((), "a", 1), ((), "", 1)]
)
def test_a_session_is_lost_only_where_there_was_one(servers: tuple[str, ...], server: str, lost: int) -> None:
    session = Session(CONFIG, known_at(*servers))
    assert sum(isinstance(action, events.SessionLost) for action in at(session, server, present=False)) == lost


def test_the_one_server_of_another_name_is_asked_for_everything_and_keeps_the_ids() -> None:
    """The setting was changed there and back: the session here is of before a filter was added, or it is the same."""
    session = Session(CONFIG, known_at("b", "a"), 5, {7: events.UnreleasedMessage(3, 1)})
    subscribe = only_sent(at(session, "b", present=True, alone=True), mqtt5.SubscribePacket)
    assert [(f.pattern, int(f.retain_handling)) for f in subscribe.topic_filters] == [("a/#", 1), ("b", 1)]
    assert session.session_resumed
    assert session.inbound.unreleased_messages
    receive(session, granted(subscribe.packet_id))
    assert session.record == known_at("a", "b")
    assert sent(at(session, "b", present=True, alone=True)) == []


def test_the_servers_of_a_record_do_not_grow_for_ever() -> None:
    session = Session(CONFIG, known_at("a"))
    for number in range(300):
        at(session, f"pod-{number}", present=False)
    assert session.record
    assert len(session.record.servers) <= 100
    assert session.record.servers[-1] == "pod-299"


def test_a_broker_that_calls_a_packet_id_in_use_is_asked_with_another_one_by_the_next_connection() -> None:
    session = Session(CONFIG)
    asked = subscribing(session)
    closed = only(
        receive(session, mqtt5.SubAckPacket(asked.packet_id, [mqtt5.SubAckReasonCode.PACKET_ID_IN_USE] * 2)),
        events.Close,
    )
    again = subscribing(session)
    assert (again.topic_filters, again.packet_id != asked.packet_id) == (asked.topic_filters, True)
    assert isinstance(closed.error, BrokerRefused)
    assert "packet id in use (0x91)" in str(closed.error)
    assert "right" not in str(closed.error)
    assert not closed.fatal, "another connection may find the ids free"


def test_a_filter_the_broker_does_not_take_back_is_given_up_again_next_time() -> None:
    """[MQTT-3.11.3-2]: only 0x00 and 0x11 say that it is gone."""
    record = replace(KNOWN, subscriptions=KNOWN.subscriptions | {"old": 1, "older": 1})
    session = Session(CONFIG, record)
    for code, patterns in (
        (mqtt5.UnsubAckReasonCode.NOT_AUTHORIZED, ["old", "older"]),
        (mqtt5.UnsubAckReasonCode.SUCCESS, ["old"]),
    ):
        unsubscribe = only_sent(connect(session, mqtt5.ConnAckPacket(session_present=True)), mqtt5.UnsubscribePacket)
        assert unsubscribe.patterns == patterns
        codes = [code, mqtt5.UnsubAckReasonCode.NO_SUBSCRIPTION_EXISTED][: len(patterns)]
        only(receive(session, mqtt5.UnsubAckPacket(unsubscribe.packet_id, codes)), events.Online)
        session.handle(events.ConnectionLost(), 2.0)


def test_a_session_the_journal_does_not_know_is_a_question_to_the_operator() -> None:
    session = Session(CONFIG)
    actions = connect(session, mqtt5.ConnAckPacket(session_present=True))
    close = only(actions, events.Close)
    assert isinstance(close.error, SessionUnknown)
    assert close.fatal
    assert only(actions, events.SaveSessionRecord).record is None, "the next start asks again"
    assert isinstance(sent(actions)[0], mqtt5.DisconnectPacket)


def test_an_unknown_session_can_be_adopted() -> None:
    session = Session(replace(CONFIG, unknown_session="adopt"))
    actions = connect(session, mqtt5.ConnAckPacket(session_present=True))
    assert isinstance(sent(actions)[0], mqtt5.SubscribePacket)


def test_an_unknown_session_can_be_discarded_with_clean_start_and_is_then_kept() -> None:
    session = Session(replace(CONFIG, unknown_session="discard"))
    assert only(connect(session, mqtt5.ConnAckPacket(session_present=True)), events.Close).reconnect_at_once
    hello = only_sent(session.handle(events.ConnectionOpened(), 1.0), mqtt5.ConnectPacket)
    assert (hello.clean_start, hello.session_expiry_interval) == (True, 0)
    assert only(receive(session, mqtt5.ConnAckPacket()), events.Close).reconnect_at_once
    hello = only_sent(session.handle(events.ConnectionOpened(), 2.0), mqtt5.ConnectPacket)
    assert not hello.clean_start, "Mosquitto saves only sessions whose last CONNECT had Clean Start 0"
    assert isinstance(sent(receive(session, mqtt5.ConnAckPacket()))[0], mqtt5.SubscribePacket)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            mqtt5.SubAckReasonCode.NOT_AUTHORIZED,
            'refused the subscription "b": not authorized (0x87). Grant this client',
        ),
        (mqtt5.SubAckReasonCode.TOPIC_FILTER_INVALID, "Change the filter"),
        (mqtt5.SubAckReasonCode.QUOTA_EXCEEDED, "Raise the broker's limit"),
        (mqtt5.SubAckReasonCode.UNSPECIFIED_ERROR, "see the broker's log"),
        (mqtt5.SubAckReasonCode.GRANTED_QOS_AT_MOST_ONCE, 'grants "b" QoS 0 instead of 1'),
    ],
)
def test_each_suback_code_is_checked(code: mqtt5.SubAckReasonCode, words: str) -> None:
    session = Session(CONFIG)
    connect(session, mqtt5.ConnAckPacket())
    close = only(
        receive(session, mqtt5.SubAckPacket(1, [mqtt5.SubAckReasonCode.GRANTED_QOS_AT_LEAST_ONCE, code])), events.Close
    )
    assert close.fatal
    assert words in str(close.error)


@pytest.mark.parametrize(
    ("version", "packet", "reasons"),
    [
        (4, mqtt5.SubAckPacket(1, [mqtt5.SubAckReasonCode.GRANTED_QOS_AT_MOST_ONCE]), []),
        (5, mqtt5.SubAckPacket(1, [mqtt5.SubAckReasonCode.GRANTED_QOS_AT_MOST_ONCE]), [0x82]),
        (5, mqtt5.PingReqPacket(), [0x82]),
        (5, mqtt5.PublishPacket("a", b"", topic_alias=3), [0x94]),
    ],
)
def test_what_a_server_must_not_send_ends_the_connection_with_a_reason(
    version: int, packet: Packet, reasons: list[int]
) -> None:
    """[MQTT-4.13.2-1], [MQTT-4.8.0-1 of 3.1.1]: 3.x has none to say."""
    session = online(replace(CONFIG, protocol=version))
    actions = receive(session, packet)
    assert isinstance(only(actions, events.Close).error, ProtocolViolation)
    said = [mqtt5.DisconnectPacket(reason_code=mqtt5.DisconnectReasonCode(reason)) for reason in reasons]
    assert sent(actions, version) == said
    assert session.handle(events.Publish(1, outgoing(publish())), 1.0) == []


# Other filters than those of the broker's session

C = events.Filter("c", 1)


def test_without_a_durable_session_removed_filters_are_unsubscribed_first() -> None:
    """A broker may send a message once for each of two filters that overlap [MQTT-3.3.4-2]."""
    session = Session(replace(CONFIG, filters=(A, C), durable=False), KNOWN)
    packets = sent(connect(session, mqtt5.ConnAckPacket(session_present=True)))
    assert [type(packet) for packet in packets] == [mqtt5.UnsubscribePacket, mqtt5.SubscribePacket]


def test_a_refused_filter_leaves_the_removed_ones_at_the_broker() -> None:
    """So the settings of before lose nothing when they come back."""
    session = Session(replace(CONFIG, filters=(A, C)), KNOWN)
    subscribe = only_sent(connect(session, mqtt5.ConnAckPacket(session_present=True)), mqtt5.SubscribePacket)
    assert [topic_filter.pattern for topic_filter in subscribe.topic_filters] == ["c"]
    actions = receive(
        session, mqtt5.SubAckPacket(subscribe.packet_id, [mqtt5.SubAckReasonCode.NOT_AUTHORIZED]), now=2.0
    )
    assert not [packet for packet in sent(actions) if isinstance(packet, mqtt5.UnsubscribePacket)]
    close = only(actions, events.Close)
    assert close.fatal
    assert '"c"' in str(close.error)
    former = Session(CONFIG, session.record)
    repeated = only_sent(
        connect(former, mqtt5.ConnAckPacket(session_present=True), now=3.0, opened=3.0), mqtt5.SubscribePacket
    )
    assert [topic_filter.pattern for topic_filter in repeated.topic_filters] == ["b"], "it was unsure"


# What is known of the broker's subscriptions, step by step, and what is asked for by it


def connected(wanted: tuple[events.Filter, ...], known: dict[str, int]) -> Subscriptions:
    """A session that the broker has kept; without anything known a new one."""
    subscriptions = Subscriptions(wanted, known)
    subscriptions.expect_connack()
    if known:
        subscriptions.restore_options()
    else:
        subscriptions.clear_options()
    return subscriptions


@pytest.mark.parametrize("handling", [0, 1, 2])
def test_what_a_filter_says_of_retained_messages_holds(handling: int) -> None:
    for known in ({}, {"a/#": UNSURE}):
        (asked,), _ = connected((events.Filter("a/#", retain_handling=handling),), known).pending_changes()
        assert (asked.pattern, asked.retain_handling) == ("a/#", handling)


@pytest.mark.parametrize("handling", [0, 1, 2, None])
def test_another_retain_handling_is_no_reason_to_subscribe_again(handling: int | None) -> None:
    wanted = (events.Filter("a/#", 1, retain_handling=handling),)
    assert connected(wanted, {"a/#": A.encoded_options}).pending_changes() == ([], [])


def test_whatever_is_wanted_in_turn_and_wherever_it_ends_the_record_never_claims_too_much() -> None:
    """Three configurations one after the other; each ends after any number of packets carried out and answers seen."""
    wishes = ((), (A,), (A, B), (events.Filter("b", 0),))
    ends = [(carried, seen) for carried in range(3) for seen in range(carried + 1)]
    for lives in product(product(wishes, ends), repeat=3):
        broker: dict[str, int] = {}
        record: dict[str, int] = {}
        for wanted, (carried, seen) in lives:
            subscriptions = connected(wanted, record)
            filters, surplus = subscriptions.pending_changes()
            if filters and carried > 0:
                broker |= {f.pattern: f.encoded_options for f in filters}
            if filters and seen > 0:
                subscriptions.confirm_granted([f.pattern for f in filters])
            place = int(bool(filters))  # of UNSUBSCRIBE
            if carried > place:
                broker = {pattern: terms for pattern, terms in broker.items() if pattern not in surplus}
            if seen > place:
                subscriptions.confirm_removed(surplus)
            record = subscriptions.known_options
            assert set(broker) <= set(record), f"a filter nobody will take back: {lives}"
            assert {p: t for p, t in record.items() if t != UNSURE}.items() <= broker.items(), f"silence: {lives}"


# Ends of a connection, and what the next one begins with


def test_a_connection_only_to_see_the_version_ends_at_connack() -> None:
    session = Session(CONFIG, KNOWN)
    session.probing_version = True
    actions = connect(session, mqtt5.ConnAckPacket(session_present=True))
    assert only(actions, events.Close) == events.Close(None, reconnect_at_once=True, version_confirmed=True)
    assert [type(packet) for packet in sent(actions)] == [mqtt5.DisconnectPacket]
    assert session.record is not None
    assert session.record.subscriptions == {"a/#": -1, "b": -1}, "asked for anew, as its answer was not seen"


@pytest.mark.parametrize(("limit", "fits"), [(None, True), (28, True), (27, False)])
def test_a_subscription_longer_than_the_broker_takes_does_not_leave(limit: int | None, fits: bool) -> None:
    """[MQTT-3.2.2-15]."""
    session = Session(replace(CONFIG, filters=(replace(A, pattern="a" * 20),)))
    actions = connect(session, mqtt5.ConnAckPacket(max_packet_size=limit))
    if fits:
        assert [type(packet) for packet in sent(actions)] == [mqtt5.SubscribePacket]
        return
    close = only(actions, events.Close)
    assert (close.fatal, sent(actions)) == (True, [])
    assert "takes packets of 27 bytes, our subscription has 28" in str(close.error)


@pytest.mark.parametrize("no_local", [False, True])
def test_no_local_is_an_option_of_the_subscription(no_local: bool) -> None:
    session = Session(replace(CONFIG, filters=(replace(A, no_local=no_local),)))
    subscribe = only_sent(connect(session, mqtt5.ConnAckPacket()), mqtt5.SubscribePacket)
    assert [f.no_local for f in subscribe.topic_filters] == [no_local]


@pytest.mark.parametrize("items", [[mqtt5.ConnAckPacket()], [], None])
def test_a_connection_that_broke_is_told_by_what_had_come(items: list[mqtt5.ConnAckPacket] | None) -> None:
    """An end in place of CONNACK may be a broker that does not speak the version."""
    session = Session(CONFIG, KNOWN)
    session.handle(events.ConnectionOpened(), 0.0)
    if items is not None:
        receive(session, *items)
    close = session.connection_break("broker")
    session.handle(events.ConnectionLost(), 2.0)
    assert (close.no_connack, close.reconnect_at_once, close.fatal) == (not items, False, False)
    assert session.ended_by_broker is bool(items), "of one that was taken in a message may be to blame"
    words = ("the connection broke", "TL-M05") if items else ("ended in place of CONNACK", "TL-M03")
    assert all(word in str(close.error) for word in words)


@pytest.mark.parametrize(("held", "lost"), [({}, False), ({7: events.UnreleasedMessage(3, 1)}, True)])
def test_a_session_that_held_nothing_is_not_lost(held: dict[int, events.UnreleasedMessage], lost: bool) -> None:
    """Brokers may keep none without subscriptions; one that was never confirmed was never there."""
    for record in (replace(KNOWN, subscriptions={}), events.SessionRecord("plant-7")):
        session = Session(CONFIG, record, 5, held)
        actions = connect(session, mqtt5.ConnAckPacket())
        assert any(isinstance(action, events.SessionLost) for action in actions) is (lost and record.established)


def test_nothing_that_comes_behind_the_end_of_a_connection_counts() -> None:
    session = online()
    actions = receive(session, mqtt5.DisconnectPacket(), publish(packet_id=1), mqtt5.ConnAckPacket())
    assert [type(action) for action in actions] == [events.Close]
    assert session.inbound.next_number == 0


@pytest.mark.parametrize("version", [5, 4])
def test_nothing_follows_our_disconnect_but_the_end_of_the_connection(version: int) -> None:
    """[MQTT-3.14.4-1], [MQTT-3.14.4-2], [MQTT-3.14.4-1 of 3.1.1], [MQTT-3.14.4-2 of 3.1.1]."""
    session = online(replace(CONFIG, protocol=version))
    receive(session, publish())
    disconnect, close = session.handle(events.Stop(), 1.0)
    assert sent([disconnect], version) == [mqtt5.DisconnectPacket()]
    assert close == events.Close(None)
    for event in (events.AckWatermark(1), events.Publish(1, outgoing(publish())), events.Tick(), events.Stop()):
        assert session.handle(event, 1.0) == []


def test_with_a_method_only_auth_leaves_before_connack() -> None:
    """[MQTT-3.1.2-30], [MQTT-3.15.2-1], [MQTT-4.12.0-3]: however much waits to be published."""
    session = Session(replace(CONFIG, authenticator=Method()), replace(KNOWN, subscriptions={}))
    session.handle(events.Publish(1, outgoing(publish())), 0.0)
    hello = only_sent(session.handle(events.ConnectionOpened(), 0.0), mqtt5.ConnectPacket)
    assert (hello.authentication_method, hello.authentication_data) == ("PLAIN", b"first")
    assert session.handle(events.Publish(2, outgoing(publish(qos=0))), 0.0) == []
    for data in (b"2", b"3"):
        assert sent(receive(session, challenge(data=data))) == [challenge(data=b"to " + data)]
    connack = mqtt5.ConnAckPacket(session_present=True, authentication_method="PLAIN", authentication_data=b"proof")
    kinds = [type(packet) for packet in sent(receive(session, connack))]
    assert kinds == [mqtt5.PublishPacket, mqtt5.PublishPacket, mqtt5.SubscribePacket]


def test_a_broker_without_the_proof_is_left_for_good() -> None:
    session = Session(replace(CONFIG, authenticator=Method()), KNOWN)
    close = only(
        connect(session, mqtt5.ConnAckPacket(authentication_method="PLAIN", authentication_data=b"other")), events.Close
    )
    assert close.fatal
    assert "proves nothing" in str(close.error)


def test_without_the_authenticator_s_first_data_no_connect_leaves() -> None:
    session = Session(replace(CONFIG, authenticator=Method(ValueError("no credentials"))), KNOWN)
    actions = session.handle(events.ConnectionOpened(), 0.0)
    close = only(actions, events.Close)
    assert (close.fatal, sent(actions), session.state) == (True, [], SessionState.OFFLINE)
    assert "no credentials" in str(close.error)


# Receiving


@pytest.mark.parametrize("version", [5, 4])
def test_each_qos_has_its_answer_with_the_same_id_and_a_known_reason(version: int) -> None:
    """[MQTT-3.3.4-1], [MQTT-4.3.2-4], [MQTT-4.3.3-8], [MQTT-2.2.1-5], of any topic [MQTT-4.5.0-2].

    [MQTT-3.4.2-1], [MQTT-3.5.2-1], [MQTT-3.7.2-1], [MQTT-3.3.4-1 of 3.1.1], [MQTT-4.5.0-2 of 3.1.1].
    """
    session = online(replace(CONFIG, protocol=version))
    early = receive(session, publish("nobody/asked", qos=0), publish(packet_id=77), publish(qos=2, packet_id=78))
    assert sent(early) == [], "not before it is settled"
    answers = sent(session.handle(events.AckWatermark(3), 1.0), version)
    assert answers == [mqtt5.PubAckPacket(77), mqtt5.PubRecPacket(78)]
    (delivery,) = receive(session, mqtt5.PubRelPacket(78))
    assert isinstance(delivery, events.Deliver)
    done = session.handle(events.DeliveryStored(delivery.delivery_id), 1.0)
    assert sent(done, version) == [mqtt5.PubCompPacket(78)]
    (unknown,) = sent(receive(session, mqtt5.PubRelPacket(79)), version)
    assert isinstance(unknown, mqtt5.PubCompPacket)
    assert int(unknown.reason_code) == (0x92 if version == 5 else 0)


@pytest.mark.parametrize("version", [5, 4])
def test_a_clean_start_begins_with_nothing(version: int) -> None:
    """[MQTT-3.1.2-4], [MQTT-3.1.2-6 of 3.1.1]: no id of before means anything."""
    config = replace(CONFIG, filters=(), protocol=version, clean_start=True, session_expiry_s=0, durable=False)
    session = Session(config, KNOWN, 10, {5: events.UnreleasedMessage(3, 0)})
    (hello,) = sent(session.handle(events.ConnectionOpened(), 0.0)[-1:], version)
    assert isinstance(hello, mqtt5.ConnectPacket)
    assert hello.clean_start
    forgotten = only(receive(session, mqtt5.ConnAckPacket()), events.Deliver)
    assert forgotten.released_ids == (5,), "durably"
    assert not session.inbound.unreleased_messages
    delivery = only(receive(session, publish(qos=2, packet_id=5, duplicate=True)), events.Deliver)
    assert len(delivery.messages) == 1


#: A new message, one that comes again, another with an id that is owed (the broker's fault), each with its packet id; a
#: read; and so many messages that are safe.
_STEPS = st.lists(
    st.tuples(st.sampled_from(["new", "again", "other", "read", "stored", "settle"]), st.integers(1, 3)),
    min_size=20,
    max_size=40,
)


@settings(max_examples=3 * settings().max_examples)
@given(_STEPS, st.booleans())
def test_qos_1_is_stored_once_and_acknowledged_once_while_its_puback_is_owed(
    steps: list[tuple[str, int]], plain: bool
) -> None:
    """[I3], in whatever order messages, repeats and acknowledgements come; nothing else is left out."""
    session, decoder = online(), Decoder(plain_reader=partial(plain_run, min_packets=1) if plain else None)
    wanted: list[tuple[int, bytes]] = []  # packet id and payload of each row
    stored: list[tuple[int, bytes]] = []
    acks: list[int] = []
    unread, tickets, settled = b"", [0], 0
    for serial, (kind, value) in enumerate([*steps, ("settle", 99)]):
        owed = dict(wanted[settled:])
        if kind in {"new", "again", "other"} and (value in owed) == (kind != "new"):
            payload = owed[value] if kind == "again" else b"%d" % serial
            again = kind != "new" or serial % 5 == 0  # DUP alone says nothing
            unread += encode(mqtt5.PublishPacket("a/1", payload, qos=mqtt5.QoS(1), packet_id=value, duplicate=again))
            wanted += [(value, payload)] if kind != "again" else []
        elif kind == "stored":
            session.handle(events.DeliveryStored(tickets[-1]), 1.0)
        elif kind in {"read", "settle"}:  # what is unread then would cross our PUBACKs
            for action in session.handle(events.PacketsReceived(decoder.feed(unread)), 1.0):
                if isinstance(action, events.Deliver):
                    assert action.first_number == len(stored)
                    stored += [(p.packet_id or 0, p.payload or b"") for p in action.messages.packets]
                    tickets.append(action.delivery_id)
            assert stored == wanted
            unread = b""
        if kind == "settle":
            settled = min(settled + value, len(wanted))
            acks += [
                p.packet_id
                for p in sent(session.handle(events.AckWatermark(settled), 1.0))
                if isinstance(p, mqtt5.PubAckPacket)
            ]
            assert acks == [packet_id for packet_id, _ in wanted[:settled]]


def test_a_full_window_is_seen_and_an_overrun_counted() -> None:
    session, seen = online(replace(CONFIG, receive_maximum=2)), []
    for packet_id in (1, 2, 3):
        receive(session, publish(packet_id=packet_id))
        seen.append((session.window_full, session.inbound.window_overruns))
    assert seen == [(False, 0), (True, 0), (True, 1)]
    session.handle(events.AckWatermark(3), 2.0)
    assert not session.window_full


def test_receive_maximum_is_always_announced() -> None:
    """65535 is the standard's default and is not sent; a Mosquitto that is told nothing keeps to 20 and drops."""
    (connect,) = [a for a in Session(CONFIG).handle(events.ConnectionOpened(), 0.0) if isinstance(a, events.Send)]
    assert b"\x21\xff\xfe" in connect.data
