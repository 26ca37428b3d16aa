"""What a connection and the session on it are told: one value for the gateway, the Publisher and the Client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeAlias

from towline.errors import ConfigError
from towline.mqtt.events import Filter, SessionConfig, SessionTerms
from towline.mqtt.rules import check_config, filter_problem, message_problem, whole_number_problem
from towline.mqtt.versions import LEVELS
from towline.net.reconnect import FIRST_PAUSE_S, LONGEST_PAUSE_S
from towline.net.transport import Endpoint, Proxy, Tls, header_problem

__all__ = ["LONGEST_DELAY_S", "ClientSettings", "ConnectionOptions", "ProtocolName", "refuse"]

#: A version of MQTT; ``auto`` is 5, and an older one where the broker does not speak it.
ProtocolName: TypeAlias = Literal["5", "3.1.1", "3.1", "auto"]


#: Stands in a `SessionConfig` for a password that is read at each connection, so that rules about one hold.
NOT_READ_YET: Final = b""
#: Longest pause that can be asked for, in seconds.
LONGEST_DELAY_S: Final = 3600.0
#: MQTT ends here [MQTT-1.5.5-1], with the bytes of the length itself.
_LARGEST_PACKET: Final = 268_435_455 + 5


@dataclass(frozen=True, kw_only=True)
class Connecting:
    """How to get to the brokers, whoever asks.

    Attributes:
        tls: How to encrypt; None to verify against the system's certificates where a broker asks for TLS.
        proxy: On the way to all of them.
        protocol: ``5``, ``3.1.1``, ``3.1``, or ``auto``: 5, and 3.1.1 or 3.1 where the broker does not speak it.
        max_packet_bytes: Of a larger message only a stub is kept; any other packet that is larger ends the connection.
        follow_redirects: Go where a broker points, same scheme, same verification; see `towline.net.reconnect`.
        brokers_share_sessions: They are one cluster; otherwise each has a session of its own: nothing is published with
            QoS 2, and what was under way to us comes again when one takes over from another.
        reconnect_delay_s: First pause before another connection in seconds; each further one is twice as long.
        reconnect_max_delay_s: The longest.
        password_file: Holds MQTT's password; read at each connection, as the other files are.
        token_provider: ``module:function``, called without arguments at each connection for a password that is
            short-lived: text or bytes (`towline.providers`).
        websocket_headers_file: Further headers of the request that opens a WebSocket, ``Name: value`` a line.
        websocket_query_file: The query of that request, in place of the URI's, as of a presigned URL.
    """

    tls: Tls | None = None
    proxy: Proxy | None = None
    protocol: ProtocolName = "5"
    max_packet_bytes: int = 64 << 20
    follow_redirects: bool = False
    brokers_share_sessions: bool = False
    reconnect_delay_s: float = FIRST_PAUSE_S
    reconnect_max_delay_s: float = LONGEST_PAUSE_S
    password_file: str | Path | None = None
    token_provider: str | None = None
    websocket_headers_file: str | Path | None = None
    websocket_query_file: str | Path | None = None


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions(Connecting):
    """How to get to the brokers, and what is said to them.

    Attributes:
        session: The session's part.
        brokers: Tried in this order, again from the first after the last, and after a connection that worked.
        linger_s: How many seconds a chunk waits for more, so that one sync serves many: twice as many in a stream, up
            to three times elsewhere (`towline.net.driver.Linger`).
        linger_after_silence_s: How many seconds after a moment of silence; nothing is sent meanwhile.
        websocket_headers: Further headers of the request that opens a WebSocket, beside those of the file.
        authenticator: ``module:factory`` of enhanced authentication, called with user name and password at each
            connection; None for the session's own.
    """

    session: SessionConfig
    brokers: tuple[Endpoint, ...]
    linger_s: float = 0.0
    linger_after_silence_s: float = 0.0
    websocket_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    authenticator: str | None = None

    @property
    def levels(self) -> tuple[int, ...]:
        """Protocol levels to try, in order (`towline.mqtt.versions`)."""
        return LEVELS[self.protocol]

    @property
    def several_sessions(self) -> bool:
        """Whether the next server may be one with another session."""
        return (len(self.brokers) > 1 or self.follow_redirects) and not self.brokers_share_sessions

    def session_at(self, level: int) -> SessionConfig:
        """The session's part for a protocol level; MQTT 3.x has no topic aliases."""
        aliases = self.session.topic_alias_maximum if level == 5 else 0
        return replace(self.session, protocol=level, topic_alias_maximum=aliases)


@dataclass(frozen=True, kw_only=True)
class ClientSettings(Connecting, SessionTerms):
    """How a `Client` or a `Publisher` meets its broker.

    Attributes:
        password: MQTT's; or a file or a function that gives it.
        session_expiry_s: Seconds the broker keeps the session while we are away, 0xFFFFFFFF for ever; 0 to begin and
            end without one. To MQTT 3.x everything above 0 is for ever. None for 3,600, and for ever in a `Publisher`.
        unknown_session: What becomes of a session that the broker has when the first connection is made: ``adopt`` it,
            or ``refuse``: the connection ends before anything of it is answered (TL-M20).
        receive_maximum: As in `SessionTerms`, and smaller where nothing is said: what comes is kept in memory.
        websocket_headers: Further headers of the request that opens a WebSocket.
    """

    password: bytes | str | None = field(default=None, repr=False)
    session_expiry_s: int | None = None
    unknown_session: Literal["adopt", "refuse"] = "adopt"
    receive_maximum: int = 1000
    websocket_headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def options(
        self,
        uri: str | Endpoint | Sequence[str | Endpoint],
        client_id: str,
        subscribe: str | Filter | Sequence[str | Filter] = (),
        *,
        session_expiry_s: int = 3600,
    ) -> ConnectionOptions:
        """Connection and session to these brokers, as `Client` is given them; what can't be is refused.

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
        headers = tuple(self.websocket_headers.items())
        if self.protocol not in LEVELS:
            refuse(where, f'protocol "{self.protocol}" is none of {", ".join(LEVELS)}')
        if problem := whole_number_problem(self.max_packet_bytes, 1, _LARGEST_PACKET):
            refuse("max_packet_bytes", problem)
        for name in ("reconnect_delay_s", "reconnect_max_delay_s"):
            value: object = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= LONGEST_DELAY_S:  # type: ignore[operator]
                refuse(name, f"{value!r} is not more than 0 and at most {LONGEST_DELAY_S:,.0f} seconds")
        if problem := next(filter(None, (header_problem(name, value) for name, value in headers)), None):
            refuse("websocket_headers", problem)
        if sum(one is not None for one in (self.password, self.password_file, self.token_provider)) > 1:
            refuse(where, "password, password_file and token_provider each give the password")
        if self.will and (problem := message_problem(self.will.topic, self.will.payload or b"", int(self.will.qos))):
            refuse("will", problem)
        expiry = session_expiry_s if self.session_expiry_s is None else self.session_expiry_s
        password = self.password.encode() if isinstance(self.password, str) else self.password
        read = self.password_file is not None or self.token_provider is not None
        session = SessionConfig(
            client_id,
            where,
            _filters_of(subscribe, where),
            password=NOT_READ_YET if read else password,
            session_expiry_s=expiry,
            durable=expiry != 0,
            clean_start=expiry == 0,
            **self._as(SessionTerms),
        )
        options = ConnectionOptions(session=session, brokers=brokers, websocket_headers=headers, **self._as(Connecting))
        check_config(options.session_at(options.levels[0]))
        return options

    def _as(self, kind: type[Connecting | SessionTerms]) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(kind)}


def refuse(where: str, what: str) -> NoReturn:
    """Raise ConfigError TL-C51."""
    raise ConfigError("TL-C51", where, what, "Change it.")


def _endpoints_of(uri: str | Endpoint | Sequence[str | Endpoint]) -> tuple[Endpoint, ...]:
    uris = (uri,) if isinstance(uri, str | Endpoint) else tuple(uri)
    if not uris:
        refuse("uri", "no broker")
    try:
        return tuple(one if isinstance(one, Endpoint) else Endpoint.parse(one) for one in uris)
    except ValueError as error:
        refuse("uri", str(error))


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
