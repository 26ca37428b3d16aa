"""What few messages cost: cores of a whole bridge by kind of process, and published → readable in Kafka.

A line at 100 messages a second and ten lines at 10, exactly once, at the default settings and at the lowest latency, in
turns: each is a bridge of its own on the same brokers, which has run for a while before the first message that counts.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.costs import clocks
from benchmarks.latency import percentile
from benchmarks.rig import UNLIMITED, machine, wait
from towline.checkpoint import Checkpoint
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.history import decode_message
from towline_prove.load import LoadPlan, run_load
from towline_prove.reader import TopicTail
from towline_prove.subject import BridgeRun

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds at the same rate before the first message that counts.
_WARM_S: Final = 20.0
_START_S: Final = 300.0
_TOPIC: Final = "telemetry"


@dataclass(frozen=True)
class Case:
    """A bridge.

    Attributes:
        lines: How many.
        rate: Messages a second of each.
        setting: A further line of each ``[[uplink]]``.
    """

    lines: int
    rate: float
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.lines} x {self.rate:g}/s {self.setting or 'default'}"

    def file(self, directory: Path, mqtt: str, kafka: str) -> str:
        """The bridge's file; line n takes what device n sends. Each has a name, and so sink ids, of its own."""
        head = f'name = "{directory.name}"\nstate_dir = "{directory / "state"}"\n[mqtt]\nbrokers = ["{mqtt}"]\n'
        lines = (
            f'[[uplink]]\nname = "{name}"\nguarantee = "exactly_once"\n{self.setting}\n'
            f'[[uplink.route]]\nfrom = "telemetry/{name}/data"\ntopic = "{_TOPIC}"\nkey = "{name}"\n'
            for name in self.names
        )
        return f'{head}[kafka]\nbootstrap_servers = "{kafka}"\n' + "".join(lines)

    @property
    def names(self) -> list[str]:
        """Of the lines, and of the devices."""
        return [f"d{number}" for number in range(self.lines)]

    def plan(self, port: int, seconds: float, run: str) -> LoadPlan:
        """The load of all lines together."""
        rate = self.lines * self.rate
        count = int(rate * seconds)
        return LoadPlan(port=port, run=run, publishers=1, devices=self.lines, messages=count, rate=rate, qos=2)


_AT_ONCE: Final = "max_trigger_delay_ms = 0"
#: The two figures that have an aim, each beside the price of the lowest latency.
CASES: Final = (Case(1, 100.0), Case(1, 100.0, _AT_ONCE), Case(10, 10.0), Case(10, 10.0, _AT_ONCE))


@dataclass(frozen=True)
class Figures:
    """Of one run.

    Attributes:
        cores: CPU seconds a second, by kind of process.
        p50: Median of published → readable, in seconds.
        p99: As `p50`.
        batches: A second.
    """

    cores: Counter[str]
    p50: float
    p99: float
    batches: float


def measured(case: Case, mosquitto: Mosquitto, kafka: Kafka, directory: Path, seconds: float) -> Figures:
    """Start a bridge, warm it, and look at it for some seconds."""
    directory.mkdir()
    config, state = directory / "bridge.toml", directory / "state"
    config.write_text(case.file(directory, mosquitto.uri, kafka.bootstrap), encoding="utf-8")
    with BridgeRun(config, state / case.names[0], directory / "bridge.log") as bridge:
        bridge.start()
        assert bridge.child is not None
        checkpoints = [state / name / "checkpoint" for name in case.names]
        wait(lambda: all(any((one / "commits").glob("[0-9]*")) for one in checkpoints), "lines", seconds=_START_S)
        run_load(case.plan(mosquitto.port, _WARM_S, "warm"), directory / "warm")
        plan, tail = (
            case.plan(mosquitto.port, seconds, directory.name),
            TopicTail(kafka.bootstrap, _TOPIC, skip_existing=True),
        )
        sender = threading.Thread(target=run_load, args=(plan, directory / "claims"))
        first, began, before = _batches(checkpoints), time.monotonic(), clocks(bridge.child.pid)
        sender.start()
        delays = _delays(tail, plan)
        used, took = clocks(bridge.child.pid), time.monotonic() - began
        used.subtract(before)
        batches = _batches(checkpoints) - first
        sender.join()
        tail.close()
        bridge.stop()
    cores: Counter[str] = Counter()
    for place, value in used.items():
        cores[place.process] += value / took  # type: ignore[assignment]  # a Counter of floats
    return Figures(cores, percentile(delays, 0.5), percentile(delays, 0.99), batches / took)


def _batches(checkpoints: Sequence[Path]) -> int:
    """Of all lines, in Spark's offset logs."""
    return sum(1 + (Checkpoint(str(one)).last_planned_batch() or 0) for one in checkpoints)


def _delays(tail: TopicTail, plan: LoadPlan) -> list[float]:
    deadline = time.monotonic() + plan.messages / plan.rate + 30
    delays: list[float] = []
    while len(delays) < plan.messages and time.monotonic() < deadline:
        arrival = tail.next_arrival(0.2)
        if arrival and (message := decode_message(arrival.value)) and message.run == plan.run:
            delays.append((time.time_ns() - message.sent_ns) / 1e9)
    return delays


def _told(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def run(rounds: int = 3, seconds: float = 30.0, cases: Sequence[Case] = CASES) -> None:
    """All cases, in turns."""
    print(f"trickle, exactly once, QoS 2, 150 B\n  {machine()}\n")
    results: dict[Case, list[Figures]] = {case: [] for case in cases}
    with (
        tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
        Mosquitto(Path(name) / "mosquitto", settings=UNLIMITED) as mosquitto,
        Kafka(Path(name) / "kafka") as kafka,
    ):
        kafka.create_topics({_TOPIC: 2})
        for turn in range(rounds):
            for number, case in enumerate(cases):
                directory = Path(name) / f"r{turn}-{number}"
                results[case].append(measured(case, mosquitto, kafka, directory, seconds))
                _print(case, results[case][-1:])
    print(f"\n  medians of {rounds} (least to most)\n")
    for case, figures in results.items():
        _print(case, figures)
    print()


def _print(case: Case, figures: Sequence[Figures]) -> None:
    cores = _told([one.cores.total() for one in figures], ".2f")
    p50, p99 = (_told([value * 1e3 for value in values], ".0f") for values in _percentiles(figures))
    print(f"  {case!s:<40} cores {cores}   p50 {p50} ms   p99 {p99} ms")
    parts = {kind: statistics.median(one.cores[kind] for one in figures) for kind in figures[0].cores}
    told = ", ".join(f"{kind} {value:.3f}" for kind, value in sorted(parts.items(), key=lambda part: -part[1]))
    batches = statistics.median(one.batches for one in figures)
    each = statistics.median(1e3 * one.cores.total() / one.batches for one in figures)
    print(f"    {told}; {batches:.1f} batches a second, {each:.0f} ms of CPU for each", flush=True)


def _percentiles(figures: Sequence[Figures]) -> tuple[list[float], list[float]]:
    return [one.p50 for one in figures], [one.p99 for one in figures]
