"""Kafka: the sink ``format("kafka_transactional")`` and look-ups in a cluster. Thin over confluent-kafka.

Importing this package imports nothing heavy; PySpark is needed only for `KafkaTransactional`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from towline.kafka.admin import ClusterInfo, client_config, create_topics, missing_topics, reachable
    from towline.kafka.datasource import KafkaTransactional
    from towline.kafka.options import SinkSettings

__all__ = [
    "ClusterInfo",
    "KafkaTransactional",
    "SinkSettings",
    "client_config",
    "create_topics",
    "missing_topics",
    "reachable",
]

_HOMES = {
    "ClusterInfo": "towline.kafka.admin",
    "KafkaTransactional": "towline.kafka.datasource",
    "SinkSettings": "towline.kafka.options",
    "client_config": "towline.kafka.admin",
    "create_topics": "towline.kafka.admin",
    "missing_topics": "towline.kafka.admin",
    "reachable": "towline.kafka.admin",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
