"""Batches and notes of a line as its checkpoint has them, without a checkpoint; and with one, for whoever reads it."""

from __future__ import annotations

import json
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


def planned(checkpoint: Path, batch: int, offsets: Mapping[str, Any], *, done: bool = True, query: str = "q") -> None:
    """A batch as Spark writes it down."""
    (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
    (checkpoint / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{json.dumps(offsets)}")
    (checkpoint / "metadata").write_text(json.dumps({"id": query}))
    if done:
        committed(checkpoint, batch)


def committed(checkpoint: Path, batch: int) -> None:
    (checkpoint / "commits").mkdir(parents=True, exist_ok=True)
    (checkpoint / "commits" / str(batch)).write_text("v1\n{}")


def journals(**ends: Mapping[str, Any]) -> dict[str, Any]:
    """Offsets of an uplink: how far each gateway was read."""
    return {"gateways": ends, "tick": 0}


def commit(directory: Path, notes: LineNotes) -> None:
    """Write them into the checkpoint of a line, whose batch is done."""
    checkpoint = directory / CHECKPOINT
    assert notes.totals is not None
    committed(checkpoint, notes.totals.batch)
    SinkNote((notes.totals,)).write(Checkpoint(str(checkpoint)))
    if notes.spark_counts:
        spark = BatchTotals(notes.totals.batch, notes.spark_counts)
        SinkNote((spark,)).write(Checkpoint(str(checkpoint)), SPARK_NOTE)
