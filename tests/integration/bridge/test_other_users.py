"""What another user of the machine can open of a running bridge: nothing with messages, and no port that talks."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running, publish
from tests.integration.bridge.test_bridge import write
from towline.bridge.runtime.surroundings import SCRATCH
from towline_prove.devstack import Kafka, Mosquitto

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(500),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv on this machine"),
]

#: Somebody else: tries to connect to unix sockets, to list directories, and to talk to Spark without its secret.
STRANGER = r"""
import json, os, socket, struct, sys
given, got = json.load(sys.stdin), {"sockets": [], "directories": [], "answers": []}
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
for port in given["ports"]:
    with socket.create_connection(("127.0.0.1", port), 10) as line:
        body = b"no secret"
        # Spark's transport: length of the frame, type 3 (RpcRequest), id, length of the body (RpcRequest.java).
        line.sendall(struct.pack(">QBQI", 21 + len(body), 3, 1, len(body)) + body)
        line.settimeout(10)
        try:
            got["answers"].append(line.recv(65536).decode("latin-1"))
        except (ConnectionError, TimeoutError) as error:
            got["answers"].append(type(error).__name__)
print(json.dumps(got))
"""


def as_another_user(given: dict[str, Any]) -> dict[str, list[str]]:
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-I", "-c", STRANGER]
    run = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    seen: dict[str, list[str]] = json.loads(run.stdout)
    return seen


def sockets_of(family: list[psutil.Process]) -> set[str]:
    named = {c.laddr for one in family for c in one.net_connections("unix") if isinstance(c.laddr, str)}
    return {path for path in named if path.startswith("/") and Path(path).exists()}


def test_another_user_reads_and_reaches_nothing(
    bridge: Running, mosquitto: Mosquitto, kafka: Kafka, topic: NewTopic
) -> None:
    write(bridge, mosquitto.port, kafka.bootstrap, topic())
    bridge.file.write_text(bridge.file.read_text().replace('master = "local[2]"', 'master = "local[2]", ui = true'))
    bridge.start()
    wait_until(lambda: bridge.status()["lines"]["line"]["gateway_running"], PATIENCE, "the gateway")
    publish(mosquitto, 0, 100)
    wait_until(lambda: bridge.account()["received"] == 100 and not bridge.account()["waiting"], PATIENCE, "a batch")

    family = [*psutil.Process(bridge.process.pid).children(recursive=True)]
    java = next(one for one in family if "SparkSubmit" in " ".join(one.cmdline()))
    listening = [c.laddr for one in family for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}

    sparks = bridge.directory / "state" / SCRATCH
    mine = {sparks, *sparks.glob("*"), *sparks.glob("*/*/")}
    names = {path.name.partition("-")[0] for path in sparks.glob("*/*/")}
    assert {"blockmgr", "spark"} <= names, "what Spark leaves when it is killed lies in the state directory"
    given = {
        "sockets": sorted(sockets_of(family)),
        "directories": [*map(str, sorted(mine)), str(bridge.state_dir), str(bridge.directory / "state" / "logs")],
        "ports": [c.laddr.port for c in java.net_connections("inet") if c.status == psutil.CONN_LISTEN],
    }
    assert given["sockets"]
    assert all(not stat.S_IMODE(Path(path).stat().st_mode) & 0o077 for path in given["sockets"])
    seen = as_another_user(given)
    assert (seen["sockets"], seen["directories"]) == ([], [])
    spoke = [answer for answer in seen["answers"] if "sasl" in answer.lower()]
    assert len(spoke) == 2, seen["answers"]  # the driver and its blocks ask who it is; py4j's own has a token
