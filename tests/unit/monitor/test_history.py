"""History of a bridge: what is recorded while it runs, and what the page's charts get of it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import wait_until
from tests.unit.monitor.playing import PlayedBridge
from towline.bridge.runtime.state import STOPPED
from towline.monitor import history
from towline.monitor.history import (
    ACCOUNT,
    BROKER,
    COLUMNS,
    GATEWAY,
    KAFKA,
    QUERY,
    SPARK,
    FaultRecord,
    History,
    HistoryRecorder,
    faults_of,
    line_history,
)


@pytest.fixture
def played(tmp_path: Path) -> PlayedBridge:
    played = PlayedBridge(tmp_path, ["telemetry", "alarms"])
    played.step()
    return played


def bands(store: History, line: str = "telemetry") -> list[tuple[str, str, bool]]:
    """Part, text and whether it has ended, of each band."""
    faults = line_history(store, line, 0.0)["faults"]
    return [(fault["part"], fault["text"], fault["end"] is not None) for fault in faults]


def test_a_running_bridge_records_its_lines_and_its_faults(played: PlayedBridge) -> None:
    recorder = HistoryRecorder()
    recorder.start(played.state, played.bridge.state_dir)
    try:
        store = History(played.bridge.state_dir)
        wait_until(lambda: line_history(store, "telemetry", 0.0)["columns"]["t"], what="a sample")
        columns = line_history(store, "telemetry", 0.0)["columns"]
        assert [columns[name][0] for name in ("waiting", "batch")] == [10, 0.25]
        assert tuple(columns) == COLUMNS
        played.state.kafka, played.state.kafka_error = "unreachable", "kafka.example: no answer \x1b[2J"
        wait_until(lambda: bands(store), what="a fault")
        played.state.kafka = "reachable"
        wait_until(lambda: bands(store)[0][2], what="its end")
        assert bands(store) == [(KAFKA, "kafka.example: no answer \\x1b[2J", True)]
    finally:
        recorder.stop()
    assert (played.bridge.state_dir / "history.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("part", "change"),
    [
        (SPARK, {"spark": "starting again", "spark_restarts": 1}),
        (KAFKA, {"kafka": "unreachable"}),
        (GATEWAY, {"gateway_error": "it does not answer"}),
        (BROKER, {"status": {"state": "offline"}}),
        (QUERY, {"query": STOPPED}),
        (QUERY, {"query_error": "topic missing"}),
        (ACCOUNT, {"received": 50}),
    ],
)
def test_each_part_has_its_fault(played: PlayedBridge, part: str, change: dict[str, Any]) -> None:
    view = played.state.lines["telemetry"]
    assert faults_of(played.state) == {}
    for name, value in change.items():
        if name == "status":
            played.step(**value)
        elif name == "received":
            played.step(messages=0, waiting=0, end=50, received=50)
        else:
            setattr(view if hasattr(view, name) else played.state, name, value)
    assert {found for _, found in faults_of(played.state)} == {part}


def test_a_gateway_that_came_back_at_once_is_a_fault(played: PlayedBridge) -> None:
    """It was killed and restarted between two comparisons: its last answer begins the band."""
    record = FaultRecord(History(played.bridge.state_dir))
    record.compare({}, {"telemetry": (0, 1000.0)})
    record.compare({}, {"telemetry": (1, 1002.0)})
    record.compare({}, {"telemetry": (1, 1003.0)})
    (fault,) = line_history(record.history, "telemetry", 0.0)["faults"]
    assert (fault["part"], fault["start"]) == (GATEWAY, 1000.0)
    assert fault["end"] is not None
    assert bands(record.history, "alarms") == []


def test_a_bridge_that_was_killed_leaves_a_gap(tmp_path: Path) -> None:
    text = '{"t":100.0,"start":true}\n{"t":105.0,"lines":{"a":[1,1,0,0,null]}}\n'
    text += (
        '{"t":106.0,"fault":{"line":"a","part":"broker","text":"offline"}}\n{"t":110.0,"lines":{"a":[1,1,0,0,null]}}\n'
    )
    (tmp_path / "history.jsonl").write_text(text + '{"t":300.0,"start":true}\n{"t":301.0,"lin')
    faults = line_history(History(tmp_path), "a", 0.0)["faults"]
    assert [(fault["part"], fault["start"], fault["end"]) for fault in faults] == [
        ("broker", 106.0, 110.0),
        ("bridge", 110.0, 300.0),
    ]


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MAX_BYTES", 2000)
    store = History(tmp_path)
    for number in range(500):
        store.append(lines={"a": [number, 0, 0, 0, None]})
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert len(sizes) == 2
    assert all(size < 2200 for size in sizes)
    assert line_history(store, "a", 0.0)["columns"]["in"][-1] == 499


def test_an_hour_is_an_hour_and_many_points_are_thinned(tmp_path: Path) -> None:
    now = time.time()
    rows = "".join(f'{{"t":{now - 7200 + second},"lines":{{"a":[{second},0,0,0,null]}}}}\n' for second in range(7200))
    (tmp_path / "history.jsonl").write_text(rows)
    columns = line_history(History(tmp_path), "a", now - 3600, 2.4)["columns"]
    assert len(columns["t"]) == 1200
    assert now - 3601 <= min(columns["t"]) <= now - 3598
    assert columns["in"][-1] >= 7197


def test_a_clock_that_was_set_back_hides_nothing(tmp_path: Path) -> None:
    rows = "".join(f'{{"t":{at},"lines":{{"a":[1,0,0,0,null]}}}}\n' for at in (9000, 9005, 2000, 2005, 2010))
    (tmp_path / "history.jsonl").write_text(rows)
    assert line_history(History(tmp_path), "a", 0.0, 5.0)["columns"]["t"] == [2000, 2005, 2010, 9000, 9005]


def test_a_disk_that_is_full_stops_nothing(tmp_path: Path) -> None:
    store = History(tmp_path / "missing")
    store.append(start=True)
    assert line_history(store, "a", 0.0)["columns"]["t"] == []


@given(st.lists(st.sets(st.sampled_from([("", SPARK), ("a", GATEWAY), ("a", QUERY), ("b", QUERY)])), max_size=20))
def test_bands_of_a_part_never_overlap(
    tmp_path_factory: pytest.TempPathFactory, steps: list[set[tuple[str, str]]]
) -> None:
    record = FaultRecord(History(tmp_path_factory.mktemp("history")))
    for faults in steps:
        record.compare(dict.fromkeys(faults, "text"), {})
    faults = line_history(record.history, "a", 0.0)["faults"]
    for part in (SPARK, GATEWAY, QUERY):
        times = [(fault["start"], fault["end"]) for fault in faults if fault["part"] == part]
        assert all(end is not None and end <= start for (_, end), (start, _) in itertools.pairwise(times))
        key = ("" if part == SPARK else "a", part)
        assert any(end is None for _, end in times) == (bool(steps) and key in steps[-1])
