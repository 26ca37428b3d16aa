"""What is asked of one line: files in its state directory that outlive whoever wrote them."""

from __future__ import annotations

import getpass
import time
from pathlib import Path

import pytest

from towline import files
from towline.bridge.runtime.line_requests import (
    PAUSED_FILE,
    Pause,
    pause,
    paused,
    request_restart,
    resume,
    take_restart,
)
from towline.errors import GatewayError


def test_a_pause_stays_until_it_is_ended(tmp_path: Path) -> None:
    """Of a line that never ran, too; who asks twice changes nothing."""
    line = tmp_path / "state" / "line"
    assert (paused(line), resume(line)) == (None, False)
    assert pause(line)
    first = paused(line)
    assert first is not None
    assert (first.by, abs(first.at - time.time()) < 60) == (getpass.getuser(), True)
    assert not pause(line, by="monitor")
    assert paused(line) == first
    assert (line / PAUSED_FILE).stat().st_mode & 0o077 == 0
    assert resume(line)
    assert (paused(line), resume(line)) == (None, False)
    assert pause(line, by="monitor")
    assert (paused(line) or first).by == "monitor"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"at": "x", "by": 1}', '{"at": 1}', "\udcff"])
def test_a_pause_that_says_nothing_is_one(tmp_path: Path, content: str) -> None:
    (tmp_path / PAUSED_FILE).write_bytes(content.encode(errors="surrogateescape"))
    assert paused(tmp_path) == Pause()
    assert resume(tmp_path)


def test_a_restart_is_asked_for_once(tmp_path: Path) -> None:
    assert take_restart(tmp_path) == ""
    request = request_restart(tmp_path)
    assert request_restart(tmp_path) == request
    assert take_restart(tmp_path) == request
    assert take_restart(tmp_path) == ""
    assert request_restart(tmp_path) != request


def test_a_disk_that_takes_no_request_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "replace_durably", full)
    with pytest.raises(GatewayError, match=r"the request can't be written \(no space left on device\).*TL-B64"):
        pause(tmp_path)
    assert paused(tmp_path) is None
