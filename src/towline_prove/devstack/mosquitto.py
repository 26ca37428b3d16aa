"""Mosquitto server for the devstack."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import warnings
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from mqtt5 import ConnectPacket, DisconnectPacket

from towline.errors import BrokerRefused, SetupError, Unreachable
from towline_prove.devstack.process import LOOPBACK
from towline_prove.devstack.server import Server
from towline_prove.load import connect

if TYPE_CHECKING:
    from collections.abc import Mapping

OLDEST_SUPPORTED = (2, 0, 13)
"""Mosquitto's issue #2301: before 2.0.13 it sends another full window after every acknowledgement."""

ANSWER_SECONDS = 2.0
SBIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
"""Debian keeps servers where an ordinary user's PATH does not look."""


class MosquittoTooOld(UserWarning):
    """This Mosquitto version loses QoS 2 messages by itself; a run on it proves little about Towline."""


class MosquittoBinary(NamedTuple):
    """Installed Mosquitto program."""

    binary: Path
    version: tuple[int, ...]


class Mosquitto(Server):
    """Real Mosquitto on loopback.

    It listens on 127.0.0.1 only and accepts all clients, unless `settings` name a ``password_file``. All limits are
    Mosquitto's own (``max_queued_messages`` 1000 among them) unless `settings` say otherwise. With a ``certfile`` the
    listener speaks TLS. A ``listener`` among the settings is a second one (``9001 127.0.0.1``, ``0 /path``), and the
    settings after it belong to it (``protocol websockets``).

    Args:
        settings: Lines of mosquitto.conf(5), such as ``{"persistence": "true"}``.
        binary: The server program; None searches ``TOWLINE_MOSQUITTO``, PATH and the sbin directories.
    """

    name: ClassVar[str] = "mosquitto"
    start_seconds: ClassVar[float] = 15.0

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        binary: Path | None = None,
    ) -> None:
        super().__init__(directory, port=port, settings=settings)
        self._binary = binary

    @property
    def address(self) -> str:
        """URI ``mqtt://127.0.0.1:PORT``, or ``mqtts://`` when the settings turn on TLS."""
        return f"{'mqtts' if self._tls else 'mqtt'}://{LOOPBACK}:{self.port}"

    uri = address

    @property
    def version(self) -> str:
        """Version of the program, such as ``2.0.21``."""
        return ".".join(map(str, find_mosquitto(self._binary).version))

    @property
    def _tls(self) -> bool:
        return "certfile" in self._first_listener

    @property
    def _first_listener(self) -> Mapping[str, str]:
        """Settings of the first listener: those before a further ``listener``."""
        return dict(takewhile(lambda line: line[0] != "listener", self.settings.items()))

    def _command(self, ports: tuple[int, ...]) -> list[str | Path]:
        mosquitto = find_mosquitto(self._binary)
        problem = version_problem(mosquitto)
        if problem:
            warnings.warn(problem, MosquittoTooOld, stacklevel=4)
        configuration = self.directory / "mosquitto.conf"
        configuration.write_text(self._configuration(ports[0]), encoding="utf-8")
        configuration.chmod(0o600)
        return [mosquitto.binary, "-c", configuration]

    def _configuration(self, port: int) -> str:
        defaults = {
            "allow_anonymous": "false" if "password_file" in self.settings else "true",
            "log_dest": "stderr",
            "log_timestamp_format": "%Y-%m-%dT%H:%M:%S",
            "persistence_location": f"{self.directory}/",
        }
        if os.geteuid() == 0:
            # Started by root, Mosquitto becomes the user "mosquitto", who can't write into a directory of root's.
            defaults["user"] = "root"
        settings = {**defaults, **self.settings}
        # mosquitto.conf(5): per_listener_settings must come before anything it concerns, and settings of a listener
        # (certfile, max_qos ...) come after their listener.
        per_listener = settings.pop("per_listener_settings", None)
        lines = [] if per_listener is None else [f"per_listener_settings {per_listener}"]
        lines += [f"listener {port} {LOOPBACK}", *(f"{key} {value}" for key, value in settings.items())]
        return "\n".join(lines) + "\n"

    def _answers(self, port: int) -> bool:
        hello = ConnectPacket("towline-devstack-check", clean_start=True, keep_alive=10)
        try:
            sock, _, _ = connect(
                hello, LOOPBACK, port, timeout=ANSWER_SECONDS, tls=_any_certificate() if self._tls else None
            )
        except BrokerRefused:  # for a missing user name: that is an answer too
            return True
        except Unreachable as error:
            # A listener with require_certificate refuses us, who have none: so is that.
            return any(alert in str(error) for alert in ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE"))
        with sock:
            sock.sendall(DisconnectPacket().write())
        return True

    def _forget_data(self) -> None:
        """Do nothing: Mosquitto writes nothing before the port is bound."""


def _any_certificate() -> ssl.SSLContext:
    """Return a TLS context without verification, for the health check of our own child on loopback; tests verify."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def find_mosquitto(binary: Path | None = None) -> MosquittoBinary:
    """Return `binary`, ``TOWLINE_MOSQUITTO``, or the first Mosquitto on PATH and in sbin; SetupError TL-S10."""
    program_name = str(binary) if binary else os.environ.get("TOWLINE_MOSQUITTO", "mosquitto")
    program = shutil.which(program_name, path=f"{os.environ.get('PATH', '')}:{SBIN_PATH}")
    if program is None:
        advice = "Install Mosquitto 2.0.13 or newer (Debian: apt install mosquitto; 12 has it in bookworm-backports)."
        raise SetupError("TL-S10", program_name, "there is no such MQTT broker on this machine", advice)
    return MosquittoBinary(Path(program), _version_of(program))


@cache
def _version_of(binary: str) -> tuple[int, ...]:
    result = subprocess.run([binary, "-h"], capture_output=True, text=True, timeout=10, check=False)
    match = re.search(r"mosquitto version (\d+(?:\.\d+)*)", result.stdout + result.stderr)
    if match is None:
        raise SetupError("TL-S10", binary, "does not tell its version, so it is no Mosquitto", "Set TOWLINE_MOSQUITTO.")
    return tuple(int(part) for part in match[1].split("."))


def version_problem(mosquitto: MosquittoBinary) -> str | None:
    """Return why this Mosquitto version is unreliable, in one line; None if it is not."""
    if mosquitto.version >= OLDEST_SUPPORTED:
        return None
    version = ".".join(map(str, mosquitto.version))
    return (
        f"Mosquitto {version} ({mosquitto.binary}) ignores Receive Maximum and reuses QoS 2 packet ids that it has not "
        "released: it loses QoS 2 messages by itself. Install 2.0.13 or newer.   [TL-S11]"
    )
