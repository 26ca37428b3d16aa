"""Where a gateway listens besides its unix socket: over a network, and there with TLS and a token, or not at all."""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from towline import files
from towline.errors import ConfigError
from towline.gateway.access import REMOTE, tokens

#: ``HOST:PORT``, an address of IP version 6 in brackets.
_ADDRESS: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_READABLE_BY_OTHERS: Final = 0o007
_NEEDED: Final = ("cert_file", "key_file", "token_file")


class ListenSettings(BaseModel):
    """A network address of a gateway.

    There is no form without TLS and token, not on loopback either: whoever is on this machine has the unix socket,
    which the rights of a file protect and which needs neither.

    Attributes:
        address: ``HOST:PORT`` to listen on; ``0.0.0.0`` or ``[::]`` for every address of the machine, port 0 for one
            that is free.
        cert_file: Certificate chain of the gateway (PEM).
        key_file: Its private key (PEM).
        token_file: Tokens, one a line; each of them lets a client in, so that one can be replaced without a stop.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    address: str
    cert_file: Path
    key_file: Path
    token_file: Path

    @model_validator(mode="before")
    @classmethod
    def _secured(cls, value: Any) -> Any:
        missing = [name for name in _NEEDED if not value.get(name)] if isinstance(value, Mapping) else []
        if missing:
            raise ValueError(f"what listens on a network has TLS and a token, and {' and '.join(missing)} is missing")
        return value

    @field_validator("address")
    @classmethod
    def _parsed(cls, value: str) -> str:
        match = _ADDRESS.fullmatch(value.strip())
        if match is None or int(match["port"]) > 65535:
            raise ValueError("it is HOST:PORT")
        return value.strip()

    @property
    def location(self) -> str:
        """As a location of Arrow Flight."""
        return f"{REMOTE}{self.address}"


#: OpenSSL's X509_V_ERR_* (x509_vfy.h).
_NOT_YET_VALID, _EXPIRED = 9, 10
#: More steps than a handshake in memory has.
_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """What was in the files.

    Attributes:
        chain: The gateway's certificate and those between it and an authority (PEM).
        key: Its private key (PEM).
        until: End of the validity of the gateway's certificate.
    """

    chain: bytes
    key: bytes = field(repr=False)
    until: datetime

    @classmethod
    def read(cls, settings: ListenSettings) -> ServerCertificate:
        """Read the files and see that they can be used.

        Raises:
            ConfigError: TL-C97, a file can't be read, is no certificate or key, does not fit the other, or is over.
        """
        chain, key = _content("cert_file", settings.cert_file), _content("key_file", settings.key_file)
        return cls(chain, key, _checked(settings))


def _content(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unusable(setting, path, f"it can't be read ({files.why(error)})") from error


def _checked(settings: ListenSettings) -> datetime:
    """The end of the certificate's validity; whether it holds now and whether the key is its own shows on the way."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(settings.cert_file, settings.key_file, password=b"")
    except ssl.SSLError as error:
        raise _refused(settings, error) from None
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        trusting.load_verify_locations(settings.cert_file)
        shown = _handshake(server, trusting)
    except ssl.SSLCertVerificationError as error:
        over = {_EXPIRED: "the certificate is over", _NOT_YET_VALID: "the certificate is not valid yet"}
        what = over.get(error.verify_code, f"the certificate is not accepted ({error.verify_message})")
        raise _unusable("cert_file", settings.cert_file, what) from None
    except ssl.SSLError as error:
        raise _refused(settings, error) from None
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(shown), UTC)


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """Let the two shake hands in memory: the client's side says until when the certificate is valid."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for step in range(_STEPS):
        try:
            sides[step % 2].do_handshake()
        except ssl.SSLWantReadError:
            continue
    return str((sides[0].getpeercert() or {})["notAfter"])


def _refused(settings: ListenSettings, error: ssl.SSLError) -> ConfigError:
    if error.reason == "KEY_VALUES_MISMATCH":
        return _unusable("key_file", settings.key_file, "the key does not fit the certificate in cert_file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(settings.cert_file)
    except ssl.SSLError:
        return _unusable("cert_file", settings.cert_file, "it holds no certificate in PEM")
    return _unusable("key_file", settings.key_file, "it holds no private key in PEM without a password")


def _unusable(setting: str, path: Path, what: str) -> ConfigError:
    do = "Correct or renew it; a renewed one is taken while the gateway runs."
    return ConfigError("TL-C97", f"{setting} {path}", what, do)


class TokenFile:
    """The tokens of a file, as they are now: it is read again when it has changed.

    Args:
        path: The file.

    Raises:
        ConfigError: TL-C98, it can't be used; later, while it can't, it lets nobody in.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: tuple[tuple[int, ...], tuple[bytes, ...]] = ((), ())
        self._read()

    def allows(self, token: str) -> bool:
        """Whether it is one of them; takes as long for a wrong one as for a right one."""
        try:
            known = self._read()
        except ConfigError:
            return False
        shown = _digest(token)
        return sum(hmac.compare_digest(shown, one) for one in known) > 0  # each is compared

    def _read(self) -> tuple[bytes, ...]:
        try:
            version = files.version(self._path)
            if not version or version != self._known[0]:
                if self._path.stat().st_mode & _READABLE_BY_OTHERS:
                    raise self._unusable("every user of this machine may read or write it", "chmod 600 it.")
                self._known = (version, tuple(map(_digest, tokens(self._path.read_bytes()))))
        except OSError as error:
            raise self._unusable(f"it can't be read ({files.why(error)})", "Check its name and rights.") from error
        except ValueError as error:
            raise self._unusable(str(error), "Make one with: openssl rand -hex 32") from None
        return self._known[1]

    def _unusable(self, what: str, do: str) -> ConfigError:
        return ConfigError("TL-C98", str(self._path), f"no file of tokens: {what}", do)


def _digest(token: str) -> bytes:
    """As long for every token, so that comparing tells nothing of its length."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
