"""What is shown of a running bridge must never end it."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest

from towline.bridge.runtime.screen import PlainScreen, make_screen
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
        screen.say("adds up \u2713 \u6e29\u5ea6")
        screen.show(state)
    sys.stdout.flush()
    assert out.getvalue().decode(encoding).startswith("adds up \u2713" if encoding == "utf-8" else "adds up \\u2713")


def test_a_full_disk_is_no_end() -> None:
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - what its buffer holds can't be written either
    PlainScreen(full).say("line")
    with contextlib.suppress(OSError):
        full.close()
