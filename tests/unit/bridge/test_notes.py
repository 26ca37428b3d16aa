"""The notes that an account is read from: where counting begins, what goes on in a new checkpoint, what Spark said."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.unit.bridge.noted import commit, committed, up
from tests.unit.bridge.test_config import GOOD, read
from tests.unit.bridge.test_downlink_file import GOOD as DOWN
from towline.bridge.config.model import CHECKPOINT
from towline.bridge.downlink.query import DownlinkQuery
from towline.bridge.lines.account import LineNotes, add_spark_counts, copy_totals, start_totals
from towline.bridge.uplink.query import UplinkQuery
from towline.checkpoint import Checkpoint
from towline.gateway.identity import JournalPosition
from towline.kafka.markers import NO_BATCH
from towline.spark.sink_note import BatchResult, BatchTotals, SinkNote, Span


def noted(checkpoint: Path, batch: int, **counts: int) -> None:
    """The sink notes a batch, and Spark commits it."""
    logs = Checkpoint(str(checkpoint))
    checkpoint.mkdir(parents=True, exist_ok=True)
    SinkNote.read(logs).with_batch(batch, BatchResult(Counter(counts))).write(logs)
    committed(checkpoint, batch)


@pytest.mark.parametrize("text", ["{", '{"totals":[{"batch":"x"}]}'])
def test_a_note_that_is_none_says_nothing(tmp_path: Path, text: str) -> None:
    for name in ("towline.totals", "towline.spark"):
        (tmp_path / name).write_text(text)
    assert LineNotes.read(tmp_path) == LineNotes()
    noted(tmp_path, 4, given=2)
    assert LineNotes.read(tmp_path).counts["given"] == 2


def test_a_new_checkpoint_goes_on_with_the_totals_of_the_one_before(tmp_path: Path) -> None:
    commit(tmp_path, up({"j": (0, 10)}, filtered=2))
    add_spark_counts(tmp_path / CHECKPOINT, 0, {"late": 1}, "dropped")
    new = tmp_path / "new"
    copy_totals(tmp_path / CHECKPOINT, new)
    notes = LineNotes.read(new)
    assert notes.totals is not None
    assert notes.totals == BatchTotals(NO_BATCH, notes.totals.counts, {"j": Span(0, 10)})
    assert (notes.counts["filtered"], notes.counts["spark.late"], notes.spark_counts) == (2, 1, {"late": 1})
    copy_totals(tmp_path / "nothing", tmp_path / "newer")
    assert not (tmp_path / "newer").exists()


@pytest.mark.parametrize(("gives_up", "gap"), [(True, "skipped"), (False, "unwitnessed")])
def test_what_a_new_checkpoint_does_not_read_is_counted_once(tmp_path: Path, gives_up: bool, gap: str) -> None:
    commit(tmp_path, up({"j": (0, 10)}))
    copy_totals(tmp_path / CHECKPOINT, tmp_path / "new")
    starts = [JournalPosition("g", "j", 14, "x"), JournalPosition("h", "k", 7)]
    for _ in range(2):  # it was started twice before it had a batch
        start_totals(tmp_path / "new", starts, drops=gives_up)
        notes = LineNotes.read(tmp_path / "new")
        assert notes.totals is not None
        assert notes.totals.spans == {"j": Span(0, 14), "k": Span(7, 7)}
        assert notes.counts[gap] == 4


def test_what_spark_says_of_a_batch_is_counted_once_and_beside_the_sinks_word(tmp_path: Path) -> None:
    for batch, rows in enumerate((5, 3)):
        noted(tmp_path, batch, given=rows)
    for batch in (0, 1, 1, 2, 0):
        add_spark_counts(tmp_path, batch, {"taken": 10}, "given")
    assert LineNotes.read(tmp_path).spark_counts == {"taken": 20, "given": 8}


DEDUPE = 'dedupe = { key = "{mqtt.topic}", within = "10 minutes" }\n'
STORES = [{"numRowsDroppedByWatermark": 1, "customMetrics": {"numDroppedDuplicateRows": 2}}]


@pytest.mark.parametrize(("line", "spark"), [(DEDUPE, {"deduplicated": 2, "late": 1, "dropped": 4}), ("", {})])
def test_of_an_uplink_spark_says_what_it_dropped(tmp_path: Path, line: str, spark: dict[str, int]) -> None:
    bridge = read(GOOD.replace('name = "telemetry"\n', 'name = "telemetry"\n' + line), tmp_path)
    query = UplinkQuery(bridge, bridge.uplinks[0])
    noted(query.line.checkpoint, 0, dropped=4)
    query.count_spark({"batchId": 0, "stateOperators": STORES})
    assert LineNotes.read(query.line.checkpoint).spark_counts == spark


@pytest.mark.parametrize(("rows", "spark"), [(11, {"taken": 11, "records": 9}), (8, {"taken": 8, "records": 9})])
def test_of_a_downlink_spark_says_what_it_took(tmp_path: Path, rows: int, spark: dict[str, int]) -> None:
    bridge = read(DOWN, tmp_path)
    query = DownlinkQuery(bridge, bridge.downlinks[0])
    noted(query.line.checkpoint, 0, records=9)
    query.count_spark({"batchId": 0, "observedMetrics": {}})
    query.count_spark({"batchId": 0, "observedMetrics": {"towline": {"rows": rows}}})
    assert LineNotes.read(query.line.checkpoint).spark_counts == spark
