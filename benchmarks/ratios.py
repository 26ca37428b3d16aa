"""Lines and the fastest rival in turns on the same brokers: ratios of their CPU a message, medians with their spread.

Each subject has MQTT topics and a Kafka topic of its own and runs all the time; while one is measured the others have
nothing to do.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.peers import floor, mq_bridge
from benchmarks.pipeline import Ends
from benchmarks.rig import UNLIMITED, held, machine, publish, wait
from towline_prove import processes
from towline_prove.rig import Rig
from towline_prove.subject import BridgeRun

if TYPE_CHECKING:
    from collections.abc import Callable

_FILE: Final = """
name = "{name}"
state_dir = "{directory}/state"
mqtt = {{ brokers = ["mqtt://127.0.0.1:{port}"] }}
kafka = {{ bootstrap_servers = "{kafka}" }}
[[uplink]]
name = "{name}"
guarantee = "{guarantee}"
dead_letter_topic = false
[[uplink.route]]
from = "{name}/{{device}}/data"
topic = "{name}"
key = "{{device}}"
{more}
"""
#: Lines: guarantee, and a further key of the route.
_LINES: Final = {
    "plain": ("at_least_once", 'properties = "none"'),
    "headers": ("at_least_once", ""),
    "once": ("exactly_once", ""),
    "sql": ("at_least_once", 'where = "length(payload) > machine_least"\nfields = { machine_least = "1" }'),
}
_RIVAL: Final = "mq-bridge"
_SAID: Final = {
    "plain": "Towline at least once, no headers",
    "headers": "Towline at least once, three headers",
    "once": "Towline exactly once, three headers",
    "sql": "Towline at least once, a where and a field",
    _RIVAL: "mq-bridge 1.2 tuned, no headers",
    "floor": "floor: decoder and librdkafka",
}


@dataclass(frozen=True)
class Subject:
    """What drains a backlog.

    Attributes:
        name: Of its topics.
        qos: Of its messages.
        held: The process that is stopped while the backlog comes.
        tree: Its processes now.
    """

    name: str
    qos: int
    held: Callable[[], int]
    tree: Callable[[], list[int]]


def run(count: int = 300_000, rounds: int = 6) -> dict[str, list[float]]:
    """Each in turn, as often as `rounds` says; the first round warms up.

    Args:
        count: Messages of a backlog.
        rounds: How often.

    Returns:
        CPU microseconds a message of each warm round, by subject.
    """
    print(f"ratios: backlogs of {count:,} drained in turns, 150 B\n  {machine()}\n")
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as name, ExitStack() as stack:
        rig = stack.enter_context(Rig(Path(name) / "rig", mosquitto=UNLIMITED, direct=True))
        rig.bridge.stop()
        rig.kafka.create_topics(dict.fromkeys([*_LINES, _RIVAL, "floor"], 2))
        subjects = [_line(stack, rig, Path(name), line) for line in _LINES]
        for peer, start in ((_RIVAL, mq_bridge), ("floor", floor)):
            pid = stack.enter_context(start(rig, Path(name), peer, peer))
            subjects.append(Subject(peer, 1, lambda pid=pid: pid, lambda pid=pid: [pid]))  # type: ignore[misc]
        spent: dict[str, list[float]] = {subject.name: [] for subject in subjects}
        for _ in range(rounds):
            for subject in subjects:
                spent[subject.name].append(_drained(rig, Path(name), subject, count))
        for subject in subjects:
            _print(subject.name, spent[subject.name][1:], spent[_RIVAL][1:])
    print()
    return {_SAID[name]: [round(micros, 2) for micros in all_rounds[1:]] for name, all_rounds in spent.items()}


def _line(stack: ExitStack, rig: Rig, directory: Path, name: str) -> Subject:
    guarantee, more = _LINES[name]
    place = directory / name
    place.mkdir()
    file = place / "bridge.toml"
    places = {"directory": place, "port": rig.mosquitto.port, "kafka": rig.bootstrap}
    file.write_text(_FILE.format(name=name, guarantee=guarantee, more=more, **places))
    bridge = stack.enter_context(BridgeRun(file, place / "state" / name, place / "bridge.log")).start()
    wait(lambda: bridge.state == "online", f"the gateway of {name}", seconds=60, pause=0.1)
    gateway = bridge.gateway_process()
    assert gateway is not None
    assert bridge.child is not None
    root = bridge.child.pid
    return Subject(
        name, 2 if guarantee == "exactly_once" else 1, lambda: gateway.pid, lambda: processes.process_tree(root)
    )


def _drained(rig: Rig, directory: Path, subject: Subject, count: int) -> float:
    """CPU microseconds a message of a backlog."""
    ends = Ends(rig.bootstrap, subject.name, 2)
    with held(subject.held()):
        publish(rig.mosquitto, directory, count, qos=subject.qos, topic=f"{subject.name}/{{device}}/data")
        written, before = ends(), processes.cpu_time_of(subject.tree()).total_s
    wait(lambda: ends() - written >= count, f"{subject.name} to drain", pause=0.02)
    ends.close()
    return (processes.cpu_time_of(subject.tree()).total_s - before) / count * 1e6


def _print(name: str, own: list[float], rival: list[float]) -> None:
    ratios = sorted(one / other for one, other in zip(own, rival, strict=True))
    least, most = min(own), max(own)
    print(
        f"  {_SAID[name]:<44} {statistics.median(own):6.2f} us ({least:.2f} to {most:.2f})"
        f"   / mq-bridge {statistics.median(ratios):5.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
    )
