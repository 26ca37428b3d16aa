"""Endpoints of brokers and proxies: URIs, parsed and validated once, and error texts for connection failures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias, cast
from urllib.parse import unquote

from towline.providers import read_secret

Scheme: TypeAlias = Literal["mqtt", "mqtts", "ws", "wss", "unix"]

#: Default ports (IANA; RFC 6455 section 3).
DEFAULT_PORTS: Final[dict[str, int]] = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
#: Default WebSocket path: as of EMQX, HiveMQ, AWS and most front ends; Mosquitto accepts any.
DEFAULT_PATH: Final = "/mqtt"
#: Host name (underscores allowed) or address, with the zone of a link-local one (RFC 6874).
_HOST: Final = r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\])"
#: Broker URI; the path is one of RFC 3986 section 3.3: no control character may reach a request line.
_BROKER_URI: Final = re.compile(
    rf"(?:(mqtts?|wss?)://)?{_HOST}(?::([0-9]{{1,5}}))?(/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)?", re.IGNORECASE
)
_UNIX_URI: Final = re.compile(r"unix://(/[^\0]*[^/\0])")
_PROXY_URI: Final = re.compile(rf"(http|socks5)://(?:([^:@/]+)@)?{_HOST}:([0-9]{{1,5}})/?")
_BROKER_FORMS: Final = (
    "a broker is mqtt://HOST[:PORT], mqtts://, ws://HOST[:PORT][/PATH], wss:// or unix:///PATH; use username, "
    "password_file and websocket_query_file for what it can't carry"
)


def _parse_host(text: str) -> str:
    host = text.strip("[]")
    return host if "%" in host else host.lower()  # the name of an interface has its case


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of one broker.

    Attributes:
        scheme: ``mqtt``, ``mqtts``, ``ws``, ``wss`` or ``unix``.
        host: Name or address; ``localhost`` for a Unix socket.
        port: TCP port; 0 for a Unix socket.
        path: Path of the WebSocket resource or of the Unix socket; empty for plain MQTT.
    """

    scheme: Scheme
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Parse ``mqtt://HOST[:PORT]``, ``mqtts://``, ``ws://HOST[:PORT][/PATH]``, ``wss://`` or ``unix:///PATH``.

        Raises:
            ValueError: Any other URI, and one with credentials or a query, which would appear in every log.
        """
        if match := _UNIX_URI.fullmatch(uri):
            return cls("unix", "localhost", 0, match[1])
        if match := _BROKER_URI.fullmatch(uri):
            scheme, path = cast("Scheme", (match[1] or "mqtt").lower()), match[4] or ""
            port, is_websocket = int(match[3] or DEFAULT_PORTS[scheme]), scheme in {"ws", "wss"}
            if 0 < port < 1 << 16 and (is_websocket or path in {"", "/"}):
                return cls(scheme, _parse_host(match[2]), port, (path or DEFAULT_PATH) if is_websocket else "")
        raise ValueError(_BROKER_FORMS)

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme in {"mqtts", "wss"}

    @property
    def websocket(self) -> bool:
        """Whether MQTT is sent in WebSocket frames."""
        return self.scheme in {"ws", "wss"}

    @property
    def authority(self) -> str:
        """``HOST:PORT``, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.scheme == "unix" else f"{self.scheme}://{self.authority}{self.path}"


@dataclass(frozen=True, slots=True)
class Proxy:
    """Proxy between this machine and the broker.

    Attributes:
        scheme: ``http`` (CONNECT) or ``socks5`` (RFC 1928, names resolved by the proxy).
        host: Name or address.
        port: TCP port.
        username: User of the proxy; the password is in `password_file`.
        password_file: Read at each connection.
    """

    scheme: Literal["http", "socks5"]
    host: str
    port: int
    username: str | None = None
    password_file: Path | None = None

    @classmethod
    def parse(cls, uri: str, password_file: Path | None = None) -> Self:
        """Parse ``http://[USER@]HOST:PORT`` or ``socks5://[USER@]HOST:PORT``.

        Raises:
            ValueError: Any other URI, and one with a password; the message never repeats the URI.
        """
        match = _PROXY_URI.fullmatch(uri)
        if match is None or not 0 < int(match[4]) < 1 << 16:
            raise ValueError(
                "a proxy is http://[USER@]HOST:PORT or socks5://[USER@]HOST:PORT, its password in proxy_password_file"
            )
        username = unquote(match[2]) if match[2] else None
        if password_file and not username:
            raise ValueError("proxy_password_file needs a user in the proxy's URI, as http://USER@HOST:PORT")
        scheme = cast('Literal["http", "socks5"]', match[1])
        return cls(scheme, _parse_host(match[3]), int(match[4]), username, password_file)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def password(self) -> str:
        """Return the password; empty without a password file.

        Raises:
            ConfigError: The file can't be read (TL-C31).
        """
        return read_secret("proxy_password_file", self.password_file, bytes.decode) if self.password_file else ""


def error_text(error: BaseException) -> str:
    """Return the system's text for an error, without its number and without local paths."""
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).strip().rstrip(".").lower().replace("_", " ")


def tls_port_hint(uri: str) -> str:
    """Return a question whether the port expects TLS, or expects none; begins with a space, "" for a Unix socket."""
    scheme, _, rest = uri.partition("://")
    if scheme in {"mqtts", "wss"}:
        return f" Is it a port without TLS? That is {scheme[:-1]}://{rest}, which anyone on the way can read."
    return f" Is it a port for TLS? That is {scheme}s://{rest}." if scheme in DEFAULT_PORTS else ""
