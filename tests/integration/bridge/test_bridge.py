"""`towline run` with real brokers, a real Spark and real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import NewTopic
from tests.helpers import ServiceManager, present, wait_for_end, wait_until
from tests.integration.bridge.conftest import a_bridge
from tests.integration.bridge.running import PATIENCE, Running, in_kafka, publish
from tests.integration.conftest import towline_command
from towline.checkpoint import Checkpoint
from towline.gateway.endpoint import GatewayEndpoint
from towline.spark.java import cache_directory, spark_kafka_jars
from towline_prove.devstack import Kafka, Mosquitto, free_port

pytestmark = pytest.mark.spark


LINE = """
[[uplink]]
name = "line"
{own}
[[uplink.route]]
from = "t/{{device}}/#"
topic = "{topic}"
key = "{{device}}"
where = "length(payload) > 1"
"""
WRONG = """
[[uplink]]
name = "wrong"
[[uplink.route]]
from = "w"
topic = "{topic}"
[[uplink.route]]
from = "x"
topic = "{topic}"
where = "no_such = 1"
"""


#: As a container has it: a file system that is read-only but for one directory, and a user without a passwd entry. He
#: may read as root does, for the Python of these tests may be root's.
CONTAINED = """
mount --make-rprivate / && mount --bind "$0" "$0" && mount -o remount,ro,bind / &&
    exec setpriv --reuid=12345 --regid=12345 --clear-groups --inh-caps=-all,+dac_read_search \\
    --ambient-caps=-all,+dac_read_search "$@"
"""


@pytest.fixture
def contained() -> Iterator[Running]:
    """A bridge that runs as in a container, where this user may make one; in a directory that others may enter."""
    with tempfile.TemporaryDirectory() as place, a_bridge(Path(place)) as bridge:
        Path(place).chmod(0o755)
        state = bridge.directory / "state"
        state.mkdir()
        within = ("unshare", "--mount", "sh", "-c", CONTAINED, str(state))
        if os.geteuid() == 0 and subprocess.run([*within, "true"], capture_output=True, check=False).returncode == 0:
            os.chown(state, 12345, 12345)
            spark_kafka_jars()  # an image brings them: its user may not put them there
            bridge.within = within
            bridge.environ = {"HOME": "/", "TMPDIR": str(state), "TOWLINE_CACHE": str(cache_directory())}
        yield bridge


@pytest.fixture
def manager(contained: Running) -> Iterator[ServiceManager]:
    with ServiceManager() as one:
        contained.environ = {**contained.environ, **one.environ}
        yield one


def test_messages_arrive_whatever_is_killed(
    contained: Running, manager: ServiceManager, broker: Mosquitto, kafka: Kafka, topic: NewTopic
) -> None:
    """The gateway, then the whole bridge, in a container; `test_delivery_semantics` kills driver and JVM.

    Beside it a line whose topic is missing until it comes, and one with a wrong condition: their faults are their own.
    """
    bridge, name, dead = contained, topic(), topic("dead")
    missing = f"missing.{name}"
    down = f'[[downlink]]\nname = "down"\nfrom = "{missing}"\ntopic = "down/{{key}}"\n'
    lines = LINE.format(own=f'dead_letter_topic = "{dead}"', topic=name) + down + WRONG.format(topic=name)
    bridge.write(broker.uri, kafka.bootstrap, lines)
    bridge.start()
    wait_until(lambda: bridge.status()["lines"]["line"]["gateway_running"], PATIENCE, "the gateway")
    publish(broker, 0, 500)
    publish(broker, 0, 7, text="x")
    wait_until(lambda: bridge.line()["account"]["waiting"] == 0, PATIENCE, "the first batch")
    account = wait_until(lambda: (a := bridge.line()["account"])["filtered"] == 7 and a, PATIENCE, "the counts")
    assert (account["received"], account["in_kafka"], account["adds_up"]) == (507, 500, True)
    record = in_kafka(kafka.bootstrap, name)[0]
    assert (record[0], record[2]["mqtt.topic"], record[2]["mqtt.qos"]) == (b"d", b"t/d/x", b"1")

    (error,) = [line for line in bridge.out.splitlines() if "[TL-C74]" in line]
    where = bridge.file.read_text().splitlines().index('where = "no_such = 1"') + 1
    assert f'{bridge.file}:{where}  uplink "wrong" route 2: where: A column' in error
    assert bridge.line("wrong")["query"] == "stopped"
    bridge.said(f'{kafka.bootstrap}: the topic "{missing}" is not there. Create it, or let Towline do it')
    assert bridge.line("down")["query"] == "waiting to retry"
    endpoint = present(GatewayEndpoint.read(bridge.state_dir))
    os.kill(endpoint.pid, signal.SIGKILL)
    publish(broker, 500, 500)
    wait_until(lambda: bridge.account()["received"] >= 1007, PATIENCE, "the gateway again")
    publish(broker, 0, 1, topic="t/d/large", text="x" * 1_100_000)
    wait_until(lambda: (a := bridge.account())["received"] >= 1008 and not a["waiting"], PATIENCE, "a dead letter")

    told_where_messages_are(bridge, name, dead)

    children = psutil.Process(bridge.process.pid).children(recursive=True)
    assert children
    bridge.process.kill()
    bridge.process.wait()
    wait_for_end(children, PATIENCE)
    (bridge.directory / "state" / "bridge.json").unlink()  # nothing of the account stands there
    publish(broker, 1000, 500)
    (bridge.directory / "out").write_text("")
    bridge.start()
    bridge.said("connected to")  # intake first: brokers drop when their queue is full
    assert "is up after" not in bridge.out
    wait_until(lambda: (a := bridge.account())["received"] >= 1508 and not a["waiting"], PATIENCE, "all of it")
    account = bridge.status_command()["lines"]["line"]["account"]
    assert account["adds_up"]
    parts = [account[name] for name in ("in_kafka", "filtered", "dead_lettered", "not_witnessed", "uncounted")]
    assert parts == [1500, 7, 1, 0, 0], "the kills took nothing of it [I11]"
    kafka.create_topics({missing: 1})
    wait_until(lambda: bridge.line("down")["query"] == "running", PATIENCE, "the line that lacked its topic")
    values = [value for _, value, _ in in_kafka(kafka.bootstrap, name)]
    assert "READY=1\nSTATUS=line: " in manager.received
    wait_until(lambda: "line: running; " in manager.received, PATIENCE, "the line in the manager's status")
    assert "STOPPING=1" not in manager.received
    stops_in_time(bridge, broker, kafka)
    assert "STOPPING=1" in manager.received.splitlines()
    assert set(values) == {f"m{n}".encode() for n in range(1500)}
    first_seen = list(dict.fromkeys(values))
    assert first_seen == [f"m{n}".encode() for n in range(1500)], "order, repeats aside"
    assert "its batch is repeated after the next start" in bridge.out
    assert "10 messages on disk; the next start delivers them" in bridge.out
    told = story(bridge, "--offset", "1517")
    assert (told["state"], told["candidates"]) == ("in_batch", [])
    assert "adds up ✓" in bridge.out
    assert "the broker keeps the session tests-line" in bridge.out
    assert "Traceback" not in bridge.out


def story(bridge: Running, *question: str) -> dict[str, Any]:
    """What `towline message --json` says of the line."""
    told: dict[str, Any] = json.loads(bridge.command("message", "--line", "line", "--json", *question))
    return told


def told_where_messages_are(bridge: Running, name: str, dead: str) -> None:
    """In Kafka; a dead letter; one whose row the gateway removed when it was killed; and the newest of a device."""
    told = story(bridge, "--offset", "600")
    assert (told["state"], told["gateway"]) == ("in_kafka", "line")
    steps = {step["name"]: step for step in told["steps"]}
    assert [*steps] == ["received", "journaled", "acknowledged", "batch", "committed", "kafka"]
    assert steps["received"]["text"] == "topic t/d/x, QoS 1, 4 bytes"
    assert steps["received"]["at"] <= steps["committed"]["at"]
    assert abs(steps["kafka"]["at"] - steps["received"]["at"]) < 0.001
    (record,) = told["candidates"]
    assert steps["kafka"]["text"] == f"{record['kafka']}, topic t/d/x"
    assert record["kafka"].startswith(f"{name}/0/")
    back = story(bridge, "--kafka", record["kafka"])
    assert (back["state"], back["offset"], back["candidates"]) == ("in_kafka", None, [record])

    removed = story(bridge, "--offset", "5")
    assert (removed["state"], removed["steps"][0]["text"]) == (
        "committed",
        "unknown: its row is no longer in the journal",
    )
    assert "no header of the routes names its offset" in removed["steps"][-1]["text"]
    told = story(bridge, "--offset", "1007")
    (letter,) = told["candidates"]
    assert (told["state"], letter["kafka"].startswith(f"{dead}/")) == ("dead_letter", True)
    assert letter["text"].startswith("dead letter, too_large: ")
    assert story(bridge, "--offset", "1008")["state"] == "not_received"

    *_, newest, largest = story(bridge, "--device", "d")["candidates"]
    assert (newest["text"], newest["kafka"].startswith(f"{name}/")) == ("topic t/d/x", True)
    assert (largest["offset"], largest["kafka"]) == (1007, letter["kafka"])


def stops_in_time(bridge: Running, broker: Mosquitto, kafka: Kafka) -> None:
    """SIGTERM amid a batch, when Kafka and the gateway of another line stand still."""
    checkpoint = Checkpoint(str(bridge.state_dir / "checkpoint"))
    deaf = present(GatewayEndpoint.read(bridge.state_dir.parent / "wrong"))
    kafka.pause()
    try:
        publish(broker, 1500, 10)
        wait_until(lambda: checkpoint.last_planned_batch() != checkpoint.last_committed_batch(), PATIENCE, "a batch")
        os.kill(deaf.pid, signal.SIGSTOP)
        driver = present(bridge.child("towline.bridge.runtime.driver"))
        bridge.process.terminate()
        assert bridge.process.wait(25) == 0
        wait_for_end([driver])
    finally:
        kafka.resume()
    assert deaf.process.has_ended()


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_intake_goes_on_while_kafka_is_down(bridge: Running, broker: Mosquitto, guarantee: str) -> None:
    lines = LINE.format(own=f'guarantee = "{guarantee}"', topic="t")
    bridge.write(broker.uri, f"127.0.0.1:{free_port()}", lines)
    bridge.start()
    bridge.said("messages are still received and wait on disk")
    wait_until(lambda: bridge.line()["gateway_running"], PATIENCE, "the gateway")
    publish(broker, 0, 100)
    wait_until(lambda: (bridge.line()["account"] or {}).get("waiting") == 100, PATIENCE, "100 waiting")
    assert bridge.out.count("[TL-K01]") == 1
    other = towline_command("run", bridge.file)
    assert other.returncode == 2
    assert f"a bridge runs here (pid {bridge.process.pid})" in other.stderr
    gateway = bridge.line()["gateway"]["pid"]
    assert bridge.command("restart", "line") == 'line "line": gateway and query restarted\n'
    wait_until(bridge.online, PATIENCE, "the gateway again")
    assert (bridge.line()["gateway"]["pid"] == gateway, bridge.account()["waiting"]) == (False, 100)
    told = story(bridge, "--offset", "3")
    assert (told["state"], [step["name"] for step in told["steps"]]) == (
        "waiting",
        ["received", "journaled", "acknowledged", "batch"],
    )
    assert told["steps"][0]["text"] == "topic t/d/x, QoS 1, 2 bytes"
    assert bridge.interrupt() == 0
    assert "100 messages on disk; the next start delivers them" in bridge.out
    told = story(bridge, "--offset", "3")
    assert (told["state"], told["steps"][0]["at"]) == ("waiting", None)
    assert told["steps"][0]["text"].startswith("unknown: its gateway does not answer")
    line = bridge.line()
    assert (line["gateway_running"], line["account"], line["last"]["account"]["waiting"]) == (False, None, 100)
