"""Access to a gateway on a network: its certificate, its token, and tickets in place of the token.

A client has file names only, so no secret travels to Spark's workers [I12]: the driver reads the token, a worker sends
a ticket. The module imports little, because workers load it.

A ticket is ``BODY.CODE``: BODY is JSON in base64url, CODE the HMAC-SHA256 of the encoded BODY, with a key that only the
gateway has. BODY has the version, the kind, the permitted range or writer, and the expiry time.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from towline import files
from towline.errors import ConfigError, GatewayError, JournalError
from towline.options import parse_list, parse_path
from towline.providers import read_secret
from towline.text import printable

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping


#: Scheme of the location of a gateway on a network.
REMOTE_SCHEME: Final = "grpc+tls://"
_REMOTE_LOCATION: Final = re.compile(re.escape(REMOTE_SCHEME) + r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}/?")
#: Codes of access errors that last until a person changes a file: the token or the certificate is not accepted, or a
#: file of the client can't be used.
ACCESS_ERROR_CODES: Final = frozenset({"TL-G40", "TL-G44", "TL-G46"})
#: Minimum characters of a token: as many hex digits hold 64 bits, too many to guess through a gateway.
MIN_TOKEN_CHARS: Final = 16
_REMEDY: Final = "Make one with: openssl rand -hex 32"

#: In the state directory: 64 hex digits. A new file invalidates every ticket.
KEY_FILE: Final = "ticket.key"
#: Default validity of a ticket, in seconds: enough for a batch, its retries and a restart of the gateway.
DEFAULT_TICKET_S: Final = 3600.0
MAX_TICKET_S: Final = 7 * 86400.0
_TICKET_VERSION: Final = 1
_KEY_BYTES: Final = 32
#: Separates these HMACs from any other use of the key.
_HMAC_PREFIX: Final = b"towline ticket\0"


def is_remote(location: str) -> bool:
    """Return True for a location on a network, which needs a token or a ticket."""
    return location.startswith(REMOTE_SCHEME)


def parse_gateway(text: str) -> str:
    """Parse the state directory or the location of a gateway; raises ValueError if it is neither."""
    if not text:
        raise ValueError("must be the state directory of a running gateway, or its location grpc+tls://HOST:PORT")
    if "://" not in text:
        return parse_path(text)
    if not text.startswith("grpc+unix:///") and not _REMOTE_LOCATION.fullmatch(text):
        raise ValueError("a location is grpc+unix:///PATH or grpc+tls://HOST:PORT; there is none without TLS")
    return text


def parse_gateways(text: str) -> tuple[str, ...]:
    """Parse several gateways: ``/var/lib/g1, grpc+tls://g2:8815``, or a JSON list of the same texts.

    Raises:
        ValueError: An entry is invalid or repeated, or the list is empty.
    """
    gateways = [parse_gateway(part.strip()).rstrip("/") for part in parse_list(text, "gateways", '["/var/lib/g1"]')]
    if not gateways:
        raise ValueError("it names no gateway")
    if duplicate := next((gateway for gateway in gateways if gateways.count(gateway) > 1), None):
        raise ValueError(f"{printable(duplicate, 200)} is listed twice")
    return tuple(gateways)


def parse_tokens(content: bytes) -> tuple[str, ...]:
    """Parse a token file, one token a line, the newest first; empty lines and lines with ``#`` in front are skipped.

    Raises:
        ValueError: The file has no token, or an invalid one; the text never shows it.
    """
    lines = [line.strip() for line in content.decode("ascii", "replace").splitlines()]
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if not tokens:
        raise ValueError("it holds no token")
    if any(len(token) < MIN_TOKEN_CHARS or not all("!" <= char <= "~" for char in token) for token in tokens):
        raise ValueError(f"a token has at least {MIN_TOKEN_CHARS} letters, digits and signs of ASCII, one token a line")
    return tokens


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """Token and certificate files of a client, "" for none; each is read where it is needed.

    Attributes:
        token_file: File of the gateway's token; only the first token counts. Read on the driver only.
        ca_file: CA certificates (PEM) for the gateway's certificate; the system's by default.
        server_name: Name in the gateway's certificate, if it is not the host of the location.
    """

    token_file: str = ""
    ca_file: str = ""
    server_name: str = ""

    def token(self) -> str:
        """Read the token from its file; a changed token is used with the next call.

        Raises:
            GatewayError: TL-G46, the file can't be read or has no token.
        """
        if not self.token_file:
            raise _file_error("gatewayTokenFile", "is not set, and this gateway is on a network", "Name the file.")
        try:
            return parse_tokens(_read_file("gatewayTokenFile", self.token_file))[0]
        except ValueError as error:
            problem = f"{self.token_file} can't be used: {error}"
            raise _file_error("gatewayTokenFile", problem, _REMEDY) from None

    def ca_pem(self) -> str:
        """Return the CA certificates as PEM text, to send to the workers; "" for the system's. Raises as `token`."""
        return _read_file("gatewayCaFile", self.ca_file).decode("ascii", "replace") if self.ca_file else ""

    def tls_options(self, ca_pem: str = "") -> Mapping[str, object]:
        """Return the TLS options of ``pyarrow.flight.connect``; a worker passes `ca_pem`, because it has no CA file."""
        root_certificates = ca_pem or self.ca_pem()
        options = {"tls_root_certs": root_certificates.encode(), "override_hostname": self.server_name}
        return {name: value for name, value in options.items() if value}


def _read_file(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        remedy = "Put the file there, or correct the path."
        raise _file_error(option, f"{path} can't be read ({files.os_error_text(error)})", remedy) from error


def _file_error(option: str, problem: str, remedy: str) -> GatewayError:
    return GatewayError("TL-G46", f"{option} on {socket.gethostname()}", problem, remedy)


class TokenFile:
    """Token file of a gateway, read again after a change; raises ConfigError, TL-C98, if it can't be used at first.

    Later, while it can't be read, no token is accepted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_tokens()

    def accepts(self, token: str) -> bool:
        """Return True for a token of the file; a wrong token takes the same time as a right one."""
        try:
            valid_tokens = self._read_tokens()
        except ConfigError:
            return False
        # Each token is compared, also after a match.
        return sum(hmac.compare_digest(_sha256(token), _sha256(valid_token)) for valid_token in valid_tokens) > 0

    def _read_tokens(self) -> tuple[str, ...]:
        return read_secret("the file of tokens", self._path, parse_tokens, "TL-C98", _REMEDY, private=True)


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """TLS certificate chain and key of a server, with the end of their validity."""

    chain: bytes
    key: bytes = field(repr=False)
    valid_until: datetime

    @classmethod
    def read(cls, cert_file: Path, key_file: Path) -> ServerCertificate:
        """Read and validate the certificate and key files.

        Raises:
            ConfigError: TL-C97, a file can't be read, has no certificate or key, does not match the other, or has
                expired.
        """
        import ssl  # noqa: PLC0415 - workers need none

        client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            chain, key = cert_file.read_bytes(), key_file.read_bytes()
            server.load_cert_chain(cert_file, key_file, password=b"")
            client.load_verify_locations(cert_file)
            return cls(chain, key, _valid_until(client, server))
        except ssl.SSLCertVerificationError as error:
            problem = error.verify_message
        except ssl.SSLError as error:
            reason = f" ({error.reason.lower().replace('_', ' ')})" if error.reason else ""
            problem = f"no matching PEM in cert_file and key_file, or one with a password{reason}"
        except OSError as error:
            problem = f"{error.filename} can't be read ({files.os_error_text(error)})"
        remedy = "Correct or renew them; renewed ones are used without a restart."
        raise ConfigError("TL-C97", f"cert_file {cert_file}, key_file {key_file}", problem, remedy)


def _valid_until(client: ssl.SSLContext, server: ssl.SSLContext) -> datetime:
    """Return the end of the certificate's validity, from a TLS handshake in memory."""
    import ssl  # noqa: PLC0415 - see above

    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls_sides = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for side in tls_sides * 4:  # more turns than a handshake needs
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str((tls_sides[0].getpeercert() or {})["notAfter"])), UTC)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Claims of a ticket: kind ``read`` permits a range of a journal, ``write`` the batches of a query or job.

    Attributes:
        expires: Expiry in seconds since 1970 by the gateway's clock, exclusive.
        start: First offset of the range; a read may also begin later, as after a broken connection.
        incarnation: Incarnation that belongs to ``end`` [I14].
        writer: Prefix of the permitted writers, ``<writer>/<part>``.
    """

    kind: str
    expires: int
    journal: str = ""
    start: int = 0
    end: int = 0
    incarnation: str = ""
    writer: str = ""


class TicketKey:
    """HMAC key that signs and verifies the tickets of one gateway; 32 random bytes, with a clock as `time.time`."""

    def __init__(self, gateway_name: str, key: bytes, clock: Callable[[], float] = time.time) -> None:
        self._gateway_name = gateway_name
        self._key = key
        self._clock = clock

    @classmethod
    def load(cls, gateway_name: str, state_dir: Path) -> Self:
        """Load the key of a state directory, or create it. Tickets stay valid after a restart of the gateway.

        Raises:
            JournalError: TL-J01, the file can't be written or read.
        """
        path = state_dir / KEY_FILE
        try:
            if not path.exists():
                files.replace_durably(path, secrets.token_hex(_KEY_BYTES))
            text = path.read_bytes().strip()
        except OSError as error:
            problem = f"the ticket key can't be stored ({files.os_error_text(error)})"
            raise JournalError("TL-J01", str(path), problem, "Check its permissions and the free space.") from error
        if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * _KEY_BYTES), text):
            remedy = "Remove the file; the gateway creates another, and old tickets become invalid."
            raise JournalError("TL-J01", str(path), "this is no ticket key", remedy)
        return cls(gateway_name, bytes.fromhex(text.decode()))

    def sign_ticket(self, valid_s: float, **claims: Any) -> str:
        """Create a ticket from fields of `Ticket`, valid for `valid_s` seconds, a week at most."""
        ticket = Ticket(expires=int(self._clock() + min(valid_s, MAX_TICKET_S)) + 1, **claims)
        content = json.dumps({"v": _TICKET_VERSION, **asdict(ticket)}, separators=(",", ":"))
        body = base64.urlsafe_b64encode(content.encode()).decode()
        return f"{body}.{self._signature(body)}"

    def verify(self, text: str) -> Ticket:
        """Verify a ticket and return its claims; raises GatewayError: TL-G41 for another key, TL-G42 if expired."""
        body, _, signature = text.partition(".")
        is_signed = hmac.compare_digest(_sha256(signature), _sha256(self._signature(body)))
        fields: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body)) if is_signed else {}
        if fields.pop("v", None) != _TICKET_VERSION:
            problem = "the ticket was not signed by this gateway"
            remedy = "Run the batch again: the driver requests a new one. Is it the location of another gateway?"
            raise GatewayError("TL-G41", self._gateway_name, problem, remedy)
        ticket = Ticket(**fields)
        if self._clock() >= ticket.expires:
            problem = f"the ticket expired {int(self._clock() - ticket.expires) + 1:,} s ago"
            remedy = "Start the query again, it gets a new one; where tasks wait longer, raise gatewayTicketValidity."
            raise GatewayError("TL-G42", self._gateway_name, problem, remedy)
        return ticket

    def _signature(self, body: str) -> str:
        return hmac.new(self._key, _HMAC_PREFIX + _encode(body), "sha256").hexdigest()


def _sha256(secret: str) -> bytes:
    """Return the SHA-256 of a secret: a comparison of digests reveals nothing of its length."""
    return hashlib.sha256(_encode(secret)).digest()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
