"""What is shown of a running bridge must never end it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from towline.bridge.runtime.screen import JsonScreen, PlainScreen, make_screen
from towline.bridge.runtime.state import BridgeState


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_text_can_be_shown_in_any_encoding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str, *, live: bool
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    state = BridgeState("plant", tmp_path, {"line": "up"})
    state.lines["line"].query_error = "topic \u6e29\u5ea6"
    with make_screen(live=live) as screen:
        screen.print_event("adds up \u2713 \u6e29\u5ea6")
        screen.show(state)
    sys.stdout.flush()
    at, _, text = out.getvalue().decode(encoding).partition("  ")
    assert re.fullmatch(r"\d\d:\d\d:\d\d" if live else r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", at)
    assert text.startswith("adds up \u2713" if encoding == "utf-8" else "adds up \\u2713")


def test_a_full_disk_is_no_end() -> None:
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - what its buffer holds can't be written either
    PlainScreen(full).print_event("line")
    with contextlib.suppress(OSError):
        full.close()


def test_a_log_for_programs_has_an_object_a_line_and_changes_only(tmp_path: Path) -> None:
    out = io.StringIO()
    screen, state = JsonScreen(out), BridgeState("b", tmp_path, {"line": "up"})
    for _ in range(3):
        screen.show(state)
    screen.print_event('line "line": a\nb\x7f.   [TL-B22]')
    screen.print_event("kafka: answers")
    assert "\x7f" not in out.getvalue()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(one["event"], one["level"], one.get("code")) for one in lines] == [
        ("state", "info", None),
        ('line "line": a\nb\x7f.   [TL-B22]', "warning", "TL-B22"),
        ("kafka: answers", "info", None),
    ]
    assert all(datetime.fromisoformat(one["timestamp"]).utcoffset() == timedelta(0) for one in lines)


def test_what_is_below_the_level_is_not_logged(tmp_path: Path) -> None:
    out = io.StringIO()
    screen = JsonScreen(out, logging.WARNING)
    screen.show(BridgeState("b", tmp_path, {"line": "up"}))
    screen.print_event("kafka: answers")
    assert out.getvalue() == ""


def test_the_environment_chooses_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWLINE_LOG_FORMAT", "json")
    with make_screen(live=True) as screen:
        assert isinstance(screen, JsonScreen)
    monkeypatch.setenv("TOWLINE_LOG_FORMAT", "text")
    with make_screen(live=True) as screen:
        assert isinstance(screen, PlainScreen)
