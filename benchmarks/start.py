"""From ``towline run`` to the first record in Kafka: seconds, and CPU seconds of all that it starts."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pyspark
from mqtt5 import ConnectPacket, DisconnectPacket, PublishPacket, QoS

from benchmarks.intake import forget
from benchmarks.pipeline import Ends
from benchmarks.rig import machine, wait
from towline.spark.java import QUICK_JVM
from towline_prove import processes
from towline_prove.devstack.kafka import Kafka
from towline_prove.devstack.mosquitto import Mosquitto
from towline_prove.load import connect
from towline_prove.subject import LINE, TOPIC, BridgeRun, bridge_file

if TYPE_CHECKING:
    from collections.abc import Iterator


#: Java's own compilers and collector, also on few cores.
PEAK_JVM: Final = "-XX:TieredStopAtLevel=4 -XX:-UseSerialGC"


class Way(NamedTuple):
    """How Spark's JVM is started.

    Attributes:
        name: For people.
        options: Of the JVM, in ``SPARK_SUBMIT_OPTS``.
        light: With the archive of classes, and the home that it belongs to; else with Spark's own home.
    """

    name: str
    options: str
    light: bool


WAYS: Final = (
    Way("as Java does", PEAK_JVM, light=False),
    Way("with the archive of classes", PEAK_JVM, light=True),
    Way("and one compiler", " ".join(QUICK_JVM), light=True),
)


#: A home that the user has set stays, and no archive belongs to it.
_HOME: Final = "SPARK_HOME"


class Started(NamedTuple):
    """What a start cost."""

    seconds: float
    cpu: float


def start(directory: Path, broker: Mosquitto, kafka: Kafka, way: Way) -> Started:
    """Start a bridge that has never run; a retained message waits for it."""
    config = directory / "bridge.toml"
    text = bridge_file(directory / "state", broker.uri, kafka.bootstrap, "at_least_once", writer="start", kafka_line="")
    config.write_text(text)
    ends = Ends(kafka.bootstrap, TOPIC, 2)
    before = ends()
    os.environ["SPARK_SUBMIT_OPTS"] = way.options
    if not way.light:
        os.environ[_HOME] = str(Path(pyspark.__file__).parent)
    try:
        with BridgeRun(config, directory / "state" / LINE, directory / "log") as bridge:
            began = time.monotonic()
            bridge.start()
            assert bridge.child is not None
            wait(lambda: ends() > before, "the first record", pause=0.02)
            seconds = time.monotonic() - began
            cpu = processes.cpu_time_of(processes.process_tree(bridge.child.pid)).total_s
            bridge.stop()
    finally:
        os.environ.pop(_HOME, None)
        ends.close()
    return Started(seconds, cpu)


def _rounds(directory: Path, rounds: int) -> Iterator[tuple[Way, Started]]:
    with Mosquitto(directory / "mosquitto") as broker, Kafka(directory / "kafka") as kafka:
        kafka.create_topics({TOPIC: 2})
        sock, _, _ = connect(ConnectPacket("start", clean_start=True), "127.0.0.1", broker.port)
        packet = PublishPacket("telemetry/d/data", b"x" * 150, qos=QoS.AT_MOST_ONCE, retain=True)
        sock.sendall(packet.write() + DisconnectPacket().write())
        sock.close()
        for number in range(rounds):
            for at, way in enumerate(WAYS):
                place = directory / f"{number}-{at}"
                place.mkdir()
                yield way, start(place, broker, kafka, way)
                forget(broker, f"start-{LINE}")


def run(rounds: int = 3) -> None:
    """Each way in turn, and the best of each."""
    print(f"start: towline run to the first record, never run before\n  {machine()}\n")
    best: dict[Way, Started] = {}
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as name:
        for way, started in _rounds(Path(name), rounds):
            best[way] = min(best.get(way, started), started)
    for way, (seconds, cpu) in best.items():
        print(f"  {way.name:<28} {seconds:5.1f} s   {cpu:5.1f} CPU s   (aim 7 s, 9 CPU s)")
    print(flush=True)
