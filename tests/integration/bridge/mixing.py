"""Devices that publish with QoS 0 and QoS 1 in turn, and what a reader of Kafka finds of routes that promise less."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from paho.mqtt import client as paho

from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running, in_kafka
from tests.integration.devices import device
from towline_prove.devstack import Kafka, Mosquitto

#: In the command line of a bridge's Spark.
JVM = "org.apache.spark.deploy.SparkSubmit"
DEVICES = 3
#: The line; the header says where a message lies in the journal, which is the order it came in.
MIXED = """
[[uplink]]
name = "mixed"
guarantee = "exactly_once"
max_trigger_delay_ms = 0
[[uplink.route]]
promise = "at_least_once"
from = "q/{{device}}"
topic = "{topic}"
key = "{{device}}"
headers = {{ at = "{{mqtt.offset}}" }}
[[uplink.route]]
promise = "at_most_once"
from = "z/{{device}}"
topic = "{topic}"
key = "{{device}}"
headers = {{ at = "{{mqtt.offset}}" }}
"""


def qos_of(number: int) -> int:
    """How a message comes: each device changes its QoS with every message, and one is on the route at most once."""
    return 0 if number % DEVICES == 2 else number // DEVICES % 2


def publish_mixed(broker: Mosquitto, first: int, count: int) -> None:
    """Publish numbered messages, each device's next with the other QoS, and wait until the broker has them."""
    # Mosquitto takes 20, and ends the connection of who sends more.
    with device(broker.port, paho.MQTTv311, "mixed", in_flight=10) as client:
        sent = []
        for number in range(first, first + count):
            own = number % DEVICES
            sent.append(client.publish(f"{'z' if own == 2 else 'q'}/d{own}", f"{number}", qos=number // DEVICES % 2))
        for each in sent:  # those of QoS 1 are queued here, and one of QoS 0 may overtake them
            each.wait_for_publish(PATIENCE)


def stands_still(pid: int) -> bool:
    """Whether SIGSTOP has come to each thread: one in a call of the system, as a rename, ends that first."""
    try:
        states = [file.read_text().rpartition(")")[2].split()[0] for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return set(states) <= {"T", "t"}


def stop_in_mid_batch(
    bridge: Running,
    kafka: Kafka,
    begun: Mapping[str, Callable[[], int | None]],
    *,
    also: Callable[[], object] = lambda: True,
    driver: bool = False,
) -> None:
    """Kill Spark's JVM, with -9, when Kafka has records of batches that Spark has not committed.

    Args:
        bridge: It runs.
        kafka: Where the topics are.
        begun: The batch that was begun and is not committed, or None, by the topic that its line writes.
        also: What has to be true at that moment too.
        driver: Kill the driver with it.
    """
    process = wait_until(lambda: bridge.child(JVM), PATIENCE, "Spark")
    # The very end: that of open transactions too.
    settings = {"bootstrap.servers": kafka.bootstrap, "group.id": "ends", "isolation.level": "read_uncommitted"}
    reader = Consumer(settings)
    listed = reader.list_topics(timeout=20).topics
    places = {topic: [TopicPartition(topic, part) for part in listed[topic].partitions] for topic in begun}
    #: The batch that was seen last, and where its topic ended when it was first seen.
    seen: dict[str, tuple[int | None, int]] = dict.fromkeys(begun, (None, 0))

    def end(topic: str) -> int:
        return sum(reader.get_watermark_offsets(place, timeout=20)[1] for place in places[topic])

    def written(topic: str) -> bool:
        batch = begun[topic]()
        if batch is None or seen[topic][0] != batch:
            seen[topic] = (batch, end(topic))
            return False
        return end(topic) > seen[topic][1] + DEVICES  # four in a row of `publish_mixed` have both classes

    def struck() -> bool:
        all_written = [written(topic) for topic in begun]
        if not all(all_written) or not also():
            return False
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: stands_still(process.pid), PATIENCE, "the stop of each thread")
        if all(begun[topic]() == seen[topic][0] for topic in begun) and also():
            return True
        os.kill(process.pid, signal.SIGCONT)
        return False

    try:
        until = time.monotonic() + PATIENCE
        while not struck():  # a batch takes less time than `wait_until` rests between two looks
            assert time.monotonic() < until, "waited for records in Kafka of batches that are not committed"
    finally:
        if driver:
            bridge.kill("towline.bridge.runtime.driver")
        os.kill(process.pid, signal.SIGKILL)
        reader.close()


def check_mixed(kafka: Kafka, topic: str, sent: int, account: Mapping[str, Any]) -> None:
    """QoS 0 at most once, QoS 1 doubled only by the broker, each device in its order, an account that adds up."""
    records = [(int(value), headers) for _, value, headers in in_kafka(kafka.bootstrap, topic)]
    times = Counter(n for n, _ in records)
    none, once = ({n for n in range(sent) if qos_of(n) == qos} for qos in (0, 1))
    assert all(headers["mqtt.qos"] == str(qos_of(n)).encode() for n, headers in records)
    assert [n for n in none if times[n] > 1] == [], "QoS 0, doubled"
    assert none - times.keys(), "QoS 0 that came while no gateway was there"
    assert [n for n in once if not times[n]] == [], "QoS 1, lost"
    assert len({headers["at"] for _, headers in records}) == len(records), "doubled, and not by the broker"

    firsts = {n: int(headers["at"]) for n, headers in reversed(records)}
    for own in range(DEVICES):
        places = [firsts[n] for n in dict.fromkeys(n for n, _ in records) if n % DEVICES == own]
        assert places == sorted(places), f"the order of device {own}"

    assert account["adds_up"], account
    assert account["received"] == account["in_kafka"] == len(records)
