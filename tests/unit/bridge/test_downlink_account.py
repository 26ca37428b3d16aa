"""[I11] The account of a line to MQTT: it holds wherever a batch is killed, and fails for what is planted."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bridge.test_downlink_file import GOOD, read
from towline.bridge.downlink.account import DownlinkCounts
from towline.bridge.downlink.query import DownlinkQuery
from towline.checkpoint import Checkpoint
from towline.gateway.belonging import FILE, Remembered
from towline.spark import tally
from towline.spark.sink_note import SinkBatch

STEPS = ("planned", "in the outbox", "noted", "committed", "reported")


@dataclass
class ModelDownlink:
    """A line whose records, notes and reports are real, and whose Spark and gateway are not."""

    query: DownlinkQuery
    batches: list[tuple[int, int, int]] = field(default_factory=list)
    accepted: int = 0
    brought: int = -1
    committed: int = -1
    counts: DownlinkCounts = field(default_factory=DownlinkCounts)
    saved: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        path = Path(str(self.query.line.checkpoint))
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def run(self, rows: tuple[int, int, int], kill_after: str = "") -> None:
        """A batch of records to be delivered, to be filtered, and dead letters; what was begun before comes first."""
        batch = self.committed + 1
        if batch == len(self.batches):
            self.batches.append(rows)
        sent, filtered, dead = self.batches[batch]
        counts = {"kept": sum(self.batches[batch]), "filtered": filtered, "dead_lettered": dead}
        for step in STEPS:
            if step == "in the outbox" and self.brought < batch:
                self.accepted, self.brought = self.accepted + sent, batch
            elif step == "noted":
                before = Remembered.read(self.place)
                known = Remembered("j", self.accepted).after(before, batch, sent)
                if known != before:
                    known.keep(self.place)
                tally.given(Checkpoint(self.place), batch, dead, SinkBatch(dead, 0, dead), left_out=counts)
            elif step == "committed":
                self.committed = batch
            elif step == "reported":
                self.report(batch)
            if step == kill_after:
                self.counts = DownlinkCounts.from_json(self.saved)
                return

    def report(self, batch: int) -> None:
        progress = {
            "id": "q",
            "batchId": batch,
            "sources": [{"startOffset": {"t": {"0": 0}}, "endOffset": {"t": {"0": sum(self.batches[batch]) + 2}}}],
            "observedMetrics": {"towline": {"rows": sum(self.batches[batch])}},
        }
        self.counts = self.counts.add(json.loads(json.dumps(self.query.report(progress))))

    def save(self) -> None:
        self.saved = json.loads(json.dumps(self.counts.as_json()))

    def count_again(self) -> None:
        """What `recounted` brings, as far as it is asked for."""
        for batch in range(self.counts.batch + 1, self.committed + 1):
            self.report(batch)

    def sentence(self, **outbox: int) -> str:
        told = {"accepted": self.accepted, "delivered": self.accepted, "expired": 0, "refused": 0}
        return self.counts.account({"outbox": {**told, "acknowledged": self.accepted, **outbox}}).sentence()


def a_line(place: Path) -> ModelDownlink:
    bridge = read(GOOD, place)
    return ModelDownlink(DownlinkQuery(bridge, bridge.downlinks[0]))


ROWS = st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2))


@given(st.lists(st.tuples(ROWS, st.sampled_from(["", *STEPS]), st.booleans(), st.booleans()), max_size=12))
def test_whatever_is_killed_wherever_the_sum_holds(
    runs: list[tuple[tuple[int, int, int], str, bool, bool]],
) -> None:
    with tempfile.TemporaryDirectory() as place:
        line = a_line(Path(place))
        for rows, kill_after, save, again in runs:
            line.run(rows, kill_after)
            if save:
                line.save()
            if again and kill_after:
                line.count_again()
            assert "adds up ✓" in line.sentence(), line.counts


def runs(place: Path) -> ModelDownlink:
    line = a_line(place)
    line.run((5, 1, 2))
    line.run((3, 0, 1))
    assert "adds up ✓" in line.sentence()
    return line


def test_every_witness_speaks(tmp_path: Path) -> None:
    line = runs(tmp_path)
    assert line.sentence() == "taken 12 = delivered 8 + dead-lettered 3 + filtered 1 + waiting 0   adds up ✓"
    assert (line.counts.brought, line.counts.sink.sums.dead_lettered) == (8, 3)


def test_an_acknowledgement_that_is_missing_is_told(tmp_path: Path) -> None:
    text = runs(tmp_path).sentence(acknowledged=7)
    assert "✗ (the outbox says 8 delivered · the broker has acknowledged 7)" in text


def test_rows_that_the_outbox_does_not_have_are_told(tmp_path: Path) -> None:
    line = runs(tmp_path)
    file = Path(line.place) / FILE
    values = json.loads(file.read_text())
    values["brought"][-1][1] += 2
    file.write_text(json.dumps(values))
    line.run((4, 0, 0))
    assert "✗ (Spark says 12 messages went to the outbox · the sink says it has 14)" in line.sentence()


def test_dead_letters_that_kafka_does_not_have_are_told(tmp_path: Path) -> None:
    line = runs(tmp_path)
    file = Path(line.place) / "towline.rows"
    values = json.loads(file.read_text())
    values["sums"][-1][1][3] -= 1
    file.write_text(json.dumps(values))
    line.counts = DownlinkCounts()
    line.report(0)
    line.report(1)
    text = line.sentence()
    assert "Spark says 3 dead letters · the sink says 2" in text
    assert "Spark brought 3 dead letters and notices · the sink says 0 acknowledged by Kafka + 2 dead letters" in text


@pytest.mark.parametrize(("more", "told"), [("", "went to the outbox"), ('transform = "m:f"\n', "adds up ✓")])
def test_records_that_did_not_come_to_the_writer_are_told_but_for_a_transform(
    tmp_path: Path, more: str, told: str
) -> None:
    bridge = read(GOOD + more, tmp_path)
    line = ModelDownlink(DownlinkQuery(bridge, bridge.downlinks[0]))
    Remembered("j", 3).after(None, 0, 3).keep(line.place)
    tally.given(Checkpoint(line.place), 0, None, left_out={"kept": 3})
    progress = {"id": "q", "batchId": 0, "observedMetrics": {"towline": {"rows": 5}}}
    line.counts, line.accepted = line.counts.add(line.query.report(progress)), 3
    assert told in line.sentence()


def test_more_records_than_offsets_are_told(tmp_path: Path) -> None:
    line = a_line(tmp_path)
    line.batches = [(5, 0, 0)]
    source = {"startOffset": {"t": {"0": 10}}, "endOffset": {"t": {"0": 14}}}
    observed = {"towline": {"rows": 5, "kept": 5}}
    line.counts = line.counts.add(
        line.query.report({"id": "q", "batchId": 0, "sources": [source], "observedMetrics": observed})
    )
    assert "✗ (Kafka's offsets have room for 4 records · Spark took 5" in line.sentence(accepted=5, delivered=5)


@pytest.mark.parametrize("text", ['{"journal":"j","tip":8,"incarnation":"","since":"x"}', "{"])
def test_a_note_of_the_outbox_that_is_none_says_nothing(tmp_path: Path, text: str) -> None:
    line = runs(tmp_path)
    (Path(line.place) / FILE).write_text(text)
    line.report(1)
    assert "adds up ✓" in line.sentence()


def test_a_report_that_came_too_late_for_the_sinks_word_is_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = runs(tmp_path)
    with monkeypatch.context() as late:
        late.setattr(line.query, "_with_the_sink", lambda report: report)
        line.run((4, 0, 1))
    line.run((2, 0, 1))
    assert line.sentence() == "taken 20 = delivered 14 + dead-lettered 5 + filtered 1 + waiting 0   adds up ✓"
    assert line.counts.brought == 10


def test_a_note_without_rows_is_a_beginning(tmp_path: Path) -> None:
    line = a_line(tmp_path)
    line.batches, line.accepted, line.brought, line.committed = [(5, 0, 0)], 5, 0, 0
    Remembered("j", 5).keep(line.place)
    line.counts = line.counts.add({"query": "q", "batch": 0, "observed": {"rows": 5, "kept": 5}})
    line.run((3, 0, 0))
    assert line.sentence() == "taken 8 = delivered 8 + waiting 0   adds up ✓"
    assert line.counts.brought == 3
