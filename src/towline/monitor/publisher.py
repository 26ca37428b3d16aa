"""The metrics of a `Publisher`, as a collector for the registry that an application has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from towline.errors import PublisherError
from towline.monitor.samples import Sample, TableCollector
from towline.timing import Histogram

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from towline.publisher import Publisher

_COUNTERS: Final = {f"towline_publisher_messages_{name}_total": name for name in ("accepted", "delivered", "expired")}


def publisher_metrics(publisher: Publisher, name: str = "") -> Collector:
    """A collector of a publisher's metrics; it holds nothing up and asks nobody but this process.

    ``prometheus_client.REGISTRY.register(towline.publisher_metrics(publisher))`` adds them to what an application
    exports anyway; ``prometheus_client.start_http_server(9465, "127.0.0.1")`` serves them in one without a server. One
    that is closed has no samples; unregister its collector before another one of that name is registered.

    Args:
        publisher: Whose.
        name: Value of the label ``publisher``; default its MQTT client id.
    """
    return TableCollector(lambda: _samples(publisher, name))


def _samples(publisher: Publisher, name: str) -> Iterator[Sample]:
    try:
        status = publisher.status()
    except PublisherError:  # it belongs to the process that this one was forked from
        return
    if status["closed"]:
        return
    yield from of_status(status, name or str(status["client_id"]), publisher.journal_id)


def of_status(status: Mapping[str, Any], name: str, journal: str) -> Iterator[Sample]:
    """What a publisher's status says.

    Args:
        status: As `Publisher.status` returns it.
        name: Of the publisher.
        journal: Its journal's id.
    """
    labels, measured = (name,), status["measured"]
    for metric, key in _COUNTERS.items():
        yield Sample(metric, labels, int(status[key]), journal)
    refused = int(status["refused"]) + int(status["replayed"])  # a replay takes none of them back
    yield Sample("towline_publisher_messages_refused_total", labels, refused, journal)
    yield Sample("towline_publisher_connected", labels, int(status["online"]))
    yield Sample("towline_publisher_held_back", labels, int(bool(status["held_back"])))
    yield Sample("towline_publisher_messages_waiting", labels, int(status["queued"]) + int(status["in_flight"]))
    if status["receipts"] is not None:
        awaiting = int(status["receipts"]["awaiting"])
        yield Sample("towline_publisher_messages_awaiting_receipt", labels, awaiting)
    yield Sample("towline_publisher_outbox_size_bytes", labels, int(measured["bytes_on_disk"]))
    yield Sample("towline_publisher_window_in_flight", labels, int(status["window_open"]))
    yield Sample("towline_publisher_window_limit", labels, int(status["window"]))
    if measured["room_left"] is not None:
        yield Sample("towline_publisher_room_bytes", labels, int(measured["room_left"]))
    yield Sample("towline_publisher_fdatasync_seconds", labels, Histogram.from_json(measured["syncs"]))
