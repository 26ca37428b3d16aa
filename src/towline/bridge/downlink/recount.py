"""Counts again the batches of a downlink that were committed while nobody listened.

The checkpoint says which records such a batch had, and what becomes of a record is decided by the record alone: so they
are read and counted once more, and nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.lines.evidence import Evidence, KafkaOffsets, kafka_offsets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from towline.bridge.downlink.account import DownlinkCounts

__all__ = ["recounted", "uncounted"]

#: So many of the newest batches are counted again, at most: each is a job of Spark's.
_MOST: Final = 20
#: What Spark's Kafka source takes for the first record that there is.
_EARLIEST: Final = -2


def uncounted(
    checkpoint: Path, evidence: Evidence, counts: DownlinkCounts
) -> Iterator[tuple[int, KafkaOffsets, KafkaOffsets]]:
    """Batches that are committed and not counted: number, where each partition begins, where it ends.

    Args:
        checkpoint: Of the query, on a disk of this machine.
        evidence: What it says.
        counts: What has been counted.
    """
    if evidence.done is None:
        return
    last = counts.batch if counts.query == evidence.query else -1
    for batch in range(max(last + 1, evidence.done + 1 - _MOST), evidence.done + 1):
        before = kafka_offsets(checkpoint, batch - 1 if batch else None)
        after = kafka_offsets(checkpoint, batch)
        if before and after:
            yield batch, before, after


def recounted(
    checkpoint: Path,
    evidence: Evidence,
    counts: DownlinkCounts,
    read: Callable[[Mapping[str, str]], DataFrame],
    mapped: Callable[[DataFrame, Any, Any], DataFrame],
) -> Iterator[dict[str, Any]]:
    """The reports that nobody heard of, as `DownlinkCounts.add` takes them.

    Args:
        checkpoint: Of the query.
        evidence: What it says.
        counts: What has been counted.
        read: A batch read of Spark's Kafka source with these options beside the line's own.
        mapped: The line's mapping, with a counter of all records and one of what becomes of them.
    """
    from pyspark.sql import Observation  # noqa: PLC0415 - only the driver has Spark

    for batch, before, after in uncounted(checkpoint, evidence, counts):
        taken, kept = Observation(), Observation()
        rows = mapped(read(_options(before, after)), taken, kept)
        rows.write.format("noop").mode("overwrite").save()
        observed = {**taken.get, **kept.get}
        yield {"query": evidence.query, "batch": batch, "behind": None, "observed": observed}


def _options(before: KafkaOffsets, after: KafkaOffsets) -> dict[str, str]:
    """Exactly these partitions and records; Spark wants every partition named at both ends."""
    nowhere = {topic: dict.fromkeys(ends, _EARLIEST) for topic, ends in after.items()}
    starts = {topic: {**parts, **before.get(topic, {})} for topic, parts in nowhere.items()}
    return {
        "assign": json.dumps({topic: sorted(map(int, ends)) for topic, ends in after.items()}),
        "startingOffsets": json.dumps(starts),
        "endingOffsets": json.dumps(after),
        "failOnDataLoss": "true",  # rather not counted than counted short
    }
