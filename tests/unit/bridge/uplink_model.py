"""A line from MQTT to Kafka without Spark and Kafka: real sink, notes and account, and kills at each step."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pyspark.sql.types import StructType

from towline.bridge.config.model import Uplink
from towline.bridge.lines.account import LineAccount, LineNotes, copy_totals, start_totals, uplink_account
from towline.bridge.lines.identity import Identity
from towline.bridge.routes import routes_to_json
from towline.bridge.uplink.query import UplinkQuery
from towline.bridge.uplink.sink import RecordSink
from towline.checkpoint import SINK_TOTALS, Checkpoint
from towline.gateway.identity import JournalPosition
from towline.guarantee import policy
from towline.kafka.delivery import DeliveryResult
from towline.kafka.markers import ANY_QUERY, Marker, MarkerStep
from towline.spark.kafka_sink import KafkaTaskResult, StreamWriter

#: Where the processes of a line may be killed in a batch, in order.
STEPS: Final = (
    "planned",  # offsets/N is written
    "in Kafka",  # records, and their marker, are there
    "noted",  # the sink's note has the batch
    "committed",  # commits/N is written
    "told the gateway",  # its watermark has moved
)


@dataclass(frozen=True)
class Message:
    """A message that is to be ``sent``, ``filtered``, ``dead``, or ``lost`` by a sink that may."""

    fate: str = "sent"


@dataclass
class ModelLine:
    """A line and all that a kill does not take; `records` are counted by offset and fate."""

    query: UplinkQuery
    guarantee: str
    journal: list[Message] = field(default_factory=list)
    records: Counter[tuple[int, str]] = field(default_factory=Counter)
    committed: int = 0
    marker: Marker | None = None
    sink: int = 1
    generation: int = 1
    restarted: bool = True
    began: int = 0
    empty: int | None = None

    def __post_init__(self) -> None:
        Identity("telemetry", "s1").save(self.line.gateway.state_dir)

    # -- what there is on disk --

    @property
    def line(self) -> Uplink:
        return self.query.line

    @property
    def path(self) -> Path:
        return Path(str(self.line.checkpoint))

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(str(self.path))

    @property
    def name(self) -> str:
        return f"q{self.generation}"

    def _begin(self) -> None:
        start_totals(
            self.path, [JournalPosition("plant", "j", self.began)], drops=not policy(self.guarantee).replays_batches
        )
        for name in ("offsets", "commits"):
            (self.path / name).mkdir()
        (self.path / "metadata").write_text(json.dumps({"id": self.name}))
        self._known(self.name)

    def _known(self, query: str) -> None:
        position = JournalPosition("plant", "j", self.began)
        known = Identity("telemetry", f"s{self.sink}", self.generation, query, positions=(position,))
        known.save(self.line.gateway.state_dir)

    def _end_of(self, batch: int) -> int:
        if batch < 0:
            return self.began
        (offset,) = self.checkpoint.offsets(batch)
        return int(offset["gateways"]["plant"]["offset"])

    # -- what happens --

    def receive(self, messages: list[Message]) -> None:
        self.journal += messages

    def kill(self) -> None:
        """Bridge, driver and JVM, with -9."""
        self.restarted = True

    def forget_the_note(self) -> None:
        """A power failure took what was not synced."""
        (self.path / SINK_TOTALS).unlink(missing_ok=True)

    def reset(self) -> None:
        """``towline reset``: a new checkpoint and sink id behind the last batch that is done."""
        logs, serves = self.checkpoint, policy(self.guarantee).replays_batches
        last = logs.last_committed_batch() if serves else logs.last_planned_batch()
        self.began = max(self.committed, self._end_of(-1 if last is None else last))
        if not self.path.exists():
            return
        former = self.path.with_name(f"checkpoint.{self.generation}")
        shutil.move(self.path, former)
        copy_totals(former, self.path)
        self.generation, self.sink, self.marker = self.generation + 1, self.sink + 1, None
        self.restarted = True
        self._known("")

    def start(self) -> None:
        """Where a checkpoint begins is noted; at_most_once serves a batch that was begun before empty."""
        if not self.restarted:
            return
        self.restarted, self.empty = False, None
        if not self.checkpoint.query_id:
            self._begin()
        planned, done = self.checkpoint.last_planned_batch(), self.checkpoint.last_committed_batch()
        # The first `latestOffset` says so.
        self.committed = max(self.committed, self._end_of(-1 if done is None else done))
        if planned != done and not policy(self.guarantee).replays_batches:
            self.empty = planned

    def run(self, kill_after: str = "") -> bool:
        """One batch, as far as it comes; whether there was one."""
        self.start()
        planned, done = self.checkpoint.last_planned_batch(), self.checkpoint.last_committed_batch()
        again = planned is not None and planned != done
        if not again:
            start, end = self._end_of(-1 if planned is None else planned), len(self.journal)
            if start == end:
                return False
            planned = 0 if planned is None else planned + 1
            offset = {"gateways": {"plant": {"journal": "j", "offset": end}}, "tick": 0}
            (self.path / "offsets" / str(planned)).write_text(f"v1\n{{}}\n{json.dumps(offset)}")
        assert planned is not None
        steps = self._steps(planned, again=again)
        for step in STEPS:
            if step != "planned":
                next(steps)
            if step == kill_after:
                self.kill()
                return True
        return True

    def _steps(self, batch: int, *, again: bool) -> Any:
        start, end = self._end_of(batch - 1), self._end_of(batch)
        served = [*range(start, end)] if policy(self.guarantee).replays_batches or not again else []
        given = [n for n in served if self.journal[n].fate != "filtered"]
        written = self._deliver(batch, given)
        written.counts = {"filtered": len(served) - len(given)}
        yield
        self._writer().commit([written], batch)
        yield
        (self.path / "commits" / str(batch)).write_text("v1\n{}")
        yield
        self.committed = end
        yield

    def _writer(self) -> StreamWriter:
        letters = self.line.dead_letter_topic or ""
        options = {"kafka.bootstrap.servers": "k1:9092", "guarantee": self.guarantee, "sinkId": f"s{self.sink}"}
        options |= {"parallelism": "1"} if self.guarantee == "exactly_once" else {}
        own = {"routes": routes_to_json(self.line.routes), "letters": letters, "dedupes": "false"}
        own["empty"] = "" if self.empty is None else str(self.empty)
        sink = RecordSink(options | own).streamWriter(StructType([]), overwrite=False)
        sink._checkpoint_location = str(self.path)
        return sink

    def _deliver(self, batch: int, given: list[int]) -> KafkaTaskResult:
        """What the strategies of `towline.kafka` do."""
        if self.guarantee == "exactly_once" and self.marker is not None and self.marker.batch == batch:
            marker = self.marker
            found = Marker(0, 1, total_rows=marker.total_rows - marker.rows)
            dead = marker.total_dead_lettered - marker.dead_lettered
            step: MarkerStep | None = MarkerStep(found.totals._replace(dead_lettered=dead), marker.totals)
            rows = marker.rows - marker.dead_lettered
            done = DeliveryResult(rows, 0, dead_lettered=marker.dead_lettered, was_skipped=True, marker_step=step)
            return KafkaTaskResult(0, batch, self.name, done, len(given))
        fates = {n: self._fate(n) for n in given}
        self.records.update((n, fate) for n, fate in fates.items() if fate != "lost")
        sent, dead, lost = (sum(fate == one for fate in fates.values()) for one in ("sent", "dead", "lost"))
        step = self._mark(batch, sent + dead, dead) if self.guarantee == "exactly_once" else None
        done = DeliveryResult(sent, 0, lost, "Kafka is away" if lost else "", dead, marker_step=step)
        return KafkaTaskResult(0, batch, self.name, done, len(given))

    def _fate(self, offset: int) -> str:
        """Only at_most_once loses, and only a line with a topic for them has dead letters."""
        fate = self.journal[offset].fate
        possible = fate != "lost" or self.guarantee == "at_most_once"
        possible = possible and (fate != "dead" or self.line.dead_letter_topic is not None)
        return fate if possible else "sent"

    def _mark(self, batch: int, rows: int, dead: int) -> MarkerStep:
        before, marker = self.marker, Marker(batch, 1, rows, writer=self.name, dead_lettered=dead)
        marker = Marker(**{**marker.__dict__, "total_rows": rows, "total_dead_lettered": dead})
        self.marker = marker if before is None else marker.with_totals_after(before)
        found = None if before is None or before.writer == ANY_QUERY else before.totals
        return MarkerStep(found, self.marker.totals)

    # -- what is said --

    @property
    def account(self) -> LineAccount:
        end = len(self.journal)
        status = {"journal": "j", "received": end, "end": end, "committed": self.committed}
        return uplink_account(LineNotes.read(self.path), status)
