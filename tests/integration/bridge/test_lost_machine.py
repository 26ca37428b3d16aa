"""A machine that is lost, and a state directory that moves, as docs/operate.md has them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Flow, Running, in_kafka, kill_all, publish
from tests.integration.bridge.test_delivery_semantics import JVM, begun, nothing_waits, online, stands_still
from towline_prove.devstack import Kafka, Mosquitto

pytestmark = pytest.mark.spark

#: One line for each way; what is published goes to both.
BOTH = """
[[uplink]]
name = "least"
guarantee = "at_least_once"
ack_after = "kafka"
route = [{{ from = "l/#", topic = "{least}" }}]
[[uplink]]
name = "once"
guarantee = "exactly_once"
route = [{{ from = "o/#", topic = "{once}" }}]
"""
LINES = ("least", "once")


def publish_to_both(broker: Mosquitto, first: int, count: int) -> None:
    publish(broker, first, count, topic="l/d/x", qos=1)
    publish(broker, first, count, topic="o/d/x", qos=2)


def stop_in_a_batch(bridge: Running, broker: Mosquitto, first: int) -> int:
    """Freeze Spark's JVM in a batch of "once", under a load; return the number after its last message."""
    jvm = wait_until(lambda: bridge.child(JVM), PATIENCE, "Spark")

    def frozen() -> bool:
        if begun(bridge, "once") is None:
            return False
        jvm.suspend()
        wait_until(lambda: stands_still(jvm.pid), PATIENCE, "the stop of each thread")
        if begun(bridge, "once") is not None:
            return True
        jvm.resume()
        return False

    with Flow(broker, lambda to, sent, count: publish_to_both(to, first + sent, count), 25, 0.0) as flow:
        wait_until(frozen, PATIENCE, "a batch in work")
    return first + flow.sent


def moved(bridge: Running, to: str) -> None:
    """Copy the state directory, remove where it was, and name the copy in the file."""
    former, bridge.state = bridge.state, to
    subprocess.run(["cp", "-a", former, to], cwd=bridge.directory, check=True)
    shutil.rmtree(bridge.directory / former)
    bridge.file.write_text(bridge.file.read_text().replace(f'state_dir = "{former}"', f'state_dir = "{to}"'))


def test_what_is_lost_with_a_machine_and_what_moves_with_its_disk(
    bridge: Running, broker: Mosquitto, kafka: Kafka, topic: NewTopic
) -> None:
    """The disk of "once" moves, after a clean stop and after kill -9; that of "least" is lost. No command is typed."""
    topics = {line: topic(line) for line in LINES}
    bridge.write(broker.uri, kafka.bootstrap, BOTH.format(**topics))
    bridge.start()
    for line in LINES:
        online(bridge, line)
    publish_to_both(broker, 0, 100)
    for line in LINES:
        wait_until(lambda line=line: bridge.line(line)["gateway"]["journaled"] == 100, PATIENCE, f"all in {line}")  # type: ignore[misc]
    assert bridge.interrupt() == 0

    publish_to_both(broker, 100, 50)  # which the broker keeps
    moved(bridge, "second place")
    bridge.start()
    for line in LINES:
        nothing_waits(bridge, 150, line)
        assert bridge.account(line)["adds_up"]
    sent = stop_in_a_batch(bridge, broker, 150)
    for line in LINES:
        wait_until(lambda line=line: bridge.line(line)["gateway"]["journaled"] >= sent, PATIENCE, f"all in {line}")  # type: ignore[misc]
    gateway = bridge.line("least")["gateway"]
    assert gateway["unacknowledged"] >= gateway["waiting"] > 0, "nothing would be lost"
    kill_all(bridge.process)

    publish_to_both(broker, sent, 50)
    moved(bridge, "third place")
    shutil.rmtree(bridge.directory / bridge.state / "least")
    bridge.start()
    expected = [f"m{n}".encode() for n in range(sent + 50)]
    nothing_waits(bridge, len(expected), "once")
    assert bridge.account("once")["adds_up"]
    wait_until(
        lambda: {value for _, value, _ in in_kafka(kafka.bootstrap, topics["least"])} >= set(expected),
        PATIENCE,
        "what the broker had kept",
    )
    nothing_waits(bridge, 50, "least")
    assert bridge.account("least")["adds_up"]
    assert bridge.interrupt() == 0
    assert [value for _, value, _ in in_kafka(kafka.bootstrap, topics["once"])] == expected, "lost, doubled or moved"
