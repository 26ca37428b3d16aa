"""A real Kafka of several brokers on this machine: each is broker and controller, and everything is replicated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from towline import files
from towline_prove.devstack.kafka import KAFKA_VERSION, Kafka, new_cluster_id
from towline_prove.devstack.ports import LOOPBACK
from towline_prove.devstack.together import Together

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ClusterNode", "KafkaCluster"]

#: Every partition thrice, and an acknowledgement with acks=all means two of the three.
_REPLICATED: Final = {
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
_JVM: Final = ("-Xms96m", "-Xmx256m")


class ClusterNode(Kafka):
    """One broker of a `KafkaCluster`.

    Args:
        directory: Of this node.
        number: Its id, from 1.
        cluster_id: Of all of them.
        settings: As `Kafka`.
    """

    more_jvm = _JVM

    def __init__(self, directory: Path, number: int, cluster_id: str, settings: Mapping[str, str]) -> None:
        super().__init__(directory, settings=settings)
        self.number = number
        self.label = f"kafka-{number}"
        self._cluster_id = cluster_id
        self._voters = ""

    def join(self, nodes: Sequence[ClusterNode]) -> None:
        """Be told of all nodes, this one among them."""
        self._voters = ",".join(f"{node.number}@{LOOPBACK}:{node.ports[1]}" for node in nodes)

    def _membership(self, controller_port: int) -> dict[str, str]:
        del controller_port
        return {"node.id": str(self.number), "controller.quorum.voters": self._voters, **_REPLICATED}

    def _format_options(self) -> list[str]:
        return ["-t", self._cluster_id]


class KafkaCluster(Together):
    """Several brokers; one alone has no quorum and answers nobody, so they start at the same time.

    Args:
        directory: Each node has a folder in it.
        brokers: How many.
        settings: Lines of server.properties of every node.
    """

    name: Final = "kafka"

    def __init__(self, directory: Path, *, brokers: int = 3, settings: Mapping[str, str] | None = None) -> None:
        self.directory = Path(directory).absolute()
        self.nodes = tuple(
            ClusterNode(self.directory / f"node-{number}", number, self._id(), settings or {})
            for number in range(1, brokers + 1)
        )
        for node in self.nodes:
            node.join(self.nodes)

    def _id(self) -> str:
        file = self.directory / "cluster.id"
        if not file.exists():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.replace(file, new_cluster_id(), synced=False)
        return file.read_text(encoding="utf-8")

    @property
    def servers(self) -> tuple[ClusterNode, ...]:
        """The nodes."""
        return self.nodes

    @property
    def bootstrap(self) -> str:
        """All brokers, for ``bootstrap.servers``."""
        return ",".join(node.bootstrap for node in self.nodes)

    @property
    def client(self) -> dict[str, Any]:
        """Settings of a librdkafka client that reaches it."""
        return {"bootstrap.servers": self.bootstrap}

    @property
    def version(self) -> str:
        """The version of Kafka."""
        return KAFKA_VERSION

    @property
    def running(self) -> bool:
        """Whether all brokers run."""
        return all(node.running for node in self.nodes)

    def create_topics(self, topics: Mapping[str, int], config: Mapping[str, str] | None = None) -> None:
        """As `Kafka.create_topics`, with the cluster's replication."""
        self.nodes[0].create_topics(topics, config)

    def node(self, number: int) -> ClusterNode:
        """The node with this id."""
        return self.nodes[number - 1]
