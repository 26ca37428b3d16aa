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


def place(directory: Path) -> Path:
    """A bridge file in a directory that everybody reaches, with a line's state that lies in one of their own."""
    directory.chmod(0o755)
    (directory / "state" / "telemetry" / "outbox").mkdir(parents=True)
    file = directory / "bridge.toml"
    file.write_text(GOOD.replace('name = "telemetry"', 'name = "telemetry"\ndead_letter_topic = "dead"'))
    return file


@pytest.fixture
def places() -> Iterator[tuple[Path, Path]]:
    """Files of a bridge whose state nobody else may see, and of one whose gateway's alone lies where all may read."""
    closed = 0o700 if os.getuid() == 0 else 0  # whoever may read everything, root, is another user than looks
    with tempfile.TemporaryDirectory(prefix="towline-test-") as one, tempfile.TemporaryDirectory() as other:
        bridge, alone = place(Path(one)), place(Path(other))
        state_dir, line_dir = bridge.parent / "state", alone.parent / "state" / "telemetry"
        BridgeState("plant-7", state_dir, {"telemetry": "up"}, file=bridge).save(has_ended=True)
        alone.with_name("state").chmod(0o755)
        for directory in (state_dir, line_dir):
            directory.chmod(closed)
        yield bridge, alone
        for directory in (state_dir, line_dir):
            directory.chmod(0o700)


def test_every_command_says_what_it_may_not_see(places: tuple[Path, Path]) -> None:
    """They said that nothing runs, nothing is received, and what to start."""
    bridge, alone = places
    state_dir = bridge.parent / "state"
    commands = [
        ["status", str(alone)],
        ["status", str(bridge)],
        ["status", "--json", str(bridge)],
        ["status", "--state-dir", str(state_dir)],
        ["reload", str(bridge)],
        ["dlq", "show", str(bridge)],
        ["refused", "show", str(state_dir / "telemetry")],
        ["refused", "replay", str(state_dir)],
    ]
    arguments = [sys.executable, "-c", PROGRAM, json.dumps(MODULES), json.dumps(commands)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd="/", timeout=60)
    directories = [alone.parent / "state" / "telemetry", *[state_dir] * (len(commands) - 1)]
    for directory, command, (code, text) in zip(directories, commands, json.loads(done.stdout), strict=True):
        assert text.startswith(f"{directory}: not allowed to look: it belongs to "), command
        assert text.endswith("or as root.   [TL-B59]\n")
        assert len(text.splitlines()) == 1
        assert code == 4
