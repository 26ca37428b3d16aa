"""Devices that publish with QoS 0 and QoS 1 in turn, and what a reader of Kafka finds of that on a line by_qos."""

from __future__ import annotations

import os
import signal
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Self

from confluent_kafka import Consumer, TopicPartition
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running, in_kafka
from towline_prove.devstack import Kafka, Mosquitto

__all__ = ["DEVICES", "JVM", "MIXED", "Mixed", "check_mixed", "stop_in_mid_batch"]

#: In the command line of a bridge's Spark.
JVM = "org.apache.spark.deploy.SparkSubmit"
DEVICES = 3
#: The line; the header says where a message lies in the journal, which is the order it came in.
MIXED = """
[[uplink]]
name = "mixed"
guarantee = "by_qos"
[[uplink.route]]
from = "q/{{device}}"
topic = "{topic}"
key = "{{device}}"
headers = {{ at = "{{mqtt.offset}}" }}
"""


class Mixed:
    """Numbered messages of several devices, each of the other QoS than the one before, until it is left.

    Attributes:
        sent: How many of them were published.
    """

    def __init__(self, broker: Mosquitto) -> None:
        self._client = paho.Client(CallbackAPIVersion.VERSION2, client_id="mixed", protocol=paho.MQTTv311)
        self._client.max_inflight_messages_set(10)  # Mosquitto takes 20, and ends the connection of who sends more
        self._client.connect("127.0.0.1", broker.port)
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.sent = 0

    def __enter__(self) -> Self:
        self._client.loop_start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(PATIENCE)
        self._client.disconnect()
        self._client.loop_stop()

    def _run(self) -> None:
        for first in count(step=100):
            # n // DEVICES % 2: each device changes its QoS with every message.
            numbers = range(first, first + 100)
            published = [self._client.publish(f"q/d{n % DEVICES}", f"{n}", qos=n // DEVICES % 2) for n in numbers]
            self.sent = first + 100
            for each in published:  # those of QoS 1 are queued here, and one of QoS 0 may overtake them
                each.wait_for_publish(PATIENCE)
            if self._enough.wait(0.05):
                return


def stop_in_mid_batch(
    bridge: Running,
    kafka: Kafka,
    topic: str,
    begun: Callable[[], int | None],
    *,
    also: Callable[[], object] = lambda: True,
    driver: bool = False,
) -> None:
    """Kill Spark's JVM, with -9, when Kafka has records of a batch that Spark has not committed.

    Args:
        bridge: It runs.
        kafka: Where the topic is.
        topic: What is written.
        begun: The batch that was begun and is not committed, or None.
        also: What has to be true at that moment too.
        driver: Kill the driver with it.
    """
    process = wait_until(lambda: bridge.child(JVM), PATIENCE, "Spark")
    # The very end: that of open transactions too.
    settings = {"bootstrap.servers": kafka.bootstrap, "group.id": "ends", "isolation.level": "read_uncommitted"}
    reader = Consumer(settings)
    places = [TopicPartition(topic, part) for part in reader.list_topics(topic, timeout=20).topics[topic].partitions]
    #: The batch that was seen last, and where the topic ended when it was first seen.
    seen: tuple[int | None, int] = (None, 0)

    def end() -> int:
        return sum(reader.get_watermark_offsets(place, timeout=20)[1] for place in places)

    def struck() -> bool:
        nonlocal seen
        batch = begun()
        if batch is None or seen[0] != batch:
            seen = (batch, end())
            return False
        if end() <= seen[1] + DEVICES or not also():  # four in a row of `Mixed` have both classes
            return False
        os.kill(process.pid, signal.SIGSTOP)
        if begun() == batch and also():
            return True
        os.kill(process.pid, signal.SIGCONT)
        return False

    try:
        wait_until(struck, PATIENCE, "records in Kafka of a batch that is not committed")
    finally:
        if driver:
            bridge.kill("towline.bridge.runtime.driver")
        os.kill(process.pid, signal.SIGKILL)
        reader.close()


def check_mixed(kafka: Kafka, topic: str, sent: int, account: Mapping[str, Any]) -> None:
    """QoS 0 at most once, QoS 1 at least once, each device in its order, one producer, and an account that adds up."""
    records = [(int(value), headers) for _, value, headers in in_kafka(kafka.bootstrap, topic)]
    times = Counter(n for n, _ in records)
    none, once = ({n for n in range(sent) if n // DEVICES % 2 == qos} for qos in (0, 1))
    assert all(headers["mqtt.qos"] == str(n // DEVICES % 2).encode() for n, headers in records)
    assert [n for n in none if times[n] > 1] == [], "QoS 0, doubled"
    assert [n for n in once if not times[n]] == [], "QoS 1, lost"

    firsts = {n: int(headers["at"]) for n, headers in reversed(records)}
    for device in range(DEVICES):
        places = [firsts[n] for n in dict.fromkeys(n for n, _ in records) if n % DEVICES == device]
        assert places == sorted(places), f"the order of device {device}"

    given_up, carried = account["skipped"], account["in_kafka"]
    assert account["adds_up"], account
    assert account["received"] == carried + given_up
    assert given_up > 0
    # What was given up was handed to Kafka once before the crash, so some of it may be there.
    surely = carried - len(once)
    assert surely <= len(none & times.keys()) <= surely + given_up
    assert len(records) > carried, "no batch was interrupted after Kafka had some of it"

    writers = _producers(kafka.directory / "data" / f"{topic}-0")
    assert len(writers) == len(records)
    assert min(writers) >= 0, "a producer that is not idempotent"
    by_class = Counter((writer, n // DEVICES % 2) for writer, (n, _) in zip(writers, records, strict=True))
    # The first batches may be a few messages, of one class.
    alone = [writer for writer in set(writers) if by_class[writer, 0] > 2 * DEVICES and not by_class[writer, 1]]
    assert alone == [], "a producer for QoS 0 alone"


def _producers(partition: Path) -> list[int]:
    """The producer id of every record, by offset, out of Kafka's own log (record batches of magic 2)."""
    writers: list[int] = []
    for segment in sorted(partition.glob("*.log")):
        log, at = segment.read_bytes(), 0
        while at + 61 <= len(log):
            base, length = struct.unpack_from(">qi", log, at)
            if not length:  # the rest of the file is preallocated
                break
            (last_delta,) = struct.unpack_from(">i", log, at + 23)
            (producer,) = struct.unpack_from(">q", log, at + 43)
            assert base == len(writers)
            writers += [producer] * (last_delta + 1)
            at += 12 + length
    return writers
