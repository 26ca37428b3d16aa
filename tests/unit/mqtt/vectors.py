"""The client vectors of Eclipse Mosquitto, played against decoder and session without a socket."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mqtt5 import Packet, PublishPacket, QoS, UnsubscribePacket

from tests.helpers import packets_in
from towline.mqtt import events
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import Decoder, encode
from towline.mqtt.message import OutboundMessage
from towline.mqtt.session import Session

#: Beside the checkout, because the vectors carry a licence of their own.
FOLDER: Final = Path(__file__).parents[4] / "shared" / "vectors" / "mqtt_client"

CONNACK: Final = {3: "20 02 00 00", 4: "20 02 00 00", 5: "20 06 00 00 03 210014"}
#: The same for a session that the server has kept: the way to make ours unsubscribe is a subscription too many.
RESUMED: Final = {4: "20 02 01 00", 5: "20 06 01 00 03 210014"}
CONNECT: Final = {
    3: "10 15 0006 4D5149736470 03 02 003C 0007 66757A7A697368",
    4: "10 13 0004 4D515454 04 02 003C 0007 66757A7A697368",
    5: "10 17 0004 4D515454 05 02 003C 03 210014 0007 66757A7A697368",
}
ALIVE: Final = bytes.fromhex("40 02 FFFF")

_CONFIG: Final = events.SessionConfig(
    "fuzzish", "vectors", session_expiry_s=0, receive_maximum=20, keep_alive_s=60, durable=False, clean_start=True
)


@dataclass(frozen=True, slots=True)
class Case:
    """One case with the defaults of its group filled in."""

    name: str
    version: int
    connect: bool
    connack: bool
    command: str
    messages: tuple[tuple[str, bytes], ...]
    must_drop: bool


def load(folder: Path = FOLDER) -> dict[str, Case]:
    """All cases by file/group/name; a name that comes again gets a number."""
    seen: Counter[str] = Counter()
    cases: dict[str, Case] = {}
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            for test in group["tests"]:
                name = f"{file.stem}/{' '.join(group['group'].split())}/{test['name']}"
                seen[name] += 1
                name += f" #{seen[name]}" if seen[name] > 1 else ""
                cases[name] = _case(name, group, test)
    return cases


def _case(name: str, group: dict[str, Any], test: dict[str, Any]) -> Case:
    both = {**group, **test}
    messages = [*group.get("group_msgs", ()), *test["msgs"]]
    return Case(
        name,
        both.get("ver", 4),
        both.get("connect", True),
        both.get("connack", True),
        both.get("command", ""),
        tuple((message["type"], bytes.fromhex(message["payload"])) for message in messages),
        both.get("expect_disconnect", True),
    )


# The client ----------------------------------------------------------------------------------------------------------


class Client:
    """Drives decoder and session as the gateway does, on a disk that is always ready."""

    def __init__(
        self, config: events.SessionConfig, record: events.SessionRecord | None, limit: int = 64 << 20
    ) -> None:
        self.session = Session(config, record)
        self.decoder = Decoder(limit, config.protocol)
        self.version = config.protocol
        self.sent = bytearray()
        #: Why the connection was closed, None while it is open.
        self.closed: str | None = None
        self.now = 1.0

    def handle(self, event: events.Event) -> None:
        pending = [event]
        while pending and self.closed is None:
            actions = self.session.handle(pending.pop(0), self.now)
            for action in actions:
                pending += self._carry_out(action)

    def _carry_out(self, action: events.Action) -> list[events.Event]:
        if isinstance(action, events.Send):
            self.sent += action.data
        elif isinstance(action, events.Deliver):
            return [
                events.DeliveryStored(action.delivery_id),
                events.AckWatermark(action.first_number + len(action.messages)),
            ]
        elif isinstance(action, events.Close):
            self.closed = str(action.error)
        return []

    def receive(self, data: bytes) -> None:
        if self.closed is not None:
            return
        try:
            items = self.decoder.feed(data)
        except MalformedPacket as error:
            self.handle(events.DecodeFailed(str(error), error.reason))
            assert self.closed is not None
        else:
            self.handle(events.PacketsReceived(items))

    def take(self, count: int) -> bytes:
        taken = bytes(self.sent[:count])
        del self.sent[:count]
        return taken


def play(case: Case) -> None:
    """Play one case; an AssertionError tells what the client did against it."""
    client = Client(*_identity(case))
    client.handle(events.ConnectionOpened())
    if case.command != "unsubscribe":
        assert bytes(client.sent).hex() == bytes.fromhex(CONNECT[case.version]).hex()
    client.sent.clear()
    if case.connack:
        answer = RESUMED if case.command == "unsubscribe" else CONNACK
        client.receive(bytes.fromhex(answer[case.version]))
        assert client.closed is None
        _command(client, case)
    for kind, data in case.messages:
        if kind == "recv":
            _expect(client, data)
        else:
            client.receive(data)
    _probe(client, case)


def play_in_one_chunk(case: Case) -> None:
    """Play a case in which the server waits for nothing as one piece, from CONNACK to the probe."""
    client = Client(*_identity(case))
    client.handle(events.ConnectionOpened())
    client.sent.clear()
    pieces = [bytes.fromhex(CONNACK[case.version])] if case.connack else []
    pieces += [data for _, data in case.messages]
    client.receive(b"".join(pieces) + probe_packet(case))
    _judge(client, case)


def _identity(case: Case) -> tuple[events.SessionConfig, events.SessionRecord | None]:
    config = replace(_CONFIG, protocol=case.version)
    if case.command != "unsubscribe":
        return config, None
    record = events.SessionRecord(config.client_id, established=True, subscriptions={"test/subscribe": 1})
    return replace(config, clean_start=False, session_expiry_s=0xFFFFFFFF), record


def _command(client: Client, case: Case) -> None:
    if case.command.startswith("publish"):
        client.handle(events.Publish(1, _message(case.version, int(case.command[-1]))))


def _message(version: int, qos: int) -> OutboundMessage:
    properties: dict[str, Any] = {
        "payload_format_indicator": 1,
        "message_expiry_interval": 0xFFFFFFFF,
        "response_topic": "response/topic",
        "correlation_data": b"7deac5c5-8802-44ff-86ce-11479f337419",
        "content_type": "text/plain",
        "user_properties": [("key", "value")],
    }
    return OutboundMessage("test/publish", b"message", qos=qos, **(properties if version == 5 else {}))


def expected_bytes(expected: bytes, version: int) -> bytes:
    """What we have to say where a case expects these bytes."""
    wanted = _packet(expected, version)
    if isinstance(wanted, PublishPacket) and version == 5:
        # The standard CONNACK allows no topic alias, yet the expected bytes carry one [MQTT-3.3.2-9].
        message = _message(version, int(wanted.qos))
        return encode(message.to_packet(wanted.packet_id or 0, message.message_expiry_interval), version)
    if isinstance(wanted, UnsubscribePacket):
        return encode(UnsubscribePacket(wanted.packet_id, wanted.patterns), version)
    return expected


def _expect(client: Client, expected: bytes) -> None:
    wanted = expected_bytes(expected, client.version)
    assert client.take(len(wanted)).hex() == wanted.hex(), client.closed


def _packet(data: bytes, version: int) -> Packet:
    (item,) = Decoder(version=version).feed(data)
    (packet,) = packets_in(item)
    return packet


def _probe(client: Client, case: Case) -> None:
    unasked = "" if case.must_drop else client.sent.hex(" ")
    assert not unasked, f"sent {unasked} unasked"
    client.receive(probe_packet(case))
    _judge(client, case)


def probe_packet(case: Case) -> bytes:
    """The message a client that has not dropped the connection acknowledges with `ALIVE`."""
    return encode(PublishPacket("alive check", b"payload", qos=QoS(1), packet_id=65535), case.version)


def _judge(client: Client, case: Case) -> None:
    if case.must_drop:
        assert client.closed is not None, f"must drop, but is alive and sent {client.sent.hex(' ')}"
    else:
        assert client.closed is None, f"must stay, but dropped: {client.closed}"
        assert bytes(client.sent).hex() == ALIVE.hex()
