"""A terminal with a shell in it, and the sessions of a page that are typed into it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from tests.helpers import wait_until

PROMPT: Final = "$ "
COLUMNS: Final = 80
#: A shell whose controlling terminal is its standard input, so that Ctrl-C reaches what runs in it.
_SHELL: Final = (
    "import fcntl, os, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp('bash', ['bash', '--norc', '--noprofile', '--noediting', '-i'])"
)
#: A question that waits for an answer: ``MQTT broker [mqtt://localhost:1883]: ``.
_QUESTION: Final = re.compile(r"^(\S.*\[[^\[\]]*\]:)(?: (.*))?$")


def sessions(page: str) -> list[str]:
    """The sessions of a page, in order."""
    return re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


class Terminal:
    """A shell in a terminal of 80 columns that can't be redrawn, in a directory, with variables of its own."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self._directory = directory
        self._environ = environ
        self._said = b""
        self._read = 0

    def __enter__(self) -> Self:
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        environ = {**os.environ, "TERM": "dumb", "PS1": PROMPT, "LC_ALL": "C.UTF-8", **self._environ}
        environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
        self._shell = subprocess.Popen(
            [sys.executable, "-c", _SHELL],
            stdin=side,
            stdout=side,
            stderr=side,
            cwd=self._directory,
            env=environ,
            start_new_session=True,
        )
        os.close(side)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up; what runs in it gets SIGHUP from the shell."""
        self._shell.terminate() if self._shell.poll() is None else None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._shell.wait(10)
        self._shell.kill()
        self._shell.wait()
        os.close(self._main)
        self._listener.join(10)

    @property
    def said(self) -> str:
        """Everything on it since the last `clear`."""
        return self._said.decode(errors="replace").replace("\r\n", "\n")[self._read :]

    def clear(self) -> None:
        """Begin a page: what stands there was read, but for the prompt."""
        text = self._said.decode(errors="replace").replace("\r\n", "\n")
        self._read = len(text) - len(PROMPT) if text.endswith(PROMPT) else len(text)

    def type(self, text: str) -> None:
        """What a person types, up to its echo."""
        before = len(self.said)
        os.write(self._main, text.encode())
        if text.endswith("\n"):
            wait_until(lambda: self.said[before:].startswith(text), 60, f"the echo of {text!r}")

    def wait_for(self, end: str, timeout: float) -> None:
        """Wait until the last line ends so: a prompt, or a question."""
        wait_until(lambda: self.said.endswith(end), timeout, f"{end!r} at the end of {self.said[-600:]!r}")

    def perform(self, session: str, timeout: float, names: Mapping[str, str] = MappingProxyType({})) -> None:
        """Type what a person types in a page's session, each after what it answers; `names` are of servers."""
        for name, real in names.items():
            session = session.replace(name, real)
        for line in session.splitlines():
            if line.startswith(PROMPT):
                self.wait_for(PROMPT, timeout)
                self.type(line.removeprefix(PROMPT) + "\n")
            elif question := _QUESTION.match(line):
                self.wait_for(f"{question[1]} ", timeout)
                self.type((question[2] or "") + "\n")

    def _listen(self) -> None:
        while True:
            try:
                more = os.read(self._main, 65536)
            except OSError:  # nobody is at the other end
                return
            if not more:
                return
            self._said += more
