"""[I11] The account of a downlink holds wherever a batch is killed: real writers, notes and account."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema

from tests.unit.bridge.noted import committed
from towline.bridge.downlink.sink import DownlinkResult, DownlinkWriter, LetterSink
from towline.bridge.lines.account import LineNotes, downlink_account
from towline.bridge.messages import DEAD_LETTER_SCHEMA
from towline.gateway.identity import JournalPosition
from towline.kafka.delivery import DeliveryResult
from towline.spark import kafka_sink
from towline.spark.kafka_sink import KafkaTaskResult
from towline.spark.sink import MqttTaskResult

STEPS = ("planned", "in the outbox", "noted", "committed")


@pytest.fixture(autouse=True)
def no_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_sink, "require_configured_topics", lambda _: None)


@dataclass
class ModelDownlink:
    """A line whose Spark, Kafka and gateway are not there, and whose writers, notes and account are."""

    directory: Path
    letters: bool = True
    batches: list[tuple[int, int, int]] = field(default_factory=list)
    accepted: int = 0
    brought: int = -1
    committed: int = -1

    @property
    def writer(self) -> DownlinkWriter:
        options = {"kafka.bootstrap.servers": "k:1", "deadLetterTopic": "dead", "guarantee": "at_least_once"}
        kafka = LetterSink(options).streamWriter(from_arrow_schema(DEAD_LETTER_SCHEMA), overwrite=False)
        kafka._checkpoint_location = str(self.directory)
        mqtt: Any = SimpleNamespace(commit=lambda *_: None)
        return DownlinkWriter("", mqtt, kafka if self.letters else None, str(self.directory))

    def run(self, rows: tuple[int, int, int], kill_after: str = "") -> None:
        """A batch of records to be delivered, to be filtered, and dead letters; what was begun before comes first."""
        batch = self.committed + 1
        if batch == len(self.batches):
            self.batches.append(rows)
        sent, filtered, dead = self.batches[batch]
        for step in STEPS:
            if step == "in the outbox" and self.brought < batch:
                self.accepted, self.brought = self.accepted + sent, batch
            elif step == "noted":
                counts = Counter(records=sent + filtered + dead, filtered=filtered, unfit=dead, sent=sent)
                letters = KafkaTaskResult(0, batch, "q", DeliveryResult(0, 0, dead_lettered=dead), dead)
                answer = DownlinkResult(
                    MqttTaskResult(0, batch, sent, already_stored=False, outbox_offset=JournalPosition("", "j", sent)),
                    letters,
                    counts,
                )
                self.writer.commit([answer], batch)
            elif step == "committed":
                committed(self.directory, batch)
                self.committed = batch
            if step == kill_after:
                return

    def sentence(self, **outbox: int) -> str:
        counts = {"accepted": self.accepted, "delivered": self.accepted, "expired": 0, "refused": 0}
        gateway = {"outbox": {**counts, "acknowledged": self.accepted, **outbox}}
        return downlink_account(LineNotes.read(self.directory), gateway).sentence()


ROWS = st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2))


@given(st.booleans(), st.lists(st.tuples(ROWS, st.sampled_from(["", *STEPS])), max_size=12))
def test_the_account_adds_up_after_a_kill_at_any_step(
    letters: bool, runs: list[tuple[tuple[int, int, int], str]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        line = ModelDownlink(Path(directory), letters)
        for rows, kill_after in runs:
            line.run(rows if letters else (*rows[:2], 0), kill_after)
            assert "adds up ✓" in line.sentence()
        while line.committed < len(line.batches) - 1:
            line.run((0, 0, 0))
        sent, filtered, dead = (sum(column) for column in zip((0, 0, 0), *line.batches, strict=True))
        parts = {"dead-lettered": dead, "filtered": filtered}
        more = "".join(f" + {name} {count}" for name, count in parts.items() if count)
        expected = f"taken {sent + filtered + dead} = delivered {sent}{more} + waiting 0   adds up ✓"
        assert line.sentence() == expected


def test_a_lost_note_leaves_the_counts_of_the_outbox(tmp_path: Path) -> None:
    line = ModelDownlink(tmp_path)
    line.run((5, 1, 2))
    (tmp_path / "towline.totals").unlink()
    assert line.sentence() == "taken 5 (5 of them uncounted) = delivered 5 + waiting 0   adds up ✓"
    line.run((3, 0, 1))
    assert line.sentence() == ("taken 9 (5 of them uncounted) = delivered 8 + dead-lettered 1 + waiting 0   adds up ✓")
