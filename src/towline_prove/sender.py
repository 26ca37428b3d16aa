"""One publisher's side of MQTT 5, without a socket: numbered messages out, answers in, resends after a reconnect.

Deliberately not the product's Session: the judge of a client must not be that client. The rules it keeps: never more
unacknowledged messages than the server's Receive Maximum [MQTT-3.3.4-9]; after a resume everything unfinished again
with its packet id and DUP, in the original order [MQTT-4.4.0-1, MQTT-4.6.0-1]; never PUBLISH again after PUBREC
[MQTT-4.3.3-6]; state is dropped when the server has none [MQTT-3.2.2-5], and what was unfinished is then published
anew, as an application would.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import mqtt5
from mqtt5 import ConnAckPacket, PubAckPacket, PubCompPacket, PublishPacket, PubRecPacket, PubRelPacket, QoS

from towline_prove.numbered import encoder

__all__ = ["Answers", "NumberedSender", "own_devices", "share"]

_LAST_ID = 65535
_REFUSAL = 0x80


def own_devices(publisher: int, publishers: int, devices: int) -> list[str]:
    """Devices that this publisher alone speaks for, so that order per device has one author."""
    width = len(str(devices - 1))
    return [f"d{index:0{width}}" for index in range(publisher, devices, publishers)]


def share(publisher: int, publishers: int, messages: int) -> int:
    """How many of all messages this publisher sends; the first ones take the remainder."""
    return messages // publishers + (publisher < messages % publishers)


@dataclass(slots=True)
class Answers:
    """What one chunk of bytes from the broker says.

    Attributes:
        acked: Numbers whose flow is complete.
        refused: Numbers the broker answered with a reason >= 0x80; it will never deliver them.
        reply: Bytes that must go back (PUBREL).
        closed: Reason code of a DISCONNECT from the server, if one came.
    """

    acked: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    reply: bytearray = field(default_factory=bytearray)
    closed: int | None = None


@dataclass(slots=True)
class _Open:
    number: int
    released: bool = False


class NumberedSender:
    """Numbers 0..total-1 of one publisher, as MQTT bytes.

    Args:
        run: Name of the run.
        publisher: Its number.
        devices: Keys it speaks for, in turn.
        total: How many messages.
        qos: 0, 1 or 2.
        size: Payload bytes.
        topic: Template with ``{device}``.
        window: Most unacknowledged messages, further limited by the server's Receive Maximum.
    """

    def __init__(
        self, *, run: str, publisher: int, devices: list[str], total: int, qos: int, size: int, topic: str, window: int
    ) -> None:
        self.publisher = publisher
        self.total = total
        self.next = 0
        self.acked = 0
        self.refused = 0
        self._qos = QoS(qos)
        self._devices = devices
        self._topics = [topic.format(device=device) for device in devices]
        self._encode = encoder(run, publisher, size)
        self._wanted_window = self._window = window
        self._open: dict[int, _Open] = {}
        self._ids = itertools.cycle(range(1, _LAST_ID + 1))
        self._rest = b""

    @property
    def done(self) -> bool:
        """Everything is sent and, above QoS 0, answered."""
        return self.next == self.total and not self._open

    @property
    def unfinished(self) -> int:
        """Messages sent and not answered yet."""
        return len(self._open)

    def connected(self, connack: ConnAckPacket) -> tuple[bytes, list[int]]:
        """Begin on a new connection.

        Returns:
            Bytes to send first, and the numbers among them that are published a second time.
        """
        self._rest = b""
        self._window = min(self._wanted_window, connack.receive_max)
        waiting = list(self._open.items())
        if not connack.session_present:  # [MQTT-3.2.2-5]: nothing of the old flows may go on
            for _, entry in waiting:
                entry.released = False
        out = [self._again(packet_id, entry, dup=connack.session_present) for packet_id, entry in waiting]
        return b"".join(out), [entry.number for _, entry in waiting if not entry.released]

    def _again(self, packet_id: int, entry: _Open, *, dup: bool) -> bytes:
        if entry.released:
            return PubRelPacket(packet_id).write()
        return self._publish(packet_id, entry.number, dup=dup)

    def _publish(self, packet_id: int | None, number: int, *, dup: bool = False) -> bytes:
        turn = number % len(self._devices)
        payload = self._encode(number, self._devices[turn], time.time_ns())
        return PublishPacket(self._topics[turn], payload, qos=self._qos, packet_id=packet_id, duplicate=dup).write()

    def room(self) -> int:
        """How many messages may be sent now."""
        left = self.total - self.next
        return left if self._qos == 0 else min(left, self._window - len(self._open))

    def burst(self, limit: int) -> tuple[bytes, int, int]:
        """Encode the next messages.

        Returns:
            The bytes, the first number in them, and how many.
        """
        first = self.next
        count = max(0, min(limit, self.room()))
        self.next += count
        if self._qos == 0:
            return b"".join(self._publish(None, number) for number in range(first, self.next)), first, count
        return b"".join(map(self._new, range(first, self.next))), first, count

    def _new(self, number: int) -> bytes:
        packet_id = next(candidate for candidate in self._ids if candidate not in self._open)
        self._open[packet_id] = _Open(number)
        return self._publish(packet_id, number)

    def feed(self, data: bytes) -> Answers:
        """Take bytes from the broker in."""
        answers = Answers()
        for packet in self._packets(data):
            handle = _HANDLERS.get(type(packet))
            if handle is not None:
                handle(self, packet, answers)
        self.acked += len(answers.acked)
        self.refused += len(answers.refused)
        return answers

    def _packets(self, data: bytes) -> Iterator[object]:
        view = memoryview(self._rest + data)
        at = 0
        while at < len(view):
            try:
                packet, used = mqtt5.read(view[at:])
            except IndexError:  # the codec's word for "not whole yet"
                break
            at += used
            yield packet
        self._rest = bytes(view[at:])

    def _finish(self, packet_id: int, reason: int, answers: Answers) -> None:
        entry = self._open.pop(packet_id, None)
        if entry is not None:
            (answers.refused if reason >= _REFUSAL else answers.acked).append(entry.number)

    def _on_end(self, packet: PubAckPacket | PubCompPacket, answers: Answers) -> None:
        # PUBCOMP with "packet id not found" ends the flow as well: the server has nothing more to do [MQTT-4.3.3-11].
        reason = int(packet.reason_code) if isinstance(packet, PubAckPacket) else 0
        self._finish(packet.packet_id, reason, answers)

    def _on_pubrec(self, packet: PubRecPacket, answers: Answers) -> None:
        if int(packet.reason_code) >= _REFUSAL:
            self._finish(packet.packet_id, int(packet.reason_code), answers)
            return
        entry = self._open.get(packet.packet_id)
        if entry is not None:
            entry.released = True
        answers.reply += PubRelPacket(packet.packet_id).write()

    def _on_disconnect(self, packet: mqtt5.DisconnectPacket, answers: Answers) -> None:
        answers.closed = int(packet.reason_code)


_HANDLERS: dict[type, Callable[..., None]] = {
    PubAckPacket: NumberedSender._on_end,  # noqa: SLF001 - the table of this class
    PubCompPacket: NumberedSender._on_end,  # noqa: SLF001
    PubRecPacket: NumberedSender._on_pubrec,  # noqa: SLF001
    mqtt5.DisconnectPacket: NumberedSender._on_disconnect,  # noqa: SLF001
}
