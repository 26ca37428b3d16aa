"""What a PUBLISH that comes alone costs: most of it is Python calls, whose number does not vary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mqtt5 import PublishPacket, QoS

from tests.helpers import gateway_settings
from tests.unit.gateway.brokered import Broker, turn
from towline.gateway.pump import Pump
from towline.journal import Journal, Limits
from towline.schema import ROW_SCHEMA


def calls_between(first: str, last: str, work: Callable[[], None]) -> list[str]:
    """The Python functions that are called from the first call of one method of a socket to that of another."""
    calls: list[str] = []
    counting = False

    def profile(frame: Any, event: str, called: Any) -> None:
        nonlocal counting
        if event == "c_call" and called.__name__ in (first, last):
            counting = called.__name__ == first
        elif event == "call" and counting:
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_a_publish_alone_is_acknowledged_after_a_hundred_calls_at_most(tmp_path: Path, broker: Broker) -> None:
    inbox = Journal.open(tmp_path / "inbox", schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0))
    pump = Pump(gateway_settings(state_dir=tmp_path, brokers=broker.url), inbox)
    broker.accept(pump, session_present=False)
    broker.line.recv(4096)  # CONNECT and SUBSCRIBE
    turns = list[list[str]]()
    for packet_id in range(1, 11):  # the first ones make what the others use again, and a busy machine makes some wait
        broker.line.sendall(PublishPacket("t", b"21.5", qos=QoS.AT_LEAST_ONCE, packet_id=packet_id).write())
        turns.append(calls_between("recv_into", "send", lambda: turn(pump)))
        assert broker.line.recv(100) == bytes((0x40, 2, 0, packet_id))
    pump.stop()
    pump.run()
    inbox.close()
    fewest = min(turns, key=len)
    assert 50 < len(fewest) <= 100, fewest
