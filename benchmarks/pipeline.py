"""The whole way, MQTT → Kafka, against the bridge everybody writes by hand; same broker, same Kafka, same backlog."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, TopicPartition

from benchmarks.intake import forget
from benchmarks.rig import UNLIMITED, Meter, Outcome, held, machine, publish, running, wait
from towline_prove import processes
from towline_prove.processes import Role
from towline_prove.rig import Rig
from towline_prove.subject import TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RIVAL_TOPIC = "paho"


class Ends:
    """How many records a topic holds for a read_committed reader (control records of transactions included)."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "bench", "isolation.level": "read_committed"}
        )
        self._places = [TopicPartition(topic, number) for number in range(partitions)]

    def __call__(self) -> int:
        """The sum over the partitions."""
        return sum(self._consumer.get_watermark_offsets(place, timeout=10)[1] for place in self._places)

    def close(self) -> None:
        """Leave Kafka."""
        self._consumer.close()


def towline_drain(rig: Rig, directory: Path, count: int, *, devices: int = 50) -> Outcome:
    """Hold the gateway, pile up a backlog, let go; QoS 2 where it is to be exactly once."""
    bridge = rig.bridge
    gateway = bridge.gateway_process()
    assert gateway is not None
    meter = Meter(
        {
            "gateway": lambda: [gateway.pid],
            "spark tree": lambda: [
                p
                for root in processes.pids_with_role(_root(rig), Role.DRIVER)[:1]
                for p in processes.process_tree(root)
            ],
            "supervisor": lambda: [_root(rig)],
            "mosquitto": lambda: [rig.mosquitto.pid or 0],
            "kafka": lambda: [rig.kafka.pid or 0],
        }
    )
    own = ["gateway", "spark tree", "supervisor"]
    qos = 2 if rig.guarantee == "exactly_once" else 1
    return drain(f"towline {rig.guarantee}", rig, directory, gateway.pid, meter, TOPIC, count, own, qos, devices)


def _root(rig: Rig) -> int:
    assert rig.bridge.child is not None
    return rig.bridge.child.pid


@contextmanager
def paho(rig: Rig, directory: Path, count: int) -> Iterator[int]:
    """Run the rival; its pid."""
    out = directory / f"paho-{time.time_ns()}"
    places = [str(rig.mosquitto.port), rig.bootstrap, RIVAL_TOPIC, str(count)]
    with running([sys.executable, "-m", "benchmarks.paho_bridge", *places], out) as child:
        wait(lambda: "ready" in out.read_text(), "the paho bridge")
        yield child.pid


def paho_drain(rig: Rig, directory: Path, pid: int, count: int) -> Outcome:
    """The same for the rival."""
    return rival_drain("paho + confluent-kafka by hand", rig, directory, pid, count)


def rival_drain(name: str, rig: Rig, directory: Path, pid: int, count: int) -> Outcome:
    """Let a bridge of another make drain a backlog into its topic."""
    meter = Meter(
        {
            "bridge": lambda: [pid],
            "mosquitto": lambda: [rig.mosquitto.pid or 0],
            "kafka": lambda: [rig.kafka.pid or 0],
        }
    )
    return drain(name, rig, directory, pid, meter, RIVAL_TOPIC, count, ["bridge"])


def drain(
    name: str,
    rig: Rig,
    directory: Path,
    pid: int,
    meter: Meter,
    topic: str,
    count: int,
    own: list[str],
    qos: int = 1,
    devices: int = 50,
) -> Outcome:
    """Hold a process, pile up a backlog, let go, and wait until all of it is in the topic."""
    ends = Ends(rig.bootstrap, topic, 2)
    with held(pid):
        publish(rig.mosquitto, directory, count, qos=qos, devices=devices)
        before = ends()
        meter.start()
        began = time.monotonic()
    wait(lambda: ends() - before >= count, f"{name} to drain", pause=0.02)
    seconds = time.monotonic() - began
    meter.stop()
    ends.close()
    return Outcome(name, count, seconds, meter.used, own)


def run(count: int = 300_000, rounds: int = 2, guarantees: Sequence[str] = ("exactly_once", "at_least_once")) -> None:
    """The rival and each guarantee in turn, and their ratios (the best of each)."""
    for number, guarantee in enumerate(guarantees):
        with tempfile.TemporaryDirectory(prefix="towline-bench-") as name:
            _compare(Path(name), guarantee, count, rounds, explained=number > 0)


def _compare(directory: Path, guarantee: str, count: int, rounds: int, *, explained: bool) -> None:
    with Rig(directory / "rig", mosquitto=UNLIMITED, guarantee=guarantee, direct=True) as rig:
        if not explained:
            print(f"pipeline: backlog of {count:,} drained into Kafka {rig.kafka.version}\n  {machine()}")
            print(f"  Mosquitto {rig.mosquitto.version}, 150 B, QoS 2 for exactly_once, else 1, Spark warm\n")
        rig.kafka.create_topics({RIVAL_TOPIC: 2})
        rig.warm_up(5_000)
        ours = _rounds(lambda: towline_drain(rig, directory, count), rounds + 1)[1:]  # the first is warm-up
        rig.bridge.stop()
        forget(rig.mosquitto, "prove-telemetry")
        with paho(rig, directory, count // 3 * rounds) as pid:
            theirs = _rounds(lambda: paho_drain(rig, directory, pid, count // 3), rounds)
    best, rival = (max(runs, key=lambda outcome: outcome.rate) for runs in (ours, theirs))
    cpu = {each.name: sum(each.micros(part) for part in each.own) for each in (best, rival)}
    print(f"\n  ratio towline {guarantee} : paho by hand, at least once   {best.rate / rival.rate:.1f}   (aim 12)")
    print(f"  CPU us a message: towline {cpu[best.name]:.1f}, paho by hand {cpu[rival.name]:.1f}")
    print(f"  gateway {best.micros('gateway'):.2f} (aim 1.5), Spark {best.micros('spark tree'):.2f} (aim 6)\n")


def _rounds(measure: Callable[[], Outcome], rounds: int) -> list[Outcome]:
    outcomes = []
    for _ in range(rounds):
        outcomes.append(measure())
        print(outcomes[-1].line(), flush=True)
    return outcomes
