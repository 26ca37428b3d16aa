"""Who may not look into a state directory is told that, and never that nothing runs or waits there [I19]."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD
from towline.bridge.runtime.state import BridgeState

#: Another user's commands: forked by a process that has imported what they need, as that user may not read this Python.
PROGRAM = """
import importlib, json, os, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
from towline.cli import main
told = []
for arguments in json.loads(sys.argv[2]):
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(into, 1), os.dup2(into, 2)
        if os.getuid() == 0:
            os.setgroups([]), os.setgid(65534), os.setuid(65534)
        main(arguments)
    os.close(into)
    said = os.fdopen(out).read()
    told.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said])
print(json.dumps(told))
"""
MODULES = [
    *(f"towline.cli.{name}" for name in ("status", "lines", "refused", "dlq")),
    *(f"towline.bridge.{name}" for name in ("runtime.status", "runtime.state", "deadletters", "config.file")),
    *("towline.delivery.refused", "towline.gateway.launch", "difflib", "encodings.idna", "pwd"),
]


class Place:
    """A directory that everybody reaches, with the state of a bridge that nobody else may see."""

    def __init__(self, directory: Path) -> None:
        directory.chmod(0o755)
        self.file, self.state_dir = directory / "bridge.toml", directory / "state"
        self.line_dir = self.state_dir / "telemetry"
        (self.line_dir / "outbox").mkdir(parents=True)
        self.file.write_text(GOOD.replace('name = "telemetry"', 'name = "telemetry"\ndead_letter_topic = "dead"'))

    def close(self, directory: Path) -> None:
        """Whoever may read everything, root, is another user than the one that looks."""
        directory.chmod(0o700 if os.getuid() == 0 else 0)


#: Directory, command, exit code and text of each that may not look.
Refusal = tuple[Path, list[str], int, str]


@pytest.fixture(scope="module")
def refusals() -> Iterator[list[Refusal]]:
    """Of a bridge's directory; and of a gateway's alone, which lies in one that everybody may read."""
    with tempfile.TemporaryDirectory(prefix="towline-test-") as one, tempfile.TemporaryDirectory() as other:
        bridge, alone = Place(Path(one)), Place(Path(other))
        BridgeState("plant-7", bridge.state_dir, {"telemetry": "up"}, file=bridge.file).save(has_ended=True)
        bridge.close(bridge.state_dir)
        alone.close(alone.line_dir)
        alone.state_dir.chmod(0o755)
        yield _refusals(bridge, alone)
        for directory in (bridge.state_dir, alone.line_dir):
            directory.chmod(0o700)


def _refusals(bridge: Place, alone: Place) -> list[Refusal]:
    file, state_dir = str(bridge.file), str(bridge.state_dir)
    commands = [
        ["status", str(alone.file)],
        ["status", file],
        ["status", "--json", file],
        ["status", "--state-dir", state_dir],
        ["reload", file],
        ["dlq", "show", file],
        ["refused", "show", str(bridge.line_dir)],
        ["refused", "replay", state_dir],
    ]
    arguments = [sys.executable, "-c", PROGRAM, json.dumps(MODULES), json.dumps(commands)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd="/", timeout=60)
    directories = [alone.line_dir, *[bridge.state_dir] * (len(commands) - 1)]
    answers = ((int(code), str(text)) for code, text in json.loads(done.stdout))
    looks = zip(directories, commands, answers, strict=True)
    return [(directory, command, code, text) for directory, command, (code, text) in looks]


def test_every_command_says_what_it_may_not_see(refusals: list[Refusal]) -> None:
    """They said that nothing runs, nothing is received, and what to start."""
    for directory, command, code, text in refusals:
        assert text.startswith(f"{directory}: not allowed to look: it belongs to "), command
        assert text.endswith("or as root.   [TL-B59]\n")
        assert len(text.splitlines()) == 1
        assert code == 4
