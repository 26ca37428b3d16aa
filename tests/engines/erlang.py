"""Brokers by other authors than Mosquitto's: RabbitMQ (MQTT 3.1.1, no QoS 2) and ejabberd (MQTT 5), Debian's packages.

They are started without their scripts, which want a user of their own, and without epmd, which would outlive them.
"""

from __future__ import annotations

import os
import shutil
import socket
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from towline.errors import SetupError
from towline_prove.devstack.process import LOOPBACK
from towline_prove.devstack.server import Server

ANSWER_SECONDS = 2.0
#: CONNECT of MQTT 3.1.1, which both speak, with a clean session and the client id "devstack".
CONNECT = b"\x10\x14\x00\x04MQTT\x04\x02\x00\x0a\x00\x08devstack"
CONNACK, DISCONNECT = b"\x20", b"\xe0\x00"


class OnErlang(Server):
    """A broker on an Erlang machine of its own, on loopback; arguments are those of `Server`."""

    start_seconds: ClassVar[float] = 60.0  # RabbitMQ waits 6 s for a cluster, whatever it is told
    #: Where its compiled modules are, and the file they are known by; the newest version is taken.
    installed: ClassVar[tuple[str, str]]

    @classmethod
    def find(cls) -> Path:
        """The directory with its modules; SetupError TL-S10 if it is not on this machine."""
        root, pattern = cls.installed
        programs = sorted(Path(root).glob(pattern))
        if programs and shutil.which("erl"):
            return programs[-1].parent
        advice = "Run `python scripts/setup.py soak`, which installs it, or install Debian's package."
        raise SetupError("TL-S10", cls.name, "there is no such MQTT broker on this machine", advice)

    @property
    def uri(self) -> str:
        """``mqtt://127.0.0.1:PORT``."""
        return f"mqtt://{LOOPBACK}:{self.port}"

    @property
    def address(self) -> str:
        """The same as `uri`."""
        return self.uri

    @property
    def version(self) -> str:
        """The version of the program, such as ``3.10.8``."""
        return self.find().parent.name.split("-")[1]

    def _command(self, ports: tuple[int, ...]) -> list[str | Path]:
        environment, arguments = self._prepare(ports, self.find())
        # The cookie lies in HOME, a dump of the machine where it is told.
        given = {"HOME": self.directory, "ERL_CRASH_DUMP": self.directory / "erl_crash.dump", **environment}
        erl = ["erl", "-noinput", "-start_epmd", "false", "+S", "2", "+sbwt", "none"]
        return ["env", *(f"{name}={value}" for name, value in given.items()), *erl, *arguments]

    @abstractmethod
    def _prepare(self, ports: tuple[int, ...], modules: Path) -> tuple[Mapping[str, str | Path], list[str]]:
        """Write the configuration; the environment, and what erl is to run."""

    def _answers(self, port: int) -> bool:
        try:
            with socket.create_connection((LOOPBACK, port), ANSWER_SECONDS) as connection:
                connection.settimeout(ANSWER_SECONDS)
                connection.sendall(CONNECT)
                answered = connection.recv(1) == CONNACK
                connection.sendall(DISCONNECT)
                return answered
        except OSError:
            return False

    def _forget_data(self) -> None:
        for name in ("data", "log"):
            shutil.rmtree(self.directory / name, ignore_errors=True)


class RabbitMQ(OnErlang):
    """RabbitMQ with its MQTT plugin and nothing else: no AMQP listener. `settings` are lines of rabbitmq.conf."""

    name: ClassVar[str] = "rabbitmq"
    port_count: ClassVar[int] = 2
    installed: ClassVar[tuple[str, str]] = ("/usr/lib/rabbitmq/lib", "rabbitmq_server-*/plugins/rabbitmq_mqtt-*")

    def _prepare(self, ports: tuple[int, ...], modules: Path) -> tuple[Mapping[str, str | Path], list[str]]:
        settings = {
            "listeners.tcp": "none",
            "mqtt.listeners.tcp.1": f"{LOOPBACK}:{ports[0]}",
            "log.console": "true",
            "log.file": "false",
            **self.settings,
        }
        lines = "".join(f"{key} = {value}\n" for key, value in settings.items())
        (self.directory / "rabbitmq.conf").write_text(lines, encoding="utf-8")
        (self.directory / "enabled_plugins").write_text("[rabbitmq_mqtt].\n", encoding="utf-8")
        (rabbit,) = modules.glob("rabbit-[0-9]*/ebin")
        node = "towline@localhost"
        environment: dict[str, str | Path] = {
            "ERL_LIBS": modules,
            "ERL_FLAGS": "-start_epmd false",  # every minute it starts another node, only to have an epmd
            "RABBITMQ_NODENAME": node,
            "RABBITMQ_CONFIG_FILE": self.directory / "rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.directory / "enabled_plugins",
            "RABBITMQ_MNESIA_BASE": self.directory / "data",
            "RABBITMQ_LOG_BASE": self.directory / "log",
            "RABBITMQ_GENERATED_CONFIG_DIR": self.directory / "data",
            "RABBITMQ_PID_FILE": self.directory / "pid",
        }
        distribution = ["-erl_epmd_port", str(ports[1]), "-kernel", "inet_dist_use_interface", "{127,0,0,1}"]
        quiet = ["-syslog", "logger", "[]", "-syslog", "syslog_error_logger", "false"]
        start = ["-boot", "start_sasl", "-pa", str(rabbit), "-s", "rabbit", "boot"]
        return environment, ["-sname", node, *distribution, *quiet, *start]


class Ejabberd(OnErlang):
    """ejabberd with ``mod_mqtt`` and nothing else, for every user with any password; `settings` are ``mod_mqtt``'s."""

    name: ClassVar[str] = "ejabberd"
    installed: ClassVar[tuple[str, str]] = ("/usr/lib", "*/ejabberd-*/ebin/mod_mqtt.beam")

    def _prepare(self, ports: tuple[int, ...], modules: Path) -> tuple[Mapping[str, str | Path], list[str]]:
        file = self.directory / "ejabberd.yml"
        options = "".join(f"    {key}: {value}\n" for key, value in self.settings.items())
        everybody = '{"#": [{allow: all}]}'
        file.write_text(
            "hosts: [localhost]\nauth_method: anonymous\nanonymous_protocol: both\n"
            f'listen:\n  - {{port: {ports[0]}, ip: "{LOOPBACK}", module: mod_mqtt}}\n'
            f"modules:\n  mod_mqtt:\n    access_publish: {everybody}\n    access_subscribe: {everybody}\n{options}",
            encoding="utf-8",
        )
        (self.directory / "log").mkdir(exist_ok=True)
        environment: dict[str, str | Path] = {
            "EJABBERD_CONFIG_PATH": file,
            "EJABBERD_LOG_PATH": self.directory / "log" / "ejabberd.log",
            "ERL_LIBS": os.devnull,
        }
        data = f'"{self.directory / "data"}"'  # a term of Erlang
        return environment, ["-pa", str(modules), "-mnesia", "dir", data, "-s", "ejabberd"]
