"""A way through a proxy, HTTP CONNECT or SOCKS5, with `python-socks`.

The proxy looks the broker's name up, so it works where this machine's DNS knows nothing of the outside. What it gets
to see is the broker's name and, unless the broker is reached by TLS, everything.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Literal, Self, cast
from urllib.parse import unquote, urlsplit

from towline.errors import ConfigError, Unreachable
from towline.net.transport.endpoint import Endpoint
from towline.net.transport.patience import Patience, plain
from towline.providers import secret_of

_ADVICE: Final = {
    403: "Ask who runs the proxy to allow this host and port.",
    407: "Set a user in the proxy's URI and proxy_password_file.",
}


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy on the way to the broker.

    Attributes:
        scheme: ``http`` (CONNECT) or ``socks5`` (RFC 1928, names resolved by the proxy).
        host: Name or address.
        port: TCP port.
        username: For the proxy; the password is in `password_file`.
        password_file: Read at each connection.
    """

    scheme: Literal["http", "socks5"]
    host: str
    port: int
    username: str | None = None
    password_file: Path | None = None

    @classmethod
    def parse(cls, uri: str, password_file: Path | None = None) -> Self:
        """Read ``http://[USER@]HOST:PORT`` or ``socks5://[USER@]HOST:PORT``.

        Raises:
            ValueError: For anything else, a password among it; the message never repeats the URI.
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
        """The password, empty without a file.

        Raises:
            ConfigError: The file can't be read (TL-C31).
        """
        return secret_of("proxy_password_file", self.password_file, bytes.decode) if self.password_file else ""


def connect_through(
    proxy: Proxy, endpoint: Endpoint, patience: Patience, source_address: str | None = None
) -> socket.socket:
    """A non-blocking socket that leads to the broker.

    Raises:
        Unreachable: The proxy is not there (TL-M01), or does not let us through (TL-M15).
        ConfigError: Its password can't be read or carried (TL-C31), or python-socks is not installed (TL-C34).
    """
    try:
        import python_socks  # noqa: PLC0415  # optional: towline[proxy]
        from python_socks.sync import Proxy as Connector  # noqa: PLC0415
    except ImportError:
        what, advice = "a proxy needs the package python-socks", 'Run: pip install "towline[proxy]"'
        raise ConfigError("TL-C34", str(proxy), what, advice) from None
    http = proxy.scheme == "http"
    kind = python_socks.ProxyType.HTTP if http else python_socks.ProxyType.SOCKS5
    connector = Connector(kind, proxy.host, proxy.port, proxy.username or "", proxy.password(), rdns=True)
    own: dict[str, Any] = {"timeout": patience.left(), "local_addr": (source_address, 0) if source_address else None}
    try:
        sock = patience.call(lambda: connector.connect(endpoint.host, endpoint.port, **own), lambda late: late.close())
    except UnicodeError:  # it would carry the password
        what = "the proxy's user or password has characters that can't be carried"
        raise ConfigError("TL-C31", str(proxy), what, "Use ASCII.") from None
    except python_socks.ProxyConnectionError as error:
        reason = plain(error.__cause__ or error)
        where, advice = f"{endpoint} through {proxy}", "Is the proxy up, and the port right?"
        raise Unreachable("TL-M01", where, f"no connection ({reason})", advice) from None
    except (python_socks.ProxyError, OSError) as error:
        said, code = plain(error), getattr(error, "error_code", None) or 0
        if http and isinstance(error, python_socks.ProxyError):  # never its own words
            said = f"HTTP {http_status(code)}" if code else "no answer in HTTP"
        code = 407 if "authentication" in said else code
        what = f"the proxy {proxy} did not let us through: {said}"
        raise Unreachable(
            "TL-M15", str(endpoint), what, _ADVICE.get(code, "Does the proxy reach the broker?")
        ) from None
    sock.setblocking(False)
    return sock


def http_status(code: int) -> str:
    """``404 not found``: the code and its usual words, never the peer's own."""
    with contextlib.suppress(ValueError):
        return f"{code} {HTTPStatus(code).phrase.lower()}"
    return str(code)
