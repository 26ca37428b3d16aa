"""One gateway and two: CPU of a message on the whole way, at the same broker and Kafka, of the same messages."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.pipeline import Ends
from benchmarks.rig import UNLIMITED, Meter, held, machine, publish, wait
from towline.bridge.config.file import load
from towline.bridge.config.model import Uplink
from towline_prove import processes
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.subject import BridgeRun, GatewayRun

_TOPIC: Final = "telemetry"
#: Half of the messages each; a member of two takes one.
_HALVES: Final = ("a", "b")


def run(count: int = 300_000, rounds: int = 5) -> None:
    """Drain backlogs, half of them of each topic tree, by one gateway and by two members with filters of their own.

    Args:
        count: Messages of each backlog.
        rounds: Backlogs of each case; the first two warm Spark and are not counted.
    """
    print(f"gateways: backlogs of {count:,} messages of 150 B\n  {machine()}\n")
    with (
        tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
        Mosquitto(Path(name) / "mosquitto", settings=UNLIMITED) as mosquitto,
        Kafka(Path(name) / "kafka") as kafka,
    ):
        kafka.create_topics({_TOPIC: 2})
        one, two = (_measured(Path(name) / str(number), mosquitto, kafka, number, count, rounds) for number in (1, 2))
        print(f"  ratio of CPU, one to two   {one / two:.2f}   (aim 0.9)\n")


def _measured(directory: Path, mosquitto: Mosquitto, kafka: Kafka, members: int, count: int, rounds: int) -> float:
    """Microseconds of CPU a message, the median of the rounds that count."""
    directory.mkdir()
    config = directory / "bridge.toml"
    config.write_text(_config(directory / "state", mosquitto.uri, kafka.bootstrap, members), encoding="utf-8")
    line = load(config).uplinks[0]
    with _running(line, config) as (gateways, bridge):
        meter = Meter({"gateways": lambda: [one.pid for one in gateways], "spark": lambda: _spark(bridge)})
        costs = [_drained(directory, mosquitto, kafka, gateways, meter, count) for _ in range(rounds)]
        settled = [{name: one[name] / count * 1e6 for name in one} for one in costs[min(2, rounds - 1) :]]
    names = ("gateways", "spark")
    told = "   ".join(f"{name} {statistics.median(one[name] for one in settled):.2f}" for name in names)
    total = statistics.median(sum(one.values()) for one in settled)
    print(f"  {members} gateway{'s' * (members > 1):<2}   CPU us a message: {told}   all {total:.2f}", flush=True)
    return total


@contextlib.contextmanager
def _running(line: Uplink, config: Path) -> Iterator[tuple[list[GatewayRun], BridgeRun]]:
    gateways = [GatewayRun(one) for one in line.members]
    with contextlib.ExitStack() as stack:
        for one in gateways:
            stack.enter_context(one.start())
        wait(lambda: all((one.status() or {}).get("state") == "online" for one in gateways), "gateways")
        bridge = stack.enter_context(BridgeRun(config, line.gateway.state_dir, config.with_suffix(".log")))
        bridge.start()
        wait(lambda: any((line.checkpoint / "commits").glob("[0-9]*")), "the first batch")
        yield gateways, bridge


def _spark(bridge: BridgeRun) -> list[int]:
    return [pid for pid in bridge.all_pids() if processes.role_of(pid) is not processes.Role.GATEWAY]


def _drained(
    directory: Path, mosquitto: Mosquitto, kafka: Kafka, gateways: Sequence[GatewayRun], meter: Meter, count: int
) -> dict[str, float]:
    ends = Ends(kafka.bootstrap, _TOPIC, 2)
    before = ends()
    with contextlib.ExitStack() as stack:
        for one in gateways:
            stack.enter_context(held(one.pid))
        for half in _HALVES:
            publish(mosquitto, directory, count // 2, topic=f"{half}/{{device}}/data")
        meter.start()
    wait(lambda: ends() - before >= count // 2 * 2, "the line to drain", pause=0.02)
    meter.stop()
    ends.close()
    return dict(meter.used)


def _config(state: Path, mqtt: str, kafka: str, members: int) -> str:
    """A bridge file; one gateway is a member that takes both halves, so that both cases run the same code."""
    filters = [_HALVES] if members == 1 else [(half,) for half in _HALVES]
    named = "".join(
        f'[[uplink.member]]\nname = "g{number}"\nfilters = [{_quoted(halves)}]\n'
        for number, halves in enumerate(filters)
    )
    places = ", ".join(f'"{state}/line/members/g{number}"' for number in range(members))
    return (
        f'name = "bench{members}"\nstate_dir = "{state}"\n[mqtt]\nbrokers = ["{mqtt}"]\n'
        f'[kafka]\nbootstrap_servers = "{kafka}"\n[[uplink]]\nname = "line"\ngateways = [{places}]\n'
        f'{named}[[uplink.route]]\nfrom = "+/{{device}}/data"\ntopic = "{_TOPIC}"\nkey = "{{device}}"\n'
    )


def _quoted(halves: Sequence[str]) -> str:
    return ", ".join(f'"{half}/#"' for half in halves)
