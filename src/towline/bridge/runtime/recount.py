"""Counts again what a line carried in batches that were committed while nobody listened.

What a batch held is told after Spark has committed it. A kill in between leaves the batch committed and untold: its
messages are in the outbox, its dead letters in Kafka, and no account would know of the letters [I11]. On the way down
the checkpoint says which records it had, and what becomes of a record is decided by the record alone: so they are read
and counted once more, and nothing is written. On the way up the sink's own note in the checkpoint tells of the letters
(`towline.spark.tally`): it knows those that Kafka would have refused, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.model import Line
from towline.bridge.runtime.identity import Identity
from towline.bridge.runtime.recovery import Evidence, first_offsets, kafka_offsets, read_checkpoint
from towline.checkpoint import Checkpoint
from towline.guarantee import policy
from towline.spark.tally import sum_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from towline.bridge.config.model import AnyLine
    from towline.bridge.runtime.downaccount import DownCounts

__all__ = ["letters_told", "recounted", "untold", "up_to_now"]

#: So many of the newest batches are counted again, at most: each is a job of Spark's.
_MOST: Final = 20
#: What Spark's Kafka source takes for the first record that there is.
_EARLIEST: Final = -2

Offsets = Mapping[str, Mapping[str, int]]


def letters_told(line: AnyLine, known: Mapping[str, Any]) -> dict[str, Any]:
    """A report of a batch as `Counts.add` takes it: where the sink has a dead-letter topic, it alone counts letters.

    Args:
        line: Whose batch.
        known: The driver's facts of it.
    """
    if not isinstance(line, Line) or not _sink_counts(line):
        return dict(known)
    observed = {name: count for name, count in known["observed"].items() if name != "dead_lettered"}
    letters = sum_at(Checkpoint(str(line.checkpoint)), known["batch"])
    return {**known, "observed": observed, "letters": letters}


def _sink_counts(line: Line) -> bool:
    """Not with at_most_once, which gives up what Kafka refuses."""
    return line.dead_letter_topic is not None and policy(line.guarantee).serves_again


def up_to_now(line: Line) -> Iterator[dict[str, Any]]:
    """The report of a line to Kafka on all batches that are done, as `Counts.add` takes it."""
    identity, seen = Identity.read(line.gateway.state_dir), read_checkpoint(line.checkpoint)
    if identity is None or identity.query != seen.query or seen.done is None or not seen.done_end:
        return  # another line's batches, or none
    known = {"query": seen.query, "batch": seen.done, "journal": seen.journal, "end": seen.done_end}
    yield letters_told(line, {**known, "rows": 0, "observed": {}, "gives_up": False})


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
        before = kafka_offsets(checkpoint, batch - 1) if batch else first_offsets(checkpoint)
        after = kafka_offsets(checkpoint, batch)
        if before and after:
            yield batch, before, after


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
