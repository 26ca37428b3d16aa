"""The metrics of a `Publisher`, as a collector for the registry that an application has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from towline.errors import PublisherError
from towline.monitor.table import Sample, TableCollector, read
from towline.timing import Histogram

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from towline.publisher import Publisher

#: Metric → where a publisher's status says it, of several keys the sum; a replay takes no refusal back.
_SOURCES: Final = {
    "towline_publisher_messages_accepted_total": "accepted",
    "towline_publisher_messages_delivered_total": "delivered",
    "towline_publisher_messages_expired_total": "expired",
    "towline_publisher_messages_refused_total": "refused+replayed",
    "towline_publisher_messages_waiting": "queued+in_flight",
    "towline_publisher_messages_awaiting_receipt": "awaiting",
    "towline_publisher_connected": "online",
    "towline_publisher_window_in_flight": "window_open",
    "towline_publisher_window_limit": "window",
    "towline_publisher_outbox_size_bytes": "bytes_on_disk",
    "towline_publisher_room_bytes": "room_left",
}


def publisher_metrics(publisher: Publisher, name: str = "") -> Collector:
    """A collector of a publisher's metrics; it holds nothing up and asks nobody but this process.

    ``prometheus_client.REGISTRY.register(towline.publisher_metrics(publisher))`` adds them to what an application
    exports anyway; ``prometheus_client.start_http_server(9465, "127.0.0.1")`` serves them in one without a server. One
    that is closed has no samples; unregister its collector before another one of that name is registered.

    Args:
        publisher: Whose.
        name: Value of the label ``publisher``; default its MQTT client id.
    """

    def samples() -> Iterator[Sample]:
        with contextlib.suppress(PublisherError):  # it belongs to the process that this one was forked from
            if not (status := publisher.status())["closed"]:
                yield from of_status(status, name or str(status["client_id"]), publisher.journal_id)

    return TableCollector(samples)


def of_status(status: Mapping[str, Any], name: str, journal: str) -> Iterator[Sample]:
    """What a publisher's status says."""
    labels, measured = (name,), status["measured"]
    for metric, value in read(_SOURCES, {**measured, **(status["receipts"] or {}), **status}).items():
        yield Sample(metric, labels, value, journal)
    yield Sample("towline_publisher_held_back", labels, int(bool(status["held_back"])))
    yield Sample("towline_publisher_fdatasync_seconds", labels, Histogram.from_json(measured["syncs"]))
