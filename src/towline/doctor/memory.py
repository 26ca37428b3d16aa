"""The examiner of memory, cores, open files and Java: what the processes of a bridge need of this machine.

The figures are those of docs/benchmarks.md, where processes were measured over ten million messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from towline.bridge.config.model import BATCH_BYTES
from towline.bridge.runtime.surroundings import check_java
from towline.doctor import host
from towline.doctor.findings import Finding, Standing
from towline.doctor.kafka.flaws import sized
from towline.errors import SetupError
from towline.spark.masters import is_cluster

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge
    from towline.doctor.case import Case, LineLoad
    from towline.doctor.host import HostMemory

__all__ = ["Needed", "computing", "examine", "files", "heap_bytes", "java", "memory", "needed"]

_MB: Final = 1_000_000
#: Of the bridge and the driver's Python (benchmark ``memory``: 103 and 119 MB), of a gateway (``waiting``), of a
#: further line in Spark (``growth``), of the Python workers of the first (``memory``: 870 MB, half of it shared).
_BRIDGE, _GATEWAY, _LINE, _WORKERS = 222 * _MB, 120 * _MB, 111 * _MB, 450 * _MB
#: Of a JVM beside its heap: classes, compiled code, threads, Arrow's buffers.
_BESIDE_HEAP: Final = 400 * _MB
#: Spark's spark.driver.memory where none is set.
_HEAP: Final = 1 << 30
_UNITS: Final = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
#: CPU of a message in microseconds: in a gateway with QoS 1 and in Spark with SQL (towline.sizing's table).
_MESSAGE_US: Final = 2.0 + 6.2
_USED: Final = 0.5
#: A JVM of Spark has its jars, blocks and sockets open; each gateway its connections; 256 leaves room for the rest.
_OPEN: Final = 512
_OPEN_PER_LINE: Final = 64


@dataclass(frozen=True)
class Needed:
    """Memory that the processes of a bridge take here, in bytes.

    Attributes:
        heap: Of the driver's JVM.
        spark: Beside its heap, Python workers and batches.
        gateways: Of all that it starts.
    """

    heap: int
    spark: int
    gateways: int

    @property
    def total(self) -> int:
        """All together, with the bridge's own process."""
        return self.heap + self.spark + self.gateways + _BRIDGE


def heap_bytes(conf: str | float | None) -> int:
    """``spark.driver.memory`` in bytes: ``2g``, ``512m``; a number alone is MiB [Spark: JavaUtils.byteStringAsMb]."""
    found = re.fullmatch(r"\s*(\d+)\s*([kmgt]?)b?\s*", str(conf or "").lower())
    return int(found[1]) * _UNITS[found[2] or "m"] if found else _HEAP


def needed(bridge: Bridge) -> Needed:
    """What a bridge needs of this machine; on a cluster the tasks' part is elsewhere."""
    own = sum(len(line.each_gateway) if line.gateway.share is None else 0 for line in bridge.lines)
    here = not is_cluster(bridge.spark.master)
    lines = len(bridge.lines)
    # A whole batch may be in memory twice on its way to the sink; the measured figures have one of 64 MiB.
    batches = sum(2 * max(0, line.max_bytes_per_trigger - BATCH_BYTES) for line in bridge.uplinks)
    workers = _WORKERS + _LINE * (lines - 1) + batches if here else 0
    return Needed(heap_bytes(bridge.spark.conf.get("spark.driver.memory")), _BESIDE_HEAP + workers, _GATEWAY * own)


def examine(
    case: Case,
    look: Callable[[], HostMemory] = host.host_memory,
    cores: Callable[[], float] = host.cores,
    opened: Callable[[], tuple[int, int]] = host.open_files,
) -> Iterator[Finding]:
    """Look at this machine (`towline.doctor.case.Examiner`).

    Args:
        case: Whose bridge.
        look: Reads the memory. Injected in tests.
        cores: Counts them. Injected in tests.
        opened: Reads the limits of open files. Injected in tests.
    """
    yield from memory(needed(case.bridge), look())
    yield from computing(cores(), case.total, cluster=is_cluster(case.bridge.spark.master))
    yield files(opened(), len(case.bridge.lines))
    yield java()


def memory(need: Needed, seen: HostMemory) -> Iterator[Finding]:
    """TL-D47: memory against what Spark, its workers and the gateways take."""
    if not seen.total:
        return
    limit = "this cgroup may have" if seen.grouped else "this machine has"
    fact = (
        f"{limit} {sized(seen.total)}, {sized(seen.available)} available; the bridge needs some {sized(need.total)}: "
    )
    fact += f"{sized(need.heap)} heap of Spark (spark.driver.memory), {sized(need.spark)} beside it, "
    fact += f"{sized(need.gateways)} gateways"
    until = ""
    if need.total > seen.total:
        until = "Spark is busy: the kernel then ends a process, and the line begins again and again"
    elif need.total > seen.available:
        until = "other processes keep what they have: the kernel then ends one"
    elif seen.commit is not None and need.total > seen.commit:
        fact += f"; vm.overcommit_memory = 2 lets processes ask for {sized(seen.commit)} more"
        until = "a process is refused memory, and ends"
    mend = "Lower spark.driver.memory in [spark.conf] or max_bytes_per_trigger, split the bridge, or take more memory."
    yield Finding(
        code="TL-D47",
        promise="memory",
        verdict=Standing.WARNS if until else Standing.HOLDS,
        because=fact,
        until=until,
        mend=mend if until else "",
    )


def computing(cores: float, load: LineLoad | None, *, cluster: bool = False) -> Iterator[Finding]:
    """TL-D48 for cores: what the load takes of them, where it is known and Spark runs here."""
    if load is None or cluster:
        return
    share = load.messages_s * _MESSAGE_US / 1e6
    near = share > _USED * cores
    yield Finding(
        code="TL-D48",
        promise="cores and files",
        verdict=Standing.WARNS if near else Standing.HOLDS,
        because=f"{load.messages_s:,.0f} msg/s take some {share:.1f} of {cores:g} cores ({load.how})",
        until="messages wait after an outage: nothing is left to catch up with" if near else "",
        mend="More cores, or another machine for some lines; towline size tells how many." if near else "",
    )


def files(limits: tuple[int, int], lines: int) -> Finding:
    """TL-D48 for files: what a process may have open."""
    soft, hard = limits
    need = _OPEN + _OPEN_PER_LINE * lines
    # Java raises its own limit to the hard one (-XX:+MaxFDLimit); Python's processes have the soft one.
    near = 0 <= soft < need or 0 <= hard < need
    words = " and ".join("none" if value < 0 else f"{value:,}" for value in (soft, hard))
    return Finding(
        code="TL-D48",
        promise="cores and files",
        verdict=Standing.WARNS if near else Standing.HOLDS,
        because=f"open files of a process are limited to {words} (soft, hard); {need:,} are wanted",
        until="a file or connection more is refused (EMFILE)" if near else "",
        mend="ulimit -n 65536, or LimitNOFILE=65536 in its systemd unit." if near else "",
    )


def java() -> Finding:
    """TL-D49: a Java as Spark looks for it."""
    try:
        check_java(version=True)
    except SetupError as error:
        return Finding(
            code="TL-D49",
            promise="Java",
            verdict=Standing.BROKEN,
            because=error.what,
            until="now: no line starts",
            mend=error.do,
        )
    return Finding(code="TL-D49", promise="Java", verdict=Standing.HOLDS, because="Spark finds a Java that it runs on")
