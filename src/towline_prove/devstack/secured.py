"""A real Kafka with TLS and SASL, a real Mosquitto with TLS, client certificates and passwords; and gateways with TLS.

Users, passwords and certificates are made once and lie beside the brokers, mode 0600; the certificates with OpenSSL's
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
from towline_prove.devstack.mosquitto import SEARCHED, Mosquitto
from towline_prove.devstack.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from collections.abc import Mapping

USER: Final = "towline"
#: The user name by which Azure Event Hubs takes a connection string as password.
CONNECTION_STRING: Final = "$ConnectionString"
_DAYS: Final = "3650"
_SECONDS: Final = 30
#: Who may be called so: the server's names, or a client's user name.
_SERVER: Final = "subjectAltName=DNS:localhost,IP:127.0.0.1"
#: Gateways that may be started beside one stack.
_GATEWAYS: Final = 2


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


def secret_of(file: Path, form: str = "{}") -> Path:
    """A file with a secret, made where it is missing.

    Args:
        file: Mode 0600.
        form: Where the secret stands in its text.
    """
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(file, form.format(secrets.token_urlsafe(24)), synced=False)
    return file


class SecuredKafka(Kafka):
    """A `Kafka` whose clients come by SASL_SSL only: SCRAM-SHA-512, or PLAIN with a connection string.

    The second is the form of Azure Event Hubs: one listener, user name ``$ConnectionString``. A further listener on
    loopback without security is for the broker itself and for `create_topics`.
    """

    port_count: ClassVar[int] = 3

    @property
    def password_file(self) -> Path:
        """Password of `USER`, for SCRAM-SHA-512."""
        return secret_of(self.directory / "secrets" / "password")

    @property
    def connection_string_file(self) -> Path:
        """The connection string, password of `CONNECTION_STRING` with PLAIN."""
        form = "Endpoint=sb://devstack.invalid/;SharedAccessKeyName=towline;SharedAccessKey={}="
        return secret_of(self.directory / "secrets" / "connection-string", form)

    @property
    def authority(self) -> Path:
        """Certificate of the authority that clients trust."""
        return certificates(self.directory / "tls").authority

    def settings_of(self, mechanism: Literal["SCRAM-SHA-512", "PLAIN"] = "SCRAM-SHA-512") -> dict[str, str]:
        """What stands in a bridge file's ``[kafka] settings`` for one of the two ways, without its secret."""
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": mechanism,
            "sasl.username": CONNECTION_STRING if mechanism == "PLAIN" else USER,
            "ssl.ca.location": str(self.authority),
        }

    def secret_file(self, mechanism: str) -> Path:
        """The file with the password of that way."""
        return self.connection_string_file if mechanism == "PLAIN" else self.password_file

    def client_of(self, mechanism: Literal["SCRAM-SHA-512", "PLAIN"] = "SCRAM-SHA-512") -> dict[str, Any]:
        """Settings of a librdkafka client, secret and all: not to be shown."""
        password = self.secret_file(mechanism).read_text(encoding="utf-8")
        return {"bootstrap.servers": self.bootstrap, **self.settings_of(mechanism), "sasl.password": password}

    @property
    def client(self) -> dict[str, Any]:
        """That of SCRAM."""
        return self.client_of()

    @property
    def inside(self) -> str:
        """The listener of the broker itself, which asks for nothing."""
        return f"{LOOPBACK}:{self.ports[2]}"

    def _listeners(self, ports: tuple[int, ...]) -> dict[str, str]:
        port, controller, own = ports
        listeners = f"SASL_SSL://{LOOPBACK}:{port},CONTROLLER://{LOOPBACK}:{controller},OWN://{LOOPBACK}:{own}"
        made = certificates(self.directory / "tls")
        store = self.directory / "tls" / "server-keystore.pem"
        files.replace(store, made.server_key.read_text() + made.server.read_text(), synced=False)
        module = "org.apache.kafka.common.security"
        plain = f'user_{CONNECTION_STRING}="{self.connection_string_file.read_text(encoding="utf-8")}"'
        return {
            "listeners": listeners,
            "advertised.listeners": listeners,
            "listener.security.protocol.map": "SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT,OWN:PLAINTEXT",
            "inter.broker.listener.name": "OWN",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
            "listener.name.sasl_ssl.plain.sasl.jaas.config": f"{module}.plain.PlainLoginModule required {plain};",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(store),
        }

    def _format_options(self) -> list[str]:
        password = self.password_file.read_text(encoding="utf-8")
        user = f"SCRAM-SHA-512=[name={USER},password={password}]"
        return [*super()._format_options(), "--add-scram", user]

    def _own_port(self, ports: tuple[int, ...]) -> int:
        return ports[2]


class SecuredMosquitto(Mosquitto):
    """A `Mosquitto` whose clients need a certificate of its authority, a user name and a password.

    Args:
        directory: As `Mosquitto`.
        settings: Further lines of mosquitto.conf.
    """

    def __init__(self, directory: Path, *, settings: Mapping[str, str] | None = None) -> None:
        directory = Path(directory).absolute()
        self.certificates = certificates(directory / "tls")
        self.password_file = secret_of(directory / "secrets" / "password")
        secured = {
            "cafile": str(self.certificates.authority),
            "certfile": str(self.certificates.server),
            "keyfile": str(self.certificates.server_key),
            "require_certificate": "true",
            "password_file": str(_users(directory / "secrets" / "users", self.password_file)),
        }
        super().__init__(directory, settings={**secured, **(settings or {})})


def _users(file: Path, password_file: Path) -> Path:
    """Mosquitto's own file of users, with hashes."""
    if file.exists():
        return file
    program = shutil.which("mosquitto_passwd", path=f"/usr/bin:/usr/local/bin:{SEARCHED}")
    if program is None:
        raise SetupError("TL-S10", "mosquitto_passwd", "is not on this machine", "It comes with Mosquitto.")
    password = password_file.read_text(encoding="utf-8")
    # Its file is written with the password in clear text and hashed in place, so that no command line shows it.
    files.replace(file, f"{USER}:{password}\n", synced=False)
    subprocess.run([program, "-U", str(file)], check=True, capture_output=True, timeout=30)
    return file


@dataclass(frozen=True, slots=True)
class GatewayFiles:
    """For ``[gateway]`` of a bridge file; the gateways themselves are the user's to start.

    Attributes:
        addresses: ``HOST:PORT`` of each.
        cert_file: Certificate for localhost and 127.0.0.1.
        key_file: Its key.
        ca_file: Who signed it.
        token_file: The token.
    """

    addresses: tuple[str, ...]
    cert_file: Path
    key_file: Path
    ca_file: Path
    token_file: Path


def gateway_files(directory: Path) -> GatewayFiles:
    """The files in a directory, made where they are missing.

    Raises:
        SetupError: TL-S22, a certificate can't be made.
    """
    made = certificates(directory)
    ports = directory / "ports.json"
    if not ports.exists():
        files.replace(ports, json.dumps([free_port() for _ in range(_GATEWAYS)]), synced=False)
    addresses = tuple(f"{LOOPBACK}:{port}" for port in json.loads(ports.read_text(encoding="ascii")))
    return GatewayFiles(addresses, made.server, made.server_key, made.authority, secret_of(directory / "token"))
