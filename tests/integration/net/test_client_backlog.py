"""A backlog larger than the window: what the broker says behind it is heard, and memory stays bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from mqtt5 import PublishPacket, QoS

from tests.helpers import wait_until
from tests.integration.net.scripted import Line, Scripted
from tests.integration.net.test_client import take
from towline import Client
from towline.errors import Unreachable

MANY = 1500


def opened(make: Callable[[], Client], seconds: float = 20) -> Client:
    """A client that is there within this time: one that hangs fails its test."""
    made: list[Client] = []
    thread = threading.Thread(target=lambda: made.append(make()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert made, "it does not return"
    return made[0]


def backlog(count: int, size: int, then: Callable[[Line], Any]) -> Callable[[Line], None]:
    """Messages of QoS 1 before anything else, as a broker does that resumes a session and knows no window."""

    def script(line: Line) -> None:
        line.welcome(session_present=True)
        for number in range(1, count + 1):
            line.send(PublishPacket("t", b"%08d" % number + bytes(size), qos=QoS.AT_LEAST_ONCE, packet_id=number))
        then(line)
        while line.receive() is not None:
            pass

    return script


def test_a_backlog_too_large_for_memory_is_taken_before_the_client_is_online() -> None:
    mib, count = 1 << 20, 150
    answer = backlog(count, mib, Line.subscribed)
    with Scripted(answer) as server, opened(lambda: Client(server.uri, client_id="x", subscribe=["t"])) as client:
        assert not client.online
        assert sum(len(m.payload or b"") for m in client._receive_queue.messages) < 70 * mib
        receipt = client.publish("out", b"x")
        with pytest.raises(Unreachable, match=r"no answer within 0.1 s.*may be behind 64 MiB of them.*TL-M33"):
            receipt.wait(0.1)
        assert [int((m.payload or b"")[:8]) for m in take(client, count)] == list(range(1, count + 1))
        wait_until(lambda: client.online)
