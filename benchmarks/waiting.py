"""Very many messages wait in the journal: how fast Spark carries them, against a small backlog in the same run."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.pipeline import Ends
from benchmarks.rig import UNLIMITED, held, machine, publish, wait
from towline_prove import processes
from towline_prove.processes import Role
from towline_prove.rig import Rig
from towline_prove.subject import TOPIC

#: Kafka keeps what is written for so long, because nobody reads it.
_KEPT = {"log.retention.bytes": "200000000", "log.segment.bytes": "50000000"}
#: Messages published at a time: what Mosquitto holds in memory.
_PIECE = 500_000


def run(waiting: int = 10_000_000, small: int = 300_000, rounds: int = 4) -> None:
    """Small backlogs first, which warm Spark too, then the large one.

    Args:
        waiting: Messages of the large backlog.
        small: Messages of a small one.
        rounds: Small ones; the first is not counted.
    """
    print(f"waiting: {waiting:,} messages of 150 B in the journal\n  {machine()}\n")
    with (
        tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
        Rig(Path(name) / "rig", mosquitto=UNLIMITED, kafka=_KEPT, direct=True) as rig,
    ):
        rig.warm_up(5_000)
        normal = statistics.median([small / _carried(rig, Path(name), small) for _ in range(rounds)][1:])
        print(f"  {small:>11,} waiting: {normal:>9,.0f} msg/s, the median of {rounds - 1}")
        rate = waiting / _carried(rig, Path(name), waiting)
        print(f"  {waiting:>11,} waiting: {rate:>9,.0f} msg/s   ratio {rate / normal:.2f}   (aim 0.8)\n")


def _carried(rig: Rig, directory: Path, count: int) -> float:
    """Fill the journal while Spark stands still, let Spark go, and wait until all is in Kafka; seconds of the last."""
    assert rig.bridge.child is not None
    gateway, jvm = rig.bridge.gateway_process(), processes.pids_with_role(rig.bridge.child.pid, Role.JVM)[0]
    assert gateway is not None
    ends = Ends(rig.bootstrap, TOPIC, 2)
    written = ends()
    with held(jvm):
        for done in range(0, count, _PIECE):
            stored = rig.journaled_count()
            piece = min(_PIECE, count - done)
            publish(rig.mosquitto, directory, piece)
            wait(lambda: rig.journaled_count() - stored >= piece, "the gateway to drain the broker")  # noqa: B023 - called at once
        if count > _PIECE:
            print(f"  {count:>11,} waiting: gateway {processes.memory_of(gateway.pid) / 1e6:.0f} MB   (aim < 200)")
    began = time.monotonic()
    wait(lambda: ends() - written >= count, "Spark to drain the gateway", pause=0.02)
    seconds = time.monotonic() - began
    ends.close()
    if count > _PIECE:
        print(f"  {count:>11,} carried: gateway {processes.memory_of(gateway.pid) / 1e6:.0f} MB")
    return seconds
