"""What goes into a `towline.mqtt.session.Session` and what comes out: small frozen values.

Events tell what happened, actions tell what must be done, in order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias

from annotated_types import Ge, Le, Len
from mqtt5 import QoS, RetainHandling, TopicFilter, Will

from towline.errors import BrokerError
from towline.mqtt.codec import Item, PublishRun
from towline.mqtt.message import OutboundMessage
from towline.mqtt.plain import PlainRun
from towline.mqtt.stubs import Published

#: The owner's name for a message that it publishes; the session hands it back untouched, whatever it is.
Token: TypeAlias = Hashable


@dataclass(frozen=True, slots=True)
class Filter:
    """A topic filter with its subscription options [MQTT 5 section 3.8.3.1]; bounds are what a configuration may say.

    Attributes:
        pattern: The topic filter.
        qos: Highest QoS wanted.
        no_local: Do not send us what we published ourselves; never with ``$share`` [MQTT-3.8.3-4].
        retain_as_published: Keep the RETAIN flag as the publisher set it.
        retain_handling: 0 retained messages always, 1 only for a new subscription, 2 never; None for 1, and 0 while
            we do not know that we ever asked for this filter. MQTT 3.x has only 0.
        identifier: Comes back with each message that matches, 1 to 268,435,455; None for none.
    """

    pattern: Annotated[str, Len(1, 65535)]
    qos: Annotated[int, Ge(0), Le(2)] = 1
    no_local: bool = False
    retain_as_published: bool = True
    retain_handling: Annotated[int, Ge(0), Le(2)] | None = None
    identifier: Annotated[int, Ge(1), Le(268_435_455)] | None = None

    @property
    def shared(self) -> bool:
        """Whether it is a shared subscription [MQTT 5 section 4.8.2]."""
        return self.pattern.startswith("$share/")

    @property
    def terms(self) -> int:
        """What a `SessionRecord` remembers of a subscription: the options byte and, above it, the identifier.

        Without Retain Handling, which is about the SUBSCRIBE alone [MQTT 5 section 3.8.3.1].
        """
        return self.qos | self.no_local << 2 | self.retain_as_published << 3 | (self.identifier or 0) << 8

    def packet(self) -> TopicFilter:
        """The filter as the codec takes it."""
        return TopicFilter(
            self.pattern,
            max_qos=QoS(self.qos),
            no_local=self.no_local,
            retain_as_published=self.retain_as_published,
            retain_handling=RetainHandling(self.retain_handling or 0),
        )


class Breach(ValueError):
    """What the broker sent and the standard forbids; the connection must end.

    Attributes:
        reason: Reason code for our DISCONNECT: 0x82 protocol error, 0x94 topic alias invalid.
    """

    def __init__(self, what: str, reason: int = 0x82) -> None:
        super().__init__(what)
        self.reason = reason


class Held(NamedTuple):
    """A QoS 2 message that is stored and whose packet id the broker has not released.

    Attributes:
        number: The message's number.
        digest: CRC-32 of the content (`towline.mqtt.inbound`): tells a repeat from a packet id used again too early.
    """

    number: int
    digest: int


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages in the order of their arrival.

    Attributes:
        runs: As they came, topic aliases resolved; a stub for each that was not taken in whole.
        tags: What the owner's screen said of each (`towline.mqtt.inbound.Screening`); empty where it says nothing.
    """

    runs: Sequence[PublishRun | PlainRun]
    tags: Sequence[Any] = ()

    @property
    def headers(self) -> bytes:
        """The first byte of each packet: DUP, QoS and RETAIN."""
        runs = self.runs
        return runs[0].headers if len(runs) == 1 else b"".join([run.headers for run in runs])

    @property
    def packets(self) -> Sequence[Published]:
        """The packets one by one."""
        runs = self.runs
        return runs[0].packets if len(runs) == 1 else [packet for run in runs for packet in run.packets]

    @property
    def topics(self) -> Sequence[str]:
        """The topic of each."""
        runs = self.runs
        return runs[0].topics if len(runs) == 1 else [topic for run in runs for topic in run.topics]

    def __len__(self) -> int:
        return sum(map(len, self.runs))


class Authenticator(Protocol):
    """Enhanced authentication [MQTT 5 section 4.12].

    `start` begins an exchange with each connection. An exception from any of the three ends the connection with
    `towline.errors.Refused` (TL-M28), which shows a ValueError's words and of others only the kind, lest a secret be
    in it [I12].
    """

    @property
    def method(self) -> str:
        """The Authentication Method, such as SCRAM-SHA-256."""

    def start(self) -> bytes:
        """Authentication Data for CONNECT."""

    def challenge(self, data: bytes) -> bytes:
        """The answer to the server's data in AUTH."""

    def finish(self, data: bytes) -> None:
        """Check the server's last word, in its CONNACK; ``b""`` without one. Raise when it proves nothing."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What we durably know of the broker's session.

    Attributes:
        client_id: The session belongs to this client id.
        established: A CONNACK for it has been seen; before that a crash may or may not have left a session.
        subscriptions: Topic filter → `Filter.terms` as the broker last confirmed them, or -1 while that is not sure
            (`towline.mqtt.subscriptions`).
        servers: Where a session of ours was, each with its own, the last one in use; empty where they share sessions.
    """

    client_id: str
    established: bool = False
    subscriptions: dict[str, int] = field(default_factory=dict)
    servers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What does not change while a session lives.

    Attributes:
        client_id: Stable, never empty.
        where: The line as errors name it.
        filters: Subscriptions wanted; none for a publisher.
        username: MQTT's.
        password: MQTT's.
        receive_maximum: Unacknowledged QoS > 0 messages we allow the broker; MQTT 3.x can't tell it.
        keep_alive_s: Seconds, 0 for none; a shorter value of the server wins [MQTT-3.2.2-21].
        connect_timeout_s: Seconds for the connection, from there to CONNACK, and of silence before SUBACK.
        session_expiry_s: Seconds the broker keeps the session; 0 ends it with the connection.
        unknown_session: ``refuse``, ``adopt`` or ``discard`` a broker session without a record [MQTT-3.2.2-4].
        will: Published by the broker when the connection ends without our DISCONNECT.
        authenticator: Enhanced authentication (MQTT 5); None for none.
        durable: The line promises at least once: a session without expiry is an error.
        clean_start: Begin without a session, each time; never for a durable line.
        protocol: 5, 4 (MQTT 3.1.1) or 3 (MQTT 3.1).
        topic_alias_maximum: Topic aliases the broker may use towards us.
        window_3: Messages in flight towards a 3.x broker, which announces no Receive Maximum; Mosquitto acknowledges
            and drops what goes beyond its own 20.
        durable_ids: `Flying` goes before each PUBLISH of QoS > 0 and each PUBREL, for an owner that outlives a crash.
        exactly_once: What is published with QoS 2 must not be taken as less: one such message at a time, until the
            broker has answered one with PUBREC. MQTT 3.x has no way to say that it knows no QoS 2.
    """

    client_id: str
    where: str
    filters: tuple[Filter, ...] = ()
    _: KW_ONLY
    username: str | None = None
    password: bytes | None = None
    receive_maximum: int = 65534
    keep_alive_s: int = 60
    connect_timeout_s: float = 10.0
    session_expiry_s: int = 0xFFFFFFFF
    unknown_session: str = "refuse"
    will: Will | None = None
    authenticator: Authenticator | None = None
    durable: bool = True
    clean_start: bool = False
    protocol: int = 5
    topic_alias_maximum: int = 0
    window_3: int = 20
    durable_ids: bool = False
    exactly_once: bool = False

    def __repr__(self) -> str:
        return f"SessionConfig(client_id={self.client_id!r}, filters={self.filters!r})"  # no password [I12]


# Events --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """The transport is connected; nothing has been sent.

    Attributes:
        server: Names the server; empty where all that may be reached share sessions.
        alone: It is the only one, so another name than before may stand for the same server.
        config: With the credentials of this connection, which may have been renewed; None for the same as before.
    """

    server: str = ""
    alone: bool = False
    config: SessionConfig | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """Bytes came, and the decoder returned these items; none while a packet is still arriving."""

    items: Sequence[Item]


@dataclass(frozen=True, slots=True)
class Settled:
    """Messages below `upto` are as safe as their acknowledgement promises [I1]."""

    upto: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The `Deliver` with this ticket is durable, and every one before it."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Send a message; `Acknowledged(token)` follows.

    Attributes:
        token: The owner's name for it.
        message: What to send.
        expires_at: On the clock of `Session.handle`: the message expiry interval sent is what is left until then, at
            least 1 s; None to send the message's own.
    """

    token: Token
    message: OutboundMessage
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class PublishMany:
    """Send messages, in order; costs less than one `Publish` each."""

    messages: Sequence[Publish]


@dataclass(frozen=True, slots=True)
class Reading:
    """The transport is read again, or not any more (back-pressure): then answers can't be expected [I7]."""

    on: bool


@dataclass(frozen=True, slots=True)
class Written:
    """The system has taken more of what waited to be sent: the line lives, and a PINGREQ may still wait behind it."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time `Session.deadline` named has come."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """The decoder could not read what came; the connection can't go on [MQTT 5 section 4.13]."""

    what: str
    reason: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The transport is gone."""


@dataclass(frozen=True, slots=True)
class Want:
    """From now on these are the subscriptions wanted: a broker that is connected is asked for the difference.

    Attributes:
        filters: All of them.
        or_back: Where a connected broker refuses one of them, those before are wanted again and `Session.refusal` says
            why; else the connection ends, as with a filter that is refused at its beginning.
    """

    filters: tuple[Filter, ...]
    or_back: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """Send a PINGREQ now: when `Session.probed`, the broker has read all that left before."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the connection and leave the session at the broker."""


Event: TypeAlias = (
    Opened
    | Received
    | Settled
    | Stored
    | Publish
    | PublishMany
    | Reading
    | Written
    | Tick
    | Malformed
    | Want
    | Probe
    | Lost
    | Stop
)


# Actions -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Write these bytes to the transport, in order."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Deliver:
    """Store all of this in one step [I3]; `Stored(ticket)` says that it is durable.

    Attributes:
        ticket: Grows by one with each.
        first: Number of the first message.
        messages: May be empty.
        held: QoS 2 packet ids that came with these messages.
        released: QoS 2 packet ids, held before, that are free again; they come before those of `held`.
    """

    ticket: int
    first: int
    messages: Messages
    held: Mapping[int, Held]
    released: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Remember:
    """Make this record durable before the next action; None forgets it."""

    record: SessionRecord | None


@dataclass(frozen=True, slots=True)
class Online:
    """Connected, and every subscription is confirmed."""

    resumed: bool


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The broker has answered all that a change of filters asked for (`Want`)."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The broker had forgotten our session: what it held for us is gone; report it [MQTT-3.2.2-5]."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A published message is the broker's now.

    Attributes:
        token: As given to `Publish`.
        reason: Reason code; 0x80 or more means that it was dropped, here or there.
        degraded: The broker took a QoS 2 message at QoS 1.
        packet_id: Free again; 0 when there was none.
        unsure: After PUBREC the broker lost its session, and with it perhaps the message.
    """

    token: Token
    reason: int
    degraded: bool = False
    packet_id: int = 0
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class Flying:
    """Make this durable before the next action, in this order: `SessionConfig.durable_ids` asks for it [I10].

    Attributes:
        forgotten: Packet ids that name nothing any more: the session they belonged to is gone.
        assigned: Packet id → token of each QoS 2 message that is about to be published.
        released: Packet ids whose PUBREL is about to leave → what PUBREC said: their messages are never published again
            [MQTT-4.3.3-6], and PUBCOMP says nothing of them.
        noted: As `assigned`, of QoS 1. The disk need not be waited for: what it forgets is sent as new, which costs a
            repeat at most, and the same packet id where the broker would wait for it [MQTT-4.4.0-1].
    """

    forgotten: tuple[int, ...]
    assigned: Mapping[int, Token]
    released: Mapping[int, int]
    noted: Mapping[int, Token] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Close:
    """Flush, then close the transport.

    Attributes:
        error: Why; None when it was asked for.
        fatal: The same will happen on every try.
        again_at_once: Connect again without a pause.
        reference: Other servers the broker names (Server Reference), "" for none.
        version_refused: The broker does not speak this protocol version.
        moved: With `reference`: for good (0x9D), not only for now (0x9C).
        unanswered: No CONNACK has come.
        answered: CONNACK has come, which was all that was asked for (`Session.probing`).
    """

    error: BrokerError | None
    fatal: bool = False
    again_at_once: bool = False
    reference: str = ""
    version_refused: bool = False
    moved: bool = False
    unanswered: bool = False
    answered: bool = False


Action: TypeAlias = Send | Deliver | Remember | Online | Subscribed | SessionLost | Acknowledged | Flying | Close
