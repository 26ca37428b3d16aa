"""Each promise on a real bridge, with kill -9 at the moments that matter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from tests.conftest import NewMosquitto, NewTopic
from tests.helpers import wait_until
from tests.integration.bridge.mixing import MIXED, Mixed, check_mixed, stop_in_mid_batch
from tests.integration.bridge.running import PATIENCE, Running, in_kafka, publish
from towline.checkpoint import Checkpoint
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.history import read_history
from towline_prove.load import LoadPlan, run_load
from towline_prove.reader import read_topic
from towline_prove.referee import judge

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

JVM = "org.apache.spark.deploy.SparkSubmit"


def write(bridge: Running, mqtt: int, kafka: str, line: str, route: str, create: str = "") -> None:
    bridge.file.write_text(f"""
name = "tests"
state_dir = "state"
mqtt = {{ brokers = "mqtt://127.0.0.1:{mqtt}" }}
kafka = {{ bootstrap_servers = "{kafka}" {create} }}
spark = {{ master = "local[2]" }}
[[uplink]]
name = "line"
{line}
[[uplink.route]]
{route}
""")


def online(bridge: Running, line: str = "line") -> None:
    wait_until(
        lambda: (bridge.line(line)["gateway"] or {}).get("state") == "online", PATIENCE, f"the gateway of {line}"
    )


def nothing_waits(bridge: Running, received: int, line: str = "line") -> None:
    wait_until(
        lambda: (a := bridge.account(line))["received"] >= received and not a["waiting"],
        PATIENCE,
        f"{received} done in {line}",
    )


def checkpoint(bridge: Running, line: str = "line") -> Checkpoint:
    return Checkpoint(f"file:{bridge.state_dir.with_name(line) / 'checkpoint'}")


def in_work(bridge: Running, line: str = "line") -> int | None:
    """The batch that was begun and is not done."""
    planned, done = checkpoint(bridge, line).last_offsets_batch(), checkpoint(bridge, line).last_commit_batch()
    return planned if planned and planned != done else None


class Flow:
    """Messages at a steady pace, published beside the test until it is left.

    Attributes:
        sent: How many of them were published.
    """

    _CHUNK = 50

    def __init__(self, broker: Mosquitto) -> None:
        self._broker = broker
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.sent = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        while not self._enough.is_set():
            publish(self._broker, self.sent, self._CHUNK)
            self.sent += self._CHUNK


#: The second line, behind the one at most once.
UNREPEATED = """
[[uplink]]
name = "unrepeated"
dedupe = {{ key = "{{mqtt.user.id}}", within = "10 minutes" }}
[[uplink.route]]
from = "u/{{device}}/#"
topic = "{topic}"
key = "{{device}}"
"""


def test_at_most_once_by_qos_and_repeats_dropped_across_kills(
    bridge: Running, new_mosquitto: NewMosquitto, kafka: Kafka, topic: NewTopic
) -> None:
    """Three lines of one bridge, so that they share its starts and its kills."""
    broker = new_mosquitto(max_queued_messages="0")
    name, other, both = topic(), topic("unrepeated"), topic("mixed")
    route = f'from = "t/#"\nqos = 1\ntopic = "{name}"' + UNREPEATED.format(topic=other) + MIXED.format(topic=both)
    write(bridge, broker.port, kafka.bootstrap, 'guarantee = "at_most_once"', route)
    bridge.start()
    online(bridge)
    online(bridge, "unrepeated")
    online(bridge, "mixed")
    publish(broker, 100_000, 50)
    publish(broker, 0, 300, topic="u/d/x", user="id")
    publish(broker, 100, 100, topic="u/d/x", user="id")
    nothing_waits(bridge, 50)
    nothing_waits(bridge, 400, "unrepeated")
    # A kill between a commit and Spark's report of it leaves that batch uncounted.
    wait_until(lambda: bridge.account("unrepeated")["deduplicated"] == 100, PATIENCE, "the first counts")

    with Flow(broker) as flow:
        with Mixed(broker) as mixed:
            # The first batches may be a few messages, of one class.
            wait_until(lambda: mixed.sent > 500, PATIENCE, "batches of both classes")
            stop_in_mid_batch(bridge, JVM, kafka, both, lambda: in_work(bridge) and in_work(bridge, "mixed"))
        publish(broker, 200, 200, topic="u/d/x", user="id")
        publish(broker, 0, 10, topic="u/d/x")  # no key: passed on, whatever was seen
        publish(broker, 0, 10, topic="u/d/x")
        wait_until(lambda: bridge.child(JVM) is not None, PATIENCE, "Spark again")
        bridge.kill("towline.bridge.runtime.driver")
    wait_until(lambda: bridge.child(JVM) is not None, PATIENCE, "Spark again")
    nothing_waits(bridge, 50 + flow.sent)
    nothing_waits(bridge, 620, "unrepeated")
    nothing_waits(bridge, mixed.sent, "mixed")
    once = wait_until(lambda: (a := bridge.account())["skipped"] and a, PATIENCE, "an interrupted batch was given up")
    unrepeated = wait_until(
        lambda: (a := bridge.account("unrepeated"))["deduplicated"] == 200 and a, PATIENCE, "the counts"
    )
    assert (unrepeated["in_kafka"], unrepeated["adds_up"]) == (420, True)
    two_classes = wait_until(lambda: (a := bridge.account("mixed"))["skipped"] and a, PATIENCE, "a batch came again")
    assert bridge.interrupt() == 0
    assert "deduplicated 200" in bridge.out
    check_mixed(kafka, both, mixed.sent, two_classes)

    values = [value for _, value, _ in in_kafka(kafka.bootstrap, name)]
    assert len(values) == len(set(values)), "doubled"
    assert values[50:] == sorted(values[50:], key=lambda value: int(value[1:])), "order"
    # What was given up was handed to Kafka once before the kill, so some of it may be there.
    assert 50 < len(values) <= 50 + flow.sent
    assert once["adds_up"]
    values = [value for _, value, _ in in_kafka(kafka.bootstrap, other)]
    assert list(dict.fromkeys(values)) == [f"m{n}".encode() for n in range(400)], "all, in order"
    assert len(values) == 420


def test_exactly_once_whatever_is_killed(
    bridge: Running, new_mosquitto: NewMosquitto, own_kafka: Kafka, tmp_path: Path
) -> None:
    broker = new_mosquitto(max_queued_messages="0")
    own_kafka.create_topics({"t": 2})
    route = 'from = "telemetry/{device}/data"\ntopic = "t"\nkey = "{device}"'
    line = 'guarantee = "exactly_once"\nmax_messages_per_trigger = 150'
    write(bridge, broker.port, own_kafka.bootstrap, line, route)
    bridge.start()
    online(bridge)
    wait_until(lambda: checkpoint(bridge).last_commit_batch() is not None, PATIENCE, "the first, empty batch")
    messages = 4000
    plan = LoadPlan(port=broker.port, messages=messages, rate=100, qos=2, devices=16, publishers=4)
    load = threading.Thread(target=run_load, args=(plan, tmp_path / "claims"), daemon=True)
    load.start()
    for strike in _strikes(bridge, own_kafka):
        wait_until(lambda: in_work(bridge), PATIENCE, "a batch in work")
        before = checkpoint(bridge).last_commit_batch() or 0
        strike()
        wait_until(lambda: (checkpoint(bridge).last_commit_batch() or 0) > before, PATIENCE, "the next batch")  # noqa: B023 - asked now
    load.join(PATIENCE)
    assert not load.is_alive()
    nothing_waits(bridge, messages)
    assert bridge.account()["adds_up"]
    assert bridge.interrupt() == 0
    verdict = judge(read_history(tmp_path / "claims"), read_topic(own_kafka.bootstrap, "t", reader="kcat"))
    assert (verdict.acked, verdict.delivered) == (messages, messages), verdict.line()
    assert verdict.ok("exactly_once"), verdict.line()


def _strikes(bridge: Running, kafka: Kafka) -> list[Callable[[], None]]:
    def gateway() -> None:
        bridge.kill("towline.gateway")

    def spark() -> None:
        bridge.kill(JVM)

    def broker() -> None:
        kafka.kill()
        kafka.start()

    return [gateway, spark, broker]
