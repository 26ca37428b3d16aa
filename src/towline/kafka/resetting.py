"""Markers set by hand: the way on when marker and checkpoint do not belong together, for ``towline kafka marker``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from towline.errors import KafkaError
from towline.kafka import admin, transactions
from towline.kafka.markers import Marker
from towline.kafka.markerstore import MarkerStore
from towline.kafka.transactions import Indefinite

if TYPE_CHECKING:
    from towline.kafka.options import SinkSettings

__all__ = ["set_markers"]


def set_markers(settings: SinkSettings, sink_id: str, batch: int | None) -> dict[int, Marker | None]:
    """Set the marker of every partition of a sink; a query that still runs is fenced, and stops.

    Args:
        settings: The sink's settings; ``parallelism`` says how many partitions it has from now on.
        sink_id: The sink.
        batch: The batch that is to count as written; -1 for "none yet"; None to remove the markers.

    Returns:
        The markers as they are now. Totals go on; a removed marker takes them along.

    Raises:
        KafkaError: TL-K01, TL-K20, TL-K22; the partitions before the failing one are set.
    """
    store = MarkerStore(settings, sink_id)
    store.ensure()
    markers = {p: _set(settings, store, sink_id, p, batch) for p in range(settings.parallelism)}
    admin.settled(settings.client, store.topic, settings.timeout_s)  # who looks next sees what was set
    return markers


def _set(settings: SinkSettings, store: MarkerStore, sink_id: str, partition: int, batch: int | None) -> Marker | None:
    producer = transactions.take(settings, settings.transactional_id(sink_id, partition), {})
    try:
        marker = _next(_understood(store, partition), settings.parallelism, batch)
        producer.begin()
        producer.mark(store.topic, partition, store.key(partition), marker)
        producer.commit()
    except Indefinite as problem:
        raise problem.told from None
    finally:
        producer.close()
    return marker


def _understood(store: MarkerStore, partition: int) -> Marker | None:
    """The marker before; one that can't be understood is what a reset is for."""
    try:
        return store.read(partition)
    except KafkaError as problem:
        if problem.code != "TL-K22":
            raise
        return None


def _next(before: Marker | None, parallelism: int, batch: int | None) -> Marker | None:
    if batch is None:
        return None
    marker = Marker(batch, parallelism)
    return marker if before is None else marker.following(before)
