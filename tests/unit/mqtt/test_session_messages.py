"""A session receives and publishes: numbers, acknowledgements, packet ids."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from mqtt5 import PubAckPacket, PublishPacket, QoS

from tests.unit.mqtt.sessions import CONFIG, message, online, receive, sent
from towline.delivery.inbound import plain_run
from towline.mqtt.codec import Decoder, encode
from towline.mqtt.events import AckWatermark, ConnectionOpened, Deliver, DeliveryStored, PacketsReceived, Send
from towline.mqtt.session import Session

# Receiving


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
            unread += encode(PublishPacket("a/1", payload, qos=QoS(1), packet_id=value, duplicate=again))
            wanted += [(value, payload)] if kind != "again" else []
        elif kind == "stored":
            session.handle(DeliveryStored(tickets[-1]), 1.0)
        elif kind in {"read", "settle"}:  # what is unread then would cross our PUBACKs
            for action in session.handle(PacketsReceived(decoder.feed(unread)), 1.0):
                if isinstance(action, Deliver):
                    assert action.first_number == len(stored)
                    stored += [(p.packet_id or 0, p.payload or b"") for p in action.messages.packets]
                    tickets.append(action.delivery_id)
            assert stored == wanted
            unread = b""
        if kind == "settle":
            settled = min(settled + value, len(wanted))
            acks += [
                p.packet_id for p in sent(session.handle(AckWatermark(settled), 1.0)) if isinstance(p, PubAckPacket)
            ]
            assert acks == [packet_id for packet_id, _ in wanted[:settled]]
        session.validate()


def test_acks_take_the_short_form() -> None:
    session = online()
    receive(session, message(0x1234))
    assert session.handle(AckWatermark(1), 2.0) == [Send(b"\x40\x02\x12\x34")]


def test_a_full_window_is_seen_and_an_overrun_counted() -> None:
    session = online(replace(CONFIG, receive_maximum=2))
    receive(session, message(1))
    assert session.window_full is False
    receive(session, message(2))
    assert session.inbound.unacknowledged_count == 2
    assert session.inbound.window_overruns == 0
    receive(session, message(3))
    assert session.inbound.window_overruns == 1
    session.handle(AckWatermark(3), 2.0)
    assert session.window_full is False


def test_receive_maximum_is_always_announced() -> None:
    """65535 is the standard's default and is not sent; a Mosquitto that is told nothing keeps to 20 and drops."""
    (connect,) = [a for a in Session(CONFIG).handle(ConnectionOpened(), 0.0) if isinstance(a, Send)]
    assert b"\x21\xff\xfe" in connect.data
