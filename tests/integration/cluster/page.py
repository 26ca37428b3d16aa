"""The commands of a page, run as they stand, one after the other in one shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Self

#: A start of Spark takes 10 s alone and a minute on a machine that is busy.
PATIENCE = 240.0
#: Of ``[gateway]``: what devstack has made for gateways on a network, in the directory ``tls``.
KEYS = """cert_file = "{tls}/server.pem"
key_file = "{tls}/server.key"
ca_file = "{tls}/authority.pem"
token_file = "{tls}/token"
"""
_BLOCK = re.compile(r"^( *)```sh\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_DONE = "--- done"


def commands_of(page: Path, heading: str) -> list[str]:
    """The blocks of shell below a heading of a page."""
    text = page.read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [textwrap.dedent(block) for _, block in _BLOCK.findall(section)]


class Page:
    """A shell in a directory, in which commands are run.

    Args:
        place: Its working directory.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._shell: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        binaries = Path(sys.executable).parent
        environ = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
        self._shell = subprocess.Popen(
            ["bash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.place,
            env=environ,
        )
        return self

    def run(self, command: str) -> str:
        """Run a command; what it said.

        Raises:
            AssertionError: It failed.
        """
        shell = self._shell
        assert shell is not None
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write(f'{command}\necho "{_DONE} $?"\n')
        shell.stdin.flush()
        said: list[str] = []
        for line in shell.stdout:
            if line.startswith(_DONE):
                assert line.split()[-1] == "0", f"{command}\n{''.join(said)}"
                return "".join(said)
            said.append(line)
        raise AssertionError(f"the shell ended at {command}\n{''.join(said)}")

    def __exit__(self, *_: object) -> None:
        if self._shell is not None and self._shell.stdin is not None:
            self._shell.stdin.close()
            self._shell.wait(PATIENCE)
            assert self._shell.stdout is not None
            self._shell.stdout.close()
