"""How cost grows: a message by the number of devices, and an idle bridge by the number of its lines."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pipeline import towline_drain
from benchmarks.rig import UNLIMITED, machine, wait
from towline_prove import processes
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.rig import Rig
from towline_prove.subject import BridgeRun

#: Seconds of a look at an idle bridge.
_IDLE_S = 30.0
#: Seconds until fifty lines have begun.
_START_S = 900.0


#: What a message costs, as `Outcome.micros` names it.
_PARTS = ("gateway", "spark tree", "mosquitto")


def run(
    count: int = 200_000,
    devices: Sequence[int] = (1, 10, 100, 10_000),
    lines: Sequence[int] = (1, 10, 50),
    rounds: int = 5,
) -> None:
    """Both tables.

    Args:
        count: Messages of each drain.
        devices: Numbers of devices, each with a topic of its own.
        lines: Numbers of lines in one bridge.
        rounds: Drains of each number of devices.
    """
    print(f"growth\n  {machine()}\n")
    _by_devices(count, devices, rounds)
    _by_lines(lines)


def _by_devices(count: int, devices: Sequence[int], rounds: int) -> None:
    """The numbers take turns, each round begun by another: what drifts with time is in all of them."""
    costs: dict[int, list[tuple[float, ...]]] = {number: [] for number in devices}
    with (
        tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
        Rig(Path(name) / "rig", mosquitto=UNLIMITED, direct=True) as rig,
    ):
        rig.warm_up(5_000)
        for _ in range(2):
            towline_drain(rig, Path(name), count)  # warms Spark
        for turn in range(rounds):
            begun = turn % len(devices)
            for number in (*devices[begun:], *devices[:begun]):
                outcome = towline_drain(rig, Path(name), count, devices=number)
                costs[number].append(tuple(outcome.micros(part) for part in _PARTS))
    print(f"  CPU us a message, median of {rounds} drains (least to most)")
    print("  devices and topics" + "".join(f"{part:>24}" for part in _PARTS))
    for number, drains in costs.items():
        print(f"  {number:>18,}" + "".join(map(_told, zip(*drains, strict=True))), flush=True)
    print()


def _told(values: Sequence[float]) -> str:
    return f"{statistics.median(values):>10.2f} ({min(values):.2f} to {max(values):.2f})".rjust(24)


def _by_lines(numbers: Sequence[int]) -> None:
    print("  lines, idle   CPU % of a core   MB in all: " + "  ".join(_ROLES))
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="towline-bench-") as name:
            _idle(Path(name), number)
    print()


_ROLES = ("bridge", "driver", "jvm", "gateway", "worker")


def _idle(directory: Path, lines: int) -> None:
    with (
        Mosquitto(directory / "mosquitto", settings=UNLIMITED) as mosquitto,
        Kafka(directory / "kafka") as kafka,
    ):
        kafka.create_topics({"telemetry": 2})
        config = directory / "bridge.toml"
        config.write_text(_config(directory / "state", mosquitto.uri, kafka.bootstrap, lines), encoding="utf-8")
        with BridgeRun(config, directory / "state" / "line-0", directory / "bridge.log") as bridge:
            bridge.start()
            every = [directory / "state" / f"line-{one}" / "checkpoint" / "commits" for one in range(lines)]
            wait(lambda: all(any(one.glob("[0-9]*")) for one in every), f"{lines} lines to begin", seconds=_START_S)
            time.sleep(_IDLE_S / 2)  # what starts a line has settled
            before, began = {pid: processes.cpu_time_of([pid]).own_s for pid in bridge.all_pids()}, time.monotonic()
            time.sleep(_IDLE_S)
            still = [pid for pid in bridge.all_pids() if pid in before]  # Spark ends workers that it does not need
            used = sum(processes.cpu_time_of([pid]).own_s - before[pid] for pid in still) / (time.monotonic() - began)
            memory = _memory(still)
    told = "  ".join(f"{memory[role]:>{max(len(role), 5)},.0f}" for role in _ROLES)
    print(f"  {lines:>11}   {used * 100:>15.1f}              {told}", flush=True)


def _config(state: Path, mqtt: str, kafka: str, lines: int) -> str:
    head = (
        f'name = "many"\nstate_dir = "{state}"\n[mqtt]\nbrokers = ["{mqtt}"]\n[kafka]\nbootstrap_servers = "{kafka}"\n'
    )
    line = '[[uplink]]\nname = "line-{0}"\n[[uplink.route]]\nfrom = "plant/{0}/#"\ntopic = "telemetry"\n'
    return head + "".join(line.format(number) for number in range(lines))


def _memory(pids: Sequence[int]) -> Counter[str]:
    """Megabytes by role; what processes share is parted among them (proc(5), Pss)."""
    total: Counter[str] = Counter()
    for pid in pids:
        try:
            rolled = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue  # it has ended meanwhile
        size = next(line for line in rolled.splitlines() if line.startswith("Pss:"))
        total[processes.role_of(pid).value] += int(size.split()[1])
    return Counter({role: kilobytes // 1024 for role, kilobytes in total.items()})
