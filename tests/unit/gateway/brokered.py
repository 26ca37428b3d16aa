"""A pump and the other end of its connection, both moved by the test."""

from __future__ import annotations

import socket
from typing import Any

from mqtt5 import ConnAckPacket, SubAckPacket, SubAckReasonCode

from towline.gateway.pump import Pump

__all__ = ["Broker", "turn"]


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


def turn(pump: Pump) -> None:
    pump.wake()
    pump._turn()
