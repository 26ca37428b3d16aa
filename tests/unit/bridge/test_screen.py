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

from towline.bridge.lines.account import LineNotes
from towline.bridge.runtime.screen import JsonScreen, PlainScreen, make_screen
from towline.bridge.runtime.state import BridgeState


@pytest.mark.parametrize(("live", "encoding"), [(False, "ascii"), (False, "utf-8"), (True, "latin-1")])
def test_any_text_can_be_shown_in_any_encoding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str, *, live: bool
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    state = BridgeState("plant", tmp_path, {"line": "up"})
    state.lines["line"].query_error = "topic \u6e29\u5ea6"
    with make_screen(live=live) as screen:
        screen.print_event("\u2713 \u6e29\u5ea6 [bold]wrong[/bold]")
        screen.show(state)
    sys.stdout.flush()
    at, _, text = out.getvalue().decode(encoding).partition("  ")
    assert re.fullmatch(r"\d\d:\d\d:\d\d" if live else r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", at)
    assert text.startswith("\u2713 \u6e29" if encoding == "utf-8" else "\\u2713 \\u6e29")
    assert "[bold]wrong[/bold]" in text


def test_a_full_disk_is_no_end() -> None:
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - what its buffer holds can't be written either
    PlainScreen(full).print_event("line")
    with contextlib.suppress(OSError):
        full.close()


def test_a_log_has_changes_only_and_for_programs_an_object_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = BridgeState("b", tmp_path, {"line": "up"})
    state.lines["line"].status, state.lines["line"].notes = {"received": 5, "end": 5, "state": "online"}, LineNotes()
    monkeypatch.setenv("TOWLINE_LOG_FORMAT", "text")
    with make_screen(live=True) as screen:
        screen.show(state)
        screen.show(state)
    assert capsys.readouterr().out.count("received 5") == 1
    monkeypatch.setenv("TOWLINE_LOG_FORMAT", "json")
    with make_screen(live=True) as screen:
        for _ in range(3):
            screen.show(state)
        screen.print_event('line "line": a\nb\x7f.   [TL-B22]')
        screen.print_event("kafka: answers")
    out = capsys.readouterr().out
    assert "\x7f" not in out
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(one["event"], one["level"], one.get("code")) for one in lines] == [
        ("state", "info", None),
        ('line "line": a\nb\x7f.   [TL-B22]', "warning", "TL-B22"),
        ("kafka: answers", "info", None),
    ]
    assert all(datetime.fromisoformat(one["timestamp"]).utcoffset() == timedelta(0) for one in lines)
    warnings = io.StringIO()
    quiet = JsonScreen(warnings, logging.WARNING)
    quiet.show(state)
    quiet.print_event("kafka: answers")
    assert warnings.getvalue() == ""
