"""What Mosquitto forgets by itself, killed with its store or cut off twice, shown without any part of Towline.

Its saving (`autosave_on_changes`) does not count a message's phase as a change (src/database.c, 2.0.21): killed after
PUBREL and before PUBCOMP, it knows the message as published only, and publishes it again instead of its PUBREL. So a
QoS 2 subscriber gets it twice under one packet id, and tests that kill Mosquitto count those apart.

To publish a message again after its PUBREL it needs no kill: of a connection that ends before its PUBRELs have left
again, it remembers only that it has to begin anew (`db__message_reconnect_reset_outgoing`, the same in the source of
2.1.2). Two connections that end in a row in the middle of QoS 2 are enough.

What it has sent to a subscriber it saves later (src/loop.c): killed in between, it has forgotten that too, and the
subscriber waits for a PUBREL that never comes.

Nor is a QoS 2 message that waits for its PUBREL a change: killed then, however long after its PUBREC, it has forgotten
what its publisher must take for received, and completes the exchange as if it had it.
"""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
from paho.mqtt import publish

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.gateway.test_outbox import KEEPING, rests, save

CONNECT_KEPT = bytes.fromhex("10 0f 0004 4d515454 04 00 003c 0003 656172")  # 3.1.1, clean session 0, client id "ear"
CONNECT_OTHER = CONNECT_KEPT.replace(b"ear", b"bee")
SUBSCRIBE = bytes.fromhex("82 08 0001 0003 612f23 02")  # "a/#" at QoS 2
PUBLISH, PUBREC, PUBREL, PUBCOMP, PINGREQ, PINGRESP = 3, 5, 6, 7, 12, 13
PACKET_ID = b"\0\7"
TOPIC = b"\0\3a/b"


def read(connection: socket.socket) -> tuple[int, bytes]:
    """Type and body of a short packet."""
    head = connection.recv(2, socket.MSG_WAITALL)
    return head[0] >> 4, connection.recv(head[1], socket.MSG_WAITALL)


def meet(port: int, connect: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 10)
    connection.settimeout(10)
    connection.sendall(connect)
    assert read(connection)[0] == 2  # CONNACK
    return connection


def subscribed(port: int, connect: bytes) -> socket.socket:
    connection = meet(port, connect)
    connection.sendall(SUBSCRIBE)
    assert read(connection)[0] == 9  # SUBACK
    return connection


def test_mosquitto_publishes_again_what_it_had_released(new_mosquitto: NewMosquitto) -> None:
    broker = new_mosquitto(**KEEPING)
    store = Path(broker.directory) / "mosquitto.db"
    ear = subscribed(broker.port, CONNECT_KEPT)
    publish.single("a/b", b"once", 2, hostname="127.0.0.1", port=broker.port)
    kind, first = read(ear)
    assert kind == PUBLISH
    with subscribed(broker.port, CONNECT_OTHER):  # a change that counts: now the message is in the store
        wait_until(lambda: b"once" in store.read_bytes(), what="the store")
    packet_id = first[5:7]
    ear.sendall(bytes([PUBREC << 4, 2]) + packet_id)
    assert read(ear) == (PUBREL, packet_id)  # here a subscriber hands the message on
    broker.kill()
    ear.close()
    broker.start()
    with meet(broker.port, CONNECT_KEPT) as again:
        assert read(again) == (PUBLISH, first)  # PUBREL would be right [MQTT-4.3.3-6, -7]


def test_mosquitto_publishes_again_what_it_could_not_release_twice(new_mosquitto: NewMosquitto) -> None:
    broker = new_mosquitto()
    messages = range(4)
    with subscribed(broker.port, CONNECT_KEPT) as ear:
        for number in messages:
            publish.single("a/b", b"%d" % number, 2, hostname="127.0.0.1", port=broker.port)
        came = [body for _, body in (read(ear) for _ in messages)]
        packet_ids = [body[5:7] for body in came]
        ear.sendall(b"".join(bytes([PUBREC << 4, 2]) + packet_id for packet_id in packet_ids))
        assert [read(ear) for _ in messages] == [(PUBREL, packet_id) for packet_id in packet_ids]  # handed on here

    def published_again() -> bool:
        """Whether one comes as PUBLISH after a connection that was cut off early; PUBREL is right [MQTT-4.3.3-6]."""
        with socket.create_connection(("127.0.0.1", broker.port), 10) as early:
            early.sendall(CONNECT_KEPT)
        with meet(broker.port, CONNECT_KEPT) as again:
            return any(kind == PUBLISH and body in came for kind, body in (read(again) for _ in messages))

    wait_until(published_again, what="a message published after its PUBREL")


def test_mosquitto_forgets_what_it_had_acknowledged(new_mosquitto: NewMosquitto) -> None:
    broker = new_mosquitto(**KEEPING)
    subscribed(broker.port, CONNECT_OTHER).close()
    with meet(broker.port, CONNECT_KEPT) as publisher:
        publisher.sendall(bytes([PUBLISH << 4 | 2 << 1, 8]) + TOPIC + PACKET_ID + b"1")
        assert read(publisher) == (PUBREC, PACKET_ID)  # for a publisher: it is stored
        assert broker.pid is not None
        process = psutil.Process(broker.pid)
        wait_until(lambda: rests(process), what="a Mosquitto at rest")
        broker.kill()
    broker.start()
    with meet(broker.port, CONNECT_OTHER) as ear, meet(broker.port, CONNECT_KEPT) as publisher:
        publisher.sendall(bytes([PUBREL << 4 | 2, 2]) + PACKET_ID)  # as every publisher must after a PUBREC
        assert read(publisher) == (PUBCOMP, PACKET_ID)
        publisher.sendall(bytes([PUBLISH << 4, 6]) + TOPIC + b"2")
        assert read(ear) == (PUBLISH, TOPIC + b"2")  # and nothing before it


def test_mosquitto_forgets_what_it_has_published(new_mosquitto: NewMosquitto) -> None:
    broker = new_mosquitto(**KEEPING | {"autosave_interval": "1000000"})  # changes: it saves when it is told to
    ear = subscribed(broker.port, CONNECT_KEPT)
    save(broker)
    publish.single("a/b", b"once", 2, hostname="127.0.0.1", port=broker.port)
    assert read(ear)[0] == PUBLISH
    broker.kill()
    ear.close()
    broker.start()
    with meet(broker.port, CONNECT_KEPT) as again:
        again.sendall(bytes([PINGREQ << 4, 0]))
        assert read(again) == (PINGRESP, b"")  # neither PUBLISH nor PUBREL came before it
