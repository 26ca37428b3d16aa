"""A pump and the other end of its connection, both moved by the test."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mqtt5 import ConnAckPacket, Packet, SubAckPacket, SubAckReasonCode

from tests.helpers import gateway_settings, read_all
from towline.gateway.pump import Pump
from towline.journal import Journal, Limits, Outbox
from towline.schema import ROW_SCHEMA

ROOMY = Limits(min_free_bytes=0)


class Broker:
    """The other end of the pump's connection, one packet at a time."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.line = self.listener

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.listener.getsockname()[1]}"

    def accept(self, pump: Pump, *, session_present: bool) -> None:
        pump._driver.schedule.due_at = 0.0
        turn(pump)
        if self.line is not self.listener:
            self.line.close()
        self.line, _ = self.listener.accept()
        self.say(pump, ConnAckPacket(session_present=session_present, receive_max=10))
        if not session_present:
            self.say(pump, SubAckPacket(1, [SubAckReasonCode.GRANTED_QOS_EXACTLY_ONCE]))

    def say(self, pump: Pump, *packets: Any) -> None:
        self.line.sendall(b"".join(packet.write() for packet in packets))
        turn(pump)

    def heard(self) -> list[Packet]:
        """What has come since the last look."""
        self.line.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            return read_all(self.line.recv(65536))
        return []


def turn(pump: Pump) -> None:
    pump.wake()
    pump._turn()


@contextlib.contextmanager
def pumping(
    place: Path,
    broker: Broker,
    *,
    limits: Limits = ROOMY,
    outbox: Outbox | None = None,
    **settings: Any,
) -> Iterator[tuple[Pump, Journal]]:
    """A pump of its own inbox, which ends with the block."""
    given = {"subscriptions": [{"pattern": "#", "qos": 2}], "outbox": None if outbox is None else {}, **settings}
    with Journal.open(place / "inbox", schema=ROW_SCHEMA, limits=limits) as inbox:
        pump = Pump(gateway_settings(state_dir=place, brokers=broker.url, linger_ms=0, **given), inbox, outbox)
        try:
            yield pump, inbox
        finally:
            pump.stop()
            pump.run()
