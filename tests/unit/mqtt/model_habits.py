"""What the model broker keeps of a message, and where brokers differ."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Dup", "Habits", "Message", "Phase"]


class Dup(Enum):
    """When a broker sets DUP on what it sends at QoS > 0."""

    STANDARD = "again"  # on what it sends again [MQTT-3.3.1-1]
    NEVER = "never"  # aedes
    ALWAYS = "always"  # RabbitMQ after a crash: also on what was never sent before


class Phase(Enum):
    """How far a message to the client has come."""

    QUEUED = "queued"
    SENT = "sent"  # PUBLISH written, no PUBACK or PUBREC
    RECEIVED = "received"  # PUBREC came, PUBREL not written yet
    RELEASED = "released"  # PUBREL written, no PUBCOMP
    DONE = "done"


@dataclass(slots=True, eq=False)
class Message:
    """One message for the client.

    Attributes:
        serial: Grows by one with each; the payload is this number in ASCII.
        qos: As it is delivered.
        phase: How far it is.
        publishes: Times its PUBLISH was written in this session.
        releases: Times its PUBREL was written in this session.
        promised: The broker owes it to the client: neither lost with a session nor dropped at QoS 0.
        may_double: A fault of this broker makes more than one copy unavoidable.
        server: It waits at this one of two.
    """

    serial: int
    qos: int
    phase: Phase = Phase.QUEUED
    publishes: int = 0
    releases: int = 0
    promised: bool = True
    may_double: bool = False
    server: int = 0


@dataclass(frozen=True, slots=True)
class Habits:
    """Where brokers differ.

    Attributes:
        version: 5, 4 (MQTT 3.1.1) or 3 (MQTT 3.1).
        dup: When DUP is set.
        new_ids: A QoS 1 message that comes again has a new packet id: RabbitMQ.
        lowest_id: The lowest free packet id instead of the next: HiveMQ.
        both_again: After PUBREC and before PUBREL, a resume brings PUBLISH and PUBREL: mochi.
        republishes: A fault: after PUBREL too, against [MQTT-4.3.3-6]: Mosquitto restored from an old database.
        reuses_ids: A fault: a QoS 2 packet id is used for a new message before PUBCOMP: Mosquitto 2.0.11.
        receive_maximum: Announced to the client.
        window_3: Messages open at once towards a 3.x client, which can't say.
    """

    version: int = 5
    dup: Dup = Dup.STANDARD
    new_ids: bool = False
    lowest_id: bool = False
    both_again: bool = False
    republishes: bool = False
    reuses_ids: bool = False
    receive_maximum: int = 5
    window_3: int = 4
