"""Carries messages between MQTT brokers and Apache Kafka, with a delivery guarantee for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from towline.monitor.table import publisher_metrics
    from towline.mqtt.events import Filter
    from towline.net.client import Client, Message
    from towline.net.endpoint import Tls
    from towline.net.settings import ClientSettings, WillSettings
    from towline.publisher import AsyncPublisher, Publisher
    from towline.spark.executors import check_executors
    from towline.spark.session import register, spark_conf

__all__ = [
    "AsyncPublisher",
    "Client",
    "ClientSettings",
    "Filter",
    "Message",
    "Publisher",
    "Tls",
    "WillSettings",
    "check_executors",
    "publisher_metrics",
    "register",
    "spark_conf",
]

_PUBLIC_MODULES = {
    **dict.fromkeys(("AsyncPublisher", "Publisher"), "towline.publisher"),
    "Client": "towline.net.client",
    "ClientSettings": "towline.net.settings",
    "Filter": "towline.mqtt.events",
    "Message": "towline.net.client",
    "Tls": "towline.net.endpoint",
    "WillSettings": "towline.net.settings",
    "check_executors": "towline.spark.executors",
    "publisher_metrics": "towline.monitor.table",
    "register": "towline.spark.session",
    "spark_conf": "towline.spark.session",
}


def __getattr__(name: str) -> Any:
    """Load the public names when they are asked for: Spark's workers import this package in every process."""
    if name not in _PUBLIC_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - keeps the package light

    return getattr(import_module(_PUBLIC_MODULES[name]), name)
