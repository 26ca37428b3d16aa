"""Look-ups in a Kafka cluster for the bridge and doctor: quiet, bounded in time, with one clear line when they fail.

A client here is a mapping of librdkafka's names without a prefix; secrets as ``sasl.password.file`` or ``${NAME}``
(`towline.kafka.clientconfig`), exactly as the sink takes them after ``kafka.``.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import confluent_kafka
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from towline.errors import KafkaError
from towline.kafka import faults
from towline.kafka.clientconfig import QUIET, check_client, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["ClusterInfo", "client_config", "create_topics", "missing_topics", "reachable"]

#: One failed attempt a second is enough to learn why; the default is 100 ms and makes noise.
_PATIENCE = {"reconnect.backoff.ms": "100", "reconnect.backoff.max.ms": "1000"}


@dataclass(frozen=True)
class ClusterInfo:
    """What a cluster says about itself.

    Attributes:
        cluster_id: Kafka's id of the cluster; None from very old brokers.
        brokers: ``host:port`` of each broker, by id.
        topics: Partitions of each topic this user may see; internal ones (``__...``) included.
    """

    cluster_id: str | None
    brokers: Mapping[int, str]
    topics: Mapping[str, int]


def client_config(client: Mapping[str, str], where: str = "kafka", prefix: str = "") -> dict[str, str]:
    """Check a client configuration and resolve its secrets; the result must never be shown.

    Raises:
        ConfigError: As `check_client` and `resolve` say.
    """
    check_client(client, where, prefix)
    return resolve(client, where, prefix)


def reachable(client: str | Mapping[str, str], timeout: float = 5.0) -> ClusterInfo:
    """Ask a cluster who it is.

    Args:
        client: Bootstrap servers, or a whole client configuration.
        timeout: Seconds to wait at most.

    Raises:
        KafkaError: TL-K01: no server answered; says which and why (refused, unknown host, authentication).
        ConfigError: The configuration is impossible.
    """
    with _connected(client, timeout) as admin:
        metadata = admin.list_topics(timeout)
    brokers = {number: f"{broker.host}:{broker.port}" for number, broker in metadata.brokers.items()}
    topics = {name: len(topic.partitions) for name, topic in metadata.topics.items()}
    return ClusterInfo(metadata.cluster_id, brokers, topics)


def missing_topics(client: str | Mapping[str, str], names: Iterable[str], timeout: float = 5.0) -> list[str]:
    """Which of ``names`` the cluster does not have, sorted; looks at the whole list, so nothing is auto-created.

    Raises:
        KafkaError: TL-K01.
    """
    return sorted(set(names) - set(reachable(client, timeout).topics))


def create_topics(
    client: str | Mapping[str, str],
    topics: Mapping[str, int],
    *,
    replication: int = -1,
    config: Mapping[str, str] | None = None,
    timeout: float = 15.0,
) -> list[str]:
    """Create topics that do not exist yet; existing ones stay as they are.

    Args:
        client: Bootstrap servers, or a whole client configuration.
        topics: Name -> partitions.
        replication: Replicas of each; -1 for the cluster's default (KIP-464).
        config: Topic settings such as ``cleanup.policy``.
        timeout: Seconds to wait at most.

    Returns:
        The names that were created, sorted.

    Raises:
        KafkaError: TL-K01, or TL-K09 when Kafka refuses to create one.
    """
    wanted = [NewTopic(name, count, replication, config=dict(config or {})) for name, count in topics.items()]
    if not wanted:
        return []
    with _connected(client, timeout) as admin:
        admin.list_topics(timeout)
        futures = admin.create(wanted, timeout)
    return sorted(name for name, future in futures.items() if _created(_servers(client), name, future, timeout))


def _created(servers: str, name: str, future: Any, timeout: float) -> bool:
    try:
        future.result(timeout)
    except confluent_kafka.KafkaException as problem:
        if faults.name_of(problem) == "TOPIC_ALREADY_EXISTS":
            return False
        what = f'topic "{name}" can not be created: {faults.reason(problem)}'
        raise KafkaError("TL-K09", servers, what, "Create it by hand, or give this user the right to.") from None
    except TimeoutError:
        raise faults.unreachable(servers, timeout, "no answer to the request to create a topic") from None
    return True


class _Admin:
    """An AdminClient that remembers why it could not connect."""

    def __init__(self, config: Mapping[str, str]) -> None:
        self.why = ""
        options: dict[str, Any] = {**_PATIENCE, **config, "error_cb": self._note}
        try:
            self._client = AdminClient(options, logger=QUIET)
        except faults.FOREIGN as problem:
            raise faults.unusable("kafka", problem) from None

    def _note(self, error: Any) -> None:
        self.why = faults.clearer(self.why, error)

    def list_topics(self, timeout: float) -> Any:
        try:
            return self._client.list_topics(timeout=timeout)
        finally:
            self._client.poll(0)  # serves error_cb, which a blocking look-up does not

    def create(self, topics: list[Any], timeout: float) -> Mapping[str, Any]:
        futures: Mapping[str, Any] = self._client.create_topics(
            topics, operation_timeout=timeout, request_timeout=timeout
        )
        return futures


@contextmanager
def _connected(client: str | Mapping[str, str], timeout: float) -> Iterator[_Admin]:
    servers = _servers(client)
    mapping = {"bootstrap.servers": client} if isinstance(client, str) else client
    admin = _Admin(client_config(mapping))
    try:
        yield admin
    except faults.FOREIGN as problem:
        raise faults.unreachable(servers, timeout, admin.why or faults.reason(problem)) from None


def _servers(client: str | Mapping[str, str]) -> str:
    return client if isinstance(client, str) else client.get("bootstrap.servers", "kafka")
