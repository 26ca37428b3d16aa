"""Events and actions of `towline.mqtt.session.Session`: small frozen values.

Events report what happened. Actions list what the driver must do, in order.
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
from towline.mqtt.truncated import ReceivedPublish

#: The owner's name for a message that it publishes; the session returns it unchanged.
MessageToken: TypeAlias = Hashable


@dataclass(frozen=True, slots=True)
class Filter:
    """Topic filter with subscription options [MQTT 5 section 3.8.3.1]; the bounds are those of the configuration.

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
    def is_shared(self) -> bool:
        """True for a shared subscription [MQTT 5 section 4.8.2]."""
        return self.pattern.startswith("$share/")

    @property
    def encoded_options(self) -> int:
        """Options byte and, above it, the subscription identifier, as a `SessionRecord` stores them.

        Without Retain Handling, which is about the SUBSCRIBE alone [MQTT 5 section 3.8.3.1].
        """
        return self.qos | self.no_local << 2 | self.retain_as_published << 3 | (self.identifier or 0) << 8

    def topic_filter(self) -> TopicFilter:
        """Return the filter as the codec's `TopicFilter`."""
        return TopicFilter(
            self.pattern,
            max_qos=QoS(self.qos),
            no_local=self.no_local,
            retain_as_published=self.retain_as_published,
            retain_handling=RetainHandling(self.retain_handling or 0),
        )


class BrokerProtocolError(ValueError):
    """Protocol error by the broker; the connection must end.

    Attributes:
        reason: Reason code for our DISCONNECT: 0x82 protocol error, 0x94 topic alias invalid.
    """

    def __init__(self, problem: str, reason: int = 0x82) -> None:
        super().__init__(problem)
        self.reason = reason


class UnreleasedMessage(NamedTuple):
    """Stored QoS 2 message whose packet id the broker has not released by PUBREL.

    Attributes:
        number: Message number.
        digest: CRC-32 of the content (`towline.mqtt.inbound`): tells a repeat from a packet id reused too early.
    """

    number: int
    digest: int


@dataclass(frozen=True, slots=True)
class Messages:
    """Received messages in the order of their arrival.

    Attributes:
        runs: Decoded runs with topic aliases resolved; a truncated message for each one not taken in whole.
        tags: Tags from the duplicate filter (`towline.mqtt.inbound.FilterResult`), one a message; empty without a
            filter.
    """

    runs: Sequence[PublishRun | PlainRun]
    tags: Sequence[Any] = ()

    @property
    def headers(self) -> bytes:
        """First byte of each packet: DUP, QoS and RETAIN."""
        runs = self.runs
        return runs[0].headers if len(runs) == 1 else b"".join([run.headers for run in runs])

    @property
    def packets(self) -> Sequence[ReceivedPublish]:
        """All packets as objects."""
        runs = self.runs
        return runs[0].packets if len(runs) == 1 else [packet for run in runs for packet in run.packets]

    @property
    def topics(self) -> Sequence[str]:
        """Topic of each message."""
        runs = self.runs
        return runs[0].topics if len(runs) == 1 else [topic for run in runs for topic in run.topics]

    def __len__(self) -> int:
        return sum(map(len, self.runs))


class Authenticator(Protocol):
    """Enhanced authentication [MQTT 5 section 4.12].

    `start` begins an exchange with each connection. An exception from any of the three methods ends the connection with
    `towline.errors.Refused` (TL-M28). The error shows the text of a ValueError; of other exceptions it shows only the
    type, because their text may contain a secret [I12].
    """

    @property
    def method(self) -> str:
        """Authentication Method, such as SCRAM-SHA-256."""

    def start(self) -> bytes:
        """Return the Authentication Data for CONNECT."""

    def challenge(self, data: bytes) -> bytes:
        """Return the response to the server's Authentication Data in AUTH."""

    def finish(self, data: bytes) -> None:
        """Check the Authentication Data of CONNACK, ``b""`` without any; raise if it does not prove the server."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """Durable record of the session at the broker.

    Attributes:
        client_id: Client id that the session belongs to.
        established: True after a CONNACK for it; before that, a crash may or may not have left a session at the broker.
        subscriptions: Topic filter → `Filter.encoded_options` as the broker last confirmed them, or -1 while unsure
            (`towline.mqtt.session.Subscriptions`).
        servers: Names of the servers that had a session of ours, the last one in use last; empty for a cluster that
            shares sessions.
    """

    client_id: str
    established: bool = False
    subscriptions: dict[str, int] = field(default_factory=dict)
    servers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Settings of a session that stay the same for its lifetime.

    Attributes:
        client_id: MQTT client id, stable and never empty.
        location: Name of the line in errors.
        filters: Requested subscriptions; none for a publisher.
        username: MQTT user name.
        password: MQTT password.
        receive_maximum: Unacknowledged QoS > 0 messages we allow the broker; MQTT 3.x can't announce it.
        keep_alive_s: Keep alive in seconds, 0 for none; a shorter value of the server wins [MQTT-3.2.2-21].
        connect_timeout_s: Seconds from the connection to CONNACK, and of silence before SUBACK.
        session_expiry_s: Seconds the broker keeps the session; 0 ends it with the connection.
        unknown_session: ``refuse``, ``adopt`` or ``discard`` a broker session without a record [MQTT-3.2.2-4].
        will: Message that the broker publishes when the connection ends without our DISCONNECT.
        authenticator: Enhanced authentication (MQTT 5); None for none.
        durable: True if the line promises at least once: a session without expiry is then an error.
        clean_start: Start without a session at each connection; never for a durable line.
        protocol: 5, 4 (MQTT 3.1.1) or 3 (MQTT 3.1).
        topic_alias_maximum: Topic aliases that the broker may use.
        durable_ids: Emit `SaveInFlight` before each PUBLISH of QoS > 0 and each PUBREL, for an owner that survives a
            crash.
        exactly_once: Send one QoS 2 message at a time until the broker has answered one with PUBREC, so that none is
            taken at a lower QoS. MQTT 3.x brokers can't announce that they lack QoS 2.
    """

    client_id: str
    location: str
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
    durable_ids: bool = False
    exactly_once: bool = False

    def __repr__(self) -> str:
        return f"SessionConfig(client_id={self.client_id!r}, filters={self.filters!r})"  # no password [I12]


# Events --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectionOpened:
    """Transport connected; no packet has been sent.

    Attributes:
        server_name: Name of the server; empty if all reachable servers share sessions.
        is_only_server: True for the only server, which may have got a new name since the last connection.
        config: Settings with the (perhaps renewed) credentials of this connection; None if unchanged.
    """

    server_name: str = ""
    is_only_server: bool = False
    config: SessionConfig | None = None


@dataclass(frozen=True, slots=True)
class PacketsReceived:
    """Items decoded from received bytes; none while a packet is still incomplete."""

    items: Sequence[Item]


@dataclass(frozen=True, slots=True)
class AckWatermark:
    """All messages below `end_number` may be acknowledged [I1]."""

    end_number: int


@dataclass(frozen=True, slots=True)
class DeliveryStored:
    """The `Deliver` with this id, and each one before it, is durable."""

    delivery_id: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Request to publish a message; `PublishAcknowledged(token)` follows.

    Attributes:
        token: The owner's name for the message.
        message: Message to send.
        expires_at: Expiry time on the clock of `Session.handle`: the remaining seconds are sent as message expiry
            interval, at least 1 s; None to send the message's own interval.
    """

    token: MessageToken
    message: OutboundMessage
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class PublishMany:
    """Request to publish messages in order; costs less than one `Publish` each."""

    messages: Sequence[Publish]


@dataclass(frozen=True, slots=True)
class ReadingToggled:
    """Reading of the transport was paused (back-pressure) or resumed; while paused, no answer can be expected [I7]."""

    enabled: bool


@dataclass(frozen=True, slots=True)
class BytesWritten:
    """The system accepted more outgoing bytes: the connection is alive; a PINGREQ may still wait behind them."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time returned by `Session.deadline` has come."""


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """The decoder rejected the received bytes; the connection must end [MQTT 5 section 4.13]."""

    problem: str
    reason: int


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The transport connection is gone."""


@dataclass(frozen=True, slots=True)
class PingRequest:
    """Request to send PINGREQ now; with `Session.pings_answered` the broker has read everything sent before it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Request to end the connection; the session stays at the broker."""


Event: TypeAlias = (
    ConnectionOpened
    | PacketsReceived
    | AckWatermark
    | DeliveryStored
    | Publish
    | PublishMany
    | ReadingToggled
    | BytesWritten
    | Tick
    | DecodeFailed
    | PingRequest
    | ConnectionLost
    | Stop
)


# Actions -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Write these bytes to the transport, in order."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Deliver:
    """Store messages and packet ids in one step [I3]; `DeliveryStored(delivery_id)` confirms that they are durable.

    Attributes:
        delivery_id: Grows by one with each delivery.
        first_number: Number of the first message.
        messages: Messages, perhaps none.
        unreleased_messages: QoS 2 packet ids that came with these messages.
        released_ids: QoS 2 packet ids that the broker released; to be applied before `unreleased_messages`.
    """

    delivery_id: int
    first_number: int
    messages: Messages
    unreleased_messages: Mapping[int, UnreleasedMessage]
    released_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveSessionRecord:
    """Persist this session record before the next action; None deletes it."""

    record: SessionRecord | None


@dataclass(frozen=True, slots=True)
class Online:
    """Connected, with all subscriptions confirmed."""

    session_resumed: bool


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The broker lost our session and the messages queued in it; report it [MQTT-3.2.2-5]."""


@dataclass(frozen=True, slots=True)
class PublishAcknowledged:
    """Final answer to a published message.

    Attributes:
        token: Token given to `Publish`.
        reason: Reason code; 0x80 or more if the message was dropped, by the broker or by us.
        qos_degraded: The broker took a QoS 2 message at QoS 1.
        packet_id: Packet id that is free again; 0 for none.
        delivery_unknown: The broker lost its session after PUBREC, and with it perhaps the message.
    """

    token: MessageToken
    reason: int
    qos_degraded: bool = False
    packet_id: int = 0
    delivery_unknown: bool = False


@dataclass(frozen=True, slots=True)
class SaveInFlight:
    """Persist packet ids in flight before the next action, in this order (`SessionConfig.durable_ids`) [I10].

    Attributes:
        discarded_ids: Packet ids of a session that is gone.
        qos2_ids: Packet id → token of each QoS 2 message that is about to be published.
        pubrec_reasons: Packet id → reason code of PUBREC, for each PUBREL about to be sent. Its message is never
            published again [MQTT-4.3.3-6], and PUBCOMP does not carry this reason.
        qos1_ids: As `qos2_ids`, of QoS 1. No fsync is needed: a lost entry is sent as a new message, which costs a
            repeat at most, and the same packet id where the broker would wait for it [MQTT-4.4.0-1].
    """

    discarded_ids: tuple[int, ...]
    qos2_ids: Mapping[int, MessageToken]
    pubrec_reasons: Mapping[int, int]
    qos1_ids: Mapping[int, MessageToken] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Close:
    """Flush, then close the transport.

    Attributes:
        error: Reason of the end; None after `Stop`.
        fatal: Every further attempt will fail in the same way.
        reconnect_at_once: Reconnect without a pause.
        server_reference: Other servers named by the broker (Server Reference), "" for none.
        version_refused: The broker does not support this protocol version.
        permanent_redirect: With `server_reference`: server moved (0x9D), not use another server (0x9C).
        no_connack: The connection ended before CONNACK.
        version_confirmed: CONNACK has come, which was the purpose of the connection (`Session.probing_version`).
    """

    error: BrokerError | None
    fatal: bool = False
    reconnect_at_once: bool = False
    server_reference: str = ""
    version_refused: bool = False
    permanent_redirect: bool = False
    no_connack: bool = False
    version_confirmed: bool = False


Action: TypeAlias = (
    Send | Deliver | SaveSessionRecord | Online | SessionLost | PublishAcknowledged | SaveInFlight | Close
)
