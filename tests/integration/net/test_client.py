"""The public client against a real Mosquitto: what comes, what leaves, and what a crash of either side leaves."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mqtt5 import PublishPacket, QoS

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.conftest import KEEPING
from tests.integration.gateway.test_outbox import save
from tests.integration.net.scripted import Line, Scripted
from towline import Client, ClientSettings, Filter, Message
from towline.errors import BrokerRefused, TakenOver, TowlineError
from towline_prove.devstack import Mosquitto

ROOT = Path(__file__).parents[3]


def take(client: Client, count: int, *, ack: bool = True) -> list[Message]:
    """The next messages, acknowledged unless told otherwise."""
    taken: list[Message] = []
    while len(taken) < count:
        message = client.receive(10)
        assert message is not None, f"only {len(taken)} of {count}"
        if ack:
            message.ack()
        taken.append(message)
    return taken


@pytest.mark.parametrize("protocol", ["5", "3.1.1", "3.1", "auto"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_there_and_back(mosquitto: Mosquitto, protocol: Any, qos: int) -> None:
    """Over TCP with what the standard has and nothing else.

    [MQTT-4.2.0-1], [MQTT-7.0.0-2 of 3.1.1], [MQTT-7.1.2-1 of 3.1.1].
    """
    subscribe = [Filter("t/#", qos)]
    with Client(
        mosquitto.uri, client_id="both", subscribe=subscribe, settings=ClientSettings(protocol=protocol)
    ) as client:
        receipts = [client.publish(f"t/{n}", b"%d" % n, qos=qos) for n in range(200)]
        taken = take(client, 200)
        assert [receipt.result(60).reason for receipt in receipts] == [0] * 200
    assert [(m.topic, m.payload, m.qos) for m in taken] == [(f"t/{n}", b"%d" % n, qos) for n in range(200)]


def test_all_properties_arrive(mosquitto: Mosquitto) -> None:
    with Client(mosquitto.uri, client_id="both", subscribe=["t"]) as client:
        pairs = [("b", "1"), ("a", "2"), ("b", "1")]
        client.publish(
            "t",
            "größer",
            content_type="text/plain",
            payload_is_utf8=True,
            response_topic="answers/1",
            correlation_data=b"\0\xff",
            expiry_s=600,
            user_properties=pairs,
        )
        (message,) = take(client, 1)
    assert message.payload == "größer".encode()
    assert (message.content_type, message.payload_is_utf8) == ("text/plain", True)
    assert (message.response_topic, message.correlation_data) == ("answers/1", b"\0\xff")
    assert message.user_properties == tuple(pairs)
    assert message.expiry_s in (599, 600)
    assert (message.retain, message.duplicate, message.subscription_ids) == (False, False, ())


def test_a_message_not_acknowledged_comes_again_to_the_next_client(mosquitto: Mosquitto) -> None:
    with Client(mosquitto.uri, client_id="reader", subscribe=["t"]) as client:
        client.publish("t", b"1").result(60)
        client.publish("t", b"2").result(60)
        first, second = take(client, 2, ack=False)
        second.ack()  # can't leave before the first
        assert not first.duplicate
    with Client(mosquitto.uri, client_id="reader", subscribe=["t"]) as client:
        again = take(client, 2)
        assert [(m.payload, m.duplicate) for m in again] == [(b"1", True), (b"2", True)]
    with Client(mosquitto.uri, client_id="reader", subscribe=["t"]) as client:
        assert client.receive(0.3) is None


def test_acknowledgements_in_any_order_from_several_threads(mosquitto: Mosquitto) -> None:
    """A window of 10 moves only when acknowledgements leave, and they leave as a prefix [MQTT-4.6.0-2]."""
    with Client(
        mosquitto.uri, client_id="both", subscribe=[Filter("t", 2)], settings=ClientSettings(receive_maximum=10)
    ) as client:
        receipts = [client.publish("t", b"%d" % n, qos=1 + n % 2) for n in range(100)]
        seen: list[int] = []
        while len(seen) < 100:
            batch = take(client, min(10, 100 - len(seen)), ack=False)
            seen += [int(m.payload or b"") for m in batch]
            random.Random(4).shuffle(batch)
            with ThreadPoolExecutor(10) as pool:
                list(pool.map(Message.ack, batch))
        # A broker keeps the order within one QoS: it hands a QoS 2 message on when that is released.
        assert [n for n in seen if n % 2] == list(range(1, 100, 2))
        assert [n for n in seen if not n % 2] == list(range(0, 100, 2))
        assert all(receipt.result(60).reason in (0, 0x10) for receipt in receipts)


def test_it_goes_on_by_itself_after_the_broker_was_killed(new_mosquitto: NewMosquitto) -> None:
    broker = new_mosquitto(**KEEPING)
    with Client(broker.uri, client_id="both", subscribe=[Filter("t", 2)]) as client:
        client.publish("t", b"before", qos=2).result(60)
        take(client, 1)
        save(broker)  # or the session might be among what it forgets
        broker.kill()
        wait_until(lambda: client.last_error is not None)
        waiting = client.publish("t", b"meanwhile", qos=2)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        broker.start()
        assert waiting.result(60).reason == 0
        assert [m.payload for m in take(client, 1)] == [b"meanwhile"]
        assert client.last_error is None
        assert client.online
        assert client.sessions_lost == 0


def test_a_refused_login_is_one_sentence_without_the_password(new_mosquitto: NewMosquitto, tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text("")
    users.chmod(0o600)
    broker = new_mosquitto(allow_anonymous="false", password_file=str(users))
    with pytest.raises(BrokerRefused, match=r"TL-M08") as caught:
        Client(broker.uri, client_id="x", settings=ClientSettings(username="me", password="opensesame"))
    assert "opensesame" not in str(caught.value)


def test_a_client_id_taken_over_twice_is_given_up(mosquitto: Mosquitto) -> None:
    with Client(mosquitto.uri, client_id="same") as first, Client(mosquitto.uri, client_id="same") as second:
        ended: list[TowlineError] = []

        def listen(client: Client) -> None:
            try:
                client.receive(20)
            except TakenOver as error:
                ended.append(error)

        threads = [threading.Thread(target=listen, args=(client,)) for client in (first, second)]
        for thread in threads:
            thread.start()
        wait_until(lambda: ended, what="one that gives up")
        assert ended[0].code == "TL-M21"
        wait_until(lambda: first.online != second.online, what="the other stays")
        with pytest.raises(TakenOver):
            (second if first.online else first).publish("t", b"x")
        (first if first.online else second).close()
        for thread in threads:
            thread.join(60)


def test_the_example_answers_requests(mosquitto: Mosquitto) -> None:
    command = [sys.executable, str(ROOT / "examples" / "mqtt_client.py"), mosquitto.uri, "--count", "3"]
    with Client(mosquitto.uri, client_id="asker", subscribe=["answers/#"]) as asker:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as example:
            assert example.stdout is not None
            assert example.stdout.readline().startswith("online at ")
            asker.publish("requests/a", b"one")
            asker.publish("requests/b", b"two", response_topic="answers/elsewhere", correlation_data=b"7")
            asker.publish("requests/c", b"three")
            answers = take(asker, 3)
            assert example.stdout.read() == "3 answered\n"
        assert example.returncode == 0
    found = [(m.topic, m.payload, m.correlation_data) for m in answers]
    wanted = [("answers/a", b"ONE", None), ("answers/elsewhere", b"TWO", b"7"), ("answers/c", b"THREE", None)]
    assert found == wanted


def test_a_backlog_too_large_for_memory_is_taken_before_the_client_is_online() -> None:
    """Of a broker that resumes a session and knows no window; its SUBACK comes behind it."""
    mib, count = 1 << 20, 150

    def script(line: Line) -> None:
        line.welcome(session_present=True)
        for number in range(1, count + 1):
            line.send(PublishPacket("t", b"%08d" % number + bytes(mib), qos=QoS.AT_LEAST_ONCE, packet_id=number))
        line.subscribed()
        while line.receive() is not None:
            pass

    with Scripted(script) as server, Client(server.uri, client_id="x", subscribe=["t"]) as client:
        assert not client.online
        assert sum(len(m.payload or b"") for m in client._receive_queue.messages) < 70 * mib
        receipt = client.publish("out", b"x")
        with pytest.raises(TimeoutError):
            receipt.result(0.1)
        assert [int((m.payload or b"")[:8]) for m in take(client, count)] == list(range(1, count + 1))
        wait_until(lambda: client.online)
