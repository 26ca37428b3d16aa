"""Who may not look into a state directory is told that, and never that nothing runs or waits there [I19]."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.responses import Response
from starlette.routing import Route

from tests.unit.bridge.test_config import GOOD
from tests.unit.monitor.test_lines import TOKEN
from towline.bridge.config.file import load
from towline.bridge.runtime.state import BridgeState
from towline.bridge.runtime.status import collect_bridge_status, fetch_status, render
from towline.errors import GatewayError
from towline.monitor.bridge import BridgeMonitor
from towline.monitor.server import BridgeLines, serve
from towline_prove.devstack.process import free_port

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

    def with_monitor(self, port: int) -> str:
        """Another file of the same bridge, with a monitor, and tokens that nobody else may read."""
        file, tokens = self.file.with_name(f"{port}.toml"), self.file.with_name("token")
        file.write_text(f'{self.file.read_text()}\n[monitor]\nlisten = "{port}"\ntoken_file = "token"\n')
        tokens.write_text(TOKEN)
        tokens.chmod(0o600)
        return str(file)

    def close(self, directory: Path) -> None:
        """Whoever may read everything, root, is another user than the one that looks."""
        directory.chmod(0o700 if os.getuid() == 0 else 0)


class Told(NamedTuple):
    """What another user was told.

    Attributes:
        refused: Directory, command, exit code and text of each that may not look.
        url: Of the monitor.
        shown: What the monitor has to say.
        monitored: Exit code and text of the commands that ask the monitor.
    """

    refused: list[tuple[Path, list[str], int, str]]
    url: str
    shown: dict[str, Any]
    monitored: list[tuple[int, str]]


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    """By a bridge that runs; and a gateway alone, whose directory lies in one that everybody may read."""
    with tempfile.TemporaryDirectory(prefix="towline-test-") as one, tempfile.TemporaryDirectory() as other:
        bridge, alone = Place(Path(one)), Place(Path(other))
        BridgeState("plant-7", bridge.state_dir, {"telemetry": "up"}, file=bridge.file).save(has_ended=True)
        bridge.close(bridge.state_dir)
        alone.close(alone.line_dir)
        alone.state_dir.chmod(0o755)
        monitor, ended = BridgeMonitor("plant-7", {}), free_port()
        with serve(monitor, "0", BridgeLines(load(bridge.file), monitor).routes()) as port:
            yield _told(bridge, alone, port, ended)
        for directory in (bridge.state_dir, alone.line_dir):
            directory.chmod(0o700)


def _told(bridge: Place, alone: Place, port: int, ended: int) -> Told:
    file, state_dir, url = str(bridge.file), str(bridge.state_dir), f"http://127.0.0.1:{port}"
    monitored, unanswered = (bridge.with_monitor(one) for one in (port, ended))
    refused = [(alone.line_dir, ["status", str(alone.file)])]
    refused += [
        (bridge.state_dir, arguments)
        for arguments in (
            ["status", file],
            ["status", "--json", file],
            ["status", "--state-dir", state_dir],
            ["status", unanswered],
            ["reload", file],
            ["dlq", "show", file],
            ["refused", "show", str(bridge.line_dir)],
            ["refused", "replay", state_dir],
        )
    ]
    asking = [["status", monitored], ["status", "--json", monitored]]
    asking += [["status", "--url", one] for one in (f"{url}/", f"http://127.0.0.1:{ended}", f"{url}/x", "127.0.0.1:9")]
    commands = [*(command for _, command in refused), *asking]
    arguments = [sys.executable, "-c", PROGRAM, json.dumps(MODULES), json.dumps(commands)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd="/", timeout=60)
    said = [(int(code), str(text)) for code, text in json.loads(done.stdout)]
    shown = collect_bridge_status(load(bridge.file)) if os.getuid() == 0 else {}
    of_refused = [(*one, *answer) for one, answer in zip(refused, said, strict=False)]
    return Told(of_refused, url, shown | {"monitor": url}, said[len(refused) :])


def test_every_command_says_what_it_may_not_see(told: Told) -> None:
    """They said that nothing runs, nothing is received, and what to start."""
    for directory, command, code, text in told.refused:
        assert text.startswith(f"{directory}: not allowed to look: it belongs to "), command
        assert text.endswith("or as root.   [TL-B59]\n")
        assert len(text.splitlines()) == 1
        assert code == 4


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_sees_what_the_monitor_says(told: Told) -> None:
    """By the file, whose tokens he may not read, or by the address alone."""
    by_file, as_json, by_url, *_ = told.monitored
    for (code, text), url in ((by_file, told.url), (by_url, f"{told.url}/")):
        assert (code, re.sub("; this command is .*", "", text)) == (3, render(told.shown | {"monitor": url}))
    assert f"as its monitor says: {told.url}\n" in by_file[1]
    assert (as_json[0], json.loads(as_json[1])) == (3, json.loads(json.dumps(told.shown)))


def test_a_monitor_that_does_not_answer_is_one_line(told: Told) -> None:
    """Whatever does, or nothing; none of it is taken for a bridge."""
    *_, ended, other, wrong = told.monitored
    is_it = "Is this [monitor] listen, or --metrics, of a bridge that runs, and of this version?   [TL-B75]\n"
    assert ended[0] == 3
    assert ended[1].endswith(f"no bridge's monitor answers (connection refused). {is_it}")
    assert other == (3, f"{told.url}/x: no bridge's monitor answers (Not Found). {is_it}")
    assert wrong == (2, '--url: "127.0.0.1:9" is no URL of a monitor. Write "http://HOST:PORT".   [TL-C205]\n')


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b"\xff", b'{"lines": {"x": 1}}', b'{"lines": []}', b"<html>"])
def test_whoever_has_the_port_now_may_answer_anything(answer: bytes) -> None:
    monitor = BridgeMonitor("plant-7", {})
    with (
        serve(monitor, "0", [Route("/lines", lambda _: Response(answer))]) as port,
        pytest.raises(GatewayError, match=r"no bridge's monitor answers \(.*\)\. Is this .*TL-B75"),
    ):
        fetch_status(f"http://127.0.0.1:{port}")
