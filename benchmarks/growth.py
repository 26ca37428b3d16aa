"""How cost grows: a message by the number of devices, and an idle bridge by the number of its lines."""

from __future__ import annotations

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


def run(
    count: int = 200_000, devices: Sequence[int] = (1, 10, 100, 10_000), lines: Sequence[int] = (1, 10, 50)
) -> None:
    """Both tables.

    Args:
        count: Messages of each drain.
        devices: Numbers of devices, each with a topic of its own.
        lines: Numbers of lines in one bridge.
    """
    print(f"growth\n  {machine()}\n")
    _by_devices(count, devices)
    _by_lines(lines)


def _by_devices(count: int, devices: Sequence[int]) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
        Rig(Path(name) / "rig", mosquitto=UNLIMITED, direct=True) as rig,
    ):
        rig.warm(5_000)
        towline_drain(rig, Path(name), count)  # warms Spark
        print("  devices and topics   CPU us a message: gateway   spark   mosquitto")
        for number in devices:
            outcome = towline_drain(rig, Path(name), count, devices=number)
            gateway, spark, broker = (outcome.micros(one) for one in ("gateway", "spark tree", "mosquitto"))
            print(f"  {number:>18,}   {gateway:>25.2f}   {spark:>5.2f}   {broker:>9.2f}", flush=True)
    print()


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
            before, began = {pid: processes.cpu_of([pid]).own for pid in bridge.everyone()}, time.monotonic()
            time.sleep(_IDLE_S)
            still = [pid for pid in bridge.everyone() if pid in before]  # Spark ends workers that it does not need
            used = sum(processes.cpu_of([pid]).own - before[pid] for pid in still) / (time.monotonic() - began)
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
