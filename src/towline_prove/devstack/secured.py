"""Kafka with TLS and SASL, Mosquitto with TLS, client certificates and passwords, and certificates for gateways.

Users, passwords and certificates are created once beside the brokers, mode 0600; the certificates with OpenSSL's
program, which every Debian has.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from towline import files
from towline.errors import SetupError
from towline_prove.devstack.kafka import Kafka
from towline_prove.devstack.mosquitto import SBIN_PATH, Mosquitto
from towline_prove.devstack.process import LOOPBACK, free_port

if TYPE_CHECKING:
    from collections.abc import Mapping

USER: Final = "towline"
#: User name for a connection string as password in Azure Event Hubs.
CONNECTION_STRING: Final = "$ConnectionString"
_VALID_DAYS: Final = "3650"
_OPENSSL_TIMEOUT_S: Final = 30
#: Who may be called so: the server's names, or a client's user name.
_SERVER_NAMES: Final = "subjectAltName=DNS:localhost,IP:127.0.0.1"
#: Gateways that may be started beside one stack.
_GATEWAY_COUNT: Final = 2


@dataclass(frozen=True, slots=True)
class Certificates:
    """Certificates and keys as PEM files; keys have mode 0600."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def certificates(directory: Path) -> Certificates:
    """Return the certificates in a directory, created if missing; SetupError TL-S22 without OpenSSL."""
    names = ("authority.pem", "server.pem", "server.key", "client.pem", "client.key")
    certs = Certificates(*(directory / name for name in names))
    if certs.client_key.exists():
        return certs
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority_key = directory / "authority.key"
    _make_certificate(
        certs.authority, authority_key, "Towline devstack", "-addext", "keyUsage=critical,keyCertSign,cRLSign"
    )
    # By default OpenSSL marks a signed certificate as a CA, which strict clients refuse.
    signing: list[str | Path] = ["-CA", certs.authority, "-CAkey", authority_key]
    signing += ["-addext", "basicConstraints=critical,CA:FALSE", "-addext"]
    _make_certificate(certs.server, certs.server_key, "localhost", *signing, _SERVER_NAMES)
    _make_certificate(certs.client, certs.client_key, "towline", *signing, "extendedKeyUsage=clientAuth")
    return certs


def _make_certificate(certificate: Path, key: Path, name: str, *extra: str | Path) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise SetupError("TL-S22", "openssl", "is not on this machine", "Install it: apt-get install openssl.")
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", _VALID_DAYS, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
    command += map(str, extra)
    result = subprocess.run(command, capture_output=True, text=True, timeout=_OPENSSL_TIMEOUT_S, check=False)
    if result.returncode:
        last_line = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise SetupError("TL-S22", "openssl", f"could not create a certificate: {last_line}", "OpenSSL 3 is needed.")
    key.chmod(0o600)


def secret_file_at(file: Path, template: str = "{}") -> Path:
    """Return a file with a random secret in the template's ``{}``, created if missing; mode 0600."""
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(file, template.format(secrets.token_urlsafe(24)), sync=False)
    return file


class SecuredKafka(Kafka):
    """Kafka that accepts clients by SASL_SSL only: SCRAM-SHA-512, or PLAIN with a connection string.

    The second is the form of Azure Event Hubs: one listener, user name ``$ConnectionString``. A further listener on
    loopback without security is for the broker itself and for `create_topics`.
    """

    port_count: ClassVar[int] = 3

    @property
    def password_file(self) -> Path:
        """Password file of `USER`, for SCRAM-SHA-512."""
        return secret_file_at(self.directory / "secrets" / "password")

    @property
    def connection_string_file(self) -> Path:
        """File with the connection string, the password of `CONNECTION_STRING` with PLAIN."""
        template = "Endpoint=sb://devstack.invalid/;SharedAccessKeyName=towline;SharedAccessKey={}="
        return secret_file_at(self.directory / "secrets" / "connection-string", template)

    @property
    def authority(self) -> Path:
        """Certificate of the authority that clients trust."""
        return certificates(self.directory / "tls").authority

    def settings_of(self, mechanism: Literal["SCRAM-SHA-512", "PLAIN"] = "SCRAM-SHA-512") -> dict[str, str]:
        """Return ``[kafka] settings`` of a bridge file for a SASL mechanism, without its secret."""
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": mechanism,
            "sasl.username": CONNECTION_STRING if mechanism == "PLAIN" else USER,
            "ssl.ca.location": str(self.authority),
        }

    def secret_file(self, mechanism: str) -> Path:
        """Return the password file of a SASL mechanism."""
        return self.connection_string_file if mechanism == "PLAIN" else self.password_file

    def client_of(self, mechanism: Literal["SCRAM-SHA-512", "PLAIN"] = "SCRAM-SHA-512") -> dict[str, Any]:
        """Return settings of a librdkafka client, including the secret: not to be shown."""
        password = self.secret_file(mechanism).read_text(encoding="utf-8")
        return {"bootstrap.servers": self.bootstrap, **self.settings_of(mechanism), "sasl.password": password}

    @property
    def client(self) -> dict[str, Any]:
        """Settings of a librdkafka client with SCRAM."""
        return self.client_of()

    @property
    def internal_bootstrap(self) -> str:
        """Listener of the broker itself, without security."""
        return f"{LOOPBACK}:{self.ports[2]}"

    def _listeners(self, ports: tuple[int, ...]) -> dict[str, str]:
        port, controller, internal = ports
        listeners = f"SASL_SSL://{LOOPBACK}:{port},CONTROLLER://{LOOPBACK}:{controller},OWN://{LOOPBACK}:{internal}"
        certs = certificates(self.directory / "tls")
        store = self.directory / "tls" / "server-keystore.pem"
        files.replace(store, certs.server_key.read_text() + certs.server.read_text(), sync=False)
        module = "org.apache.kafka.common.security"
        plain_user = f'user_{CONNECTION_STRING}="{self.connection_string_file.read_text(encoding="utf-8")}"'
        return {
            "listeners": listeners,
            "advertised.listeners": listeners,
            "listener.security.protocol.map": "SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT,OWN:PLAINTEXT",
            "inter.broker.listener.name": "OWN",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
            "listener.name.sasl_ssl.plain.sasl.jaas.config": f"{module}.plain.PlainLoginModule required {plain_user};",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(store),
        }

    def _format_options(self) -> list[str]:
        password = self.password_file.read_text(encoding="utf-8")
        user = f"SCRAM-SHA-512=[name={USER},password={password}]"
        return [*super()._format_options(), "--add-scram", user]

    def _internal_port(self, ports: tuple[int, ...]) -> int:
        return ports[2]


class SecuredMosquitto(Mosquitto):
    """Mosquitto whose clients need a certificate of its authority, a user name and a password."""

    def __init__(self, directory: Path, *, settings: Mapping[str, str] | None = None) -> None:
        directory = Path(directory).absolute()
        self.certificates = certificates(directory / "tls")
        self.password_file = secret_file_at(directory / "secrets" / "password")
        secured_settings = {
            "cafile": str(self.certificates.authority),
            "certfile": str(self.certificates.server),
            "keyfile": str(self.certificates.server_key),
            "require_certificate": "true",
            "password_file": str(_users_file(directory / "secrets" / "users", self.password_file)),
        }
        super().__init__(directory, settings={**secured_settings, **(settings or {})})


def _users_file(file: Path, password_file: Path) -> Path:
    """Return Mosquitto's own password file, with hashes."""
    if file.exists():
        return file
    program = shutil.which("mosquitto_passwd", path=f"/usr/bin:/usr/local/bin:{SBIN_PATH}")
    if program is None:
        raise SetupError("TL-S10", "mosquitto_passwd", "is not on this machine", "It comes with Mosquitto.")
    password = password_file.read_text(encoding="utf-8")
    # Its file is written with the password in clear text and hashed in place, so that no command line shows it.
    files.replace(file, f"{USER}:{password}\n", sync=False)
    subprocess.run([program, "-U", str(file)], check=True, capture_output=True, timeout=30)
    return file


@dataclass(frozen=True, slots=True)
class GatewayFiles:
    """Addresses and TLS files for ``[gateway]`` of a bridge file; the user starts the gateways."""

    addresses: tuple[str, ...]
    cert_file: Path
    key_file: Path
    ca_file: Path
    token_file: Path


def gateway_files(directory: Path) -> GatewayFiles:
    """Return the gateway files in a directory, created if missing; SetupError as `certificates`."""
    certs = certificates(directory)
    ports = directory / "ports.json"
    if not ports.exists():
        files.replace(ports, json.dumps([free_port() for _ in range(_GATEWAY_COUNT)]), sync=False)
    addresses = tuple(f"{LOOPBACK}:{port}" for port in json.loads(ports.read_text(encoding="ascii")))
    return GatewayFiles(addresses, certs.server, certs.server_key, certs.authority, secret_file_at(directory / "token"))
