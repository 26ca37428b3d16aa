"""Where the time of a message goes: CPU of every process and kind of thread on the whole way, warm, from /proc.

The gateway drains the broker while Spark stands still, then Spark drains the gateway; several times, and the first half
warms Spark's compilers and is not counted.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.intake import forget
from benchmarks.peers import beside
from benchmarks.pipeline import RIVAL_TOPIC, Ends
from benchmarks.rig import UNLIMITED, held, machine, publish, wait
from benchmarks.start import PEAK_JVM
from towline.spark.java import QUICK_JVM
from towline_prove import processes
from towline_prove.processes import Role
from towline_prove.rig import Rig
from towline_prove.subject import TOPIC

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Kinds of the JVM's threads, by the beginning of their names (Linux keeps 15 characters); the first match counts.
_JVM_THREADS: Final = {
    "executor task": r"Executor task|stdout writer|Writer for",
    "stream thread": r"stream executio",
    "JIT C2": r"C2 Compiler",
    "JIT C1": r"C1 Compiler",
    "garbage collector": r"G1 |GC Thread|VM Thread|VM Periodic|Sweeper|Common-Cleaner|Finalizer|Reference Hand",
}


#: Guarantee and the compilers of Spark's JVM; peers are measured beside the last.
_CASES: Final = (("exactly_once", "quick"), ("at_least_once", "peak"), ("at_least_once", "quick"))


@dataclass(frozen=True)
class Place:
    """One row of the table.

    Attributes:
        process: Which.
        part: Which kind of its threads.
    """

    process: str
    part: str


def _place(role: Role, pid: int, thread: int, name: str) -> Place:
    if role is Role.JVM:
        kind = next((kind for kind, sign in _JVM_THREADS.items() if re.match(sign, name)), "other")
        return Place("JVM", kind)
    if role is Role.GATEWAY:
        return Place("gateway", "intake" if thread == pid else "serving rows")  # the pump is the main thread
    if role is Role.WORKER:
        return Place("Python workers", "librdkafka" if name.startswith("rdk:") else _module(pid))
    return Place("bridge and driver", role.value)


def _module(pid: int) -> str:
    module = re.search(r"-m\0pyspark\.([\w.]+)", processes.command_line(pid))
    name = module[1].rpartition(".")[2] if module else ""
    return {"daemon": "sink", "python_streaming_source_runner": "source"}.get(name, "other")


def _threads(root: int) -> Iterator[tuple[Place, float]]:
    """CPU seconds of each thread below a process; what of a process is none of these was of threads that have ended."""
    for pid in processes.process_tree(root):
        role = processes.role_of(pid)
        left = processes.cpu_time_of([pid]).total_s
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                name = (task / "comm").read_text().strip()
                fields = (task / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            seconds = (int(fields[11]) + int(fields[12])) / processes.TICKS_PER_SECOND
            left -= seconds
            yield _place(role, pid, int(task.name), name), seconds
        yield Place(_place(role, pid, pid, "").process, "ended threads and children"), max(0.0, left)


def clocks(root: int) -> Counter[Place]:
    """CPU seconds so far by place."""
    total: Counter[Place] = Counter()
    for place, seconds in _threads(root):
        total[place] += seconds  # type: ignore[assignment]  # a Counter of floats
    return total


def _drained(rig: Rig, directory: Path, child: int, count: int) -> Counter[Place]:
    """What `count` messages cost: first to the journal, while Spark stands still, and then from there to Kafka."""
    gateway = rig.bridge.gateway_process()
    jvm = processes.pids_with_role(child, Role.JVM)[0]  # what it forks looks like itself for a moment
    assert gateway is not None
    ends = Ends(rig.bootstrap, TOPIC, 2)
    written, stored = ends(), rig.journaled_count()
    with held(jvm):
        with held(gateway.pid):
            publish(rig.mosquitto, directory, count, qos=2 if rig.guarantee == "exactly_once" else 1)
            before = clocks(child)
        wait(lambda: rig.journaled_count() - stored >= count, "the gateway to drain the broker")
    wait(lambda: ends() - written >= count, "Spark to drain the gateway", pause=0.02)
    ends.close()
    used = clocks(child)
    used.subtract(before)  # with what has become less: of a thread that has ended
    return used


def profile(count: int, rounds: int, guarantee: str, tier: str) -> None:
    """Drain `count` messages as often as `rounds` says, and print the second half."""
    os.environ["SPARK_SUBMIT_OPTS"] = " ".join(QUICK_JVM) if tier == "quick" else PEAK_JVM
    with (
        tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
        Rig(Path(name) / "rig", mosquitto=UNLIMITED, guarantee=guarantee, direct=True) as rig,
    ):
        rig.warm_up(5_000)
        child = rig.bridge.child
        assert child is not None
        used: Counter[Place] = Counter()
        for number in range(rounds):
            cost = _drained(rig, Path(name), child.pid, count)
            if number >= rounds // 2:
                used.update(cost)
        counted = (rounds - rounds // 2) * count
        print(f"  {guarantee}, tier {tier}: {counted:,} messages after {rounds // 2 * count:,} to warm up\n")
        _print(used, counted)
        if (guarantee, tier) == _CASES[-1]:
            rig.bridge.stop()
            forget(rig.mosquitto, "prove-telemetry")
            rig.kafka.create_topics({RIVAL_TOPIC: 2})
            beside(rig, Path(name), count, rounds // 2)
            print()


def _print(used: Counter[Place], count: int) -> None:
    micros = {place: seconds / count * 1e6 for place, seconds in used.items()}
    for process in dict.fromkeys(place.process for place in sorted(used, key=lambda place: place.process)):
        parts = {place.part: value for place, value in micros.items() if place.process == process}
        told = ", ".join(f"{part} {value:.2f}" for part, value in sorted(parts.items(), key=lambda one: -one[1]))
        print(f"  {process:<20} {sum(parts.values()):6.2f} us a message: {told}")
    print(f"  {'all told':<20} {sum(micros.values()):6.2f}\n", flush=True)


def run(count: int = 300_000, rounds: int = 6) -> None:
    """Both guarantees with one compiler of Java's, and with two."""
    print(f"profile: backlog of {count:,} drained, 150 B, three headers\n  {machine()}\n")
    for guarantee, tier in _CASES:
        profile(count, rounds, guarantee, tier)
