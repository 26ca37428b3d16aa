"""Process tree, roles, CPU time and memory of processes, from /proc; and the disk usage of spools and files.

A process is identified by pid *and* start time (`towline_prove.devstack.process`), so a recycled pid is never killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline import processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from towline_prove.rig import Rig
    from towline_prove.subject import BridgeRun

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SIZE_LINE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


class Role(StrEnum):
    """Roles of the processes of one running bridge, its brokers and its publisher."""

    BRIDGE = "bridge"
    GATEWAY = "gateway"
    DRIVER = "driver"
    JVM = "jvm"
    WORKER = "worker"
    KAFKA = "kafka"
    MOSQUITTO = "mosquitto"
    PUBLISHER = "publisher"
    OTHER = "other"


#: Role → pattern of its command line; the first match wins.
_ROLE_PATTERNS = (
    (Role.JVM, re.compile(r"(^|/)java\0.*org\.apache\.spark\.deploy\.SparkSubmit", re.DOTALL)),
    (Role.WORKER, re.compile(r"-m\0pyspark\.")),
    (Role.GATEWAY, re.compile(r"-m\0towline\.gateway$|towline\0gateway\0")),
    (Role.DRIVER, re.compile(r"-m\0towline\.bridge\.runtime\.driver$")),
    (Role.BRIDGE, re.compile(r"towline\0run\0|main\(\)\0run\0")),
)


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU seconds, user and system together."""

    own_s: float
    reaped_s: float

    @property
    def total_s(self) -> float:
        """CPU seconds of the process and its children."""
        return self.own_s + self.reaped_s


def process_tree(root: int) -> list[int]:
    """Return the pids of the process and its descendants, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names only, a hundred times a second
        if entry.isdigit() and (fields := processes.stat_fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    pids = [root]
    for pid in pids:
        pids.extend(sorted(children.get(pid, [])))
    return pids


def command_line(pid: int) -> str:
    r"""Return the command line, its arguments separated by ``\0``; empty for a process that is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def role_of(pid: int) -> Role:
    """Return the role that matches the command line."""
    arguments = command_line(pid)
    return next((role for role, pattern in _ROLE_PATTERNS if pattern.search(arguments)), Role.OTHER)


def pids_with_role(root: int, role: Role) -> list[int]:
    """Return the pids below `root` (itself included) with this role, outermost first."""
    return [pid for pid in process_tree(root) if role_of(pid) is role]


def cpu_time_of(pids: Iterable[int]) -> CpuTime:
    """Return the CPU time of these processes; 0 for those that are gone (their parent may have reaped them)."""
    own_ticks = reaped_ticks = 0
    for fields in map(processes.stat_fields, pids):
        if fields:
            own_ticks += int(fields[11]) + int(fields[12])
            reaped_ticks += int(fields[13]) + int(fields[14])
    return CpuTime(own_ticks / TICKS_PER_SECOND, reaped_ticks / TICKS_PER_SECOND)


def memory_fields(pid: int) -> dict[str, int]:
    """Return the sizes in ``/proc/<pid>/status``, such as ``VmRSS``, in bytes; empty for a process that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    return {name: int(size) * 1024 for name, size in _SIZE_LINE.findall(status)}


def memory_of(pid: int) -> int:
    """Return the resident bytes of a process; 0 if it is gone."""
    return memory_fields(pid).get("VmRSS", 0)


#: A file that never had a name, open(2) ``O_TMPFILE``.
_UNNAMED_FILE: Final = re.compile(r"/#\d+ \(deleted\)$")
#: Used heap in `jcmd PID GC.heap_info`: a line for each generation.
_HEAP_USED: Final = re.compile(r"(?:generation|heap)\s+total \d+K, used (\d+)K")
#: Growth that a process without a JVM may show between a tenth of the run and its end; buffers settle late.
_PYTHON_GROWTH_MB: Final = 20.0
#: The same for the JVM's live heap. Resident memory shows nothing: garbage stays until the heap is full.
_HEAP_GROWTH_MB: Final = 20.0
#: Files that a run may keep: Spark keeps 100 entries of each log with their checksums (``minBatchesToRetain``).
_MAX_FILES: Final = 1_000


@dataclass(slots=True)
class Peaks:
    """Largest values measured, in bytes.

    Attributes:
        rss: Resident memory of the gateway, pages of mapped files included, as the kernel remembers it.
        spool: Files without a name below the temporary directory, of all processes together.
    """

    rss: int = 0
    spool: int = 0

    def measure(self, bridge: BridgeRun) -> None:
        """Take a measurement; between two of them the kernel keeps a process's own peak."""
        gateway = bridge.gateway_process()
        if gateway is not None:
            self.rss = max(self.rss, memory_fields(gateway.pid).get("VmHWM", 0))
        self.spool = max(self.spool, sum(map(_spool_bytes, bridge.all_pids())))


def _spool_bytes(pid: int) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if _UNNAMED_FILE.search(str(descriptor.readlink())):
                    total += descriptor.stat().st_size
    return total


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory and file sample after some batches.

    Attributes:
        batches: Batches in the commit log so far.
        memory_mb: Resident megabytes of the largest process of each role.
        heap_mb: Live heap of Spark's JVM after a collection, in megabytes.
        files: Files in the bridge's state directory, including the checkpoint.
        kilobytes: Size of these files.
    """

    batches: int
    memory_mb: dict[str, float]
    heap_mb: float
    files: int
    kilobytes: int

    @classmethod
    def take(cls, rig: Rig) -> MemorySample | None:
        """Take a sample now; None while no JVM answers ``jcmd``, as after a kill."""
        heap_mb = _heap_mb(rig)
        if heap_mb is None:
            return None
        memory: dict[str, int] = {}
        for pid in rig.bridge.all_pids():
            role = role_of(pid).value
            memory[role] = max(memory.get(role, 0), memory_of(pid))
        files = [path for path in (rig.directory / "state").rglob("*") if path.is_file()]
        kilobytes = sum(path.stat().st_size for path in files if path.exists()) // 1000
        megabytes = {role: round(size / 1e6, 1) for role, size in sorted(memory.items())}
        return cls(rig.batches, megabytes, heap_mb, len(files), kilobytes)


def _heap_mb(rig: Rig) -> float | None:
    """Return the live heap in megabytes; runs a full garbage collection first."""
    jvm = rig.bridge.find_process(Role.JVM)
    if jvm is None:
        return None
    for command in ("GC.run", "GC.heap_info"):
        answer = subprocess.run(["jcmd", str(jvm.pid), command], check=False, capture_output=True, text=True)
        if answer.returncode:
            return None
    return round(sum(int(used) for used in _HEAP_USED.findall(answer.stdout)) / 1000, 1)


def growth_problems(samples: Sequence[MemorySample]) -> list[str]:
    """Return forbidden growth between a sample at a tenth of the run and the last one."""
    early_sample, last_sample = samples[len(samples) // 10], samples[-1]
    problems = [
        f"{role} grew from {early_sample.memory_mb[role]:.0f} to {megabytes:.0f} MB"
        for role, megabytes in last_sample.memory_mb.items()
        if role != Role.JVM and megabytes - early_sample.memory_mb.get(role, megabytes) > _PYTHON_GROWTH_MB
    ]
    if last_sample.heap_mb - early_sample.heap_mb > _HEAP_GROWTH_MB:
        problems.append(f"the JVM's heap grew from {early_sample.heap_mb:.0f} to {last_sample.heap_mb:.0f} MB")
    if last_sample.files > _MAX_FILES:
        problems.append(f"{last_sample.files:,} files in the state directory")
    return problems
