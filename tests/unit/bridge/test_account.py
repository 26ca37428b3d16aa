"""The account of what is noted adds up, and so it is shown."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bridge.noted import commit, up
from towline.bridge.lines.account import LineNotes, uplink_account
from towline.bridge.runtime.screen import line_state, line_summary
from towline.bridge.runtime.state import BridgeState, LineView, read_notes
from towline.checkpoint import SINK_TOTALS


def status(received: int, end: int, committed: int, **more: Any) -> dict[str, Any]:
    return {"journal": "j", "received": received, "end": end, "committed": committed, "state": "online", **more}


def account(spans: tuple[int, int], told: dict[str, Any], spark: dict[str, int] | None = None, **counts: int) -> str:
    return uplink_account(up({"j": spans}, spark, **counts), told).sentence()


def test_every_way_out_is_in_the_sum() -> None:
    ways = {"filtered": 1, "dead_lettered": 2, "undecided": 3, "unrouted": 4, "skipped": 5, "lost": 6, "left_out": 7}
    told, spark = status(115, 110, 100, deduplicated=4), {"deduplicated": 30, "dropped": 30}
    assert account((0, 100), told, spark, dropped=30, **ways) == (
        "received 115 = in Kafka 42 + filtered 1 + where is null 3 + unrouted 4 + dropped 5 + lost 6 + dead-lettered 2"
        " + deduplicated 34 + unexplained 7 + arriving 1 + waiting 10   adds up ✓"
    )
    assert 115 == 42 + 1 + 3 + 4 + 5 + 6 + 2 + 34 + 7 + 1 + 10


@pytest.mark.parametrize(
    ("spark", "told"),
    [
        ({"deduplicated": 3, "dropped": 5}, "2 rows did not reach the sink, for no reason that the line has)"),
        ({"deduplicated": 6, "dropped": 5}, "the sink was given 1 rows more than the journal has committed)"),
        ({"late": 5, "dropped": 5}, "5 rows were lost: Spark took them for late. That should not happen"),
    ],
)
def test_rows_that_spark_has_not_dropped_and_the_sink_has_not_got_are_told(spark: dict[str, int], told: str) -> None:
    assert f"does not add up ✗ ({told}" in account((0, 10), status(10, 10, 10), spark, dropped=5)


@pytest.mark.parametrize(
    ("notes", "told", "text"),
    [
        (  # of batches that nobody heard of
            up({"j": (0, 10)}, {"deduplicated": 3, "dropped": 3}, dropped=5),
            status(10, 10, 10),
            "received 10 = in Kafka 5 + deduplicated 3 + unexplained 2 + waiting 0",
        ),
        (LineNotes(), status(12, 12, 10), "received 12 = in Kafka 10 (10 of them unconfirmed) + waiting 2"),
        (up({"j": (0, 10)}), status(15, 15, 14), "received 15 = in Kafka 10 + waiting 5 (4 of them committed)"),
        (  # of a journal that has gone
            up({"j": (0, 10), "k": (0, 3)}),
            status(4, 4, 3, journal="k"),
            "received 14 = in Kafka 13 + waiting 1",
        ),
    ],
)
def test_what_one_source_alone_has_is_named_so(notes: LineNotes, told: dict[str, Any], text: str) -> None:
    assert uplink_account(notes, told).sentence() == f"{text}   adds up ✓"


def test_rates_and_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    view = LineView("l")
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    for second in range(11):
        monkeypatch.setattr(time, "monotonic", lambda now=float(second): now)
        view.update_status(status(second * 10, second * 10, max(0, second * 10 - 30), oldest=997.0), LineNotes())
        assert view.lag_s() == (3.0 if second else 0.0)
    assert view.rates() == (10.0, 10.0)
    view.status = status(100, 100, 100, oldest=997.0)
    assert view.lag_s() == 0.0, "nothing waits"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "running"),
        ({"gateway_error": "x"}, "no gateway"),
        ({"status": {}}, "starting"),
        ({"status": status(0, 0, 0, state="offline")}, "broker offline"),
        ({"status": status(0, 0, 0, held_back="journal full")}, "throttled: journal full"),
        ({"notes": up({"j": (0, 10)}), "status": status(9, 9, 9)}, "does not add up ✗"),
        ({"query": "waiting to retry"}, "receiving, query waiting to retry"),
        ({"query": "paused"}, "paused"),
    ],
)
def test_the_state_is_the_worst_news(change: dict[str, Any], word: str) -> None:
    view = LineView("l", **{"query": "running", "status": status(0, 0, 0), "notes": LineNotes(), **change})
    assert line_state(view, "running") == word
    assert word in line_summary(view, "running")


def test_a_batch_that_is_newer_than_the_gateways_answer_is_no_disagreement(tmp_path: Path) -> None:
    """Under load the next batch ends in front of the answer: its messages are beyond the journal's known end."""
    view = LineView("l", directory=tmp_path)
    commit(tmp_path, up({"j": (0, 10)}))
    notes = read_notes(tmp_path)
    commit(tmp_path, up({"j": (0, 15)}))
    view.update_status(status(10, 10, 10), notes)
    assert view.account is not None
    assert view.account.adds_up
    view.update_status(status(12, 12, 12), read_notes(tmp_path))
    assert view.account.disagreements == ["12 were received · the parts are 15"]
    (tmp_path / "checkpoint" / SINK_TOTALS).unlink()
    (tmp_path / "checkpoint" / SINK_TOTALS).mkdir()
    view.update_status(status(10, 10, 10), read_notes(tmp_path))
    assert view.account is None, "notes that can't be read"


def test_the_next_start_knows_the_last_answer_if_it_is_of_this_line(tmp_path: Path) -> None:
    state = BridgeState("b", tmp_path, {"l": "up"})
    state.lines["l"].update_status(status(10, 10, 10), up({"j": (0, 10)}))
    state.save()
    assert (tmp_path / "bridge.json").stat().st_mode & 0o777 == 0o600
    assert BridgeState("b", tmp_path, {"l": "up"}).lines["l"].previous_status == status(10, 10, 10)
    assert BridgeState("b", tmp_path, {"l": "down"}).lines["l"].previous_status == {}, "of another line"
