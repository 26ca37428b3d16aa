"""What runs below a process, which role each one plays, and the CPU time each has used; all from /proc.

A process is named by pid *and* start time (`towline_prove.devstack.process`), so a recycled pid is never hurt.
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

TICKS = os.sysconf("SC_CLK_TCK")
_SIZE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


class Role(StrEnum):
    """The processes of one running bridge, the brokers it stands between, and who publishes to it."""

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
_SIGNS = (
    (Role.JVM, re.compile(r"(^|/)java\0.*org\.apache\.spark\.deploy\.SparkSubmit", re.DOTALL)),
    (Role.WORKER, re.compile(r"-m\0pyspark\.")),
    (Role.GATEWAY, re.compile(r"-m\0towline\.gateway$|towline\0gateway\0")),
    (Role.DRIVER, re.compile(r"-m\0towline\.bridge\.runtime\.driver$")),
    (Role.BRIDGE, re.compile(r"towline\0run\0|main\(\)\0run\0")),
)


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds, user and system together.

    Attributes:
        own: Of the process and its threads.
        reaped: Of its children that have ended and were waited for.
    """

    own: float
    reaped: float

    @property
    def total(self) -> float:
        """Both."""
        return self.own + self.reaped


def tree(root: int) -> list[int]:
    """The process and all that descend from it now, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names only, a hundred times a second
        if entry.isdigit() and (fields := processes.fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    pids = [root]
    for pid in pids:
        pids.extend(sorted(children.get(pid, [])))
    return pids


def command_line(pid: int) -> str:
    r"""The command line, its arguments separated by ``\0``; empty for a gone process or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def role_of(pid: int) -> Role:
    """The role that the command line shows."""
    line = command_line(pid)
    return next((role for role, sign in _SIGNS if sign.search(line)), Role.OTHER)


def named(root: int, role: Role) -> list[int]:
    """Pids below `root` (itself included) that play this role, outermost first."""
    return [pid for pid in tree(root) if role_of(pid) is role]


def cpu_of(pids: Iterable[int]) -> Cpu:
    """CPU time of these processes; gone ones count nothing (their parent may have reaped it)."""
    own = reaped = 0
    for fields in map(processes.fields, pids):
        if fields:
            own += int(fields[11]) + int(fields[12])
            reaped += int(fields[13]) + int(fields[14])
    return Cpu(own / TICKS, reaped / TICKS)


def memory_fields(pid: int) -> dict[str, int]:
    """The sizes in ``/proc/<pid>/status``, such as ``VmRSS``, in bytes; none for a process that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    return {name: int(size) * 1024 for name, size in _SIZE.findall(status)}


def memory_of(pid: int) -> int:
    """Resident bytes of a process; 0 when it is gone."""
    return memory_fields(pid).get("VmRSS", 0)
