"""Many messages through one run of a bridge: the memory of its processes, from the first million to the last."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.pipeline import towline_drain
from benchmarks.rig import UNLIMITED, machine
from towline_prove import processes
from towline_prove.rig import Rig

#: Kafka keeps what is written for so long, because nobody reads it.
_KEPT = {"log.retention.bytes": "200000000", "log.segment.bytes": "50000000"}


def _memory(root: int) -> Counter[str]:
    """Bytes by role; what JVM and Python forks share is counted once for each."""
    total: Counter[str] = Counter()
    for pid in processes.process_tree(root):
        total[processes.role_of(pid).value] += processes.memory_of(pid)
    return total


def run(count: int = 10_000_000, share: int = 500_000) -> None:
    """Drain backlogs of `share` messages one after the other."""
    print(f"memory: {count:,} messages of 150 B through one run, {share:,} at a time\n  {machine()}\n")
    with (
        tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
        Rig(Path(name) / "rig", mosquitto=UNLIMITED, kafka=_KEPT, direct=True) as rig,
    ):
        rig.warm_up(5_000)
        child = rig.bridge.child
        assert child is not None
        parts = count // share
        for number in range(1, parts + 1):
            directory = Path(name) / str(number)
            directory.mkdir()
            towline_drain(rig, directory, share)
            if number in {parts // 10, parts // 4, parts // 2, 3 * parts // 4, parts}:
                told = "   ".join(f"{role} {size / 1e6:.0f}" for role, size in sorted(_memory(child.pid).items()))
                print(f"  after {number * share:>11,}: MB {told}", flush=True)
    print()
