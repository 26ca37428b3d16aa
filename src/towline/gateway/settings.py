"""What a gateway is told: one validated value, the same for a bridge line, a Spark option map and the command line."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
    model_validator,
)

from towline.delivery.receipts.payload import PREFIX
from towline.gateway.listen import ListenSettings
from towline.guarantee import AckAfter, Guarantee, policy
from towline.journal import Limits
from towline.mqtt.events import Filter
from towline.mqtt.filters import overlapping
from towline.mqtt.rules import filter_problem
from towline.net.options import LONGEST_DELAY_S, ProtocolName
from towline.net.reconnect import FIRST_PAUSE_S, LONGEST_PAUSE_S
from towline.net.transport import Endpoint, Proxy, Tls

__all__ = [
    "ConnectionSettings",
    "GatewaySettings",
    "ListenSettings",
    "OutboxLimits",
    "OutboxSettings",
    "ReceiptSettings",
    "ShareSettings",
    "ShareWay",
    "WillSettings",
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def _one_filter(value: object) -> object:
    """Settings call a filter ``filter``, and may leave the rest of it out."""
    if isinstance(value, Mapping) and "filter" in value:
        return {"pattern": value["filter"], **{name: one for name, one in value.items() if name != "filter"}}
    return value


def _filter_settings(value: Filter) -> dict[str, object]:
    fields = asdict(value)
    return {"filter": fields.pop("pattern"), **fields}


def _subscribable(value: Filter) -> Filter:
    if problem := filter_problem(value.pattern):
        raise ValueError(problem)
    if value.no_local and value.pattern.startswith("$share/"):
        raise ValueError("no_local can't be used with a shared subscription [MQTT-3.8.3-4]")
    return value


#: A topic filter and its options. What it leaves open about retained messages the gateway's own setting decides.
SubscribedFilter = Annotated[
    Filter, BeforeValidator(_one_filter), AfterValidator(_subscribable), PlainSerializer(_filter_settings)
]


class WillSettings(_Model):
    """The message the broker publishes when the gateway's connection ends without DISCONNECT [MQTT 5 section 3.1.3.2].

    Attributes:
        topic: Without wildcards.
        payload: Text.
        qos: 0 to 2.
        retain: Keep it for later subscribers.
        delay_s: Seconds the broker waits for us to come back before it publishes (MQTT 5).
        expiry_s: Seconds after which nobody gets it any more; None for never (MQTT 5).
        content_type: What the payload is (MQTT 5).
        response_topic: Where an answer is expected (MQTT 5).
        user_properties: Pairs, in order (MQTT 5).
        payload_is_utf8: Whether the payload is said to be UTF-8 text (MQTT 5).
        correlation_data: What an answer repeats, as text (MQTT 5).
    """

    topic: str = Field(min_length=1, max_length=65535, pattern=r"^[^+#\x00]+$")
    payload: str = ""
    qos: Annotated[int, Field(ge=0, le=2)] = 0
    retain: bool = False
    delay_s: Annotated[int, Field(ge=0, le=0xFFFFFFFF)] = 0
    expiry_s: Annotated[int, Field(ge=0, le=0xFFFFFFFF)] | None = None
    content_type: str | None = None
    response_topic: str | None = None
    user_properties: tuple[tuple[str, str], ...] = ()
    payload_is_utf8: bool = True
    correlation_data: str | None = None


class OutboxLimits(_Model):
    """When the outbox takes no more, and when its messages are too old [I7].

    Attributes:
        max_bytes: Most bytes on disk; None for no limit but the disk. More is refused until something was delivered.
        min_free_bytes: Space left free on the file system.
        segment_bytes: Size at which a new segment begins.
        max_age_s: Messages that came so many seconds ago are not sent any more, and counted as expired; None for never.
    """

    max_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    min_free_bytes: Annotated[int, Field(ge=0)] = 512 << 20
    segment_bytes: Annotated[int, Field(ge=64 << 10)] = 64 << 20
    max_age_s: Annotated[float, Field(gt=0)] | None = None


class OutboxSettings(OutboxLimits):
    """An outbox: its limits, and the query that writes to it.

    Attributes:
        checkpoint: Location of the checkpoint of a query that writes here: an outbox that is an older copy than what it
            remembers sends nothing [I14]. "" for one that is not known.
        number: Of the outbox, where that query writes to several.
    """

    checkpoint: str = ""
    number: Annotated[int, Field(ge=0)] = 0


class ReceiptSettings(_Model):
    """End-to-end receipts for publishers that ask for them (docs/receipts.md).

    Attributes:
        key_file: Holds the line's keys; only publishers with one of them, or with one made of it, are heard.
        prefix: Receipts go to this topic, a slash, and the publisher's id.
        max_publishers: More are not known: their messages pass, get no receipt, and repeats are doubles.
        max_ranges: Ranges of one publisher's numbers with others missing between them; what would make one more is
            dropped and comes again.
        keep_s: A publisher that is silent for so long is forgotten, and with it what it had sent.
    """

    key_file: Path
    prefix: Annotated[str, Field(pattern=r"^[^+#\x00$/](?:[^+#\x00]{0,198}[^+#\x00/])?$")] = PREFIX
    max_publishers: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    max_ranges: Annotated[int, Field(ge=1, le=100_000)] = 256
    keep_s: Annotated[float, Field(ge=60)] = 30 * 86400


class ShareWay(StrEnum):
    """How a line's messages are shared among its gateways."""

    #: Each member has filters of its own, and no topic is taken by two of them: order per topic and device.
    FILTERS = "filters"
    #: A shared subscription, ``$share/GROUP/FILTER``: the broker chooses, and order is not promised.
    SUBSCRIPTION = "subscription"


class ShareSettings(_Model):
    """One member among the gateways of a line.

    Attributes:
        member: This one.
        members: The names of all, sorted.
        way: How they share.
        client_id: The line's, without the name of a member.
    """

    member: str = Field(min_length=1)
    members: tuple[str, ...] = Field(min_length=1)
    way: ShareWay
    client_id: str = ""

    def id_of(self, member: str) -> str:
        """The MQTT client id of a member."""
        return f"{self.client_id}-{member}"


#: ``package.module:function``.
FUNCTION: Final = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
#: A larger one costs Mosquitto, which looks through it for each answer, more than it spares the gateway.
_WINDOW_QOS_2: Final = 2000


def _endpoints(value: object) -> object:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple):
        return tuple(Endpoint.parse(item.strip()) if isinstance(item, str) else item for item in value)
    return value


#: Written as URIs, in a list or with commas between them.
Brokers = Annotated[
    tuple[Endpoint, ...],
    BeforeValidator(_endpoints, json_schema_input_type=str | list[str]),
]


class ConnectionSettings(_Model):
    """How a gateway reaches its brokers and what it says to them, whichever way messages go: ``[mqtt]``.

    Every face has its names: the bridge file as they are, options of Spark in camel case without unit. Secrets stand in
    files. Times are seconds, but for ``linger_ms``; sizes are bytes.

    Attributes:
        brokers: Tried in this order, again from the first after the last, and after a connection that worked.
        proxy: ``http://[USER@]HOST:PORT`` or ``socks5://[USER@]HOST:PORT`` on the way to the brokers.
        proxy_password_file: Its password.
        client_id: Stable MQTT client id; default the name.
        username: For the broker; None for none.
        password_file: Holds its password; read at each connection, as all these files are.
        token_provider: ``module:function`` that gives the password at each connection, for one that is short-lived.
        tls: How the broker is verified, and how we show who we are, with ``mqtts://`` and ``wss://``.
        connect_timeout_s: Seconds that a connection and its CONNACK may take.
        keep_alive_s: MQTT keep alive in seconds; a shorter value of the server wins [MQTT-3.2.2-21].
        session_expiry_s: How long the broker keeps the session while we are away; 0xFFFFFFFF for ever.
        receive_maximum: Unacknowledged messages we allow the broker [MQTT 5 section 3.1.2.11.3]. At most 65534: 65535
            is the standard's default and so not sent, and a Mosquitto that is told nothing keeps to 20, queues 1,000
            more and drops the rest. Default 65534, and 2000 with QoS 2, whose answers cost Mosquitto a search through
            the whole window (100,000 messages: 4 s with 1000, minutes with 65534, measured on 2.0.21).
        max_packet_bytes: Of a larger message only a row without payload is kept (`towline.mqtt.stubs`). It is not
            announced to the broker, which would silently drop larger messages [MQTT-3.1.2-25].
        linger_ms: How long a chunk may wait for more before it is made durable: twice as long in a stream, up to three
            times elsewhere.
        protocol: ``5``, ``3.1.1``, ``3.1``, or ``auto``: 5, and 3.1.1 or 3.1 where the broker does not speak it, as it
            says, or shows by ending the connection or by silence in place of CONNACK. 3.1 and 3.1.1 have no expiry, no
            Receive Maximum and no properties.
        will: Published by the broker when the gateway's connection breaks.
        topic_alias_maximum: Topic aliases the broker may use, which makes packets with long topics shorter.
        retain_handling: Retained messages when a filter is subscribed: 0 always, 1 only where the broker's session did
            not have it, 2 never (MQTT 5). Default 1, so that a SUBSCRIBE that is sent a second time brings none twice,
            and 0 for a filter that this journal never subscribed. MQTT 3.x always sends them.
        unknown_session: What to do with a broker session the journal knows nothing of [MQTT-3.2.2-4]: ``refuse``
            and ask, ``adopt`` its queue, or ``discard`` it. Default ``refuse``, because a lost journal has acknowledged
            what the session holds no more; ``adopt`` with ``ack_after = "kafka"``, where Kafka has all of that.
        abandon_session: A former client id of this state directory whose session at the broker is given up, with all
            that waits in it; without it a changed client id is refused.
        follow_redirects: Go to the server that a broker names with "use another server" or "server moved", with the
            same scheme and TLS verification; otherwise its word is shown as an error.
        brokers_share_sessions: The brokers are one cluster that keeps one session for us, whichever we reach. Without
            it each is taken to have a session of its own: at least once holds, exactly once does not.
        reconnect_delay_s: First pause before another connection; each further one is twice as long.
        reconnect_max_delay_s: The longest pause.
        websocket_headers_file: Further headers of the request that opens a WebSocket, ``Name: value`` a line; a file,
            because one may be a secret.
        websocket_query_file: The query of that request, in place of the URI's, or a whole presigned URL.
        authenticator: Enhanced authentication (MQTT 5): ``package.module:factory``, called with user name and password,
            gives an `towline.mqtt.Authenticator`.
    """

    brokers: Brokers = ()
    client_id: str = Field(default="", max_length=256)
    username: str | None = None
    password_file: Path | None = None
    token_provider: str | None = Field(default=None, pattern=FUNCTION)
    tls: Tls = Tls()
    proxy: str | None = None
    proxy_password_file: Path | None = None
    keep_alive_s: Annotated[int, Field(ge=5, le=65535)] = 60
    session_expiry_s: Annotated[int, Field(ge=0, le=0xFFFFFFFF)] = 0xFFFFFFFF
    receive_maximum: Annotated[int, Field(ge=1, le=65534)] | None = None
    max_packet_bytes: Annotated[int, Field(ge=1024, le=268_435_460)] = 64 << 20
    linger_ms: Annotated[float, Field(ge=0, le=1000)] = 1.0
    connect_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    protocol: ProtocolName = "5"
    will: WillSettings | None = None
    topic_alias_maximum: Annotated[int, Field(ge=0, le=65535)] = 0
    retain_handling: Annotated[int, Field(ge=0, le=2)] | None = None
    unknown_session: Literal["refuse", "adopt", "discard"] | None = None
    abandon_session: str = Field(default="", max_length=256)
    follow_redirects: bool = False
    brokers_share_sessions: bool = False
    reconnect_delay_s: Annotated[float, Field(gt=0, le=LONGEST_DELAY_S)] = FIRST_PAUSE_S
    reconnect_max_delay_s: Annotated[float, Field(gt=0, le=LONGEST_DELAY_S)] = LONGEST_PAUSE_S
    websocket_headers_file: Path | None = None
    websocket_query_file: Path | None = None
    authenticator: str | None = Field(default=None, pattern=FUNCTION)

    @field_validator("tls", mode="before")
    @classmethod
    def _one_protocol_or_more(cls, value: object) -> object:
        if isinstance(value, Mapping) and isinstance(alpn := value.get("alpn"), str):
            return {**value, "alpn": tuple(alpn.replace(",", " ").split())}
        return value

    @field_validator("tls")
    @classmethod
    def _usable_tls(cls, value: Tls) -> Tls:
        if problem := value.problem():
            raise ValueError(problem)
        return value


class GatewaySettings(ConnectionSettings):
    """Everything one gateway needs; secrets only as names of files.

    Attributes:
        name: Names the gateway in rows, logs and metrics.
        state_dir: Directory of this gateway alone: journal, lock, endpoint.
        subscriptions: At least one, unless there is an outbox.
        outbox: What to send is taken and delivered; None for a gateway that only receives.
        receipts: Publishers that ask for it learn what is in Kafka, and their repeats are dropped; None for neither.
        guarantee: Sets ``ack_after`` unless it is given.
        linger_after_silence_ms: How long it may wait after a moment of silence, for who is in no hurry.
        owner_pid: End when this process has died.
        detached: Go on when whoever had it started has ended (`towline.gateway.launch.ensure`).
        drain_s: Leave the line (`towline.gateway.draining`), and end the session after so many seconds in which nothing
            came; None to take part.
        checkpoint: Location of the checkpoint of the query that reads here: a journal that it does not belong to takes
            nothing in [I14]. "" for one that is not known.
        listen: Where to listen on a network, besides the unix socket; None for not at all.
        share: Which member of a line this is; None for a line's only gateway.
        repeatable: Filters of which a message may come twice, because who reads drops repeats by a key, or promises at
            least once. Others may have no topic in common, unless the guarantee is at_least_once.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    state_dir: Path
    subscriptions: tuple[SubscribedFilter, ...] = ()
    outbox: OutboxSettings | None = None
    receipts: ReceiptSettings | None = None
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    ack_after: AckAfter | None = None
    linger_after_silence_ms: Annotated[float, Field(ge=0, le=1000)] = 0.0
    journal: Limits = Limits()
    owner_pid: int | None = None
    detached: bool = False
    drain_s: Annotated[float, Field(ge=0)] | None = None
    checkpoint: str = ""
    listen: ListenSettings | None = None
    share: ShareSettings | None = None
    repeatable: tuple[str, ...] = ()
    brokers: Brokers = Field(min_length=1, description='Add it, as brokers = ["mqtt://localhost:1883"].')

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.subscriptions and self.outbox is None:
            raise ValueError("subscriptions is empty, and there is no outbox: nothing to do")
        if len({s.pattern for s in self.subscriptions}) != len(self.subscriptions):
            raise ValueError("a topic filter is subscribed twice; give each filter one QoS")
        if self.password_file and self.token_provider:
            raise ValueError("password_file and token_provider both give the password; keep one")
        table = policy(self.guarantee)
        if table.persistent and self.session_expiry_s == 0:
            raise ValueError(
                f"guarantee {self.guarantee} needs a session that outlives the connection; raise session_expiry_s"
            )
        if self.acks not in table.acks:
            wanted = " or ".join(table.acks)
            raise ValueError(f"guarantee {self.guarantee} needs ack_after {wanted}, not {self.acks}")
        return self

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if pair := next(overlapping(self.single), None):
            raise ValueError(
                f'"{pair[0]}" and "{pair[1]}" have topics in common, and a broker may send a message for each '
                f"[MQTT-3.3.4-2]: guarantee {self.guarantee} does not bear it; take one wider filter, a line or query "
                "for each, or a dedupe key of the line"
            )
        return self

    @model_validator(mode="after")
    def _versioned(self) -> Self:
        if self.protocol != "5" and any((self.retain_handling, *(s.retain_handling for s in self.subscriptions))):
            raise ValueError('retain_handling 1 and 2 need protocol "5": MQTT 3.x always sends retained messages')
        shared = next((s.pattern for s in self.subscriptions if s.pattern.startswith("$share/")), None)
        if shared and self.protocol in {"3.1.1", "3.1"}:
            raise ValueError(
                f'"{shared}" needs protocol "5": to MQTT 3.x it is a filter as any other, and nothing comes'
            )
        return self

    @model_validator(mode="after")
    def _receipted(self) -> Self:
        if self.receipts is None:
            return self
        if not policy(self.guarantee).serves_again:
            raise ValueError(
                f"receipts need guarantee at_least_once or exactly_once: {self.guarantee} gives messages up"
            )
        if self.protocol != "5":
            raise ValueError('receipts need protocol "5": marks are user properties')
        shared = [s.pattern for s in self.subscriptions if s.pattern.startswith("$share/")]
        if shared:
            raise ValueError(f'receipts need every message of a publisher, "{shared[0]}" shares them with others')
        return self

    @model_validator(mode="after")
    def _shared(self) -> Self:
        if self.share is None:
            return self
        if self.outbox is not None:
            raise ValueError("share is for what is received, and there is an outbox")
        shared = [s.pattern.startswith("$share/") for s in self.subscriptions]
        if any(shared) is not (self.share.way is ShareWay.SUBSCRIPTION) or any(shared) is not all(shared):
            raise ValueError('share = "subscription" and filters with $share/ go together, all of them')
        return self

    @model_validator(mode="after")
    def _proxied(self) -> Self:
        if self.proxy is None:
            if self.proxy_password_file:
                raise ValueError("proxy_password_file needs proxy")
            return self
        Proxy.parse(self.proxy, self.proxy_password_file)
        if any(broker.scheme == "unix" for broker in self.brokers):
            raise ValueError("a Unix socket is not reached through a proxy")
        return self

    @property
    def single(self) -> list[str]:
        """Filters of which no message may come twice."""
        if self.guarantee is Guarantee.AT_LEAST_ONCE:
            return []
        return [one.pattern for one in self.subscriptions if one.pattern not in self.repeatable]

    @property
    def several_sessions(self) -> bool:
        """Whether the next broker may be one that has another session of ours."""
        return (len(self.brokers) > 1 or self.follow_redirects) and not self.brokers_share_sessions

    @property
    def way(self) -> Proxy | None:
        """The proxy on the way to the brokers."""
        return Proxy.parse(self.proxy, self.proxy_password_file) if self.proxy else None

    @property
    def window(self) -> int:
        """The Receive Maximum announced: as set, or by the highest QoS subscribed."""
        if self.receive_maximum is not None:
            return self.receive_maximum
        return _WINDOW_QOS_2 if any(s.qos == 2 for s in self.subscriptions) else 65534

    @property
    def acks(self) -> AckAfter:
        """The watermark that drives acknowledgements, from ``ack_after`` or the guarantee."""
        return self.ack_after or policy(self.guarantee).acks[0]

    @property
    def mqtt_client_id(self) -> str:
        """The client id sent in CONNECT."""
        return self.client_id or self.name

    @property
    def inbox(self) -> Path:
        """Directory of the inbox journal."""
        return self.state_dir / "inbox"

    @property
    def outgoing(self) -> Path:
        """Directory of the outbox journal."""
        return self.state_dir / "outbox"

    @property
    def refused(self) -> Path:
        """Directory of what the broker refused."""
        return self.state_dir / "refused"

    def digest(self) -> str:
        """Eight hex digits that change with any setting but owner and checkpoint: a running gateway has these."""
        apart: dict[str, Any] = {"owner_pid": True, "checkpoint": True, "outbox": {"checkpoint", "number"}}
        text = self.model_dump_json(exclude=apart)
        return hashlib.sha256(text.encode()).hexdigest()[:8]
