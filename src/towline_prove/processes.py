"""Process tree, roles, CPU time and memory of processes; all from /proc.

A process is identified by pid *and* start time (`towline_prove.devstack.process`), so a recycled pid is never killed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from towline import processes

if TYPE_CHECKING:
    from collections.abc import Iterable

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


#: First match wins; what the command line of each role holds.
_ROLE_PATTERNS = (
    (Role.JVM, re.compile(r"(^|/)java\0.*org\.apache\.spark\.deploy\.SparkSubmit", re.DOTALL)),
    (Role.WORKER, re.compile(r"-m\0pyspark\.")),
    (Role.GATEWAY, re.compile(r"-m\0towline\.gateway$|towline\0gateway\0")),
    (Role.DRIVER, re.compile(r"-m\0towline\.bridge\.runtime\.driver$")),
    (Role.BRIDGE, re.compile(r"towline\0run\0|main\(\)\0run\0")),
)


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU seconds, user and system together.

    Attributes:
        process_s: Of the process and its threads.
        children_s: Of its children that have ended and were waited for.
    """

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
