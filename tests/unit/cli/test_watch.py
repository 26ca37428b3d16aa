"""`towline status --watch` on a real terminal: the live view where it can be redrawn, else plain text."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from tests.helpers import wait_until
from towline.bridge.runtime.state import BridgeState

#: What rich writes to change to another screen and back, and to choose a colour.
WHOLE, BACK, COLOUR = "\x1b[?1049h", "\x1b[?1049l", re.compile(r"\x1b\[[0-9;]*3[0-7]m")


class Watching:
    """`towline status --watch` of a directory on a terminal of 24 rows."""

    def __init__(self, state_dir: Path, columns: int, **environ: str) -> None:
        self._main, side = pty.openpty()
        self.resize(columns)
        kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self._said = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "towline", "status", "--state-dir", str(state_dir), "--watch"],
            stdin=side,
            stdout=side,
            stderr=side,
            env={**kept, "LC_ALL": "C.UTF-8", **environ},
        )
        os.close(side)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            while more := os.read(self._main, 65536):
                self._said += more

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    @property
    def said(self) -> str:
        return self._said.decode(errors="replace")

    def wait_for(self, pattern: str) -> str:
        """Wait until it has written a text; return all it has."""
        wait_until(lambda: re.search(pattern, self.said), 60, f"{pattern} in {self.said[-2000:]!r}")
        return self.said

    def end(self) -> str:
        """Interrupt it as Ctrl-C does; return all it has written."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(30) == 130
        self._listener.join(30)
        os.close(self._main)
        return self.said


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    state = BridgeState("plant-7", tmp_path, {f"line-{number}": "up" for number in range(30)})
    state.spark, state.kafka = "running", "reachable"
    state.save()
    return tmp_path


def test_a_terminal_is_redrawn_in_its_size_and_given_back(state_dir: Path) -> None:
    watching = Watching(state_dir, 80, TERM="xterm")
    text = watching.wait_for(r"and \d+ more lines: all gateway silent")
    assert text.startswith(WHOLE)
    assert COLOUR.search(text)
    assert "! line-0   gateway silent" in re.sub(r"\x1b\[[0-9;]*m", "", text)
    watching.resize(200)
    watching.wait_for(r"gateway silent   account unknown: no gateway answers   rate unknown ·{20}   waiting unknown")
    text = watching.end()
    assert BACK in text
    assert "\x1b[2J" not in text, "no flicker"


def test_without_colour_and_without_utf_8_it_is_redrawn(state_dir: Path) -> None:
    watching = Watching(state_dir, 80, TERM="xterm", NO_COLOR="1", PYTHONIOENCODING="ascii")
    watching.wait_for(r"rate unknown -{20}   waiting unknown")
    text = watching.end()
    assert text.startswith(WHOLE)
    assert not COLOUR.search(text)
    assert text.isascii()


def test_a_terminal_that_can_not_be_redrawn_has_plain_text(state_dir: Path) -> None:
    watching = Watching(state_dir, 80, TERM="dumb")
    watching.wait_for(r'(?s)line "line-29".*line "line-29"')
    assert "\x1b" not in watching.end()
