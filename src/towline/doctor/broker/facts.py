"""What probes have seen of a broker. Values; what they mean is judged elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from mqtt5 import ConnAckPacket

from towline.errors import TowlineError

__all__ = [
    "BrokerFacts",
    "Elsewhere",
    "FilterAnswer",
    "Greeting",
    "InFlight",
    "KeptQueue",
    "KeptWindow",
    "LargeMessage",
    "LineAnswers",
    "NoGreeting",
    "OwnTopics",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The broker took us in.

    Attributes:
        level: Of the protocol: 5, 4 or 3.
        connack: What it said.
        asked_expiry_s: The Session Expiry Interval that was asked for.
        round_trip_s: Seconds from PINGREQ to PINGRESP.
        software: What it calls itself in ``$SYS/broker/version``; empty where it does not say.
    """

    level: int
    connack: ConnAckPacket
    asked_expiry_s: int = 0
    round_trip_s: float = 0.001
    software: str = ""

    @property
    def expiry_s(self) -> int:
        """Seconds it keeps a session, as far as it says so."""
        given = self.connack.session_expiry_interval
        return self.asked_expiry_s if given is None else given


@dataclass(frozen=True, slots=True, kw_only=True)
class NoGreeting:
    """It did not.

    Attributes:
        error: Why.
        speaks: The older version of the protocol that it took instead; None for none.
        tls: The port of a scheme without TLS speaks TLS.
    """

    error: TowlineError
    speaks: int | None = None
    tls: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTopics:
    """Whether a message on a topic of the doctor's comes back to it.

    Attributes:
        why: Empty where it does.
    """

    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptQueue:
    """What a session held that was away.

    Attributes:
        present: Session Present when it came back.
        accepted: Messages that the broker acknowledged while it was away.
        kept: Those that came.
        first: The oldest came: what is dropped is the newest.
        window: Messages that came before the first was acknowledged.
    """

    present: bool
    accepted: int
    kept: int
    first: bool = True
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWindow:
    """Whether Receive Maximum is kept.

    Attributes:
        announced: Receive Maximum.
        before: Messages that came without an acknowledgement.
        after: And after one.
    """

    announced: int
    before: int
    after: int

    @property
    def broken(self) -> bool:
        """More came than the standard allows [MQTT-3.3.4-9]."""
        return self.before > self.announced or self.after > self.announced + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeMessage:
    """What became of a large message.

    Attributes:
        size: Bytes of its payload.
        code: Reason code of PUBACK; 0 with MQTT 3.x.
        arrived: A subscriber got it.
        level: Of the protocol that its publisher spoke.
    """

    size: int
    code: int
    arrived: bool
    level: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """What became of QoS 2 messages that a 3.x publisher had in flight together.

    Attributes:
        sent: Published together.
        arrived: Those that a subscriber got, all being completed with PUBCOMP; or those that were answered.
        ended: The broker ended the connection before it had answered all.
    """

    sent: int
    arrived: int
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterAnswer:
    """The answer to one filter of a line.

    Attributes:
        pattern: The filter, as the line has it.
        qos: Wanted.
        code: Reason code of SUBACK; None where the broker ended the connection in its place.
        seen: Messages that came on it.
    """

    pattern: str
    qos: int
    code: int | None
    seen: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LineAnswers:
    """What was seen of one line.

    Attributes:
        filters: Of all its filters.
        levels: Messages that came with QoS 0, 1 and 2.
        started: Its gateway has run before; None where that is not seen from here.
    """

    filters: tuple[FilterAnswer, ...] = ()
    levels: tuple[int, int, int] = (0, 0, 0)
    started: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Whether a session made at one broker is there at another.

    Attributes:
        made_at: The broker where it was made.
        asked_at: The other one.
        present: Session Present.
    """

    made_at: str
    asked_at: str
    present: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFacts:
    """All that was seen of a broker; None for what was not looked at.

    Attributes:
        greeting: Its first word.
        own: Whether probes are let through.
        queue: What it keeps for a session that is away.
        window: Whether it keeps to Receive Maximum.
        qos_2: A PUBLISH of QoS 2 was answered with PUBREC.
        large: A message of some size.
        retained: A retained message was there for a later subscriber.
        in_flight: Messages that a 3.x publisher has in flight together.
        stopped: Why probing ended early.
        lines: By line.
    """

    greeting: Greeting | NoGreeting
    own: OwnTopics | None = None
    queue: KeptQueue | None = None
    window: KeptWindow | None = None
    qos_2: bool | None = None
    large: LargeMessage | None = None
    retained: bool | None = None
    in_flight: InFlight | None = None
    stopped: TowlineError | None = None
    lines: tuple[tuple[str, LineAnswers], ...] = ()
