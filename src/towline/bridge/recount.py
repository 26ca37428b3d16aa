"""Counts again what a line took from Kafka in batches that were committed while nobody listened.

What a batch held is told after Spark has committed it. A kill in between leaves the batch committed and untold: its
messages are in the outbox, its dead letters in Kafka, and no account would know of the letters [I11]. Which records it
had stands in the checkpoint, and what becomes of a record is decided by the record alone: so they are read and counted
once more, and nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.recovery import Evidence, kafka_offsets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from towline.bridge.downaccount import DownCounts

__all__ = ["recounted", "untold"]

#: So many of the newest batches are counted again, at most: each is a job of Spark's.
_MOST: Final = 20
#: What Spark's Kafka source takes for the first record that there is.
_EARLIEST: Final = -2

Offsets = Mapping[str, Mapping[str, int]]


def untold(checkpoint: Path, seen: Evidence, counts: DownCounts) -> Iterator[tuple[int, Offsets, Offsets]]:
    """Batches that are committed and not counted: number, where each partition begins, where it ends.

    Args:
        checkpoint: Of the query, on a disk of this machine.
        seen: What it says.
        counts: What has been counted.
    """
    if seen.done is None:
        return
    last = counts.batch if counts.query == seen.query else -1
    for batch in range(max(last + 1, seen.done + 1 - _MOST), seen.done + 1):
        before = kafka_offsets(checkpoint, batch - 1) if batch else _first_offsets(checkpoint)
        after = kafka_offsets(checkpoint, batch)
        if before and after:
            yield batch, before, after


def _first_offsets(checkpoint: Path) -> Offsets:
    """Where the query began, as Spark's Kafka source notes it; nothing where that can't be read."""
    try:
        content = (checkpoint / "sources" / "0" / "0").read_text()
    except OSError:
        return {}
    # A zero byte, the version and the offsets (KafkaSourceInitialOffsetWriter).
    offsets = content.lstrip("\0").partition("\n")[2]
    found: Offsets = json.loads(offsets) if offsets else {}
    return found


def recounted(
    checkpoint: Path,
    seen: Evidence,
    counts: DownCounts,
    read: Callable[[Mapping[str, str]], DataFrame],
    mapped: Callable[[DataFrame, Any, Any], DataFrame],
) -> Iterator[dict[str, Any]]:
    """The reports that nobody heard, as `DownCounts.add` takes them.

    Args:
        checkpoint: Of the query.
        seen: What it says.
        counts: What has been counted.
        read: A batch read of Spark's Kafka source with these options beside the line's own.
        mapped: The line's mapping, with a counter of all records and one of what becomes of them.
    """
    from pyspark.sql import Observation  # noqa: PLC0415 - only the driver has Spark

    for batch, before, after in untold(checkpoint, seen, counts):
        all_of_them, kept = Observation(), Observation()
        rows = mapped(read(_options(before, after)), all_of_them, kept)
        rows.write.format("noop").mode("overwrite").save()
        observed = {**all_of_them.get, **kept.get}
        yield {"query": seen.query, "batch": batch, "behind": None, "observed": observed}


def _options(before: Offsets, after: Offsets) -> dict[str, str]:
    """Exactly these partitions and records; Spark wants every partition named at both ends."""
    nowhere = {topic: dict.fromkeys(ends, _EARLIEST) for topic, ends in after.items()}
    starts = {topic: {**parts, **before.get(topic, {})} for topic, parts in nowhere.items()}
    return {
        "assign": json.dumps({topic: sorted(map(int, ends)) for topic, ends in after.items()}),
        "startingOffsets": json.dumps(starts),
        "endingOffsets": json.dumps(after),
        "failOnDataLoss": "true",  # rather not counted than counted short
    }
