"""One running bridge, looked at: what it can't take in whole, what another user of the machine sees, and its lines."""

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
from tests.integration.bridge.conftest import a_bridge
from tests.integration.bridge.running import PATIENCE, Running, in_kafka, publish
from tests.integration.bridge.test_dlq import run_dlq
from towline import Client
from towline.bridge.config.file import load
from towline.bridge.runtime.session import SCRATCH_DIR
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.devstack.process import free_port

pytestmark = pytest.mark.spark

TOKEN = "0123456789abcdef"  # noqa: S105


@pytest.fixture(scope="module")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path_factory.mktemp("mosquitto"), settings={"max_queued_messages": "0"}) as broker:
        yield broker


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory, mosquitto: Mosquitto, kafka: Kafka) -> Iterator[Running]:
    kafka.create_topics({"whole": 1, "set-aside": 1})
    # Of a length that leaves no room for Java's sockets below it.
    state = tempfile.mkdtemp(prefix="towline-".ljust(44 - len("/abcdefgh") - len(tempfile.gettempdir()), "x"))
    assert len(state) == 44
    with a_bridge(tmp_path_factory.mktemp("shared")) as running:
        running.state = state
        (running.directory / "token").write_text(TOKEN)
        (running.directory / "token").chmod(0o600)
        running.file.write_text(f"""
name = "stubs"
state_dir = "{state}"
mqtt = {{ brokers = "{mosquitto.uri}", max_packet_bytes = 1500000 }}
kafka = {{ bootstrap_servers = "{kafka.bootstrap}" }}
spark = {{ master = "local[2]", ui = true }}
monitor = {{ listen = "{free_port()}", token_file = "token" }}
[[uplink]]
name = "line"
guarantee = "exactly_once"
dead_letter_topic = "set-aside"
[[uplink.route]]
from = "t/{{device}}/#"
topic = "whole"
key = "{{device}}"
where = "length(payload) > 1"
""")
        running.start()
        wait_until(lambda: running.status()["lines"]["line"]["gateway_running"], PATIENCE, "the gateway")
        yield running
        assert running.interrupt() == 0
    shutil.rmtree(state)


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


def sockets_of(family: list[psutil.Process]) -> set[str]:
    """Of those that still run: Spark ends Python workers that are idle."""
    named: set[Any] = set()
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            named |= {connection.laddr for connection in one.net_connections("unix")}
    return {path for path in named if isinstance(path, str) and path.startswith("/") and Path(path).exists()}


def test_what_the_gateway_cant_take_in_is_a_dead_letter_between_its_neighbours(
    bridge: Running, mosquitto: Mosquitto, kafka: Kafka
) -> None:
    """Each of them, and the account adds up."""
    crowd = [("k", "v")] * 1_001
    with Client(mosquitto.uri, client_id="device") as client:
        for payload in (b"m1", bytes(2_000_000), b"m2", bytes(1_200_000), b"m3"):
            pairs = crowd if len(payload) == 1_200_000 else []
            client.publish("t/d/x", payload, qos=2, user_properties=pairs).wait(60)
    wait_until(lambda: bridge.account()["received"] == 5, PATIENCE, "all of them")
    wait_until(lambda: not bridge.account()["waiting"], PATIENCE, "the batches")
    account = wait_until(
        lambda: (a := bridge.account())["waiting"] == 0 and a["dead_lettered"] == 2 and a, PATIENCE, "the counts"
    )
    assert (account["in_kafka"], account["filtered"], account["adds_up"]) == (3, 0, True)

    assert [value for _, value, _ in in_kafka(kafka.bootstrap, "whole")] == [b"m1", b"m2", b"m3"]
    assert all(value is not None for _, value, _ in in_kafka(kafka.bootstrap, "set-aside")), "no tombstone"
    waiting = json.loads(run_dlq("show", str(bridge.file), "--json")[1])
    reasons = {letter["reason"]: letter for letter in waiting["first"]}
    assert set(reasons) == {"packet_too_large", "too_many_properties"}
    assert reasons["packet_too_large"]["bytes"] == 0
    assert reasons["too_many_properties"]["bytes"] > 1_200_000, "every byte of the packet, in chunks"
    assert reasons["too_many_properties"]["mqtt_topic"] == "t/d/x"
    stay = json.loads(run_dlq("replay", str(bridge.file), "--json")[1])
    assert (stay["replayed"], sum(stay["dead"].values())) == ({}, 2)


def addresses(process: psutil.Process) -> list[Any]:
    """Where it listens; nowhere if it has ended, as Spark's Python workers do when they are idle."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv on this machine")
def test_another_user_reads_and_reaches_nothing(bridge: Running, mosquitto: Mosquitto) -> None:
    """Nothing with messages, and no port that talks."""
    received = bridge.account()["received"]
    publish(mosquitto, 0, 100)
    wait_until(lambda: (a := bridge.account())["received"] == received + 100 and not a["waiting"], PATIENCE, "a batch")

    family = [*psutil.Process(bridge.process.pid).children(recursive=True)]
    listening = [address for one in family for address in addresses(one)]
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}

    sparks = bridge.directory / bridge.state / SCRATCH_DIR
    mine = {sparks, *sparks.glob("*"), *sparks.glob("*/*/")}
    names = {path.name.partition("-")[0] for path in sparks.glob("*/*/")}
    assert {"blockmgr", "spark"} <= names, "what Spark leaves when it is killed lies in the state directory"
    given = {
        "sockets": sorted(sockets_of(family)),
        "directories": [*map(str, sorted(mine)), str(bridge.state_dir), str(bridge.directory / bridge.state / "logs")],
        "monitor": f"http://{load(bridge.file).monitor.listen}",
    }
    assert given["sockets"]
    assert all(not stat.S_IMODE(Path(path).stat().st_mode) & 0o077 for path in given["sockets"])
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-I", "-c", STRANGER]
    run = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True, timeout=120)
    seen = json.loads(run.stdout)
    assert (seen["sockets"], seen["directories"]) == ([], [])
    shown = seen["status"]["lines"]["line"]
    assert (shown["query"], shown["account"]["adds_up"], seen["refused"]) == ("running", True, 401)
