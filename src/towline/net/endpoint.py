"""Endpoints of brokers and proxies, and TLS settings: parsed and validated once, with their errors."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeAlias, cast
from urllib.parse import unquote

from annotated_types import Len

from towline.errors import BrokerError, ConfigError, Unreachable
from towline.options import Option, parse_list
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


_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
#: ALPN protocol name (RFC 7301 section 3.1), printable ASCII only.
_ALPN_NAME: Final = re.compile(r"[!-~]{1,255}")
#: OpenSSL's X509_V_ERR_* (x509_vfy.h) → remedy for a rejected certificate. From 80 on they are RFC 5280's rules for
#: extensions, names and curves, which only X509_V_FLAG_X509_STRICT checks.
_CERTIFICATE_REMEDIES: Final = {
    **dict.fromkeys((9, 10), "The broker needs a valid one; is the clock of this machine right?"),
    **dict.fromkeys((2, 18, 19, 20, 21), "If it is the right one, set tls.ca_file to its authority's certificate."),
    **dict.fromkeys((62, 64), "Use the name in the certificate, or set tls.server_name to it."),
    **dict.fromkeys(
        range(80, 95), "Reissue it and its authority by RFC 5280, or set tls.strict = false: the rest is verified."
    ),
}
#: TLS alerts about a wrong or missing client certificate (RFC 8446 section 6.2).
_CLIENT_CERTIFICATE_ALERTS: Final = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")
#: OpenSSL's reasons if the peers share no TLS version.
_VERSION_ERRORS: Final = ("PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "NO_PROTOCOLS_AVAILABLE")


def _parse_protocols(text: str) -> list[str]:
    return parse_list(text, "protocols", '["mqtt"]')


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings: verification of the broker, and the client's certificate.

    Attributes:
        ca_file: Trusted certificates (PEM); default the system's.
        cert_file: Client certificate chain, with ``key_file``, for a broker that asks for one.
        key_file: Private key of the client; default it is in ``cert_file``.
        key_password_file: Holds the password of an encrypted key.
        server_name: Name that the certificate must carry, also sent as SNI; default the host of the URI.
        alpn: Protocols offered (RFC 7301), such as ``mqtt``; default none.
        min_version: Oldest TLS version allowed.
        strict: Refuse certificates that break RFC 5280's rules about extensions (X509_V_FLAG_X509_STRICT), as Python
            does by default from 3.13 on and Towline on every Python. Without it chain, dates and name are verified all
            the same (docs/security.md#certificates-that-break-rfc-5280).
        insecure: Verify nothing; shown in every status.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    key_password_file: Path | None = None
    server_name: Annotated[str, Len(1, 253)] | None = None
    alpn: Annotated[tuple[str, ...], Option(parse=_parse_protocols)] = ()
    min_version: Literal["1.2", "1.3"] = "1.2"
    strict: bool = True
    insecure: bool = False

    def problem(self) -> str:
        """Return the reason why these settings are invalid together; "" if they are valid."""
        if (self.key_file or self.key_password_file) and not self.cert_file:
            return "key_file and key_password_file need cert_file"
        if not all(_ALPN_NAME.fullmatch(name) for name in self.alpn):
            return "a protocol in alpn has 1 to 255 characters of ASCII, and no space among them"
        return ""

    def context(self) -> ssl.SSLContext:
        """Return the OpenSSL context; files are read again at each call, so that a renewed certificate is used.

        Raises:
            ConfigError: A file is missing, or holds no certificate or key, or its password is wrong (TL-C30).
        """
        try:
            context = ssl.create_default_context(cafile=str(self.ca_file) if self.ca_file else None)
        except OSError as error:  # includes ssl.SSLError
            raise _file_error(error, "tls.ca_file", self.ca_file) from None
        context.minimum_version = _VERSIONS[self.min_version]
        # As create_default_context of Python 3.13 has them.
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        if not self.strict:
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self.alpn:
            context.set_alpn_protocols(list(self.alpn))
        if self.cert_file:
            self._load_client_certificate(context, self.cert_file)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def _load_client_certificate(self, context: ssl.SSLContext, cert_file: Path) -> None:
        password = b""  # without a password OpenSSL prompts on the terminal
        if self.key_password_file:
            password = read_secret("tls.key_password_file", self.key_password_file, bytes)
        try:
            context.load_cert_chain(cert_file, self.key_file, password)
        except (OSError, ValueError) as error:
            options = "tls.cert_file, tls.key_file and tls.key_password_file"
            raise _file_error(error, options, cert_file, self.key_file) from None


def _file_error(error: BaseException, options: str, *files: Path | None) -> ConfigError:
    names = ", ".join(str(file) for file in files if file) or "the system's certificates"
    problem = f"{'no matching PEM' if isinstance(error, ssl.SSLError) else 'not usable'} ({error_text(error)})"
    return ConfigError("TL-C30", names, problem, f"Check {options}.")


def tls_error(error: Exception, tls: Tls, location: str) -> BrokerError:
    """Return the error for a failed TLS handshake, or a later alert: TLS 1.3 rejects a client certificate after it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = f"the server's certificate is not accepted ({error.verify_message.strip().rstrip('.')})"
        remedy = _CERTIFICATE_REMEDIES.get(error.verify_code, "Ask who runs the broker.")
        return Unreachable("TL-M07", location, problem, remedy)
    reason = getattr(error, "reason", None) or ""
    if "ALERT" in reason and any(word in reason for word in _CLIENT_CERTIFICATE_ALERTS):
        problem = f"the broker needs another client certificate ({error_text(error).rpartition('alert ')[2]})"
        return Unreachable("TL-M09", location, problem, "Set or check tls.cert_file and tls.key_file.")
    if any(word in reason for word in _VERSION_ERRORS):
        problem = f"the broker speaks no TLS {tls.min_version} or newer"
        return Unreachable("TL-M02", location, problem, "Upgrade the broker, or lower tls.min_version.")
    if "NO_APPLICATION_PROTOCOL" in reason:
        problem = f"the broker accepts none of the ALPN protocols {', '.join(tls.alpn)}"
        return Unreachable("TL-M02", location, problem, "Check tls.alpn.")
    return Unreachable("TL-M02", location, f"no TLS ({error_text(error)})", tls_port_hint(location).strip())
