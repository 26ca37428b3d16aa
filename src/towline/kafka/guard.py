"""What the driver looks at before the tasks of a batch: the checkpoint, made durable, and lost markers.

A task can compare its own marker only. Here the largest marker of all partitions is held against Spark's commit log: a
batch in that log has been committed in Kafka, so a smaller marker means that markers were lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from towline.checkpoint import Checkpoint
from towline.errors import KafkaError
from towline.kafka import admin, faults
from towline.kafka.exactly_once import BatchOrigin, place_of
from towline.kafka.markers import Claim, Situation
from towline.kafka.markerstore import MarkerStore
from towline.kafka.mismatches import mismatch

if TYPE_CHECKING:
    from towline.kafka.markers import Marker
    from towline.kafka.options import SinkSettings

__all__ = ["look", "require_topics"]

#: Kafka answers a commit before its control records are everywhere: seconds to wait for the last marker to show.
_SETTLED_S: Final = 5.0
#: Checkpoints whose markers were held against the commit log; once in a process's life is enough, since every task
#: compares its own marker in every batch.
_checked: Final[set[tuple[str, str]]] = set()
#: Bootstrap servers and topics that were there.
_seen: Final[set[tuple[str, str]]] = set()
#: Seconds to wait for Kafka's list of topics.
_LOOK_S: Final = 2.0


def look(settings: SinkSettings, location: str) -> BatchOrigin:
    """Sync the checkpoint, and learn which batch is about to run.

    Args:
        settings: The sink's settings.
        location: The query's checkpoint.

    Raises:
        JournalError: TL-J20, the checkpoint can't be made durable.
        KafkaError: TL-K10, TL-K11 the markers fell behind the commit log; TL-K01, TL-K22 they can't be read.
    """
    checkpoint = Checkpoint(location)
    checkpoint.sync()
    newest = checkpoint.last_offsets_batch()
    if newest is None:
        return BatchOrigin()
    sink_id = settings.sink_id or checkpoint.query
    if sink_id and (location, sink_id) not in _checked:
        _hold_against(settings, sink_id, checkpoint, newest)
        _checked.add((location, sink_id))
    hashes = {batch: checkpoint.offsets_hash(batch) for batch in (newest - 1, newest)}
    return BatchOrigin(newest=newest, hashes={batch: text for batch, text in hashes.items() if text is not None})


def require_topics(settings: SinkSettings) -> None:
    """See that the topics that are always written to are there, once in a process, and before a task or a row asks.

    Raises:
        KafkaError: TL-K04. No answer is no reason: the tasks wait longer for Kafka, and tell it.
    """
    named = {name for name in (settings.topic, settings.dead_letter_topic) if name}
    asked = {(settings.servers, name) for name in named}
    if asked <= _seen:
        return
    try:
        absent = admin.missing_topics(settings.client, named, _LOOK_S)
    except KafkaError:
        return
    if absent:
        raise faults.missing(settings.servers, absent)
    _seen.update(asked)


def _hold_against(settings: SinkSettings, sink_id: str, checkpoint: Checkpoint, newest: int) -> None:
    done = checkpoint.last_commit_batch()
    if done is None:
        return
    store = MarkerStore(settings, sink_id)
    largest = _largest(store)
    if largest is None or largest.batch < done:
        admin.settled(settings.client, store.topic, _SETTLED_S)
        largest = _largest(store)
    if largest is not None and largest.batch >= done:
        return
    found = Situation.MISSING if largest is None else Situation.BEHIND
    claim = Claim(newest, 0, settings.parallelism, writer="")
    raise mismatch(found, largest, claim, place_of(settings, sink_id))


def _largest(store: MarkerStore) -> Marker | None:
    """The marker of the newest batch of any partition."""
    markers = [marker for marker in store.read_all().values() if marker is not None]
    return max(markers, key=lambda marker: marker.batch, default=None)
