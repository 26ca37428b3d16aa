"""A certificate authority of the devstack's own, made with OpenSSL's program, which every Debian has."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from towline.errors import SetupError

__all__ = ["Certificates", "certificates"]

_DAYS: Final = "3650"
_SECONDS: Final = 30
#: Who may be called so: the server's names, or a client's user name.
_SERVER: Final = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files in PEM; keys have mode 0600.

    Attributes:
        authority: Certificate of the authority, which clients trust.
        server: Certificate for localhost and 127.0.0.1.
        server_key: Its key.
        client: Certificate of a client, named ``towline``.
        client_key: Its key.
    """

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def certificates(directory: Path) -> Certificates:
    """The certificates in a directory, made where they are missing.

    Raises:
        SetupError: TL-S22, there is no ``openssl``, or it could not make them.
    """
    names = ("authority.pem", "server.pem", "server.key", "client.pem", "client.key")
    made = Certificates(*(directory / name for name in names))
    if made.client_key.exists():
        return made
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority_key = directory / "authority.key"
    _make(made.authority, authority_key, "Towline devstack", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    # OpenSSL takes what it signs here for another authority, unless it is told: strict clients refuse that.
    signed: list[str | Path] = ["-CA", made.authority, "-CAkey", authority_key]
    signed += ["-addext", "basicConstraints=critical,CA:FALSE", "-addext"]
    _make(made.server, made.server_key, "localhost", *signed, _SERVER)
    _make(made.client, made.client_key, "towline", *signed, "extendedKeyUsage=clientAuth")
    return made


def _make(certificate: Path, key: Path, name: str, *more: str | Path) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise SetupError("TL-S22", "openssl", "is not on this machine", "Install it: apt-get install openssl.")
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", _DAYS, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate), *map(str, more)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if answer.returncode:
        words = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise SetupError("TL-S22", "openssl", f"could not make a certificate: {words}", "OpenSSL 3 is needed.")
    key.chmod(0o600)
