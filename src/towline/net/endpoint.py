"""Endpoints of brokers and proxies: URIs, parsed and validated once, and error texts for connection failures."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias, cast
from urllib.parse import SplitResult, unquote, urlsplit

from towline.providers import read_secret

Scheme: TypeAlias = Literal["mqtt", "mqtts", "ws", "wss", "unix"]

#: Default ports (IANA; RFC 6455 section 3).
DEFAULT_PORTS: Final[dict[str, int]] = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
#: Default WebSocket path: as of EMQX, HiveMQ, AWS and most front ends; Mosquitto accepts any.
DEFAULT_PATH: Final = "/mqtt"
#: Longest path of a Unix socket in bytes (unix(7): sun_path has 108 with its final NUL).
_MAX_UNIX_PATH_BYTES: Final = 107
#: Host name (underscores allowed) or address, with the zone of a link-local one (RFC 6874).
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
#: URI path (RFC 3986 section 3.3); no control character may reach a request line.
_URI_PATH: Final = re.compile(r"/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*")


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
        """Parse ``mqtt://HOST[:PORT]``, ``mqtts://``, ``ws://HOST[:PORT][/PATH]``, ``wss://``, ``unix://``.

        Raises:
            ValueError: Any other URI, and one with credentials or a query, which would appear in every log.
        """
        try:
            parts = urlsplit(uri if "://" in uri else f"mqtt://{uri}")
        except ValueError:
            raise ValueError("a broker URI is mqtt://HOST[:PORT]; an IPv6 address stands in [ ]") from None
        if parts.scheme not in {*DEFAULT_PORTS, "unix"}:
            schemes = "mqtt://, mqtts://, ws://, wss:// or unix://"
            raise ValueError(f'"{parts.scheme}://" is not a broker scheme; use {schemes}')
        if parts.username is not None or parts.password is not None:
            raise ValueError("a broker URI carries no user or password; use username and password_file")
        scheme = cast("Scheme", parts.scheme)
        if parts.fragment or parts.query:
            raise ValueError("a broker URI ends with its path: no #, and instead of ? use websocket_query_file")
        if scheme == "unix":
            return cls(scheme, "localhost", 0, _unix_path(parts))
        return cls(scheme, _host(parts), _port(parts), _web_path(parts))

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
        try:
            parts = urlsplit(uri)
            port = parts.port
        except ValueError:
            raise ValueError("the port of a proxy is a number from 1 to 65535") from None
        if parts.scheme not in {"http", "socks5"}:
            raise ValueError("a proxy is http://[USER@]HOST:PORT or socks5://[USER@]HOST:PORT")
        if parts.password is not None:
            raise ValueError("the proxy's URI carries no password; use proxy_password_file")
        if not parts.hostname or not port or parts.path not in {"", "/"} or parts.query or parts.fragment:
            raise ValueError(f"a proxy is {parts.scheme}://[USER@]HOST:PORT, its port always named")
        username = unquote(parts.username) if parts.username else None
        if password_file and not username:
            raise ValueError("proxy_password_file needs a user in the proxy's URI, as http://USER@HOST:PORT")
        if username and parts.scheme == "http" and ":" in username:
            raise ValueError("a user of an HTTP proxy has no colon (RFC 7617 section 2)")
        return cls(cast('Literal["http", "socks5"]', parts.scheme), parts.hostname, port, username, password_file)

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


def http_status(code: int) -> str:
    """Return the status with its standard phrase, such as ``404 not found``; never the peer's own phrase."""
    with contextlib.suppress(ValueError):
        return f"{code} {HTTPStatus(code).phrase.lower()}"
    return str(code)


def tls_port_hint(uri: str) -> str:
    """Return a question whether the port expects TLS, or expects none; begins with a space, "" for a Unix socket."""
    scheme, _, rest = uri.partition("://")
    if scheme in {"mqtts", "wss"}:
        return f" Is it a port without TLS? That is {scheme[:-1]}://{rest}, which anyone on the way can read."
    return f" Is it a port for TLS? That is {scheme}s://{rest}." if scheme in DEFAULT_PORTS else ""


def _host(parts: SplitResult) -> str:
    if not parts.hostname:
        raise ValueError(f"a broker URI is {parts.scheme}://HOST[:PORT]")
    try:
        host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
    except UnicodeError:
        host = ""
    if not _HOST.fullmatch(host):
        raise ValueError("the host of a broker URI is a name or an address: letters, digits, dots and dashes")
    if ":" in host and "%" not in host and ip_address(host).is_link_local:
        raise ValueError(f"{host} is a link-local address, and needs its interface: [{host}%eth0]")
    return host


def _port(parts: SplitResult) -> int:
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("the port of a broker URI is a number from 1 to 65535")
    return port or DEFAULT_PORTS[parts.scheme]


def _web_path(parts: SplitResult) -> str:
    if parts.scheme in {"ws", "wss"}:
        if parts.path and not _URI_PATH.fullmatch(parts.path):
            raise ValueError("the path of a WebSocket URI has only letters, digits and -._~!$&'()*+,;=:@%/")
        return parts.path or DEFAULT_PATH
    if parts.path not in {"", "/"}:
        raise ValueError("a broker URI is mqtt://HOST[:PORT] or mqtts://HOST[:PORT], without a path")
    return ""


def _unix_path(parts: SplitResult) -> str:
    if parts.netloc or not parts.path.startswith("/") or parts.path.endswith("/"):
        raise ValueError("a Unix socket is unix:///PATH, three slashes and the absolute path of the socket")
    if "\0" in parts.path or len(parts.path.encode()) > _MAX_UNIX_PATH_BYTES:
        raise ValueError(f"the path of a Unix socket has at most {_MAX_UNIX_PATH_BYTES} bytes")
    return parts.path
