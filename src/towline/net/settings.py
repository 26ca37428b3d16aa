"""The settings of a connection to a broker: one model for bridge file, Spark options, gateway, Publisher and Client.

A further option is a field of `ConnectionSettings` and the place of its effect: every face has it by its name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, Self

from mqtt5 import QoS, Will
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from towline.errors import ConfigError, Unreachable, did_you_mean
from towline.mqtt.events import Authenticator, Filter, SessionConfig
from towline.mqtt.rules import check_config, filter_problem, message_problem, topic_problem
from towline.mqtt.versions import LEVELS
from towline.net.connecting import Transport, connect, header_problem, within
from towline.net.endpoint import Endpoint, Proxy, query_problem
from towline.net.tls import Tls
from towline.options import OptionText, parts
from towline.providers import credential, secret_of
from towline.validation import SettingsModel, requirement

#: A version of MQTT; ``auto`` is 5, and an older one where the broker does not speak it.
ProtocolName = Literal["5", "3.1.1", "3.1", "auto"]

#: Stands in a `SessionConfig` for a password that is read at each connection, so that rules about one hold.
_NOT_READ_YET: Final = b""
#: Longest pause that can be asked for, in seconds.
_LONGEST_DELAY_S: Final = 3600.0
#: MQTT ends here [MQTT-1.5.5-1], with the bytes of the length itself.
_LARGEST_PACKET: Final = 268_435_455 + 5
#: ``package.module:function``.
_FUNCTION: Final = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
_FOR_EVER: Final = 0xFFFFFFFF
#: MQTT's password is binary data with a length of two bytes [MQTT 5 section 3.1.3.6].
_LONGEST_PASSWORD: Final = 0xFFFF
_URL: Final = re.compile(r"wss?://[^?]*\?")

Headers = tuple[tuple[str, str], ...]
_Seconds = Annotated[int, Field(ge=0, le=_FOR_EVER)]
_Pause = Annotated[float, Field(gt=0, le=_LONGEST_DELAY_S)]


def _address(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError("must be an IP address of this machine") from None


def _pairs(text: str) -> list[Any]:
    """User properties: ``NAME=VALUE, ...``, or JSON pairs where a comma stands in one."""
    example = '[["a", "1, 2"]]'
    pairs = [
        one.split("=", 1) if isinstance(one, str) else one for one in parts(text, "NAME=VALUE", example, str | list)
    ]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"must be NAME=VALUE with commas between them, or JSON such as {example}")
    return [tuple(map(str, pair)) for pair in pairs]


#: A setting that may hold a password, where a user put one.
_Secret = Annotated[str, OptionText(hidden=True)]


def _callable(value: str) -> str:
    if not re.fullmatch(_FUNCTION, value):
        raise ValueError("must be module:function")
    return value


#: The name of a function, for what is called at run time.
FunctionName = Annotated[str, AfterValidator(_callable), Field(json_schema_extra={"pattern": _FUNCTION})]


def _topic(value: str) -> str:
    if problem := topic_problem(value):
        raise ValueError(problem)
    return value


class WillSettings(SettingsModel):
    """The message the broker publishes when the connection ends without DISCONNECT [MQTT 5 section 3.1.3.2].

    Attributes:
        topic: Without wildcards.
        payload: Text; of a program bytes too.
        qos: 0 to 2.
        retain: Keep it for later subscribers.
        delay_s: Seconds the broker waits for us to come back before it publishes (MQTT 5).
        expiry_s: Seconds after which nobody gets it any more; default never (MQTT 5).
        content_type: What the payload is (MQTT 5).
        response_topic: Where an answer is expected (MQTT 5).
        user_properties: Pairs, in order (MQTT 5); as an option ``NAME=VALUE, ...`` or JSON pairs.
        payload_is_utf8: Whether the payload is said to be UTF-8 text (MQTT 5).
        correlation_data: What an answer repeats: text, of a program bytes too (MQTT 5).
    """

    topic: Annotated[str, AfterValidator(_topic)]
    payload: str | SkipJsonSchema[bytes] = ""
    qos: Annotated[int, Field(ge=0, le=2)] = 0
    retain: bool = False
    delay_s: _Seconds = 0
    expiry_s: _Seconds | None = None
    content_type: str | None = None
    response_topic: str | None = None
    user_properties: Annotated[tuple[tuple[str, str], ...], OptionText(read=_pairs)] = ()
    payload_is_utf8: bool = True
    correlation_data: str | SkipJsonSchema[bytes] | None = None

    @model_validator(mode="after")
    def _publishable(self) -> Self:
        if problem := message_problem(self.topic, self.payload, self.qos):
            raise ValueError(problem)
        return self

    @property
    def message(self) -> Will:
        """As CONNECT carries it."""
        data = self.correlation_data
        return Will(
            self.topic,
            payload=_bytes_of(self.payload),
            qos=QoS(self.qos),
            retain=self.retain,
            payload_format_indicator=int(self.payload_is_utf8 and isinstance(self.payload, str)),
            message_expiry_interval=self.expiry_s,
            content_type=self.content_type,
            response_topic=self.response_topic,
            correlation_data=None if data is None else _bytes_of(data),
            will_delay_interval=self.delay_s,
            user_properties=list(self.user_properties),
        )


def _bytes_of(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


class ConnectionSettings(SettingsModel):
    """How brokers are reached and what is said to them, whoever connects.

    Every face has its names: the bridge file and Python as they are, options of Spark in camel case without unit.
    Secrets stand in files. Times are seconds, sizes bytes.

    Attributes:
        username: For the broker; default none.
        password_file: Holds its password; read at each connection, as all these files are (docs/transports.md#secrets).
        token_provider: ``module:function`` that gives the password at each connection, for one that is short-lived.
        authenticator: Enhanced authentication (MQTT 5): ``package.module:factory``, called with user name and password,
            gives an Authenticator (docs/client.md#enhanced-authentication).
        tls: How the broker is verified, and how we show who we are, with ``mqtts://`` and ``wss://``.
        source_address: Address of this machine that connections to brokers come from, for a firewall's rule or a second
            network; default the one that the system chooses.
        proxy: ``http://[USER@]HOST:PORT`` or ``socks5://[USER@]HOST:PORT`` on the way to the brokers.
        proxy_password_file: Its password.
        protocol: ``5``, ``3.1.1``, ``3.1``, or ``auto``: 5, and 3.1.1 or 3.1 where the broker does not speak it, as it
            says, or shows by ending the connection or by silence in place of CONNACK. 3.1 and 3.1.1 have no expiry, no
            Receive Maximum and no properties.
        connect_timeout_s: Seconds that a connection and its CONNACK may take.
        keep_alive_s: MQTT keep alive in seconds; a shorter value of the server wins [MQTT-3.2.2-21].
        receive_maximum: Unacknowledged messages we allow the broker [MQTT 5 section 3.1.2.11.3].
        topic_alias_maximum: Topic aliases the broker may use, which makes packets with long topics shorter.
        max_packet_bytes: Of a larger message only a row without payload is kept
            (docs/guarantees.md#what-is-not-taken-in-whole). It is not announced to the broker, which would silently
            drop larger messages [MQTT-3.1.2-25].
        will: Published by the broker when the connection breaks.
        follow_redirects: Go to the server that a broker names with "use another server" or "server moved", with the
            same scheme and TLS verification; otherwise its word is shown as an error.
        brokers_share_sessions: The brokers are one cluster that keeps one session for us, whichever we reach. Without
            it each is taken to have a session of its own: nothing is published with QoS 2 to more than one, and what
            was under way to us comes again when another takes over: at least once holds, exactly once does not
            (docs/transports.md#several-brokers).
        reconnect_delay_s: First pause before another connection; each further one is twice as long.
        reconnect_max_delay_s: The longest pause.
        websocket_headers_file: Further headers of the request that opens a WebSocket, ``Name: value`` a line; a file,
            because one may be a secret.
        websocket_query_file: The query of that request, in place of the URI's, or a whole presigned URL.
    """

    username: _Secret | None = None
    password_file: Path | None = None
    token_provider: FunctionName | None = None
    authenticator: FunctionName | None = None
    tls: Tls = Tls()
    source_address: Annotated[str, AfterValidator(_address)] | None = None
    proxy: _Secret | None = None
    proxy_password_file: Path | None = None
    protocol: ProtocolName = "5"
    connect_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    keep_alive_s: Annotated[int, Field(ge=5, le=65535)] = 60
    receive_maximum: Annotated[int, Field(ge=1, le=65534)] | None = None
    topic_alias_maximum: Annotated[int, Field(ge=0, le=65535)] = 0
    max_packet_bytes: Annotated[int, Field(ge=1024, le=_LARGEST_PACKET)] = 64 << 20
    will: WillSettings | None = None
    follow_redirects: bool = False
    brokers_share_sessions: bool = False
    reconnect_delay_s: _Pause = 0.25
    reconnect_max_delay_s: _Pause = 30.0
    websocket_headers_file: Path | None = None
    websocket_query_file: Path | None = None

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

    @property
    def way(self) -> Proxy | None:
        """The proxy on the way to the brokers.

        Raises:
            ValueError: It can't be one.
        """
        return Proxy.parse(self.proxy, self.proxy_password_file) if self.proxy else None

    def check_connection(self, brokers: Iterable[Endpoint]) -> None:
        """Refuse settings that contradict each other.

        Raises:
            ValueError: Two passwords, a proxy that can't be, or what a Unix socket has not.
        """
        if self.password_file and self.token_provider:
            raise ValueError("password_file and token_provider both give the password; keep one")
        if self.proxy_password_file and not self.proxy:
            raise ValueError("proxy_password_file needs proxy")
        unix = any(broker.scheme == "unix" for broker in brokers)
        if self.way and unix:
            raise ValueError("a Unix socket is not reached through a proxy")
        if self.source_address and unix:
            raise ValueError("a Unix socket has no source_address")

    def session(self, client_id: str, where: str, filters: tuple[Filter, ...] = (), **terms: Any) -> SessionConfig:
        """The session's part of these settings.

        Args:
            client_id: Stable, never empty.
            where: The line as errors name it.
            filters: Subscriptions.
            terms: Further fields of `SessionConfig`, in place of those of these settings too.
        """
        read_later = self.password_file or self.token_provider
        own: dict[str, Any] = {
            "username": self.username,
            "password": _NOT_READ_YET if read_later else None,
            "keep_alive_s": self.keep_alive_s,
            "connect_timeout_s": self.connect_timeout_s,
            "topic_alias_maximum": self.topic_alias_maximum,
            "will": self.will.message if self.will else None,
        }
        return SessionConfig(client_id, where, filters, **{**own, **terms})


def _brokers(text: str) -> str:
    if not text.strip(" ,"):
        raise ValueError("must be mqtt://HOST[:PORT], several with a comma between them")
    if "?" in text:  # Spark shows its options, and a presigned query is a secret
        raise ValueError("a query is given as webSocketQueryFile")
    return text


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
    OptionText("broker", _brokers, hidden=True),
]


class MqttSettings(ConnectionSettings):
    """A gateway's brokers and its session, whichever way messages go: ``[mqtt]``.

    Attributes:
        brokers: ``mqtt://HOST:PORT``, ``mqtts://``, ``ws://``, ``wss://``, ``unix:///PATH`` (docs/transports.md). Tried
            in this order, again from the first after the last, and after a connection that worked.
        client_id: MQTT client id: stable, never shared; default the name.
        session_expiry_s: Seconds that the broker keeps the session while we are away; the default is for ever.
        receive_maximum: Unacknowledged messages allowed to the broker [MQTT 5 section 3.1.2.11.3]. At most 65534: 65535
            is the standard's default and so not sent, and a Mosquitto that is told nothing keeps to 20, queues 1,000
            more and drops the rest. Default 65534, and 2000 with QoS 2, whose answers cost Mosquitto a search through
            the whole window (100,000 messages: 4 s with 1000, minutes with 65534, measured on 2.0.21).
        linger_ms: How long a chunk may wait for more before it is made durable: twice as long in a stream, up to three
            times elsewhere.
        retain_handling: Retained messages when a filter is subscribed: 0 always, 1 only where the broker's session did
            not have it, 2 never (MQTT 5). Default 1, so that a SUBSCRIBE that is sent a second time brings none twice,
            and 0 for a filter that this journal never subscribed. MQTT 3.x always sends them.
        unknown_session: What to do with a broker session the journal knows nothing of [MQTT-3.2.2-4]: ``refuse``
            and ask, ``adopt`` its queue, or ``discard`` it. Default ``refuse``, because a lost journal has acknowledged
            what the session holds no more; ``adopt`` with ``ack_after = "kafka"``, where Kafka has all of that.
        abandon_session: A former client id of this state directory whose session at the broker is given up, with all
            that waits in it; without it a changed client id is refused.
    """

    brokers: Brokers = ()
    client_id: str = Field(default="", max_length=256)
    session_expiry_s: _Seconds = _FOR_EVER
    linger_ms: Annotated[float, Field(ge=0, le=1000)] = 1.0
    retain_handling: Annotated[int, Field(ge=0, le=2)] | None = None
    unknown_session: Literal["refuse", "adopt", "discard"] | None = None
    abandon_session: str = Field(default="", max_length=256)


@dataclass(frozen=True, kw_only=True)
class BrokerConnection:
    """A connection to be made: where to, by which settings, for which session.

    Attributes:
        settings: How to get there.
        session: The session's part.
        brokers: Tried in this order, again from the first after the last, and after a connection that worked.
        linger_s: How many seconds a chunk waits for more, so that one sync serves many: twice as many in a stream, up
            to three times elsewhere (`towline.net.driver.Linger`).
        linger_after_silence_s: How many seconds after a moment of silence; nothing is sent meanwhile.
    """

    settings: ConnectionSettings
    session: SessionConfig
    brokers: tuple[Endpoint, ...]
    linger_s: float = 0.0
    linger_after_silence_s: float = 0.0

    @property
    def levels(self) -> tuple[int, ...]:
        """Protocol levels to try, in order (`towline.mqtt.versions`)."""
        return LEVELS[self.settings.protocol]

    @property
    def several_sessions(self) -> bool:
        """Whether the next server may be one with another session."""
        several = len(self.brokers) > 1 or self.settings.follow_redirects
        return several and not self.settings.brokers_share_sessions

    def session_at(self, level: int) -> SessionConfig:
        """The session's part for a protocol level; MQTT 3.x has no topic aliases."""
        aliases = self.session.topic_alias_maximum if level == 5 else 0
        return replace(self.session, protocol=level, topic_alias_maximum=aliases)

    def credentials(self, cancelled: Callable[[], bool]) -> tuple[dict[str, Any], Headers, str]:
        """As they are now, so that a renewed one is used: fields of `SessionConfig`; a WebSocket's headers and query.

        Args:
            cancelled: Ends the wait for a provider, which has as long as a connection.

        Raises:
            ConfigError: TL-C31, a file can't be read, is empty, or holds something else. TL-C179, the authenticator.
            Unreachable: TL-C179, the provider gave no password: it may do better with the next try.
        """
        settings, session = self.settings, self.session
        headers: Headers = tuple(settings.websocket_headers.items()) if isinstance(settings, ClientSettings) else ()
        password, authenticator, query = session.password, session.authenticator, ""
        if settings.password_file is not None:
            password = secret_of("password_file", settings.password_file, _password)
        elif settings.token_provider is not None:
            password = _provided(settings.token_provider, session, cancelled)
        if isinstance(settings.authenticator, str):
            given = (session.username, password)
            authenticator = credential(
                settings.authenticator, session.where, _authenticator, "an Authenticator", *given
            )
        if settings.websocket_headers_file is not None:
            headers += secret_of("websocket_headers_file", settings.websocket_headers_file, _headers)
        if settings.websocket_query_file is not None:
            query = secret_of("websocket_query_file", settings.websocket_query_file, _query)
        return {"password": password, "authenticator": authenticator}, headers, query

    def connect(
        self, broker: Endpoint, keep_alive_s: int, cancelled: Callable[[], bool]
    ) -> tuple[Transport, dict[str, Any]]:
        """Open a connection to a broker; with the credentials for its session. Errors of both."""
        credentials, headers, query = self.credentials(cancelled)
        own: dict[str, Any] = {"keep_alive_s": keep_alive_s, "cancelled": cancelled}
        return connect(broker, self.settings, headers=headers, query=query, **own), credentials


def _provided(name: str, session: SessionConfig, cancelled: Callable[[], bool]) -> bytes:
    where = session.where

    def ask() -> bytes:
        return credential(name, where, _password, "a password, text or bytes")

    try:
        return within(session.connect_timeout_s, cancelled, ask)
    except ConfigError as error:
        raise Unreachable(error.code, error.where, error.what, error.do) from None
    except TimeoutError as error:
        raise Unreachable("TL-C179", where, f'"{name}" gave no password: {error}', "Trying again.") from None


def _password(given: Any) -> bytes:
    password = given.encode() if isinstance(given, str) else given
    if not isinstance(password, bytes) or not 0 < len(password) <= _LONGEST_PASSWORD:
        raise ValueError("a password of MQTT has 1 to 65,535 bytes")
    return password


def _authenticator(given: Any) -> Authenticator:
    if not all(hasattr(given, name) for name in ("method", "start", "challenge", "finish")):
        raise TypeError
    made: Authenticator = given
    return made


def _headers(content: bytes) -> Headers:
    """One header a line, as ``Name: value``."""
    lines = (line for line in content.decode("latin-1").splitlines() if line.strip())
    parts = [[part.strip() for part in line.partition(":")] for line in lines]
    for number, (name, colon, value) in enumerate(parts, start=1):
        if problem := header_problem(name, value) if colon else "it is no header, written as Name: value":
            raise ValueError(f"line {number}: {problem}")
    return tuple((name, value) for name, _, value in parts)


def _query(content: bytes) -> str:
    """The query alone, or that of a whole presigned URL."""
    query = _URL.sub("", content.decode("latin-1").strip(), count=1).removeprefix("?")
    if problem := query_problem(query):
        raise ValueError(problem)
    return query


class Arguments(SettingsModel):
    """Settings that a program gives; an error is about the argument.

    Raises:
        ConfigError: TL-C51 for one that can't be.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _refused(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"] if part not in ("bytes", "str")) or "settings"
            if first["type"] == "extra_forbidden":
                raise ConfigError("TL-C51", name, "no such setting", did_you_mean(name, cls.model_fields)) from None
            refuse(name, requirement(first))


class ClientSettings(Arguments, ConnectionSettings):
    """How a `Client` or a `Publisher` meets its broker.

    Attributes:
        authenticator: As above, or the object itself.
        password: MQTT's; or a file or a function that gives it.
        session_expiry_s: Seconds the broker keeps the session while we are away, 0xFFFFFFFF for ever; 0 to begin and
            end without one. To MQTT 3.x everything above 0 is for ever. None for 3,600, and for ever in a `Publisher`.
        unknown_session: What becomes of a session that the broker has when the first connection is made: ``adopt`` it,
            or ``refuse``: the connection ends before anything of it is answered (TL-M20).
        keep_alive_s: As above, 0 for none.
        receive_maximum: Smaller where nothing is said: what comes is kept in memory.
        max_packet_bytes: As above, and as small as you like.
        websocket_headers: Further headers of the request that opens a WebSocket.
    """

    authenticator: Any = None
    password: bytes | str | None = Field(default=None, repr=False)
    session_expiry_s: _Seconds | None = None
    unknown_session: Literal["adopt", "refuse"] = "adopt"
    keep_alive_s: Annotated[int, Field(ge=0, le=65535)] = 60
    receive_maximum: Annotated[int, Field(ge=1, le=65535)] = 1000
    max_packet_bytes: Annotated[int, Field(ge=1, le=_LARGEST_PACKET)] = 64 << 20
    websocket_headers: Mapping[str, str] = Field(default_factory=dict, repr=False)

    @field_validator("websocket_headers")
    @classmethod
    def _sendable(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        if problem := next(filter(None, (header_problem(*header) for header in value.items())), None):
            raise ValueError(problem)
        return value

    def connection(
        self,
        uri: str | Endpoint | Sequence[str | Endpoint],
        client_id: str,
        subscribe: str | Filter | Sequence[str | Filter] = (),
        *,
        session_expiry_s: int = 3600,
    ) -> BrokerConnection:
        """The connection to these brokers, as `Client` is given them; what can't be is refused.

        Args:
            uri: The broker, or several.
            client_id: Names the session.
            subscribe: Topic filters, or one.
            session_expiry_s: Where the setting is None.

        Raises:
            ConfigError: TL-C51, or TL-C50 for what the version of the protocol can't say.
        """
        brokers = _endpoints_of(uri)
        where = str(brokers[0]) if len(brokers) == 1 else f'client "{client_id}"'
        if self.password is not None and (self.password_file or self.token_provider):
            refuse(where, "password, password_file and token_provider each give the password")
        try:
            self.check_connection(brokers)
        except ValueError as error:
            refuse(where, str(error))
        expiry = session_expiry_s if self.session_expiry_s is None else self.session_expiry_s
        terms: dict[str, Any] = {
            "session_expiry_s": expiry,
            "durable": expiry != 0,
            "clean_start": expiry == 0,
            "receive_maximum": self.receive_maximum,
            "unknown_session": self.unknown_session,
        }
        if self.password is not None:
            terms["password"] = _bytes_of(self.password)
        if not isinstance(self.authenticator, str):
            terms["authenticator"] = self.authenticator
        session = self.session(client_id, where, _filters_of(subscribe, where), **terms)
        connection = BrokerConnection(settings=self, session=session, brokers=brokers)
        check_config(connection.session_at(connection.levels[0]))
        return connection


def refuse(where: str, what: str) -> NoReturn:
    """Raise ConfigError TL-C51."""
    raise ConfigError("TL-C51", where, what, "Change it.")


def _endpoints_of(uri: str | Endpoint | Sequence[str | Endpoint]) -> tuple[Endpoint, ...]:
    uris = (uri,) if isinstance(uri, str | Endpoint) else tuple(uri)
    try:
        brokers = tuple(one if isinstance(one, Endpoint) else Endpoint.parse(one) for one in uris)
    except ValueError as error:
        refuse("uri", str(error))
    return brokers or refuse("uri", "no broker")


def _filters_of(given: str | Filter | Sequence[str | Filter], where: str) -> tuple[Filter, ...]:
    several: Any = (given,) if isinstance(given, str | Filter) else given
    if not isinstance(several, Iterable) or not all(isinstance(one, str | Filter) for one in several):
        refuse("subscribe", 'it is a topic filter, or a list of them, each a text or a Filter("telemetry/#", qos=2)')
    filters = tuple(Filter(one) if isinstance(one, str) else one for one in several)
    if len({one.pattern for one in filters}) != len(filters):
        refuse(where, "a topic filter is subscribed twice")
    for one in filters:
        problem = filter_problem(one.pattern) if one.pattern else "a topic filter is not empty"
        if problem or one.qos not in range(3) or one.retain_handling not in (None, 0, 1, 2):
            level = f"qos and retain_handling are 0, 1 or 2, not {one.qos!r} and {one.retain_handling!r}"
            refuse(f'subscription "{one.pattern}"', problem or level)
    return filters
