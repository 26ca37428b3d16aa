"""The live view of a bridge: one look for the running bridge and for its status, on any terminal."""

from __future__ import annotations

import io
import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from tests.unit.bridge.noted import commit, down, up
from towline.bridge.lines import statuses
from towline.bridge.lines.account import LineNotes
from towline.bridge.runtime.live import LiveView, bridge_values, sparkline
from towline.bridge.runtime.screen import LiveScreen
from towline.bridge.runtime.state import BridgeState, pause
from towline.bridge.runtime.status import collect_status

NOW = 1_800_000_000.0
ONLINE = {"state": "online", "guarantee": "exactly_once", "journal": "j"}
UNKNOWN = "·" * 20


class Running(BridgeState):
    """A running bridge without processes, at a time that only `tick` moves."""

    def __init__(self, directory: Path, directions: dict[str, str]) -> None:
        super().__init__("plant-7", directory, directions)
        self.directory, self.seconds = directory, 3000.0
        self.spark, self.kafka = "running", "reachable"
        for view in self.lines.values():
            view.query = "running"

    def tick(self, seconds: float = 1.0) -> None:
        """Let time pass."""
        self.seconds += seconds

    def answer(self, name: str, received: int, in_kafka: int, notes: LineNotes | None = None, **status: Any) -> None:
        """Let the gateway of an uplink answer."""
        counts = {"received": received, "end": received, "committed": in_kafka, "oldest": time.time() - 2.5}
        notes = notes or up({"j": (0, in_kafka)})
        self.lines[name].update_status({**ONLINE, **counts, **status}, notes)

    def drawn(self, width: int = 80, height: int = 24, view: LiveView | None = None) -> list[str]:
        """Rows of a view, a new one by default, without the title."""
        rows = (view or LiveView()).rows(bridge_values(self), width, height)
        assert len(rows) <= height
        assert max(map(len, rows)) <= width
        return rows[1:]


def made(directory: Path, monkeypatch: pytest.MonkeyPatch, **directions: str) -> Running:
    state = Running(directory, directions)
    monkeypatch.setattr(time, "monotonic", lambda: state.seconds)
    monkeypatch.setattr(time, "time", lambda: NOW + state.seconds)
    return state


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    return made(tmp_path, monkeypatch, telemetry="up")


def carry(state: Running, view: LiveView, rates: Iterator[int]) -> list[str]:
    """Draw a line that receives at changing rates, with one second of it waiting; return the last rows."""
    received, rows = 0, []
    for rate in rates:
        state.tick()
        state.answer("telemetry", received + rate, received)
        received += rate
        rows = state.drawn(80, 24, view)
    return rows


def test_a_line_has_its_account_its_rates_and_what_waits(running: Running) -> None:
    view = LiveView()
    rows = carry(running, view, itertools.chain([0] * 30, [300] * 15, [1200] * 15, [600] * 15))
    assert rows == [
        "▸ telemetry   running   exactly_once",
        "  received 31,500 = in Kafka 30,900 + waiting 600   adds up ✓",
        "  in 600/s ▁▁▁▁▂▃▃▃▃▅█████▆▅▅▅▅ out 600/s",
        "  waiting 600 ████░░░░ peak 1,200   lag 2.5 s",
    ]
    (row,) = running.drawn(200, 24, view)
    assert row == "   ".join(text.strip() for text in rows)
    assert running.drawn(120)[-1] == f"  in 600/s {'·' * 19}█ out 600/s   waiting 600 ████████ peak 600   lag 2.5 s"


def test_run_and_status_have_one_look(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        running.tick()
        running.answer("telemetry", 500, 400, dead_lettered=3)
    status, notes = running.lines["telemetry"].status, running.lines["telemetry"].notes
    assert notes is not None
    commit(running.directory / "telemetry", notes)
    pause(running.directory / "telemetry", by="anna")
    running.lines["telemetry"].query = "paused"
    monkeypatch.setattr(statuses, "gateway_status", lambda _: status)
    running.save()
    for width in (80, 200):
        saved, own = collect_status(running.directory), bridge_values(running)
        rows = LiveView().rows(saved, width, 24)
        assert rows[1:] == LiveView().rows(own, width, 24)[1:]
        assert re.fullmatch(r'bridge "plant-7"   spark running   kafka reachable   \d\d:\d\d:\d\d', rows[0])
        assert rows[1].startswith("! telemetry   paused   exactly_once")
        assert re.search(r"  ! paused by anna .*: new messages wait until towline", " ".join(rows))
    running.save(has_ended=True)
    title, *rows = LiveView().rows(collect_status(running.directory), 80, 24)
    assert title.startswith('bridge "plant-7"   not running   last update ')
    assert rows[0] == "! telemetry   not running   exactly_once"
    assert f"  rate unknown {UNKNOWN}" in rows
    assert "  waiting 100 ████████ peak 100   lag unknown" in rows


def test_a_gateway_that_is_silent_has_no_rate_and_no_waiting_messages(running: Running) -> None:
    view = LiveView()
    assert running.drawn(80, 24, view) == [
        "▸ telemetry   starting   account unknown: no gateway answers",
        f"  rate unknown {UNKNOWN}   waiting unknown",
    ]
    carry(running, view, itertools.repeat(100, 30))
    running.tick(11)
    rows = running.drawn(80, 24, view)
    assert rows[0] == "! telemetry   gateway silent   exactly_once"
    assert re.match(r"  account unknown: no gateway answers   last update .*: +received 3,000 = ", rows[1] + rows[2])
    assert f"  rate unknown {'·' * 6}{'█' * 11}{'·' * 3}   waiting unknown" in rows
    assert not any("✓" in row for row in rows)
    running.lines["telemetry"].gateway_error = "the gateway ended with code 1.   [TL-G02]"
    rows = running.drawn(80, 24, view)
    assert rows[0] == "✗ telemetry   no gateway   exactly_once"
    assert "  ! the gateway ended with code 1.   [TL-G02]" in rows


def test_an_account_that_does_not_add_up_stands_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = made(tmp_path, monkeypatch, good="up", broken="up")
    state.answer("good", 10, 10)
    state.answer("broken", 9, 9, up({"j": (0, 10)}))
    rows = state.drawn(80)
    assert rows[0] == "✗ broken   does not add up ✗   exactly_once"
    assert " ".join(rows[1:3]).startswith("  received 9 = in Kafka 10 + waiting 0   does not add up ✗ (9 were received")
    assert [row for row in rows if "adds up ✓" in row] == ["  received 10 = in Kafka 10 + waiting 0   adds up ✓"]
    assert any("sources disagree" in row for row in rows)


def test_a_downlink_has_what_waits_in_kafka_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = made(tmp_path, monkeypatch, commands="down")
    view, outbox = state.lines["commands"], {"accepted": 3, "delivered": 2, "acknowledged": 2}
    view.update_status({**ONLINE, "outbox": outbox}, down(3))
    assert state.drawn(200)[0].endswith("waiting 1 ████████ peak 1   lag 0.0 s   unknown behind in Kafka")
    view.behind = 1700
    assert state.drawn(200)[0].endswith("   1,700 behind in Kafka")


def test_a_member_on_this_machine_is_shown_without_its_bridge(running: Running) -> None:
    member = {"state": "online", "client_id": "c", "broker": "mqtt://a:1883", "received": 1200, "waiting": 30}
    values = bridge_values(running)
    values["lines"]["telemetry"] |= {"members": {"m1": member}, "gateway_running": False, "query": "not running"}
    rows = LiveView().rows({**values, "running": False}, 80, 24)
    assert rows[1:4] == [
        "▸ telemetry   not running   account unknown: its gateway does not tell it",
        f"  rate unknown {UNKNOWN}   waiting unknown",
        "  member    m1   online   c at mqtt://a:1883   received 1,200   waiting 30",
    ]


@pytest.mark.parametrize(("count", "width", "height"), [(10, 80, 24), (50, 80, 24), (50, 200, 24), (10, 200, 24)])
def test_lines_beyond_the_terminal_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, width: int, height: int
) -> None:
    state = made(tmp_path, monkeypatch, **{f"line-{number}": "up" for number in range(count)})
    for name in state.lines:
        state.answer(name, 5, 5)
    state.lines["line-7"].query_error = "Kafka refused a record.   [TL-K11]"
    rows = state.drawn(width, height)
    assert rows[0].startswith("! line-7 ")
    heads = [row for row in rows if re.match(r"[▸!✗] line-", row)]
    if len(heads) == count:
        assert (count, width) == (10, 200)
        assert len({row.index("running") for row in heads}) == 1, "in columns"
    else:
        assert len(rows) > height - 6, "the terminal is used"
        assert rows[-1] == f"and {count - len(heads)} more lines: all running"
        state.lines[f"line-{count - 1}"].query = state.lines[f"line-{count - 2}"].query = "waiting to retry"
        counts = {"running": count - len(heads) - 2, "receiving, query waiting to retry": 2}
        text = ", ".join(f"{counts[word]} {word}" for word in sorted(counts, key=lambda word: -counts[word]))
        assert state.drawn(width, height)[-1] == f"and {count - len(heads)} more lines: {text}"


@pytest.mark.parametrize(("width", "height"), [(20, 3), (5, 2), (1, 1)])
def test_a_terminal_that_is_too_small_has_the_worst(running: Running, width: int, height: int) -> None:
    running.answer("telemetry", 5, 5)
    rows = LiveView().rows(bridge_values(running), width, height)
    assert len(rows) == height


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        ({}, UNKNOWN),
        ({3000: 0.0}, "·" * 19 + "▁"),
        ({3000: 0.0, 2997: 0.01, 2995: 8.0, 2994: 1.0, 2990: 4.0}, "·" * 15 + "▅·█▂▁"),
        ({3000: 1.0, 2943: 2.0, 2942: 8.0}, "█" + "·" * 18 + "▅"),
    ],
)
def test_a_sparkline_is_a_minute(rates: dict[int, float], text: str) -> None:
    assert sparkline(rates, 3000) == text
    assert sparkline(rates, 3002) == text, "a step has three seconds"
    assert sparkline(rates, 3063) == UNKNOWN


def terminal_output(state: Running, encoding: str) -> str:
    """What a terminal of 80 columns gets from a redraw, an event and a redraw."""
    out = io.BytesIO()
    file = io.TextIOWrapper(out, encoding=encoding, errors="backslashreplace")
    screen = LiveScreen()
    screen._console = Console(file=file, force_terminal=True, color_system="standard", width=80, height=24)
    screen.live = Live(console=screen._console, auto_refresh=False, transient=True)
    with screen.live:
        screen.show(state)
        screen.live.refresh()
        screen.print_event("kafka: answers")
        screen.show(state)
    file.flush()
    return out.getvalue().decode(encoding)


def test_without_colour_it_is_redrawn_all_the_same(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    running.answer("telemetry", 9, 9, up({"j": (0, 10)}))
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colour.search(terminal_output(running, "utf-8"))
    monkeypatch.setenv("NO_COLOR", "1")
    text = terminal_output(running, "utf-8")
    assert not colour.search(text)
    assert text.count("\x1b[2K") > 5, "rows are erased"
    assert "✗ telemetry" in re.sub(r"\x1b\[[0-9;]*m", "", text), "the mark and the word are there without colour"
    assert "  kafka: answers" in text


def test_a_terminal_without_utf_8_has_ascii(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    running.answer("telemetry", 10, 4)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal_output(running, "ascii"))
    assert "> telemetry" in text
    assert "adds up +" in text
    assert f"rate unknown {'-' * 20}" in text
    assert "waiting 6 ######## peak 6" in text
    assert "\\u" not in text
