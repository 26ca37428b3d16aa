"""What tests of every room share: waiting for a condition, and saying what this machine lacks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NoReturn, Self, TypeVar

import mqtt5
import psutil
import pytest
from confluent_kafka import Producer

from towline import Client
from towline.errors import GatewayUnreachable
from towline.gateway.client import GatewayClient, Lease
from towline.gateway.settings import GatewaySettings
from towline.kafka.deadletters import Header
from towline.mqtt.codec import AckRun, Item, Packet, PublishRun
from towline.mqtt.message import OutboundMessage
from towline.mqtt.plain import PlainRun
from towline.mqtt.truncated import TruncatedMessage
from towline.processes import start_time

T = TypeVar("T")


class ServiceManager:
    """What a service tells its manager, as sd_notify(3) has it.

    Attributes:
        environ: Names the socket: an abstract one, which every mount namespace of the machine has.
        received: All that came so far, a line each.
    """

    def __init__(self) -> None:
        name = f"towline-{uuid.uuid4().hex}"
        self.environ = {"NOTIFY_SOCKET": f"@{name}"}
        self.received = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{name}")
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RD)
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while text := self._socket.recv(4096):
                self.received += text.decode() + "\n"


def wait_for_end(processes: Iterable[psutil.Process], timeout: float = 60.0) -> None:
    """Wait until all have ended; one that nobody reaps has ended too, which `psutil.wait_procs` does not say."""
    for process in processes:
        ended = partial(lambda one: not one.is_running() or start_time(one.pid) is None, process)
        wait_until(ended, timeout, f"the end of {process}")


def wait_until(condition: Callable[[], T | None], timeout: float = 60.0, what: str = "") -> T:
    """The first true answer of `condition`, asked every 10 ms for up to `timeout` seconds; less often where it is slow.

    Raises:
        AssertionError: There was none; it tells `what` was awaited and the last answer.
    """
    end = time.monotonic() + timeout
    while True:
        asked = time.monotonic()
        answer = condition()
        if answer:
            return answer
        now = time.monotonic()
        if now > end:
            awaited = what or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"waited {timeout:g} s for {awaited}; the last answer was {answer!r}")
        time.sleep(min(0.2, max(0.01, 20 * (now - asked))))  # what is awaited needs the machine too


def present(value: T | None) -> T:
    """What has to be there."""
    assert value is not None
    return value


def gateway_settings(**more: Any) -> GatewaySettings:
    """Of a gateway of which nothing matters but what is given."""
    given = {"name": "g", "state_dir": "g", "brokers": "mqtt://b", "subscriptions": [{"pattern": "t/#"}]}
    return GatewaySettings.model_validate(given | more)


def producer_in_order(bootstrap: str) -> Producer:
    """A producer whose records stand in each partition as they were given to it.

    Without idempotence (KIP-98) several requests are on their way, and one that is tried again comes after the next:
    right after a topic was made its broker may answer NOT_LEADER_OR_FOLLOWER.
    """
    return Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})


def produce_all(
    bootstrap: str, topic: str, records: Iterable[tuple[bytes | None, bytes | None, Sequence[Header]]]
) -> None:
    """Write records of key, value and headers, in order, and return when Kafka has all of them."""
    producer = producer_in_order(bootstrap)
    for key, value, headers in records:
        producer.produce(topic, value, key, headers=[*headers])
        producer.poll(0)
    assert producer.flush(60) == 0


def publish_all(uri: str, packets: Iterable[mqtt5.PublishPacket]) -> None:
    """Publish messages and return when the broker has taken all of them."""
    with Client(uri, client_id="device") as client:
        results = [
            client.publish(
                packet.topic,
                packet.payload,
                qos=int(packet.qos),
                retain=packet.retain,
                content_type=packet.content_type,
                payload_is_utf8=packet.payload_format_indicator == 1,
                response_topic=packet.response_topic,
                correlation_data=packet.correlation_data,
                expiry_s=packet.message_expiry_interval,
                user_properties=packet.user_properties,
            )
            for packet in packets
        ]
        for result in results:
            result.result(60)


def publish(
    topic: str = "t", payload: bytes = b"x", qos: int = 1, packet_id: int = 7, **more: Any
) -> mqtt5.PublishPacket:
    """A PUBLISH; at QoS 0 the packet id is left out."""
    return mqtt5.PublishPacket(topic, payload, qos=mqtt5.QoS(qos), packet_id=packet_id if qos else None, **more)


def outgoing(packet: mqtt5.PublishPacket) -> OutboundMessage:
    """What a packet says, to be published."""
    return OutboundMessage(
        packet.topic,
        packet.payload,
        qos=int(packet.qos),
        retain=packet.retain,
        payload_format_indicator=packet.payload_format_indicator,
        message_expiry_interval=packet.message_expiry_interval,
        content_type=packet.content_type,
        response_topic=packet.response_topic,
        correlation_data=packet.correlation_data,
        user_properties=packet.user_properties,
    )


def lacking(reason: str) -> NoReturn:
    """Skip the test because this machine lacks something; where CI=true a gap is a failure."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(f"CI must have everything: {reason}", pytrace=False)
    pytest.skip(reason)


@cache
def ptrace_works() -> bool:
    """Whether strace is here and may trace a child of ours."""
    strace = shutil.which("strace")
    if strace is None:
        return False
    answer = subprocess.run([strace, "-o", os.devnull, "true"], capture_output=True, timeout=30, check=False)
    return answer.returncode == 0


def read_all(data: bytes) -> list[mqtt5.Packet]:
    """The MQTT 5 packets in these bytes, read by a codec that is not ours."""
    left, packets = memoryview(data), []
    while left:
        packet, used = mqtt5.read(left)
        packets.append(packet)
        left = left[used:]
    return packets


def packets_in(item: Item) -> list[Packet]:
    """The packets of an item of the decoder, none of them a stub."""
    packets: list[Packet] = []
    for packet in item.packets if isinstance(item, PublishRun | PlainRun | AckRun) else [item]:
        assert not isinstance(packet, TruncatedMessage)
        packets.append(packet)
    return packets


def commit(client: GatewayClient, consumer: str, upto: int) -> None:
    """Move a consumer's watermark, as its reader does."""
    lease = Lease(consumer)
    client.wait(lease, upto, journal=client.status()["journal"], timeout_s=0)
    with contextlib.suppress(GatewayUnreachable):  # a drain ends with it
        client.release(lease)


def content(text: str) -> set[str]:
    """What an error says whatever its prose: its code, quoted words, names of settings, numbers and addresses."""
    return set(re.findall(r'TL-[A-Z]\d+|"[^"\s]*"|\w+(?:[_.]\w+)+|[a-z]+[A-Z]\w*|\w+://\S*|\d[\d,]*', text))
