"""The account adds up, over restarts, repeats and lost reports."""

from __future__ import annotations

import io
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from towline.backoff import Backoff
from towline.bridge.downlink.account import DownlinkCounts
from towline.bridge.runtime.screen import PlainScreen, _cells, _table, line_state, make_screen, summary
from towline.bridge.runtime.state import BridgeState, LineView, read_state
from towline.bridge.uplink.account import UplinkCounts


def batch(number: int, start: int, end: int, **more: Any) -> dict[str, Any]:
    rows = more.pop("rows", end - start)
    return {"batch": number, "rows": rows, "spans": {"j": (start, end)}, "observed": more}


def status(received: int, end: int, committed: int, **more: Any) -> dict[str, Any]:
    return {"journal": "j", "received": received, "end": end, "committed": committed, "state": "online", **more}


def test_batches_are_counted_once() -> None:
    counts = UplinkCounts().add(batch(0, 0, 10, filtered=2)).add(batch(1, 10, 15, unrouted=1))
    assert counts.add(batch(1, 10, 15, unrouted=1)) == counts
    assert (counts.rows, counts.filtered, counts.unrouted, counts.offsets) == (15, 2, 1, 15)
    assert counts.agree


def test_a_batch_nobody_heard_of_is_missed_not_wrong() -> None:
    counts = UplinkCounts().add(batch(0, 0, 10)).add(batch(2, 14, 20))
    assert (counts.rows, counts.missed) == (16, 4)
    assert counts.agree


def test_a_repeat_served_empty_is_given_up() -> None:
    counts = UplinkCounts().add(batch(0, 0, 10)).add(batch(1, 10, 15, rows=0))
    assert counts.skipped == 5
    assert "given up 5" in counts.account(status(15, 15, 15)).sentence()


def test_a_batch_that_the_marker_skipped_is_in_kafka() -> None:
    counts = UplinkCounts().add(batch(0, 0, 10)).add({**batch(1, 10, 15, rows=0), "gives_up": False})
    account = counts.account(status(15, 15, 15))
    assert (counts.skipped, account.carried, account.uncounted) == (0, 15, 5)
    assert account.adds_up


def test_every_way_out_is_in_the_sum() -> None:
    counts = UplinkCounts().add({**batch(0, 0, 100, filtered=1, deduplicated=30), "query": "q", "letters": 2})
    account = counts.account(status(115, 110, 100, deduplicated=4))
    assert account.sentence() == (
        "received 115 = in Kafka 67 + filtered 1 + dead-lettered 2 + deduplicated 34 + arriving 1 + waiting 10"
        "   adds up ✓"
    )
    assert 115 == 67 + 1 + 2 + 34 + 1 + 10


def test_the_sinks_letters_are_in_the_sum_once() -> None:
    """It tells the sum of its batches: nothing is missed when a report is, and nothing doubled when one comes again."""
    reports = [{**batch(n, n * 10, n * 10 + 10), "query": "q", "letters": sum_} for n, sum_ in enumerate([0, 3, 4, 6])]
    counts = UplinkCounts().add(reports[0]).add(reports[1]).add(reports[1]).add(reports[3]).add(reports[0])
    assert counts.dead_lettered == 6
    begun_again = {**batch(0, 40, 50), "query": "another", "letters": 2}
    account = UplinkCounts.from_json(counts.as_json()).add(begun_again).account(status(50, 50, 50))
    assert "in Kafka 42 (10 of them uncounted) + dead-lettered 8 + waiting 0   adds up ✓" in account.sentence()


def test_rows_that_the_state_store_dropped_are_told() -> None:
    account = UplinkCounts().add(batch(0, 0, 10, late=3)).account(status(10, 10, 10))
    assert "does not add up ✗ (3 rows were lost: Spark took them for late" in account.sentence()


def test_rows_that_did_not_come_to_the_sink_for_no_reason_are_told() -> None:
    account = UplinkCounts().add(batch(0, 0, 10, astray=2)).account(status(10, 10, 10))
    assert "does not add up ✗ (2 rows did not come to the sink" in account.sentence()


def test_more_rows_than_offsets_is_told() -> None:
    account = UplinkCounts().add(batch(0, 0, 10, rows=11)).account(status(10, 10, 10))
    assert not account.adds_up
    assert "does not add up" in account.sentence()


def test_what_no_report_told_of_is_named() -> None:
    account = UplinkCounts().add(batch(0, 0, 10)).add(batch(2, 14, 20)).account(status(25, 25, 25))
    assert account.uncounted == 9
    assert "in Kafka 20 (4 of them uncounted) + waiting 5 (5 of them committed)" in account.sentence()


def test_what_was_carried_of_a_journal_that_has_gone_stays() -> None:
    counts = UplinkCounts().add(batch(0, 0, 10)).add({**batch(0, 0, 3), "spans": {"k": (0, 3)}})
    account = counts.account(status(4, 4, 3, journal="k"))
    assert account.sentence() == "received 14 = in Kafka 13 + waiting 1   adds up ✓"


def test_counts_survive_as_json() -> None:
    counts = UplinkCounts().add(batch(0, 5, 10, fallback=3))
    assert UplinkCounts.from_json(counts.as_json()) == counts


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.booleans()), max_size=20), st.integers(0, 9))
def test_whatever_is_lost_or_repeated_the_sum_holds(batches: list[tuple[int, bool, bool]], waiting: int) -> None:
    counts, place = UplinkCounts(), 0
    for number, (size, heard, again) in enumerate(batches):
        report = batch(number, place, place + size, filtered=min(size, 1))
        place += size
        counts = counts.add(report) if heard else counts
        counts = counts.add(report) if heard and again else counts
    account = counts.account(status(place + waiting + 2, place + waiting, place))
    assert account.adds_up
    assert account.carried + sum(account.parts.values()) + account.waiting == account.received
    assert account.waiting == place + waiting - (counts.spans["j"][1] if counts.spans else place)


def test_a_journal_that_ends_too_early_is_told() -> None:
    account = UplinkCounts().add(batch(0, 0, 10)).account(status(5, 5, 5))
    assert not account.adds_up
    assert "restored from a copy" in account.why_not


def test_the_sentence_names_what_is_there() -> None:
    account = UplinkCounts().add(batch(0, 0, 1_000, filtered=10)).account(status(1_012, 1_010, 1_000))
    assert account.sentence() == "received 1,012 = in Kafka 990 + filtered 10 + arriving 2 + waiting 10   adds up ✓"


def test_rates_and_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    view = LineView("l")
    monkeypatch.setattr("towline.bridge.runtime.state.time.time", lambda: 1000.0)
    for second in range(11):
        view.status = status(second * 10, second * 10, max(0, second * 10 - 30), oldest=997.0)
        view.sample(float(second))
    assert view.rates() == (10.0, 10.0)
    assert view.lag_s() == 3.0
    view.status = status(100, 100, 100, oldest=None)
    assert view.lag_s() == 0.0


def test_the_lag_is_true_from_the_first_line() -> None:
    """100 messages that came an hour ago waited at the start, and it said 0.0 s."""
    view = LineView("l", status=status(100, 100, 0, oldest=time.time() - 3600))
    assert 3600 <= view.lag_s() < 3700
    assert "lag 3,60" in summary(view, "starting")


def test_the_state_remembers(tmp_path: Path) -> None:
    state = BridgeState("b", tmp_path, {"l": "up"})
    state.lines["l"].counts = UplinkCounts().add(batch(0, 0, 10))
    state.say("hello")
    state.save()
    assert state.heard() == ["hello"]
    assert state.heard() == []
    assert BridgeState("b", tmp_path, {"l": "up"}).lines["l"].counts.rows == 10
    assert (tmp_path / "bridge.json").stat().st_mode & 0o777 == 0o600
    assert BridgeState("b", tmp_path, {"l": "down"}).lines["l"].counts == DownlinkCounts(), "of another line"
    (tmp_path / "bridge.json").write_text("[]")
    assert read_state(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "running"),
        ({"gateway_error": "x"}, "no gateway"),
        ({"status": {}}, "starting"),
        ({"status": status(0, 0, 0, state="offline")}, "broker offline"),
        ({"status": status(0, 0, 0, held_back="journal full")}, "held back: journal full"),
        ({"query": "waiting to retry"}, "receiving, query waiting to retry"),
    ],
)
def test_the_state_is_the_worst_news(change: dict[str, Any], word: str) -> None:
    view = LineView("l", query="running", status=status(0, 0, 0))
    for name, value in change.items():
        setattr(view, name, value)
    assert line_state(view, "running") == word
    assert word in summary(view, "running")


def test_a_batch_that_is_newer_than_the_gateways_answer_is_no_disagreement() -> None:
    """Under load the next batch ends in front of the next answer: its messages are beyond the journal's known end."""
    view = LineView("l", query="running")
    view.counts = UplinkCounts().add(batch(0, 0, 10))
    view.hear(status(10, 10, 10))
    view.counts = view.counts.add(batch(1, 10, 15))
    assert view.account is not None
    assert view.account.adds_up
    view.asks()
    view.counts = view.counts.add(batch(2, 15, 20))
    view.hear(status(15, 15, 15))
    assert view.account is not None
    assert view.account.adds_up
    view.hear(status(12, 12, 12))
    assert view.account is not None
    assert "Spark committed up to 20, the journal ends at 12" in view.account.why_not


def test_a_screen_says_that_an_account_does_not_add_up() -> None:
    view = LineView("l", query="running", status=status(10, 10, 10))
    view.counts = UplinkCounts().add(batch(0, 0, 10, filtered=2))
    assert line_state(view, "running") == "running"
    assert [cell.strip() for cell in _cells(view, "running")[1:6]] == ["10", "8", "2", "0", "0"]
    view.counts = UplinkCounts().add(batch(0, 0, 10, rows=11))
    assert line_state(view, "running") == "does not add up ✗, see towline status"


def test_the_plain_screen_says_only_what_changed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import sys  # noqa: PLC0415 - the captured stream, not the one at import

    state = BridgeState("b", tmp_path, {"l": "up"})
    state.lines["l"].status = status(5, 5, 5)
    screen = PlainScreen(sys.stdout)
    screen.show(state)
    screen.show(state)
    assert capsys.readouterr().out.count("received 5") == 1


def test_the_table_shows_numbers_and_the_reason(tmp_path: Path) -> None:
    state = BridgeState("b", tmp_path, {"l": "up", "m": "up"})
    state.lines["l"].status = status(5000, 5000, 4000)
    state.lines["l"].query_error = "k1:9092: gone. [odd] markup   [TL-K01]"
    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(_table(state, 160))
    text = console.export_text()
    assert "5,000" in text
    assert "4,000" in text
    assert "gone. [odd] markup   [TL-K01]" in text


def test_the_live_screen_prints_events_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with make_screen(live=True) as screen:
        screen.show(BridgeState("b", tmp_path, {"l": "up"}))
        screen.say("x: [bold]wrong[/bold].   [TL-X01]")
    assert "x: [bold]wrong[/bold].   [TL-X01]" in capsys.readouterr().out


def test_backoff_doubles_to_a_limit_and_begins_again() -> None:
    backoff = Backoff(first=1, most=8, jitter=0.5, rng=random.Random(1))
    pauses = [backoff.next() for _ in range(100)]
    assert all(0.5 * full <= pause <= full for pause, full in zip(pauses, [1, 2, 4, 8, *[8] * 96], strict=True))
    backoff.reset()
    assert backoff.next() <= 1
