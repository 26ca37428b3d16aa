"""[I11] Whatever is killed wherever, the account adds up."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.config.model import Uplink
from towline.bridge.lines.account import LineAccount, LineNotes, copy_totals, start_totals, uplink_account
from towline.bridge.lines.identity import Identity
from towline.bridge.routes import routes_to_json
from towline.bridge.uplink.query import UplinkQuery
from towline.bridge.uplink.sink import RecordSink
from towline.checkpoint import SINK_TOTALS, Checkpoint
from towline.gateway.identity import JournalPosition
from towline.guarantee import Guarantee, policy
from towline.kafka.delivery import BatchOrigin, DeliveryResult
from towline.kafka.markers import Marker, MarkerStep
from towline.spark import kafka_sink
from towline.spark.kafka_sink import KafkaTaskResult, StreamWriter

#: Where the processes of a line may be killed in a batch, in order.
STEPS: Final = (
    "planned",  # offsets/N is written
    "in Kafka",  # records, and their marker, are there
    "noted",  # the sink's note has the batch
    "committed",  # commits/N is written
    "told the gateway",  # its watermark has moved
)


@dataclass
class ModelLine:
    """A line without MQTT, Spark and Kafka: real sink, notes and account, and kills at each step.

    Attributes:
        journal: What is to become of each message: ``sent``, ``filtered``, ``dead``, or ``lost`` by a sink that may.
        records: Counted by offset and fate.
    """

    query: UplinkQuery
    guarantee: str
    journal: list[str] = field(default_factory=list)
    records: Counter[tuple[int, str]] = field(default_factory=Counter)
    committed: int = 0
    marker: Marker | None = None
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
        known = Identity("telemetry", f"s{self.generation}", self.generation, query, positions=(position,))
        known.save(self.line.gateway.state_dir)

    def _end_of(self, batch: int) -> int:
        if batch < 0:
            return self.began
        (offset,) = self.checkpoint.offsets(batch)
        return int(offset["gateways"]["plant"]["offset"])

    # -- what happens --

    def receive(self, messages: list[str]) -> None:
        self.journal += messages

    def lose_power(self) -> None:
        """What was not synced is gone."""
        self.restarted = True
        (self.path / SINK_TOTALS).unlink(missing_ok=True)

    def reset(self) -> None:
        """``towline reset``: a new checkpoint and sink id behind the last batch that is done."""
        self.restarted = True
        logs, serves = self.checkpoint, policy(self.guarantee).replays_batches
        last = logs.last_committed_batch() if serves else logs.last_planned_batch()
        self.began = max(self.committed, self._end_of(-1 if last is None else last))
        if not self.path.exists():
            return
        former = self.path.with_name(f"checkpoint.{self.generation}")
        shutil.move(self.path, former)
        copy_totals(former, self.path)
        self.generation, self.marker = self.generation + 1, None
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
            if step == kill_after:  # bridge, driver and JVM, with -9
                self.restarted = True
                return True
        return True

    def _steps(self, batch: int, *, again: bool) -> Any:
        start, end = self._end_of(batch - 1), self._end_of(batch)
        served = [*range(start, end)] if policy(self.guarantee).replays_batches or not again else []
        given = [n for n in served if self.journal[n] != "filtered"]
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
        options = {"kafka.bootstrap.servers": "k1:9092", "guarantee": self.guarantee, "sinkId": f"s{self.generation}"}
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
        fate = self.journal[offset]
        possible = fate != "lost" or self.guarantee == "at_most_once"
        possible = possible and (fate != "dead" or self.line.dead_letter_topic is not None)
        return fate if possible else "sent"

    def _mark(self, batch: int, rows: int, dead: int) -> MarkerStep:
        before, marker = self.marker, Marker(batch, 1, rows, writer=self.name, dead_lettered=dead)
        marker = Marker(**{**marker.__dict__, "total_rows": rows, "total_dead_lettered": dead})
        self.marker = marker if before is None else marker.with_totals_after(before)
        found = None if before is None else before.totals
        return MarkerStep(found, self.marker.totals)

    # -- what is said --

    @property
    def account(self) -> LineAccount:
        end = len(self.journal)
        status = {"journal": "j", "received": end, "end": end, "committed": self.committed}
        return uplink_account(LineNotes.read(self.path), status)


MESSAGES = st.sampled_from(("sent", "sent", "filtered", "dead", "lost"))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("receive"), st.lists(MESSAGES, min_size=1, max_size=6)),
        st.tuples(st.just("run"), st.sampled_from(["", *STEPS])),
        st.sampled_from([("run",), ("lose_power",), ("reset",)]),
    ),
    max_size=14,
)


@pytest.fixture(autouse=True)
def no_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_sink, "require_configured_topics", lambda _: None)
    monkeypatch.setattr(kafka_sink, "batch_origin", lambda *_: BatchOrigin())
    for name in ("fsync", "fdatasync"):  # no power fails here
        monkeypatch.setattr(os, name, lambda _: None)


def a_line(place: Path, guarantee: str, *, letters: bool) -> ModelLine:
    own = f'name = "telemetry"\nguarantee = "{guarantee}"\n' + ('dead_letter_topic = "dead"\n' if letters else "")
    route = "where = \"topic <> 'none'\"\n"
    bridge = read(GOOD.replace('name = "telemetry"\n', own) + route, place)
    return ModelLine(UplinkQuery(bridge, bridge.uplinks[0]), guarantee)


def check(line: ModelLine) -> None:
    """The sum is whole and holds."""
    account = line.account
    assert account.adds_up, account.sentence()
    assert sum(account.counts.values()) - account.received == account.received == len(line.journal)
    assert min(account.counts.values()) >= 0, account.sentence()


@pytest.mark.parametrize("guarantee", [one.value for one in Guarantee])
@given(operations=OPERATIONS, letters=st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_killed_wherever_the_sum_holds(
    guarantee: str, letters: bool, operations: list[tuple[Any, ...]]
) -> None:
    """What Kafka has is what it says, each message once, however often at_least_once writes it."""
    with tempfile.TemporaryDirectory() as place:
        line = a_line(Path(place), guarantee, letters=letters)
        for operation, *arguments in operations:
            getattr(line, operation)(*arguments)
            check(line)
        while line.run():
            check(line)
        line.start()
        check(line)
        account = line.account
        assert account.counts["waiting"] == 0
        if guarantee != "at_most_once" and letters and ("lose_power",) not in operations:
            sent, dead = ({n for n, fate in line.records if fate == one} for one in ("sent", "dead"))
            filtered = line.journal.count("filtered")
            assert (account.counts["in_kafka"], account.counts["dead_lettered"]) == (len(sent), len(dead))
            assert (account.counts["filtered"], account.counts["left_out"]) == (filtered, 0)
            assert account.more["not_witnessed"] == 0


#: What may be gone, or be done, after a kill.
AFTER: list[list[tuple[str]]] = [[], [("lose_power",)], [("reset",)]]


@pytest.mark.parametrize("guarantee", [one.value for one in Guarantee])
def test_each_crash_point_and_what_may_be_gone_after_it(guarantee: str, tmp_path: Path) -> None:
    """Enumerated: two batches, a kill at each step of the second, what is lost with it, and another kill."""
    mixed = ["sent", "sent", "filtered", "dead", "lost"]
    for number, (first, after, second) in enumerate(product(STEPS, AFTER, ("", "in Kafka"))):
        place = tmp_path / str(number)
        place.mkdir()
        line = a_line(place, guarantee, letters=True)
        operations: list[tuple[Any, ...]] = [("receive", mixed), ("run",), ("receive", mixed), ("run", first), *after]
        operations += [("receive", mixed), ("run", second), ("run",), ("run",)]
        for operation, *arguments in operations:
            getattr(line, operation)(*arguments)
            check(line)
        assert line.account.counts["waiting"] == 0
