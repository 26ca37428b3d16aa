"""What another user of the machine sees of a bridge that runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running, publish
from towline.bridge.config.file import load
from towline.bridge.runtime.session import SCRATCH_DIR
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.devstack.process import free_port

pytestmark = pytest.mark.spark


@pytest.fixture
def running(bridge: Running, mosquitto: Mosquitto, kafka: Kafka) -> Iterator[Running]:
    """A bridge whose state directory has a name that leaves no room for Java's sockets below it."""
    kafka.create_topics({"whole": 1})
    bridge.state = tempfile.mkdtemp(prefix="towline-".ljust(44 - len("/abcdefgh") - len(tempfile.gettempdir()), "x"))
    assert len(bridge.state) == 44
    (bridge.directory / "token").write_text("0123456789abcdef")
    (bridge.directory / "token").chmod(0o600)
    monitor = f'monitor = {{ listen = "{free_port()}", token_file = "token" }}\n'
    line = '[[uplink]]\nname = "line"\nroute = [{ from = "t/#", topic = "whole", where = "length(payload) > 1" }]\n'
    bridge.write(mosquitto.uri, kafka.bootstrap, monitor + line, name="stubs", spark_settings=", ui = true")
    bridge.start()
    wait_until(bridge.online, PATIENCE, "the gateway")
    yield bridge
    assert bridge.interrupt() == 0
    shutil.rmtree(bridge.state)


#: Somebody else: tries to connect to unix sockets, to list directories, and to pause a line.
STRANGER = r"""
import json, os, socket, sys, urllib.error, urllib.request
given, got = json.load(sys.stdin), {"sockets": [], "directories": []}
with urllib.request.urlopen(given["monitor"] + "/lines", timeout=60) as answer:
    got["status"] = json.load(answer)
try:
    urllib.request.urlopen(given["monitor"] + "/lines/line/pause", data=b"", timeout=60)
except urllib.error.HTTPError as error:
    got["refused"] = error.code
for path in given["sockets"]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        got["sockets"].append(path)
    except PermissionError:
        pass
for path in given["directories"]:
    try:
        os.listdir(path)
        got["directories"].append(path)
    except PermissionError:
        pass
print(json.dumps(got))
"""


def connections(family: list[psutil.Process], kind: str) -> list[Any]:
    """Of those that still run: Spark ends Python workers that are idle."""
    found: list[Any] = []
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += one.net_connections(kind)
    return found


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv on this machine")
def test_another_user_reads_and_reaches_nothing(running: Running, mosquitto: Mosquitto) -> None:
    publish(mosquitto, 0, 100)
    wait_until(lambda: (a := running.account())["received"] == 100 and not a["waiting"], PATIENCE, "a batch")

    family = [*psutil.Process(running.process.pid).children(recursive=True)]
    listening = [one.laddr.ip for one in connections(family, "inet") if one.status == psutil.CONN_LISTEN]
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    named = {one.laddr for one in connections(family, "unix") if isinstance(one.laddr, str)}

    sparks = running.directory / running.state / SCRATCH_DIR
    logs = running.directory / running.state / "logs"
    mine = {running.state_dir, logs, sparks, *sparks.glob("*"), *sparks.glob("*/*/")}
    names = {path.name.partition("-")[0] for path in sparks.glob("*/*/")}
    assert {"blockmgr", "spark"} <= names, "what Spark leaves when it is killed lies in the state directory"
    given = {
        "sockets": sorted(path for path in named if path.startswith("/") and Path(path).exists()),
        "directories": sorted(map(str, mine)),
        "monitor": f"http://{load(running.file).monitor.listen}",
    }
    assert given["sockets"]
    assert all(not stat.S_IMODE(Path(path).stat().st_mode) & 0o077 for path in given["sockets"])
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-I", "-c", STRANGER]
    run = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True, timeout=120)
    seen = json.loads(run.stdout)
    assert (seen["sockets"], seen["directories"]) == ([], [])
    shown = seen["status"]["lines"]["line"]
    assert (shown["query"], shown["account"]["adds_up"], seen["refused"]) == ("running", True, 401)
