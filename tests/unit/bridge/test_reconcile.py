"""What Kafka says against what the line says: equal, one batch ahead, or told."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bridge.test_config import GOOD, read
from tests.unit.cli.test_main import ran
from towline.bridge.config.model import Bridge
from towline.bridge.lines.identity import Identity
from towline.bridge.runtime.reconciling import compare_markers, reconcile
from towline.bridge.runtime.status import collect_status, exit_code, render
from towline.checkpoint import Checkpoint
from towline.errors import KafkaError
from towline.kafka.markers import Marker, MarkerStep, MarkerTotals
from towline.kafka.markerstore import MarkerStore
from towline.spark.sink_note import BatchResult, BatchTotals, SinkNote

NOTED = BatchTotals(4, {"acknowledged": 18, "dead_lettered": 2}, marks=MarkerTotals(20, 2), sink="s/2")
MARKERS = {
    0: Marker(4, 2, 3, writer="q", total_rows=12, total_dead_lettered=2),
    1: Marker(4, 2, 1, writer="q", total_rows=8),
}
EQUAL = {"rows": 20, "noted_rows": 20, "dead_lettered": 2, "noted_dead_lettered": 2, "agrees": True, "why": ""}


@given(st.integers(0, 9), st.integers(0, 3), st.sets(st.sampled_from([0, 1])))
def test_a_kill_between_kafka_and_the_note_is_no_disagreement(rows: int, dead: int, ahead: set[int]) -> None:
    markers = {
        part: Marker(5, 2, rows, writer="q", dead_lettered=dead).with_totals_after(marker) if part in ahead else marker
        for part, marker in MARKERS.items()
    }
    assert compare_markers(NOTED, dict(markers), "s/2") == EQUAL


@pytest.mark.parametrize(
    ("marker", "why"),
    [
        (replace(MARKERS[0], total_rows=13), "the markers say 21 rows, the sink has 20"),
        (replace(MARKERS[0], total_dead_lettered=1), "the markers say 1 dead letters, the sink has 2"),
        (replace(MARKERS[0], batch=3), "a marker is of batch 3, the sink has batch 4"),
        (replace(MARKERS[0], batch=6), "a marker is of batch 6, the sink has batch 4"),
        (None, "1 of 2 markers are missing"),
    ],
)
def test_other_markers_are_told(marker: Marker | None, why: str) -> None:
    found = compare_markers(NOTED, {**MARKERS, 0: marker}, "s/2")
    assert (found["agrees"], found["why"]) == (False, f"{why}   [TL-K62]")


@pytest.mark.parametrize(
    ("noted", "markers"),
    [
        (None, {}),
        (replace(NOTED, marks=None), MARKERS),
        (replace(NOTED, sink="other/2"), MARKERS),
        (NOTED, {**MARKERS, 1: Marker(4, 2)}),  # a person has set it
    ],
)
def test_what_can_not_be_compared_is_no_disagreement(noted: BatchTotals | None, markers: dict[int, Marker]) -> None:
    assert compare_markers(noted, dict(markers), "s/2")["agrees"] is None


@pytest.mark.parametrize(("committed", "agrees"), [(900, None), (1_000, False)])
def test_a_journal_ahead_of_its_checkpoint_is_told(tmp_path: Path, committed: int, agrees: bool | None) -> None:
    """Behind it is none: the gateway hears of a batch with the next one."""
    bridge = read(GOOD, tmp_path)
    place = '{"gateways": {"g": {"journal": "j", "offset": 900}}, "tick": 0}'
    for log, content in (("offsets", place), ("commits", "{}")):
        (bridge.uplinks[0].checkpoint / log).mkdir(parents=True)
        (bridge.uplinks[0].checkpoint / log / "0").write_text(f"v1\n{{}}\n{content}")
    status = collect_status(bridge.state_dir, ["telemetry"])
    status["lines"]["telemetry"]["gateway"] = {"consumers": {"bridge": committed}}
    reconcile(bridge, status)
    said = "journal says 1,000 committed · the checkpoint's last batch ends at 900   [TL-K61]"
    markers = status["lines"]["telemetry"]["markers"]
    assert markers == {"agrees": agrees, "why": said if agrees is False else "the line has none"}
    assert exit_code(status) == (1 if agrees is False else 3)


@pytest.fixture
def begun(tmp_path: Path) -> Bridge:
    own = 'name = "telemetry"\nguarantee = "exactly_once"\ndead_letter_topic = "dead"\n'
    bridge = read(GOOD.replace('name = "telemetry"\n', own), tmp_path)
    Identity("telemetry", "s", query="q").save(bridge.uplinks[0].gateway.state_dir)
    return bridge


def test_a_line_is_held_against_its_markers(begun: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = begun.uplinks
    line.checkpoint.mkdir(parents=True)
    step = MarkerStep(None, MarkerTotals(20, 2))
    result = BatchResult(Counter(given=20, acknowledged=18, dead_lettered=2), step, "s/1")
    SinkNote().with_batch(4, result).write(Checkpoint(str(line.checkpoint)))
    marker = Marker(4, 1, 20, writer="q", dead_lettered=2, total_rows=20, total_dead_lettered=2)
    asked: list[str] = []

    def read_markers(store: MarkerStore) -> dict[int, Marker | None]:
        asked.append(store.topic)
        return {0: marker}

    monkeypatch.setattr(MarkerStore, "read_markers", read_markers)
    status = collect_status(begun.state_dir, ["telemetry"])
    reconcile(begun, status)
    assert (asked, status["lines"]["telemetry"]["markers"]) == (["towline.s.markers"], EQUAL)
    row = "  markers   rows 20   dead letters 2   "
    assert f"{row}equal to the sink's ✓\n" in render(status)
    status["lines"]["telemetry"]["markers"] |= {"agrees": False, "why": "a marker is gone"}
    assert f"{row}✗: a marker is gone\n" in render(status)


def test_a_kafka_that_is_away_is_one_line(
    begun: Bridge, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> Any:
        raise KafkaError("TL-K01", "k1:9092", "no answer", "Is it there?")

    monkeypatch.setattr(MarkerStore, "read_markers", away)
    code, out, err = ran(capsys, "status", "--reconcile", "--json", str(begun.file))
    assert (code, err) == (3, "k1:9092: no answer. Is it there?   [TL-K01]\n")
    assert "markers" not in json.loads(out)["lines"]["telemetry"]
    code, out, err = ran(capsys, "status", "--reconcile", "--state-dir", str(begun.state_dir))
    assert (code, out, "[TL-C149]" in err) == (2, "", True)
