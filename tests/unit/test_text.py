"""What comes from outside never acts on a terminal or a log: every way to print is fed the same hostile text."""

from __future__ import annotations

import io
import json
import logging
import unicodedata
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import structlog
from rich.console import Console

from tests.unit.bridge.test_config import GOOD
from tests.unit.cli.test_main import ran
from towline.bridge import deadletters
from towline.bridge.runtime.failures import failure_reason
from towline.bridge.runtime.screen import LiveScreen, PlainScreen
from towline.bridge.runtime.state import BridgeState
from towline.errors import KafkaError
from towline.gateway.process import configure_logging
from towline.kafka.deadletters import DeadLetter, Reason
from towline.kafka.markers import Marker
from towline.kafka.markerstore import MarkerStore
from towline.publisher.receipt import log
from towline.text import printable, wrap_line

#: Move the cursor, set title and clipboard, a link, markup, a forged line, C1, bidi, separators, a lone surrogate.
HOSTILE = (
    "a\x1b[2J\x1b]0;title\x07\x1b]52;c;eA==\x1b\\\x1b]8;;http://x\x1b\\[red]b[/red]\r\nforged \x9b31m\x7f\x00\b"
    "\u202ereversed\u2066\u2028\u2029\u200b\udc9b\U000e0041[/]"
)


def hidden(text: str, *, but: str = "\n") -> list[str]:
    """The characters of a text that could do something."""
    return [c for c in text if c not in but and unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"}]


def assert_harmless(text: str) -> None:
    assert hidden(text) == []
    assert "\nforged" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain/topic-1", "plain/topic-1"),
        ("Ölstand/温度/датчик/😀", "Ölstand/温度/датчик/😀"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\nb\tc", r"a\x0ab\x09c"),
        ("\x9b\x7f", r"\x9b\x7f"),
        ("\u202e\u2028\udc9b", r"\u202e\u2028\udc9b"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_has_no_shape_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_code_in_a_devices_text_is_not_the_code_of_the_failure() -> None:
    error = KafkaError("TL-K05", "kafka", "topic x   [TL-C44] is refused")
    told = failure_reason(f"traceback\ntowline.errors.KafkaError: {error}\n  at line", "line")
    assert (told.code, told.permanent) == ("TL-K05", False)
    assert told.text == str(error)


def test_the_command_line_tells_an_error_harmlessly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text(GOOD)
    for raised in (KafkaError("TL-K01", HOSTILE, HOSTILE, HOSTILE), ValueError(HOSTILE)):
        monkeypatch.setattr("towline.bridge.deadletters.dead_letter_topics", Mock(side_effect=raised))
        _, out, err = ran(capsys, "dlq", "show", str(file))
        assert out == ""
        assert_harmless(err)
    assert_harmless(ran(capsys, HOSTILE)[2])


@pytest.fixture
def hostile_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A bridge file and its state directory; dead letters, markers and the state have hostile text."""
    letter = DeadLetter(
        Reason.TOPIC_ILLEGAL, HOSTILE, None, None, [("mqtt.topic", b"\x1b]52;c;eA==\x07\xff")], detail=HOSTILE
    )
    shelf = SimpleNamespace(
        topic=HOSTILE,
        is_missing=True,
        unknown_sources=Counter([HOSTILE]),
        is_former=False,
        unreadable_records=0,
        waiting_letters=lambda *_: [deadletters.StoredLetter(0, 7, 0, letter)],
        line_of=lambda _: SimpleNamespace(name=HOSTILE),
    )
    replayed: list[deadletters.RemapResult] = [(HOSTILE, None, None, -1, None, None, 0, None), HOSTILE]
    monkeypatch.setattr("towline.bridge.deadletters.dead_letter_topics", lambda _: [shelf])
    monkeypatch.setattr("towline.bridge.deadletters.replay", lambda *_, **__: iter(replayed))
    monkeypatch.setattr(MarkerStore, "read_markers", lambda _: {0: Marker(3, 1, writer=HOSTILE)})
    (tmp_path / "bridge.toml").write_text(GOOD.replace('from = "telemetry', 'from = "\\u001b[2J\\u202e/telemetry'))
    hostile_board(tmp_path).save()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("check {}/bridge.toml", 0, r"\x1b[2J\u202e/telemetry"),
        ("dlq show {}/bridge.toml", 0, "title"),
        ("dlq show {}/bridge.toml --json", 0, "title"),
        ("dlq replay {}/bridge.toml", 1, "title"),
        ("dlq replay {}/bridge.toml --json", 1, "title"),
        ("kafka marker show --kafka k:9092 --sink x", 0, "3"),
        ("kafka marker show --kafka k:9092 --sink x --json", 0, "3"),
        ("status --state-dir {}", 3, "title"),
        ("status --state-dir {} --json", 3, "title"),
    ],
)
def test_a_command_tells_harmlessly_what_there_is(
    capsys: pytest.CaptureFixture[str], hostile_places: Path, command: str, code: int, told: str
) -> None:
    ended, out, _ = ran(capsys, *command.format(hostile_places).split())
    assert ended == code
    assert told in out
    assert_harmless(out)


def test_dead_letters_are_shown_a_line_each_and_whole_to_scripts(
    capsys: pytest.CaptureFixture[str], hostile_places: Path
) -> None:
    file = str(hostile_places / "bridge.toml")
    assert ran(capsys, "dlq", "show", file)[1].count("\n") == 3
    assert json.loads(ran(capsys, "dlq", "show", file, "--json")[1])["first"][0]["topic"] == HOSTILE


def hostile_board(state_dir: Path) -> BridgeState:
    state = BridgeState("plant", state_dir, {"telemetry": "up"})
    state.kafka = state.kafka_error = HOSTILE
    view = state.lines["telemetry"]
    view.query_error = HOSTILE
    numbers = {"end": 1, "received": 1, "committed": 0}
    view.status = {
        **numbers,
        "state": HOSTILE,
        "client_id": HOSTILE,
        "broker": HOSTILE,
        "last_error": {"text": HOSTILE},
    }
    return state


def test_the_screens_of_run(tmp_path: Path) -> None:
    state = hostile_board(tmp_path)
    stream = io.StringIO()
    lines = PlainScreen(stream)
    lines.print_event(HOSTILE.replace("\n", ""))
    lines.show(state)
    assert_harmless(stream.getvalue())

    stream = io.StringIO()
    screen = LiveScreen()
    screen._console = screen.live.console = Console(file=stream, width=2000, color_system=None)
    screen.live.auto_refresh = False
    screen.print_event(HOSTILE.replace("\n", ""))
    screen.show(state)
    screen._console.print(screen.live.renderable)
    assert "[red]b[/red]" in stream.getvalue()
    assert_harmless(stream.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
def test_the_gateways_log(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign] # as a terminal would say
    try:
        configure_logging(stream)
        structlog.get_logger("x").warning(HOSTILE, topic=HOSTILE, raw=[HOSTILE, HOSTILE.encode("utf-8", "replace")])
    finally:
        structlog.reset_defaults()
    assert stream.getvalue().count("\n") == 1
    assert hidden(stream.getvalue(), but="\n\x7f" if not terminal else "\n") == []


def test_a_publishers_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log.warning("refused", topic=HOSTILE)
    assert_harmless(caplog.messages[0])


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("short", ["short"]),
        ("", [""]),
        (
            "bridge.toml:14: guarantee exactly_once needs QoS 2. Raise it.   [TL-C12]",
            ["bridge.toml:14: guarantee exactly_once needs", "  QoS 2. Raise it.   [TL-C12]"],
        ),
        (
            "  route 1   telemetry/{device}/# → kafka:t   key {device}   no retain",
            ["  route 1   telemetry/{device}/# → kafka:t", "    key {device}   no retain"],
        ),
        (
            "  ! the broker is held back: make room, or bring Kafka back",
            ["  ! the broker is held back: make room, or", "    bring Kafka back"],
        ),
        (
            "12:31:07  gateway ended with code 1; it is started again",
            ["12:31:07  gateway ended with code 1; it is", "  started again"],
        ),
        (f"  state     /{'d' * 60}   journal", ["  state", f"    /{'d' * 60}", "    journal"]),
    ],
)
def test_a_line_goes_on_below_its_text(line: str, rows: list[str]) -> None:
    assert wrap_line(line, 44) == rows
