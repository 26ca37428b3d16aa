"""The account of what is noted adds up, and so it is shown."""

from __future__ import annotations

import io
import random
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.bridge.noted import commit, up
from towline.bridge.lines.account import LineNotes, uplink_account
from towline.bridge.runtime.screen import LiveScreen, PlainScreen, line_state, line_summary, make_screen
from towline.bridge.runtime.state import BridgeState, LineView, read_notes, read_state
from towline.checkpoint import SINK_TOTALS
from towline.timing import Backoff


def status(received: int, end: int, committed: int, **more: Any) -> dict[str, Any]:
    return {"journal": "j", "received": received, "end": end, "committed": committed, "state": "online", **more}


def account(spans: tuple[Any, ...], told: dict[str, Any], spark: dict[str, int] | None = None, **counts: int) -> str:
    return uplink_account(up({"j": spans}, spark, **counts), told).sentence()


def test_every_way_out_is_in_the_sum() -> None:
    ways = {"filtered": 1, "dead_lettered": 2, "undecided": 3, "unrouted": 4, "skipped": 5, "lost": 6, "left_out": 7}
    text = account(
        (0, 100), status(115, 110, 100, deduplicated=4), {"deduplicated": 30, "dropped": 30}, dropped=30, **ways
    )
    assert text == (
        "received 115 = in Kafka 42 + filtered 1 + where is null 3 + unrouted 4 + dropped 5 + lost 6 + dead-lettered 2"
        " + deduplicated 34 + unexplained 7 + arriving 1 + waiting 10   adds up ✓"
    )
    assert 115 == 42 + 1 + 3 + 4 + 5 + 6 + 2 + 34 + 7 + 1 + 10


def test_rows_that_the_state_store_dropped_as_late_are_told() -> None:
    text = account((0, 10), status(10, 10, 10), {"late": 3, "dropped": 3}, dropped=3)
    assert "does not add up ✗ (3 rows were lost: Spark took them for late" in text


@pytest.mark.parametrize(
    ("spark", "told"),
    [
        ({"deduplicated": 3, "dropped": 5}, "2 rows did not reach the sink, for no reason that the line has"),
        ({"deduplicated": 6, "dropped": 5}, "the sink was given 1 rows more than the journal has committed"),
    ],
)
def test_rows_that_spark_has_not_dropped_and_the_sink_has_not_got_are_told(spark: dict[str, int], told: str) -> None:
    assert f"does not add up ✗ ({told}" in account((0, 10), status(10, 10, 10), spark, dropped=5)


def test_what_spark_dropped_of_batches_that_nobody_heard_of_is_left_out() -> None:
    text = account((0, 10), status(10, 10, 10), {"deduplicated": 3, "dropped": 3}, dropped=5)
    assert text == "received 10 = in Kafka 5 + deduplicated 3 + unexplained 2 + waiting 0   adds up ✓"


def test_what_was_carried_before_the_totals_is_not_witnessed() -> None:
    assert account((4, 10), status(12, 12, 10)) == (
        "received 12 = in Kafka 10 (4 of them unconfirmed) + waiting 2   adds up ✓"
    )
    nothing = uplink_account(LineNotes(), status(12, 12, 10)).sentence()
    assert nothing == "received 12 = in Kafka 10 (10 of them unconfirmed) + waiting 2   adds up ✓"


def test_what_the_gateway_calls_committed_and_no_note_tells_of_waits() -> None:
    assert account((0, 10), status(15, 15, 14)) == (
        "received 15 = in Kafka 10 + waiting 5 (4 of them committed)   adds up ✓"
    )


def test_what_was_carried_of_a_journal_that_has_gone_stays() -> None:
    told = uplink_account(up({"j": (0, 10), "k": (0, 3)}), status(4, 4, 3, journal="k"))
    assert told.sentence() == "received 14 = in Kafka 13 + waiting 1   adds up ✓"


def test_rates_and_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    view = LineView("l", notes=LineNotes())
    monkeypatch.setattr("towline.bridge.runtime.state.time.time", lambda: 1000.0)
    for second in range(11):
        view.status = status(second * 10, second * 10, max(0, second * 10 - 30), oldest=997.0)
        view.sample_rates(float(second))
    assert view.rates() == (10.0, 10.0)
    assert view.lag_s() == 3.0
    view.status = status(100, 100, 100, oldest=None)
    assert view.lag_s() == 0.0


def test_the_lag_is_true_from_the_first_line() -> None:
    """100 messages that came an hour ago waited at the start, and it said 0.0 s."""
    view = LineView("l", status=status(100, 100, 0, oldest=time.time() - 3600), notes=LineNotes())
    assert 3600 <= view.lag_s() < 3700
    assert "lag 3,60" in line_summary(view, "starting")


def test_the_state_says_what_is_noted(tmp_path: Path) -> None:
    state = BridgeState("b", tmp_path, {"l": "up"})
    commit(tmp_path / "l", up({"j": (0, 10)}))
    state.lines["l"].update_status(status(10, 10, 10), read_notes(tmp_path / "l"))
    state.add_event("hello")
    state.save()
    assert state.take_events() == ["hello"]
    assert state.take_events() == []
    assert (tmp_path / "bridge.json").stat().st_mode & 0o777 == 0o600
    assert BridgeState("b", tmp_path, {"l": "up"}).lines["l"].previous_status == status(10, 10, 10)
    assert BridgeState("b", tmp_path, {"l": "down"}).lines["l"].previous_status == {}, "of another line"
    told = state.lines["l"].account
    assert told is not None
    assert told.sentence() == "received 10 = in Kafka 10 + waiting 0   adds up ✓"
    (tmp_path / "bridge.json").write_text("[]")
    assert read_state(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "running"),
        ({"gateway_error": "x"}, "no gateway"),
        ({"status": {}}, "starting"),
        ({"status": status(0, 0, 0, state="offline")}, "broker offline"),
        ({"status": status(0, 0, 0, held_back="journal full")}, "throttled: journal full"),
        ({"query": "waiting to retry"}, "receiving, query waiting to retry"),
    ],
)
def test_the_state_is_the_worst_news(change: dict[str, Any], word: str) -> None:
    view = LineView("l", query="running", status=status(0, 0, 0), notes=LineNotes())
    for name, value in change.items():
        setattr(view, name, value)
    assert line_state(view, "running") == word
    assert word in line_summary(view, "running")


def test_a_batch_that_is_newer_than_the_gateways_answer_is_no_disagreement(tmp_path: Path) -> None:
    """Under load the next batch ends in front of the answer: its messages are beyond the journal's known end."""
    view = LineView("l", query="running", directory=tmp_path)
    commit(tmp_path, up({"j": (0, 10)}))
    notes = read_notes(tmp_path)
    commit(tmp_path, up({"j": (0, 15)}))
    view.update_status(status(10, 10, 10), notes)
    assert view.account is not None
    assert view.account.adds_up
    view.update_status(status(12, 12, 12), read_notes(tmp_path))
    assert "Spark committed up to 15, the journal ends at 12" in view.account.disagreement_text


def test_an_account_whose_notes_can_not_be_read_is_not_known(tmp_path: Path) -> None:
    view = LineView("l", query="running", directory=tmp_path)
    (tmp_path / "checkpoint" / SINK_TOTALS).mkdir(parents=True)
    view.update_status(status(10, 10, 10), read_notes(tmp_path))
    assert view.account is None


def test_new_dead_letters_are_told_of_since_the_answer_before(tmp_path: Path) -> None:
    view = LineView("l", query="running", directory=tmp_path)
    heard = []
    for letters in (3, 5, 5):
        commit(tmp_path, up({"j": (0, 10)}, dead_lettered=letters))
        heard.append(view.update_status(status(10, 10, 10), read_notes(tmp_path)))
    assert heard == [0, 2, 0]


def test_a_screen_says_that_an_account_does_not_add_up() -> None:
    view = LineView("l", query="running", status=status(10, 10, 10), notes=up({"j": (0, 10)}, filtered=2))
    assert line_state(view, "running") == "running"
    assert "received 10 = in Kafka 8 + filtered 2 + waiting 0" in line_summary(view, "running")
    view.notes = up({"j": (0, 10)}, acknowledged=11)
    assert line_state(view, "running") == "does not add up ✗, see towline status"


def test_the_plain_screen_says_only_what_changed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import sys  # noqa: PLC0415 - the captured stream, not the one at import

    state = BridgeState("b", tmp_path, {"l": "up"})
    state.lines["l"].status, state.lines["l"].notes = status(5, 5, 5), LineNotes()
    screen = PlainScreen(sys.stdout)
    screen.show(state)
    screen.show(state)
    assert capsys.readouterr().out.count("received 5") == 1


def test_the_live_screen_shows_numbers_and_the_reason(tmp_path: Path) -> None:
    state = BridgeState("b", tmp_path, {"l": "up", "m": "up"})
    state.lines["l"].status, state.lines["l"].notes = status(5000, 5000, 4000), LineNotes()
    state.lines["l"].query_error = "k1:9092: gone. [odd] markup   [TL-K01]"
    console = Console(file=io.StringIO(), width=160, record=True)
    screen = LiveScreen()
    screen.show(state)
    console.print(screen.live.renderable)
    text = console.export_text()
    assert "5,000" in text
    assert "4,000" in text
    assert "gone. [odd] markup   [TL-K01]" in text


def test_the_live_screen_prints_events_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with make_screen(live=True) as screen:
        screen.show(BridgeState("b", tmp_path, {"l": "up"}))
        screen.print_event("x: [bold]wrong[/bold].   [TL-X01]")
    assert "x: [bold]wrong[/bold].   [TL-X01]" in capsys.readouterr().out


def test_backoff_doubles_to_a_limit_and_begins_again() -> None:
    backoff = Backoff(first_s=1, max_s=8, jitter=0.5, rng=random.Random(1))
    pauses = [backoff.next_pause() for _ in range(100)]
    assert all(0.5 * full <= pause <= full for pause, full in zip(pauses, [1, 2, 4, 8, *[8] * 96], strict=True))
    backoff.reset()
    assert backoff.next_pause() <= 1
