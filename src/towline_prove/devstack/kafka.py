"""Apache Kafka (KRaft) for the devstack: one node, broker and controller in one; or a cluster."""

from __future__ import annotations

import base64
import logging
import os
import secrets
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from towline import files
from towline.errors import KafkaError, SetupError
from towline.spark.java import (
    QUIET_JVM,
    archive_options,
    class_archive_path,
    create_archive_once,
    find_java,
    resolve_jars,
)
from towline_prove.devstack.process import LOOPBACK, wait_for
from towline_prove.devstack.server import Server, ServerGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KAFKA_VERSION = "4.3.1"
SCALA_VERSION = "2.13"
SLF4J_VERSION = "1.7.36"

ANSWER_SECONDS = 2.0
TOPIC_SECONDS = 60.0
FORMAT_SECONDS = 60

DEFAULTS = {
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    # one node: nothing can be replicated
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "2",
    "group.initial.rebalance.delay.ms": "0",
    # It stands still most of its time: a record of nothing twice a second, and five heartbeats, took half of its CPU.
    "metadata.max.idle.interval.ms": "0",
    "broker.heartbeat.interval.ms": "500",
    # A transaction times out at the next sweep only; Kafka's default is every 10 s.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
    "log.cleaner.dedupe.buffer.size": "16777216",
    # Kafka deletes by the time a record carries, and a device may say that it is years back.
    "log.retention.ms": "-1",
    # A typing error in a topic's name must not become a topic.
    "auto.create.topics.enable": "false",
}

#: A machine that stands still for a while must not fence the only broker; Kafka's own value is 9 s.
SESSION_MS = "18000"
#: After SIGKILL the next incarnation waits until its own old session has lapsed.
SESSION_AFTER_KILL_MS = "2000"

FORMAT_JVM = [*QUIET_JVM, "-Xmx128m", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]
BROKER_JVM = [
    *QUIET_JVM,
    "-Xms256m",
    "-Xmx512m",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSS",
]

#: Options for compiler and garbage collector; Kafka's own start script (kafka-run-class.sh) splits them at spaces, too.
PERFORMANCE_VARIABLE = "KAFKA_JVM_PERFORMANCE_OPTS"

#: Every partition thrice, and an acknowledgement with acks=all means two of the three.
_REPLICATION_SETTINGS: Final = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "unclean.leader.election.enable": "false",
    # A follower that stands still is out of the set of replicas in sync after this long; Kafka's own value is 30 s.
    "replica.lag.time.max.ms": "4000",
    "replica.fetch.wait.max.ms": "200",
    # A broker that was killed is fenced after this long, and its partitions have other leaders then; Kafka: 9 s.
    "broker.session.timeout.ms": "4000",
    "controller.quorum.election.timeout.ms": "1000",
    "controller.quorum.fetch.timeout.ms": "2000",
}
_SMALL_JVM: Final = ("-Xms96m", "-Xmx256m")

# librdkafka logs every refused connection while the broker starts: discarded.
_silent_logger = logging.Logger("towline_prove.devstack.kafka", level=logging.CRITICAL + 1)  # noqa: LOG001  kept out of the tree


def kafka_jars() -> Path:
    """Return the directory of Kafka's jars, fetched once (46 jars, 44 MB, some 6 s); SetupError TL-S15 or TL-S18."""
    coordinates = [f"org.apache.kafka:kafka_{SCALA_VERSION}:{KAFKA_VERSION}", f"org.slf4j:slf4j-simple:{SLF4J_VERSION}"]
    return resolve_jars(f"kafka-{KAFKA_VERSION}", coordinates)


def prepare_kafka() -> Path:
    """Return the directory of Kafka's jars, with an archive of loaded classes that saves some two seconds a start.

    The archive (50 MB, Java's class data sharing, JEP 350) belongs to one build of Java; another one ignores it.
    """
    jars = kafka_jars()
    create_archive_once(class_archive_path(jars, jars), _record_classes)
    return jars


def _record_classes(directory: Path, jvm_option: str) -> None:
    broker = Kafka(directory / "kafka")
    broker.extra_jvm_options = [jvm_option]
    with broker:
        broker.create_topics({"trial": 1})


class Kafka(Server):
    """Real single-node Kafka on loopback, without security and automatic topics; `settings` extend `DEFAULTS`."""

    name: ClassVar[str] = "kafka"
    port_count: ClassVar[int] = 2  # the controller's port is part of the quorum's state, so it stays too
    start_seconds: ClassVar[float] = 90.0
    stop_seconds: ClassVar[float] = 30.0

    #: Further options of the broker's JVM, for its next start.
    extra_jvm_options: Sequence[str] = ()

    @property
    def address(self) -> str:
        """Address ``127.0.0.1:PORT``, for ``bootstrap.servers``."""
        return f"{LOOPBACK}:{self.port}"

    bootstrap = address

    @property
    def client(self) -> dict[str, Any]:
        """Settings of a librdkafka client for this broker."""
        return {"bootstrap.servers": self.bootstrap}

    @property
    def version(self) -> str:
        """Version of Kafka, such as ``4.3.1``."""
        return KAFKA_VERSION

    def create_topics(self, topics: Mapping[str, int], config: Mapping[str, str] | None = None) -> None:
        """Create topics with these partition counts and wait for their leaders; KafkaError TL-K70 after a minute.

        `config` has topic settings for all of them, such as ``{"cleanup.policy": "compact"}``.
        """
        admin = self._admin(self._internal_port(self.ports))
        new_topics = [NewTopic(name, partitions, -1, config=dict(config or {})) for name, partitions in topics.items()]
        futures = admin.create_topics(new_topics, operation_timeout=TOPIC_SECONDS, request_timeout=TOPIC_SECONDS)
        for name, future in futures.items():
            try:
                future.result(TOPIC_SECONDS)
            except (KafkaException, TimeoutError) as error:
                reason = error.args[0].str() if isinstance(error, KafkaException) else "no answer"
                raise KafkaError("TL-K70", self.bootstrap, f"can't create topic {name!r}: {reason}") from error
        if not wait_for(lambda: all(_has_leaders(admin, name) for name in topics), TOPIC_SECONDS):
            problem = f"a topic of {', '.join(topics)} has no leader after {TOPIC_SECONDS:.0f} s"
            raise KafkaError("TL-K70", self.bootstrap, problem, f"Its log is {self.log}.")

    def _command(self, ports: tuple[int, ...]) -> list[str | Path]:
        java, jars = find_java(), kafka_jars()
        properties = self.directory / "server.properties"
        properties.write_text(self._properties(*ports), encoding="utf-8")
        java_command: list[str | Path] = [java, *archive_options(class_archive_path(jars, jars)), "-cp", f"{jars}/*"]
        if not self._is_formatted():
            self._format([*java_command, *FORMAT_JVM], properties)
        tuning = os.environ.get(PERFORMANCE_VARIABLE, "-XX:+UseG1GC").split()
        return [*java_command, *BROKER_JVM, *tuning, *self.extra_jvm_options, "kafka.Kafka", properties]

    def _properties(self, *ports: int) -> str:
        own_settings = {
            "broker.session.timeout.ms": SESSION_AFTER_KILL_MS if self._was_killed() else SESSION_MS,
            "log.dirs": str(self._data),
            **self._listeners(ports),
            **self._membership(ports[1]),
        }
        return "".join(f"{key}={value}\n" for key, value in {**DEFAULTS, **own_settings, **self.settings}.items())

    def _listeners(self, ports: tuple[int, ...]) -> dict[str, str]:
        """Return the settings of listeners and their security."""
        listeners = f"PLAINTEXT://{LOOPBACK}:{ports[0]},CONTROLLER://{LOOPBACK}:{ports[1]}"
        return {
            "listeners": listeners,
            "advertised.listeners": listeners,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }

    def _membership(self, controller_port: int) -> dict[str, str]:
        """Return the settings of node id and controller quorum."""
        return {"node.id": "1", "controller.quorum.bootstrap.servers": f"{LOOPBACK}:{controller_port}"}

    def _format_options(self) -> list[str]:
        return ["--standalone", "-t", new_cluster_id()]

    def _internal_port(self, ports: tuple[int, ...]) -> int:
        """Return the port of the listener without credentials."""
        return ports[0]

    def _was_killed(self) -> bool:
        """Return whether the data lacks the marker of a clean shutdown (Kafka's CleanShutdownFileHandler)."""
        return self._is_formatted() and not (self._data / ".kafka_cleanshutdown").exists()

    def _is_formatted(self) -> bool:
        return (self._data / "meta.properties").exists()

    def _format(self, java_command: list[str | Path], properties: Path) -> None:
        command = [*java_command, "kafka.tools.StorageTool", "format", *self._format_options(), "-c", properties]
        result = subprocess.run(command, capture_output=True, text=True, timeout=FORMAT_SECONDS, check=False)
        if result.returncode:
            output_lines = (result.stderr + result.stdout).strip().splitlines() or ["no output"]
            problem = f"its directory could not be formatted: {output_lines[0]}"
            raise SetupError("TL-S12", self.name, problem, f"Look at the settings in {properties}.")

    def _answers(self, port: int) -> bool:
        try:
            # Far cheaper than a client of librdkafka, and most of the waiting is for this.
            socket.create_connection((LOOPBACK, port), ANSWER_SECONDS).close()
            return bool(self._admin(self._internal_port(self.ports)).list_topics(timeout=1).brokers)
        except (OSError, KafkaException):
            return False

    def _admin(self, port: int) -> AdminClient:
        settings: dict[str, Any] = {
            "bootstrap.servers": f"{LOOPBACK}:{port}",
            "socket.timeout.ms": int(ANSWER_SECONDS * 1000),
            "log_level": 0,
            "logger": _silent_logger,
        }
        return AdminClient(settings)

    def _forget_data(self) -> None:
        shutil.rmtree(self._data, ignore_errors=True)

    @property
    def _data(self) -> Path:
        return self.directory / "data"


def _has_leaders(admin: AdminClient, topic: str) -> bool:
    try:
        description = admin.list_topics(topic, timeout=ANSWER_SECONDS).topics[topic]
    except KafkaException:
        return False
    return bool(description.partitions) and all(partition.leader >= 0 for partition in description.partitions.values())


def new_cluster_id() -> str:
    """Return a cluster id like Kafka's Uuid.randomUuid: 16 random bytes in URL-safe base64, without a leading dash."""
    while True:
        text = base64.urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")
        if not text.startswith("-"):
            return text


class ClusterNode(Kafka):
    """Broker of a `KafkaCluster`."""

    extra_jvm_options = _SMALL_JVM

    def __init__(self, directory: Path, number: int, cluster_id: str, settings: Mapping[str, str]) -> None:
        super().__init__(directory, settings=settings)
        self.number = number
        self.label = f"kafka-{number}"
        self._cluster_id = cluster_id
        self._voters = ""

    def set_voters(self, nodes: Sequence[ClusterNode]) -> None:
        """Set the controller quorum voters: all nodes, this one among them."""
        self._voters = ",".join(f"{node.number}@{LOOPBACK}:{node.ports[1]}" for node in nodes)

    def _membership(self, controller_port: int) -> dict[str, str]:
        del controller_port
        return {"node.id": str(self.number), "controller.quorum.voters": self._voters, **_REPLICATION_SETTINGS}

    def _format_options(self) -> list[str]:
        return ["-t", self._cluster_id]


class KafkaCluster(ServerGroup):
    """Kafka cluster; a single broker of it has no quorum and answers nobody, so all start at the same time."""

    name: Final = "kafka"

    def __init__(self, directory: Path, *, brokers: int = 3, settings: Mapping[str, str] | None = None) -> None:
        self.directory = Path(directory).absolute()
        self.nodes = tuple(
            ClusterNode(self.directory / f"node-{number}", number, self._id(), settings or {})
            for number in range(1, brokers + 1)
        )
        for node in self.nodes:
            node.set_voters(self.nodes)

    def _id(self) -> str:
        file = self.directory / "cluster.id"
        if not file.exists():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.replace(file, new_cluster_id(), sync=False)
        return file.read_text(encoding="utf-8")

    @property
    def servers(self) -> tuple[ClusterNode, ...]:
        """All nodes."""
        return self.nodes

    @property
    def bootstrap(self) -> str:
        """Addresses of all brokers, for ``bootstrap.servers``."""
        return ",".join(node.bootstrap for node in self.nodes)

    @property
    def client(self) -> dict[str, Any]:
        """Settings of a librdkafka client for this cluster."""
        return {"bootstrap.servers": self.bootstrap}

    @property
    def version(self) -> str:
        """Version of Kafka."""
        return KAFKA_VERSION

    @property
    def running(self) -> bool:
        """True while all brokers run."""
        return all(node.running for node in self.nodes)

    def create_topics(self, topics: Mapping[str, int], config: Mapping[str, str] | None = None) -> None:
        """Create topics as `Kafka.create_topics`, with the cluster's replication."""
        self.nodes[0].create_topics(topics, config)

    def node(self, number: int) -> ClusterNode:
        """Return the node with this id."""
        return self.nodes[number - 1]
