"""Where a gateway listens besides its unix socket: over a network, and there with TLS and a token, or not at all."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pydantic import field_validator, model_validator

from towline import files
from towline.errors import ConfigError
from towline.gateway.access import REMOTE
from towline.validation import SettingsModel

#: ``HOST:PORT``, an address of IP version 6 in brackets.
_ADDRESS: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_NEEDED: Final = ("cert_file", "key_file", "token_file")


class ListenSettings(SettingsModel):
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


#: OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED (x509_vfy.h).
_NOT_VALID: Final = {9: "the certificate is not valid yet", 10: "the certificate is over"}
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
        paths = {"cert_file": settings.cert_file, "key_file": settings.key_file}
        chain, key = (_content(setting, path) for setting, path in paths.items())
        setting, what = "cert_file", "it holds no certificate in PEM"
        client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            client.load_verify_locations(settings.cert_file)
            setting, what = "key_file", "it holds no private key in PEM without a password"
            server.load_cert_chain(settings.cert_file, settings.key_file, password=b"")
            return cls(chain, key, _valid_until(client, server))
        except ssl.SSLCertVerificationError as error:
            setting, what = "cert_file", f"the certificate is not accepted ({error.verify_message})"
            what = _NOT_VALID.get(error.verify_code, what)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                what = "the key does not fit the certificate in cert_file"
        raise _unusable(setting, paths[setting], what)


def _content(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unusable(setting, path, f"it can't be read ({files.why(error)})") from error


def _valid_until(client: ssl.SSLContext, server: ssl.SSLContext) -> datetime:
    """The end of the certificate's validity, which the client's side of a handshake in memory says."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for step in range(_STEPS):
        with contextlib.suppress(ssl.SSLWantReadError):
            sides[step % 2].do_handshake()
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str((sides[0].getpeercert() or {})["notAfter"])), UTC)


def _unusable(setting: str, path: Path, what: str) -> ConfigError:
    do = "Correct or renew it; a renewed one is taken while the gateway runs."
    return ConfigError("TL-C97", f"{setting} {path}", what, do)
