"""Stack of a Mosquitto and a Kafka in one directory, for the demo and the command line.

Kafka has one broker, or several; or one with TLS and SASL beside a Mosquitto with certificates and passwords.
A Spark cluster may be added.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from towline import files
from towline.errors import ConfigError, SetupError
from towline_prove.devstack.kafka import Kafka, KafkaCluster
from towline_prove.devstack.mosquitto import Mosquitto
from towline_prove.devstack.secured import SecuredKafka, SecuredMosquitto, gateway_files
from towline_prove.devstack.server import Server, ServerGroup
from towline_prove.devstack.spark import SparkCluster, WorkerMachine

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class StackForm:
    """Form of a stack; saved in its directory, so that every command uses the same.

    Attributes:
        brokers: Kafka brokers, 1 or 3.
        secure: True if clients need TLS and credentials.
        spark_workers: Workers of a Spark cluster; 0 for no Spark.
        bare: True if the workers' Python lacks Towline and its dependencies.
        shared: True if the workers and this machine share a directory, `Stack.shared_directory`.
    """

    brokers: int = 1
    secure: bool = False
    spark_workers: int = 0
    bare: bool = False
    shared: bool = False

    @classmethod
    def resolve(cls, directory: Path, requested_form: StackForm | None) -> StackForm:
        """Return the form of a directory's stack, new ones as requested; SetupError TL-S23 if it has another form."""
        file = directory / "stack.json"
        stored_form = cls(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None
        existing_form = stored_form or (cls() if (directory / "kafka").exists() else None)
        if requested_form is not None and existing_form is not None and requested_form != existing_form:
            problem = f"has a stack of another form ({existing_form.description})"
            raise SetupError("TL-S23", str(directory), problem, "Name another directory with --dir, or remove it.")
        if requested_form is not None and stored_form is None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.replace(file, json.dumps(asdict(requested_form)), sync=False)
        return requested_form or existing_form or cls()

    @property
    def description(self) -> str:
        """Description for a person."""
        kafka = f"{self.brokers} broker{'s' * (self.brokers > 1)} of Kafka{', TLS and passwords' * self.secure}"
        workers = f"{self.spark_workers}{' bare' * self.bare} worker{'s' * (self.spark_workers > 1)} of Spark"
        workers += ", which share a directory" * self.shared
        return f"{kafka}, {workers}" if self.spark_workers else kafka


class Stack(ServerGroup):
    """Mosquitto and Kafka in one directory (default `default_directory`), each in a folder of its name."""

    def __init__(
        self,
        directory: Path | None = None,
        *,
        mosquitto: Mapping[str, str] | None = None,
        kafka: Mapping[str, str] | None = None,
        form: StackForm | None = None,
    ) -> None:
        self.directory = (directory or default_directory()).absolute()
        self.form = StackForm.resolve(self.directory, form)
        mosquitto_class = SecuredMosquitto if self.form.secure else Mosquitto
        self.mosquitto: Mosquitto = mosquitto_class(self.directory / "mosquitto", settings=mosquitto)
        self.kafka: Kafka | KafkaCluster = (
            KafkaCluster(self.directory / "kafka", brokers=self.form.brokers, settings=kafka)
            if self.form.brokers > 1
            else (SecuredKafka if self.form.secure else Kafka)(self.directory / "kafka", settings=kafka)
        )
        spark_dir, workers = self.directory / "spark", self.form.spark_workers
        self.spark = SparkCluster(spark_dir, workers=workers, machine=self._worker_machine) if workers else None

    @property
    def shared_directory(self) -> Path:
        """Directory that a stack of this form shares with its workers."""
        return self.directory / "shared"

    @property
    def _worker_machine(self) -> WorkerMachine:
        kafka = self.kafka
        files = (kafka.password_file, kafka.authority) if isinstance(kafka, SecuredKafka) else ()
        return WorkerMachine(self.form.bare, files, (self.shared_directory,) if self.form.shared else ())

    @property
    def servers(self) -> tuple[Server, ...]:
        """All servers of the stack."""
        kafka = self.kafka.nodes if isinstance(self.kafka, KafkaCluster) else (self.kafka,)
        return self.mosquitto, *kafka, *(self.spark.servers if self.spark else ())

    def start(self) -> Self:
        """Start all servers, as `ServerGroup.start`."""
        if self.spark:
            self.spark.prepare()
            if self.form.shared:
                self.shared_directory.mkdir(mode=0o700, exist_ok=True)
        super().start()
        if self.spark:
            self.spark.describe()
            gateway_files(self.directory / "gateway")  # executors come to a gateway with these
        return self

    def variables(self) -> dict[str, str]:
        """Return all addresses as variables of a shell or a bridge file; paths of secret files, but no secret."""
        variables = {"DIR": str(self.directory), "MQTT": self.mosquitto.address, "KAFKA": self.kafka.bootstrap}
        if self.spark:
            variables |= {"SPARK": self.spark.master.address}
            addresses = gateway_files(self.directory / "gateway").addresses
            variables |= {f"GATEWAY_{number}": address for number, address in enumerate(addresses, 1)}
        return {f"STACK_{name}": value for name, value in variables.items()}

    def server(self, name: str) -> Server:
        """Return the server with this name; ConfigError TL-C71 for none."""
        for server in self.servers:
            if server.label == name:
                return server
        names = ", ".join(server.label for server in self.servers)
        raise ConfigError("TL-C71", name, "is no server of the devstack", f"There are {names}.")


def default_directory() -> Path:
    """Return ``towline/devstack`` in the user's state directory (XDG)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "towline" / "devstack"
