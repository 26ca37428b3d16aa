"""What a connection and the session on it are told: one value for the gateway, the Publisher and the Client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from towline.mqtt.events import SessionConfig
from towline.mqtt.versions import LEVELS
from towline.net.pauses import FIRST_PAUSE_S, LONGEST_PAUSE_S
from towline.net.transport import Endpoint, Proxy, Tls, header_problem

__all__ = ["LONGEST_DELAY_S", "ConnectionOptions", "ProtocolName", "connection_problem"]

#: A version of MQTT; ``auto`` is 5, and an older one where the broker does not speak it.
ProtocolName: TypeAlias = Literal["5", "3.1.1", "3.1", "auto"]


#: Longest pause that can be asked for, in seconds.
LONGEST_DELAY_S: Final = 3600.0


def connection_problem(first_s: float, longest_s: float, headers: Iterable[tuple[str, str]]) -> str | None:
    """What can't be of the pauses between connections and the headers of a WebSocket's request, or None."""
    for name, value in (("reconnect_delay_s", first_s), ("reconnect_max_delay_s", longest_s)):
        number: object = value  # of a caller without types
        if type(number) not in (int, float) or not 0 < value <= LONGEST_DELAY_S:
            return f"{name} is {value!r}, and is more than 0 and at most {LONGEST_DELAY_S:,.0f} seconds"
    return next((found for name, value in headers if (found := header_problem(name, value))), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """How to get to the brokers, and what is said to them.

    Attributes:
        session: The session's part.
        brokers: Tried in this order, again from the first after the last, and after a connection that worked.
        tls: How to encrypt; None for the defaults where a broker asks for TLS.
        proxy: On the way to all of them.
        protocol: Which versions are tried.
        max_packet_bytes: Of a larger message only a stub is kept; any other packet that is larger ends the connection.
        follow_redirects: Go where a broker points; see `towline.net.redirect`.
        brokers_share_sessions: They are one cluster; otherwise each has a session of its own.
        linger_s: How many seconds a chunk waits for more, so that one sync serves many: twice as many in a stream, up
            to three times elsewhere (`towline.net.linger`).
        reconnect_delay_s: First pause before another connection in seconds; each further one is twice as long.
        reconnect_max_delay_s: The longest.
        websocket_headers: Further headers of the request that opens a WebSocket, such as an authorization.
    """

    session: SessionConfig
    brokers: tuple[Endpoint, ...]
    tls: Tls | None = None
    proxy: Proxy | None = None
    protocol: ProtocolName = "5"
    max_packet_bytes: int = 64 << 20
    follow_redirects: bool = False
    brokers_share_sessions: bool = False
    linger_s: float = 0.0
    reconnect_delay_s: float = FIRST_PAUSE_S
    reconnect_max_delay_s: float = LONGEST_PAUSE_S
    websocket_headers: tuple[tuple[str, str], ...] = ()

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
