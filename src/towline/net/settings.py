"""Settings of a broker connection: one model for bridge file, Spark options, gateway, Publisher and Client.

A further option is one field of `ConnectionSettings` and the code that uses it; every interface has it by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, Self, cast

from mqtt5 import QoS, Will
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from towline.errors import ConfigError, Unreachable, did_you_mean
from towline.mqtt.events import Authenticator, Filter, SessionConfig
from towline.mqtt.rules import check_config, filter_problem, message_problem
from towline.mqtt.versions import LEVELS_OF_SETTING
from towline.net.connecting import Transport, call_with_timeout, connect
from towline.net.endpoint import Endpoint, Proxy, Tls
from towline.options import Option, parse_list
from towline.providers import call_provider, read_secret
from towline.validation import SettingsModel, requirement

#: MQTT version; ``auto`` is 5, or an older one if the broker does not support 5.
ProtocolName = Literal["5", "3.1.1", "3.1", "auto"]

#: Placeholder in a `SessionConfig` for a password that is read at each connection, so that its rules apply.
_UNREAD_PASSWORD: Final = b""
#: Largest configurable pause in seconds.
_MAX_DELAY_S: Final = 3600.0
#: Largest MQTT packet in bytes, with its length field [MQTT-1.5.5-1].
_MAX_PACKET_BYTES: Final = 268_435_455 + 5
#: ``package.module:function``.
_FUNCTION_PATTERN: Final = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
_NEVER_EXPIRES: Final = 0xFFFFFFFF
#: Largest MQTT password in bytes: binary data with a length of two bytes [MQTT 5 section 3.1.3.6].
_MAX_PASSWORD_BYTES: Final = 0xFFFF
_WEBSOCKET_URL: Final = re.compile(r"wss?://[^?]*\?")
#: A header's name [RFC 9110 section 5.6.2], and a value without control characters.
_HEADER_LINE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*:\s*([\t\x20-\x7e\xa0-\xff]*)")
#: URI query (RFC 3986 section 3.4).
_URI_QUERY: Final = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%/?-]+")

Headers = tuple[tuple[str, str], ...]
_Seconds = Annotated[int, Field(ge=0, le=_NEVER_EXPIRES)]
_Pause = Annotated[float, Field(gt=0, le=_MAX_DELAY_S)]


def _parse_user_properties(text: str) -> list[Any]:
    """Parse user properties: ``NAME=VALUE, ...``, or a JSON list of such texts if a value contains a comma."""
    example = '["a=1, 2"]'
    pairs = [tuple(item.split("=", 1)) for item in parse_list(text, "NAME=VALUE", example)]
    if not all(len(pair) == 2 for pair in pairs):
        raise ValueError(f"must be NAME=VALUE with commas between them, or JSON such as {example}")
    return pairs


#: Setting that is never shown, because users may put a password into it.
_Secret = Annotated[str, Option(secret=True)]


def _check_function(value: str) -> str:
    if not re.fullmatch(_FUNCTION_PATTERN, value):
        raise ValueError("must be module:function")
    return value


#: Name of a function that is called at run time.
FunctionName = Annotated[str, AfterValidator(_check_function), Field(json_schema_extra={"pattern": _FUNCTION_PATTERN})]


class WillSettings(SettingsModel):
    """Will message: published by the broker when the connection ends without DISCONNECT [MQTT 5 section 3.1.3.2].

    Attributes:
        topic: Topic name without wildcards.
        payload: Text; in Python also bytes.
        qos: 0 to 2.
        retain: The broker retains it for later subscribers.
        delay_s: Seconds the broker waits for a reconnect before it publishes (MQTT 5).
        expiry_s: Message expiry interval in seconds; default never (MQTT 5).
        content_type: Content type of the payload (MQTT 5).
        response_topic: Topic for the response (MQTT 5).
        user_properties: Pairs, in order (MQTT 5); as an option ``NAME=VALUE, ...`` or a JSON list of them.
        payload_is_utf8: The payload is declared as UTF-8 text (MQTT 5).
        correlation_data: Bytes that the response repeats: text, in Python also bytes (MQTT 5).
    """

    topic: str
    payload: str | SkipJsonSchema[bytes] = ""
    qos: Annotated[int, Field(ge=0, le=2)] = 0
    retain: bool = False
    delay_s: _Seconds = 0
    expiry_s: _Seconds | None = None
    content_type: str | None = None
    response_topic: str | None = None
    user_properties: Annotated[tuple[tuple[str, str], ...], Option(parse=_parse_user_properties)] = ()
    payload_is_utf8: bool = True
    correlation_data: str | SkipJsonSchema[bytes] | None = None

    @model_validator(mode="after")
    def _check_message(self) -> Self:
        if problem := message_problem(self.topic, self.payload, self.qos):
            raise ValueError(problem)
        return self

    @property
    def message(self) -> Will:
        """Will as part of CONNECT."""
        data = self.correlation_data
        return Will(
            self.topic,
            payload=_to_bytes(self.payload),
            qos=QoS(self.qos),
            retain=self.retain,
            payload_format_indicator=int(self.payload_is_utf8 and isinstance(self.payload, str)),
            message_expiry_interval=self.expiry_s,
            content_type=self.content_type,
            response_topic=self.response_topic,
            correlation_data=None if data is None else _to_bytes(data),
            will_delay_interval=self.delay_s,
            user_properties=list(self.user_properties),
        )


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


class ConnectionSettings(SettingsModel):
    """Settings of the connection to the brokers, shared by all interfaces.

    Bridge file and Python use the names as they are; options of Spark use camel case without the unit. Secrets are in
    files. Times are in seconds, sizes in bytes.

    Attributes:
        username: User name at the broker; default none.
        password_file: Holds the password; read at each connection, as all these files are
            (docs/security.md#secrets-of-a-connection).
        token_provider: ``module:function`` that returns the password at each connection, for short-lived tokens.
        authenticator: Enhanced authentication (MQTT 5): ``package.module:factory``, called with user name and password,
            returns an Authenticator (docs/publishers.md#enhanced-authentication).
        tls: Verification of the broker and the client's certificate, with ``mqtts://`` and ``wss://``.
        proxy: ``http://[USER@]HOST:PORT`` or ``socks5://[USER@]HOST:PORT`` between this machine and the brokers.
        proxy_password_file: Holds the proxy password.
        protocol: ``5``, ``3.1.1``, ``3.1``, or ``auto``: 5, and 3.1.1 or 3.1 if the broker rejects it, closes the
            connection or sends no CONNACK. 3.1 and 3.1.1 have no expiry, no Receive Maximum and no properties.
        connect_timeout_s: Timeout of a connection and its CONNACK, in seconds.
        keep_alive_s: MQTT keep alive in seconds; a shorter value of the server wins [MQTT-3.2.2-21].
        receive_maximum: Most unacknowledged messages from the broker [MQTT 5 section 3.1.2.11.3].
        topic_alias_maximum: Most topic aliases the broker may use; they shorten packets with long topics.
        max_packet_bytes: Of a larger message only a row without payload is kept
            (docs/guarantees.md#truncated-messages). It is not announced to the broker, which would silently
            drop larger messages [MQTT-3.1.2-25].
        will: Message that the broker publishes when the connection breaks.
        follow_redirects: Follow "use another server" and "server moved" to the server that the broker names, with the
            same scheme and TLS verification; otherwise a redirect is an error.
        brokers_share_sessions: The brokers are one cluster that shares the session. Without it each broker is assumed
            to have its own session: QoS 2 is not published to more than one, and unfinished messages are received again
            after a failover: at least once holds, exactly once does not (docs/security.md#several-brokers).
        reconnect_delay_s: First pause before a reconnect; each further pause is twice as long.
        reconnect_max_delay_s: Longest pause.
        websocket_headers_file: Further headers of the WebSocket request, ``Name: value`` a line; a file, because a
            header may be a secret.
        websocket_query_file: Query of the WebSocket request, or a whole presigned URL, which is a secret.
    """

    username: _Secret | None = None
    password_file: Path | None = None
    token_provider: FunctionName | None = None
    authenticator: FunctionName | None = None
    tls: Tls = Tls()
    proxy: _Secret | None = None
    proxy_password_file: Path | None = None
    protocol: ProtocolName = "5"
    connect_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    keep_alive_s: Annotated[int, Field(ge=5, le=65535)] = 60
    receive_maximum: Annotated[int, Field(ge=1, le=65534)] | None = None
    topic_alias_maximum: Annotated[int, Field(ge=0, le=65535)] = 0
    max_packet_bytes: Annotated[int, Field(ge=1024, le=_MAX_PACKET_BYTES)] = 64 << 20
    will: WillSettings | None = None
    follow_redirects: bool = False
    brokers_share_sessions: bool = False
    reconnect_delay_s: _Pause = 0.25
    reconnect_max_delay_s: _Pause = 30.0
    websocket_headers_file: Path | None = None
    websocket_query_file: Path | None = None

    @property
    def proxy_endpoint(self) -> Proxy | None:
        """Parsed proxy setting; None without a proxy.

        Raises:
            ValueError: Invalid proxy setting.
        """
        return Proxy.parse(self.proxy, self.proxy_password_file) if self.proxy else None

    def check_connection(self, brokers: Iterable[Endpoint]) -> None:
        """Validate settings that depend on each other.

        Raises:
            ValueError: Two passwords, contradictory TLS settings, an invalid proxy, or one in front of a Unix socket.
        """
        passwords = [name for name in ("password", "password_file", "token_provider") if getattr(self, name, None)]
        if len(passwords) > 1:
            raise ValueError(f"{' and '.join(passwords)} both give the password; keep one")
        if problem := self.tls.problem():
            raise ValueError(f"tls: {problem}")
        if self.proxy_password_file and not self.proxy:
            raise ValueError("proxy_password_file needs proxy")
        if self.proxy_endpoint and any(broker.scheme == "unix" for broker in brokers):
            raise ValueError("a Unix socket is not reached through a proxy")

    def session_config(
        self, client_id: str, location: str, filters: tuple[Filter, ...] = (), **overrides: Any
    ) -> SessionConfig:
        """Return the session's configuration.

        Args:
            client_id: Stable client id, never empty.
            location: Name of the line in errors.
            filters: Subscriptions.
            overrides: Further fields of `SessionConfig`; they take precedence over these settings.
        """
        password_unread = self.password_file or self.token_provider
        fields: dict[str, Any] = {
            "username": self.username,
            "password": _UNREAD_PASSWORD if password_unread else None,
            "keep_alive_s": self.keep_alive_s,
            "connect_timeout_s": self.connect_timeout_s,
            "topic_alias_maximum": self.topic_alias_maximum,
            "will": self.will.message if self.will else None,
        }
        return SessionConfig(client_id, location, filters, **{**fields, **overrides})


def _parse_endpoints(value: object) -> object:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, Endpoint):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple(Endpoint.parse(item.strip()) if isinstance(item, str) else item for item in value)
    return value


#: Broker URIs, as a list or separated by commas.
Brokers = Annotated[
    tuple[Endpoint, ...],
    BeforeValidator(_parse_endpoints, json_schema_input_type=str | list[str]),
    Option("broker", secret=True),
]


def _filter_fields(value: object) -> object:
    """Return the fields of a filter to validate: pydantic takes a dataclass object as it is."""
    return {"pattern": value} if isinstance(value, str) else asdict(value) if isinstance(value, Filter) else value


def _check_filter(value: Filter) -> Filter:
    if problem := filter_problem(value.pattern):
        raise ValueError(problem)
    if value.no_local and value.is_shared:
        raise ValueError("no_local can't be used with a shared subscription [MQTT-3.8.3-4]")
    return value


def _check_unique(value: tuple[Filter, ...]) -> tuple[Filter, ...]:
    if len({topic_filter.pattern for topic_filter in value}) != len(value):
        raise ValueError("a topic filter is subscribed twice; give each filter one QoS")
    return value


#: Topic filters with their options, each filter once.
Subscriptions = Annotated[
    tuple[Annotated[Filter, BeforeValidator(_filter_fields), AfterValidator(_check_filter)], ...],
    AfterValidator(_check_unique),
]


class MqttSettings(ConnectionSettings):
    """Brokers and session of a gateway, for both directions: ``[mqtt]``.

    Attributes:
        brokers: ``mqtt://HOST:PORT``, ``mqtts://``, ``ws://``, ``wss://``, ``unix:///PATH``
            (docs/security.md#broker-addresses). Tried in this order; again from the first after the last, and after a
            connection that worked.
        client_id: MQTT client id: stable, never shared; default the name.
        session_expiry_s: Seconds that the broker keeps the session without a connection; default for ever.
        receive_maximum: Most unacknowledged messages from the broker [MQTT 5 section 3.1.2.11.3]. At most 65534: 65535
            is the standard's default and is not sent; without a value Mosquitto allows 20, queues 1,000 more and drops
            the rest. Default 65534, and 2000 with QoS 2, where each answer costs Mosquitto a search through the whole
            window (100,000 messages: 4 s with 1000, minutes with 65534, measured on 2.0.21).
        linger_ms: Milliseconds that a chunk may wait for more before it is persisted: twice as long in a stream, up to
            three times elsewhere.
        retain_handling: Retained messages at SUBSCRIBE: 0 always, 1 only for a new subscription, 2 never (MQTT 5).
            Default 1, so that a repeated SUBSCRIBE brings none twice, and 0 for a filter that this journal never
            subscribed. MQTT 3.x always sends them.
        unknown_session: Action for a broker session that the journal does not know [MQTT-3.2.2-4]: ``refuse`` with an
            error, ``adopt`` its queue, or ``discard`` it. Default ``refuse``, because a lost journal has acknowledged
            messages that the session no longer has; ``adopt`` with ``ack_after = "kafka"``, where Kafka has them.
        abandon_session: Former client id of this state directory; its session at the broker is abandoned with all
            queued messages. Without it a changed client id is refused.
    """

    brokers: Brokers = ()
    client_id: str = Field(default="", max_length=256)
    session_expiry_s: _Seconds = _NEVER_EXPIRES
    linger_ms: Annotated[float, Field(ge=0, le=1000)] = 1.0
    retain_handling: Annotated[int, Field(ge=0, le=2)] | None = None
    unknown_session: Literal["refuse", "adopt", "discard"] | None = None
    abandon_session: str = Field(default="", max_length=256)


@dataclass(frozen=True, kw_only=True)
class BrokerConnection:
    """Connection to be opened: brokers, settings and session configuration.

    Attributes:
        settings: Connection settings.
        session: Session configuration.
        brokers: Tried in this order; again from the first after the last, and after a connection that worked.
        linger_s: Seconds that a chunk waits for more messages, so that one sync serves many: twice as many in a stream,
            up to three times elsewhere (`towline.net.driver.Linger`).
        linger_after_silence_s: Seconds that a chunk waits after a silence.
    """

    settings: ConnectionSettings
    session: SessionConfig
    brokers: tuple[Endpoint, ...]
    linger_s: float = 0.0
    linger_after_silence_s: float = 0.0

    @property
    def levels(self) -> tuple[int, ...]:
        """Protocol levels in the order of attempts (`towline.mqtt.versions`)."""
        return LEVELS_OF_SETTING[self.settings.protocol]

    @property
    def several_sessions(self) -> bool:
        """Whether the next server may have another session."""
        several = len(self.brokers) > 1 or self.settings.follow_redirects
        return several and not self.settings.brokers_share_sessions

    def session_config_for(self, level: int) -> SessionConfig:
        """Return the session configuration for a protocol level; MQTT 3.x has no topic aliases."""
        alias_maximum = self.session.topic_alias_maximum if level == 5 else 0
        return replace(self.session, protocol=level, topic_alias_maximum=alias_maximum)

    def credentials(self, cancelled: Callable[[], bool]) -> tuple[dict[str, Any], Headers, str]:
        """Read the current credentials: fields of `SessionConfig`, WebSocket headers, WebSocket query.

        Args:
            cancelled: Polled while a provider runs; True ends the wait. Its timeout is the connection's.

        Raises:
            ConfigError: TL-C31, a file can't be read, is empty or malformed. TL-C179, the authenticator is invalid.
            Unreachable: TL-C179, the provider returned no password; the next attempt may succeed.
        """
        settings, session_config = self.settings, self.session
        password, authenticator = session_config.password, session_config.authenticator
        headers, query = Headers(), ""
        if settings.password_file is not None:
            password = read_secret("password_file", settings.password_file, _check_password)
        elif settings.token_provider is not None:
            password = _call_token_provider(settings.token_provider, session_config, cancelled)
        if isinstance(settings.authenticator, str):
            arguments = (session_config.username, password)
            name, location = settings.authenticator, session_config.location
            authenticator = call_provider(name, location, _check_authenticator, "an Authenticator", *arguments)
        if settings.websocket_headers_file is not None:
            headers = read_secret("websocket_headers_file", settings.websocket_headers_file, _parse_headers)
        if settings.websocket_query_file is not None:
            query = read_secret("websocket_query_file", settings.websocket_query_file, _parse_query)
        return {"password": password, "authenticator": authenticator}, headers, query

    def connect(
        self, broker: Endpoint, keep_alive_s: int, cancelled: Callable[[], bool]
    ) -> tuple[Transport, dict[str, Any]]:
        """Open a connection to a broker; return it with session credentials. Raises as `credentials`, `connect`."""
        credentials, headers, query = self.credentials(cancelled)
        options: dict[str, Any] = {"keep_alive_s": keep_alive_s, "cancelled": cancelled}
        return connect(broker, self.settings, headers=headers, query=query, **options), credentials


def _call_token_provider(name: str, session_config: SessionConfig, cancelled: Callable[[], bool]) -> bytes:
    location = session_config.location
    call = partial(call_provider, name, location, _check_password, "a password, text or bytes")
    try:
        return call_with_timeout(session_config.connect_timeout_s, cancelled, call)
    except ConfigError as error:
        raise Unreachable(error.code, error.location, error.problem, error.remedy) from None
    except TimeoutError as error:
        raise Unreachable("TL-C179", location, f'"{name}" returned no password: {error}', "Trying again.") from None


def _check_password(value: Any) -> bytes:
    password = value.encode() if isinstance(value, str) else value
    if not isinstance(password, bytes) or not 0 < len(password) <= _MAX_PASSWORD_BYTES:
        raise ValueError("a password of MQTT has 1 to 65,535 bytes")
    return password


def _check_authenticator(value: Any) -> Authenticator:
    if not all(hasattr(value, name) for name in ("method", "start", "challenge", "finish")):
        raise TypeError
    return cast("Authenticator", value)


def _parse_headers(content: bytes) -> Headers:
    """Parse one header a line, as ``Name: value``."""
    lines = [line.strip() for line in content.decode("latin-1").splitlines() if line.strip()]
    matches = [match for line in lines if (match := _HEADER_LINE.fullmatch(line))]
    if len(matches) < len(lines):
        raise ValueError("each line must be a header of the form Name: value")
    return tuple((match[1], match[2]) for match in matches)


def _parse_query(content: bytes) -> str:
    """Return the query, or the query part of a presigned URL."""
    query = _WEBSOCKET_URL.sub("", content.decode("latin-1").strip(), count=1).removeprefix("?")
    if not _URI_QUERY.fullmatch(query):
        raise ValueError("the query of a WebSocket URI has characters that a URI can't have")
    return query


class Arguments(SettingsModel):
    """Settings given as Python arguments; errors name the argument.

    Raises:
        ConfigError: TL-C51, invalid argument.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _validate_arguments(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(values)
        except ValidationError as error:
            first_error = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first_error["loc"] if part not in ("bytes", "str")) or "settings"
            if first_error["type"] == "extra_forbidden":
                raise ConfigError("TL-C51", name, "no such setting", did_you_mean(name, cls.model_fields)) from None
            reject_argument(name, requirement(first_error))


class _ClientArguments(Arguments):
    uri: Brokers = Field(min_length=1)
    subscribe: Annotated[Subscriptions, BeforeValidator(lambda v: (v,) if isinstance(v, str | Filter) else v)] = ()


class ClientSettings(Arguments, ConnectionSettings):
    """Connection settings of a `Client` or a `Publisher`.

    Attributes:
        authenticator: As above, or the object itself.
        password: Password at the broker, in place of a file or a provider.
        session_expiry_s: Seconds that the broker keeps the session without a connection, 0xFFFFFFFF for ever; 0 starts
            and ends without a session. For MQTT 3.x all values above 0 are for ever. Default 3,600, for ever in a
            `Publisher`.
        unknown_session: Action for a session that the broker has at the first connection: ``adopt`` it, or ``refuse``:
            the connection ends before anything is acknowledged (TL-M20).
        keep_alive_s: As above, 0 for none.
        receive_maximum: As above; smaller by default, because received messages are in memory.
    """

    authenticator: Any = None
    password: bytes | str | None = Field(default=None, repr=False)
    session_expiry_s: _Seconds | None = None
    unknown_session: Literal["adopt", "refuse"] = "adopt"
    keep_alive_s: Annotated[int, Field(ge=0, le=65535)] = 60
    receive_maximum: Annotated[int, Field(ge=1, le=65535)] = 1000

    def connection(
        self,
        uri: str | Endpoint | Sequence[str | Endpoint],
        client_id: str,
        subscribe: str | Filter | Sequence[str | Filter] = (),
        *,
        session_expiry_s: int = 3600,
    ) -> BrokerConnection:
        """Validate the arguments of a `Client` and return its connection.

        Args:
            uri: One or more brokers.
            client_id: Client id, the name of the session.
            subscribe: One or more topic filters.
            session_expiry_s: Session expiry in seconds if the setting is None.

        Raises:
            ConfigError: TL-C51 invalid argument, TL-C50 not possible with this protocol version.
        """
        arguments = _ClientArguments.model_validate({"uri": uri, "subscribe": subscribe})
        brokers = arguments.uri
        location = str(brokers[0]) if len(brokers) == 1 else f'client "{client_id}"'
        try:
            self.check_connection(brokers)
        except ValueError as error:
            reject_argument(location, str(error))
        expiry_s = session_expiry_s if self.session_expiry_s is None else self.session_expiry_s
        overrides: dict[str, Any] = {
            "session_expiry_s": expiry_s,
            "durable": expiry_s != 0,
            "clean_start": expiry_s == 0,
            "receive_maximum": self.receive_maximum,
            "unknown_session": self.unknown_session,
        }
        if self.password is not None:
            overrides["password"] = _to_bytes(self.password)
        if not isinstance(self.authenticator, str):
            overrides["authenticator"] = self.authenticator
        session_config = self.session_config(client_id, location, arguments.subscribe, **overrides)
        connection = BrokerConnection(settings=self, session=session_config, brokers=brokers)
        check_config(connection.session_config_for(connection.levels[0]))
        return connection


def reject_argument(location: str, problem: str) -> NoReturn:
    """Raise ConfigError TL-C51."""
    raise ConfigError("TL-C51", location, problem, "Change it.")
