"""The client without a broker: what it refuses at once, its receipts, its end, and what waits in its memory."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
from mqtt5 import PublishPacket, QoS

from towline import Client, ClientSettings, Filter
from towline.errors import BrokerRefused, ConfigError, Unreachable
from towline.mqtt.events import PublishAcknowledged
from towline.net.client import Message, ReceiveQueue
from towline_prove.devstack.process import free_port

URI = "mqtt://127.0.0.1:1"


class Idle(Client):
    """Online as far as its callers see, with a thread that has nothing to do."""

    def _run(self) -> None:
        self._driver.ever_online = True
        with self._condition:
            self._condition.notify_all()


class Away(Client):
    """As after a connection that broke, and with no broker to find."""

    def _run(self) -> None:
        self._driver.ever_online = True
        super()._run()


def opened(uri: str | list[str] = URI, **settings: Any) -> Client:
    return Idle(uri, client_id="x", settings=ClientSettings(**settings))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"uri": "mqtt://me:secret@a"}, "a broker is mqtt://HOST"),
        ({"uri": []}, "uri: must be something, it is empty"),
        ({"protocol": "4"}, 'protocol: must be "5", "3.1.1", "3.1" or "auto"'),
        ({"subscribe": ["a/#/b"]}, "# stands alone and last"),
        ({"subscribe": [""]}, "subscribe.0.pattern: must be something, it is empty"),
        ({"subscribe": ["a", Filter("a", 2)]}, "subscribed twice"),
        ({"subscribe": [Filter("a", 3)]}, "subscribe.0.qos: must be less than or equal to 2"),
        ({"subscribe": [Filter("a", identifier=268_435_456)]}, "must be less than or equal to 268435455"),
        ({"subscribe": [Filter("a", no_local=True)], "protocol": "3.1.1"}, "need MQTT 5"),
        ({"password": "x", "protocol": "3.1.1"}, "a password needs a username"),
        ({"receive_maximum": 0}, "receive_maximum: must be greater than or equal to 1"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s: must be less than or equal to 600"),
        ({"client_id": "a\0b"}, "client_id: it has a surrogate or U+0000 [MQTT-1.5.4-1, -2]"),
        ({"keepalive": 5}, 'keepalive: no such setting. Did you mean "keep_alive_s"?'),
        ({"password": 5}, "password: must be bytes or text"),
        ({"subscribe": 5}, "subscribe: must be a list"),
        ({"will": {"topic": "a\0b"}}, "will: a topic has no +, no # and no U+0000"),
    ],
)
def test_what_can_not_be_is_one_line(given: dict[str, Any], words: str) -> None:
    own = {name: given.pop(name) for name in ("uri", "client_id", "subscribe") if name in given}
    with pytest.raises(ConfigError) as caught:
        Client(**{"uri": URI, "client_id": "x", **own}, settings=ClientSettings(**given))
    told = str(caught.value)
    assert words in told
    assert "\n" not in told
    assert "secret" not in told


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"uri": [URI, "mqtt://b"]}, True),
        ({"uri": URI, "follow_redirects": True}, True),
        ({"uri": [URI, "mqtt://b"], "brokers_share_sessions": True}, False),
        ({"uri": URI}, False),
    ],
)
def test_qos_2_to_several_brokers_needs_a_word(given: dict[str, Any], refused: bool) -> None:
    client = opened(given.pop("uri"), **given)
    client.publish("t", qos=1)
    expected = pytest.raises(ConfigError, match=r"brokers_share_sessions.*TL-C51") if refused else nullcontext()
    with expected:
        client.publish("t", qos=2)
    client.close(0)


def test_a_closed_client_says_so() -> None:
    client = Away(f"mqtt://127.0.0.1:{free_port()}", client_id="x")
    waiting = client.publish("t", b"never sent")
    client._pid += 1  # as after a fork
    with pytest.raises(Unreachable, match=r"belongs to the process that created it.*TL-M34"):
        client.receive()
    client._pid -= 1
    client.close(0)
    client.close(0)
    assert client.receive() is None
    assert list(client) == []
    with pytest.raises(Unreachable, match=r"the client is closed.*TL-M32"):
        client.publish("t")
    with pytest.raises(Unreachable, match="TL-M32"):
        waiting.result(1)


def test_too_many_unconfirmed_messages_make_publish_wait() -> None:
    client = opened()
    for _ in range(1000):
        client.publish("t")
    with pytest.raises(Unreachable, match=r"1,000 messages are not confirmed after 0.05 s.*TL-M33"):
        client.publish("t", timeout_s=0.05)
    client.close(0)


def test_results() -> None:
    client = opened()
    taken, dropped, weaker, nobody = (client.publish(f"t/{n}", qos=2) for n in range(4))
    for action in (
        PublishAcknowledged(taken, 0),
        PublishAcknowledged(dropped, 0x97),
        PublishAcknowledged(weaker, 0, qos_degraded=True),
    ):
        client._perform(action)
    assert taken.result() == PublishAcknowledged(taken, 0)
    assert not taken.cancel()
    with pytest.raises(BrokerRefused, match=r"t/1: the message was dropped: quota exceeded \(0x97\).*TL-M31"):
        dropped.result()
    assert weaker.result().qos_degraded
    assert not nobody.done()
    client._fail_pending_results(client._closed_error())
    assert nobody.done()


def test_the_size_of_a_message_is_what_it_carries() -> None:
    pairs = [("é", "1"), ("é", "1")]
    packet = PublishPacket("plant/ü", b"12345", content_type="text", correlation_data=b"id", user_properties=pairs)
    assert Message(packet, "plant/ü", 1, lambda _number: None).size == 8 + 5 + 4 + 2 + 2 * 3
    assert Message(PublishPacket("t", b""), "t", 1, lambda _number: None).size == 1


def test_the_session_never_shows_its_password() -> None:
    settings = ClientSettings(username="me", password="opensesame")
    assert "opensesame" not in repr(settings)
    assert "opensesame" not in repr(settings.connection(URI, "x"))


def test_a_message_beyond_what_mqtt_can_say_is_refused_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    client = opened()
    with pytest.raises(ConfigError, match=r"268,435,455.*\[TL-C51\]"):
        client.publish("t", bytes(300_000_000))
    client.close()
    assert capfd.readouterr().err == ""


# -- what waits in memory --


class Inbox(ReceiveQueue):
    """Arrivals that number what comes."""

    def come(self, qos: int, payload: bytes = b"") -> None:
        packet = PublishPacket("t", payload, qos=QoS(qos), packet_id=self._next_number + 1 if qos else None)
        self.add(Message(packet, "t", self._next_number, self.acknowledge))

    @property
    def numbers(self) -> list[int]:
        return [message.number for message in self.messages]


def test_settled_is_a_prefix_whatever_the_order_of_the_calls() -> None:
    inbox = Inbox()
    for number in range(100):
        inbox.come(number % 3)  # every third has no acknowledgement
    assert inbox.acknowledgeable == 1
    taken = [inbox.pop() for _ in range(100)]
    random.Random(7).shuffle(taken)
    done: set[int] = {number for number in range(100) if number % 3 == 0}
    for message in taken:
        message.ack()
        message.ack()
        done.add(message.number)
        assert inbox.acknowledgeable == next((number for number in range(100) if number not in done), 100)
    assert inbox.acknowledgeable == 100


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_64_mib_stop_the_reading(qos: int) -> None:
    inbox = Inbox()
    for number in range(64):
        assert not inbox.is_full
        inbox.come(qos, bytes(1 << 20))
        assert inbox.numbers[-1] == number
    assert inbox.is_full
    inbox.pop()
    assert not inbox.is_full


@pytest.mark.parametrize(("resumed", "settled", "waiting"), [(True, 3, [3, 4]), (False, 6, [3, 4, 5])])
def test_a_new_connection(resumed: bool, settled: int, waiting: list[int]) -> None:
    """A kept session sends QoS 1 again under new numbers, and of QoS 2 wants the PUBREC; a lost one wants nothing."""
    inbox = Inbox()
    for qos in (0, 1, 1, 2, 0, 1):
        inbox.come(qos)
    for _ in range(3):
        inbox.pop()
    inbox.connection_opened(2, resumed=resumed)
    assert (inbox.acknowledgeable, inbox.numbers) == (settled, waiting)
    inbox.come(1)
    inbox.connection_opened(2, resumed=resumed)
    assert inbox.numbers[-1] == 6, "a second call does nothing"
    for _ in range(len(inbox.messages)):
        inbox.pop().ack()
    assert inbox.acknowledgeable == 7
