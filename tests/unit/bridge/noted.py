"""Notes of a line as its checkpoint has them, without a checkpoint; and with one, for whoever reads the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from towline.bridge.config.model import CHECKPOINT
from towline.bridge.lines.account import SPARK_NOTE, LineNotes
from towline.checkpoint import Checkpoint
from towline.spark.sink_note import BatchTotals, SinkNote, Span


def up(spans: Mapping[str, tuple[Any, ...]], spark: Mapping[str, int] | None = None, /, **counts: int) -> LineNotes:
    """Of an uplink: all that no count tells of was acknowledged by Kafka."""
    made = {journal: Span(*span) for journal, span in spans.items()}
    messages = sum(span.end - span.start for span in made.values())
    others = ("filtered", "undecided", "unrouted", "skipped", "dropped", "left_out", "astray", "unwitnessed")
    given = messages - sum(counts.get(name, 0) for name in others)
    sent = given - sum(counts.get(name, 0) for name in ("dead_lettered", "lost", "unknown"))
    return LineNotes(BatchTotals(0, {"given": given, "acknowledged": sent, **counts}, made), spark or {})


def down(records: int, spark: Mapping[str, int] | None = None, /, **counts: int) -> LineNotes:
    """Of a downlink: what no count tells of went to the outbox."""
    dead = counts.get("unfit", 0)
    sent = records - dead - counts.get("filtered", 0) - counts.get("undecided", 0)
    letters = {"given": dead, "dead_lettered": dead}
    return LineNotes(BatchTotals(0, {"records": records, "sent": sent, **letters, **counts}), spark or {})


def commit(directory: Path, notes: LineNotes) -> None:
    """Write them into the checkpoint of a line, whose batch is done."""
    checkpoint = directory / CHECKPOINT
    (checkpoint / "commits").mkdir(parents=True, exist_ok=True)
    assert notes.totals is not None
    (checkpoint / "commits" / str(notes.totals.batch)).write_text("v1\n{}")
    SinkNote((notes.totals,)).write(Checkpoint(str(checkpoint)))
    if notes.spark_counts:
        spark = BatchTotals(notes.totals.batch, notes.spark_counts)
        SinkNote((spark,)).write(Checkpoint(str(checkpoint)), SPARK_NOTE)
