"""What lets a call in to a gateway on a network: its certificate, and its token, or a ticket in place of that.

A client holds names of files, so that they travel to Spark's workers without a secret [I12]: the driver reads the
token, a worker shows a ticket. Import-light, as everything that workers load.

A ticket is ``BODY.CODE``: BODY is JSON in base64url, CODE the HMAC-SHA256 of BODY as it stands there, with a key that
only the gateway has. It says its version, its kind, what it opens, and until when; it opens nothing else.
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
from towline.options import parts, path
from towline.providers import secret_of
from towline.text import printable

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    from towline.gateway.settings import ListenSettings

#: Begins the location of a gateway that is reached over a network.
REMOTE: Final = "grpc+tls://"
_LOCATION: Final = re.compile(re.escape(REMOTE) + r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}/?")
#: Codes of the errors by which a gateway and its client do not come together until a person has changed a file: the
#: token is refused, the certificate is not accepted, or a file of the client's can't be used.
REFUSALS: Final = frozenset({"TL-G40", "TL-G44", "TL-G46"})
#: Characters of a token: as many hex digits hold 64 bits, which nobody guesses at a gateway's pace.
SHORTEST_TOKEN: Final = 16
_REMEDY: Final = "Make one with: openssl rand -hex 32"

#: OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED (x509_vfy.h).
_NOT_VALID: Final = {9: "the certificate is not valid yet", 10: "the certificate is over"}
#: More steps than a handshake in memory has.
_STEPS: Final = 8

#: In the state directory: 64 hex digits. A new file makes every ticket worthless.
KEY_FILE: Final = "ticket.key"
#: A batch, its retries and a restart of the gateway between them fit in.
DEFAULT_VALID_S: Final = 3600.0
LONGEST_VALID_S: Final = 7 * 86400.0
_VERSION: Final = 1
_KEY_BYTES: Final = 32
#: Keeps the codes apart from whatever else a key may ever sign.
_PURPOSE: Final = b"towline ticket\0"
#: Longer ones are none: names have at most 256 characters.
_LONGEST: Final = 4096


def is_remote(location: str) -> bool:
    """Whether a location is reached over a network, where a token or a ticket is needed."""
    return location.startswith(REMOTE)


def gateway_location(text: str) -> str:
    """Read where a gateway is: its state directory, or its location; raises ValueError where it is neither."""
    if not text:
        raise ValueError("must be the state directory of a running gateway, or its location grpc+tls://HOST:PORT")
    if "://" not in text:
        return path(text)
    if not text.startswith("grpc+unix:///") and not _LOCATION.fullmatch(text):
        raise ValueError("a location is grpc+unix:///PATH or grpc+tls://HOST:PORT; there is none without TLS")
    return text


def gateway_list(text: str) -> tuple[str, ...]:
    """Read several gateways: ``/var/lib/g1, grpc+tls://g2:8815``, or a JSON list of the same texts.

    Raises:
        ValueError: One is none, or stands there twice, or there is none.
    """
    named = [gateway_location(part.strip()).rstrip("/") for part in parts(text, "gateways", '["/var/lib/g1"]')]
    if not named:
        raise ValueError("it names no gateway")
    if twice := next((one for one in named if named.count(one) > 1), None):
        raise ValueError(f"{printable(twice, 200)} stands there twice")
    return tuple(named)


def tokens(content: bytes) -> tuple[str, ...]:
    """The tokens of a file, one a line; the first is the newest. Empty lines and those with ``#`` in front are none.

    Raises:
        ValueError: It holds none, or one that is no token; the text never shows it.
    """
    lines = [line.strip() for line in content.decode("ascii", "replace").splitlines()]
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise ValueError("it holds no token")
    if any(len(token) < SHORTEST_TOKEN or not all("!" <= each <= "~" for each in token) for token in found):
        raise ValueError(f"a token has at least {SHORTEST_TOKEN} letters, digits and signs of ASCII, one token a line")
    return found


@dataclass(frozen=True, slots=True)
class Access:
    """The files of a client, "" for none; each is read where and when it is needed.

    Attributes:
        token_file: Holds the gateway's token; of several lines the first counts. Read on the driver only.
        ca_file: The authorities that may have signed the gateway's certificate (PEM); the system's by default.
        server_name: Name in the gateway's certificate, where it is not the host of the location.
    """

    token_file: str = ""
    ca_file: str = ""
    server_name: str = ""

    def token(self) -> str:
        """The token, read fresh: one that was changed is used with the next call.

        Raises:
            GatewayError: TL-G46, the file can't be read or holds none.
        """
        if not self.token_file:
            what = "is not set, and this gateway is on a network"
            raise _unusable("gatewayTokenFile", what, "Name the token's file.")
        try:
            return tokens(_content("gatewayTokenFile", self.token_file))[0]
        except ValueError as error:
            what = f"{self.token_file} can't be used: {error}"
            raise _unusable("gatewayTokenFile", what, _REMEDY) from None

    def authority(self) -> str:
        """The authorities as PEM text, which travels to the workers, "" for the system's; raises as `token`."""
        return _content("gatewayCaFile", self.ca_file).decode("ascii", "replace") if self.ca_file else ""

    def connection(self, authority: str = "") -> Mapping[str, object]:
        """What ``pyarrow.flight.connect`` takes; a worker brings the `authority`, of which it has no file."""
        trusted = authority or self.authority()
        given = {"tls_root_certs": trusted.encode(), "override_hostname": self.server_name}
        return {name: value for name, value in given.items() if value}


def _content(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        do = "Put the file there, or correct the path."
        raise _unusable(option, f"{path} can't be read ({files.why(error)})", do) from error


def _unusable(option: str, what: str, do: str) -> GatewayError:
    return GatewayError("TL-G46", f"{option} on {socket.gethostname()}", what, do)


class TokenFile:
    """The tokens of a file, as they are now; raises ConfigError, TL-C98, where it can't be used at first.

    Later, while it can't, it lets nobody in.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read()

    def allows(self, token: str) -> bool:
        """Whether it is one of them; takes as long for a wrong one as for a right one."""
        try:
            known = self._read()
        except ConfigError:
            return False
        return sum(hmac.compare_digest(_digest(token), _digest(one)) for one in known) > 0  # each is compared

    def _read(self) -> tuple[str, ...]:
        return secret_of("the file of tokens", self._path, tokens, "TL-C98", _REMEDY, private=True)


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """What was in the files: the gateway's certificate with those up to an authority, its key, and its last moment."""

    chain: bytes
    key: bytes = field(repr=False)
    until: datetime

    @classmethod
    def read(cls, settings: ListenSettings) -> ServerCertificate:
        """Read the files and see that they can be used.

        Raises:
            ConfigError: TL-C97, a file can't be read, is no certificate or key, does not fit the other, or is over.
        """
        import ssl  # noqa: PLC0415 - workers need none

        setting, path, what = "cert_file", settings.cert_file, "it holds no certificate in PEM"
        client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            chain = path.read_bytes()
            client.load_verify_locations(path)
            setting, path, what = "key_file", settings.key_file, "it holds no private key in PEM without a password"
            key = path.read_bytes()
            server.load_cert_chain(settings.cert_file, path, password=b"")
            return cls(chain, key, _valid_until(client, server))
        except ssl.SSLCertVerificationError as error:
            setting, path = "cert_file", settings.cert_file
            what = _NOT_VALID.get(error.verify_code, f"the certificate is not accepted ({error.verify_message})")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                what = "the key does not fit the certificate in cert_file"
        except OSError as error:
            what = f"it can't be read ({files.why(error)})"
        do = "Correct or renew it; a renewed one is taken while the gateway runs."
        raise ConfigError("TL-C97", f"{setting} {path}", what, do)


def _valid_until(client: ssl.SSLContext, server: ssl.SSLContext) -> datetime:
    """The end of the certificate's validity, which the client's side of a handshake in memory says."""
    import ssl  # noqa: PLC0415 - see above

    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for step in range(_STEPS):
        with contextlib.suppress(ssl.SSLWantReadError):
            sides[step % 2].do_handshake()
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str((sides[0].getpeercert() or {})["notAfter"])), UTC)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a ticket opens: of kind ``read`` a range of a journal, of ``write`` the batches of a query or job.

    Attributes:
        expires: Seconds since 1970 by the clock of the gateway, the first second at which it is worth nothing.
        start: Reading may begin later, as after a broken connection.
        incarnation: What ``end`` came with [I14].
        writer: Its writers are ``<writer>/<part>``.
    """

    kind: str
    expires: int
    journal: str = ""
    start: int = 0
    end: int = 0
    incarnation: str = ""
    writer: str = ""


class TicketKey:
    """Signs and checks the tickets of the gateway `where` by a key of 32 random bytes, and a clock as `time.time`."""

    def __init__(self, where: str, key: bytes, clock: Callable[[], float] = time.time) -> None:
        self._where = where
        self._key = key
        self._clock = clock

    @classmethod
    def of(cls, where: str, state_dir: Path) -> Self:
        """The key of a state directory, made at the first call: tickets outlive a restart of the gateway.

        Raises:
            JournalError: TL-J01, the directory does not take or give the file.
        """
        path = state_dir / KEY_FILE
        try:
            if not path.exists():
                files.replace_durably(path, secrets.token_hex(_KEY_BYTES))
            text = path.read_bytes().strip()
        except OSError as error:
            what = f"the key of the tickets can't be kept ({files.why(error)})"
            raise JournalError("TL-J01", str(path), what, "Look at the directory's rights and room.") from error
        if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * _KEY_BYTES), text):
            what, do = "this is no key of tickets", "Remove the file; the gateway makes another, and old tickets end."
            raise JournalError("TL-J01", str(path), what, do)
        return cls(where, bytes.fromhex(text.decode()))

    def sign(self, valid_s: float, **claims: Any) -> str:
        """Make a ticket: fields of `Ticket`, and seconds until it is worth nothing, a week at most."""
        ticket = Ticket(expires=int(self._clock() + min(valid_s, LONGEST_VALID_S)) + 1, **claims)
        content = json.dumps({"v": _VERSION, **asdict(ticket)}, separators=(",", ":"))
        body = base64.urlsafe_b64encode(content.encode()).decode()
        return f"{body}.{self._code(body)}"

    def opened(self, text: str) -> Ticket:
        """What a ticket says; raises GatewayError, TL-G41 where it is not of this key, TL-G42 where it has expired."""
        body, _, code = text.partition(".")
        genuine = len(text) <= _LONGEST and hmac.compare_digest(_digest(code), _digest(self._code(body)))
        fields: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body)) if genuine else {}
        if fields.pop("v", None) != _VERSION:
            what = "the ticket is none that this gateway has signed"
            do = "Run the batch again: the driver asks for a new one. Is the location that of another gateway?"
            raise GatewayError("TL-G41", self._where, what, do)
        ticket = Ticket(**fields)
        if self._clock() >= ticket.expires:
            what = f"the ticket expired {int(self._clock() - ticket.expires) + 1:,} s ago"
            do = "Start the query again, it gets a new one; where tasks wait longer, raise gatewayTicketValidity."
            raise GatewayError("TL-G42", self._where, what, do)
        return ticket

    def _code(self, body: str) -> str:
        return hmac.new(self._key, _PURPOSE + _bytes(body), "sha256").hexdigest()


def _digest(secret: str) -> bytes:
    """As long for every text, so that comparing tells nothing of its length."""
    return hashlib.sha256(_bytes(secret)).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
