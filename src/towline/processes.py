"""Processes identified by pid and start time: a pid alone is used again for another process."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

#: Places in `fields` of proc(5) ``stat``, whose third field is the first here.
_STATE, _PARENT, _THREADS, _START_TIME = 0, 1, 17, 19


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """A process for ever.

    Attributes:
        pid: Process id on ``host``.
        started: Start time in clock ticks since boot; 0 for a process that was not there.
        host: Where ``pid`` is a name: the machine, and in a container the number of its pid namespace too, since
            containers may share a host name.
    """

    pid: int
    started: int
    host: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """Mark a process of this machine; ``started`` is 0 when it is not there."""
        return cls(pid, started(pid) or 0, _host())

    def runs_here(self) -> bool:
        """Whether the process runs on this machine; another one with its pid, or one on another host, is not it."""
        return self == ProcessMark.of(self.pid)

    def gone(self) -> bool:
        """Whether the process has certainly ended; of a process on another host nothing is certain."""
        return self.host == _host() and started(self.pid) != self.started


#: Inode number of the pid namespace that a machine boots with (PROC_PID_INIT_INO, include/linux/proc_ns.h).
_FIRST_NAMESPACE: Final = 0xEFFFFFFC
#: Tells processes with one pid apart where their namespaces are not known.
_NONCE: Final = secrets.token_hex(4)


def _host() -> str:
    """`ProcessMark.host` of this process; only its own where ``/proc`` can't be read or is another namespace's."""
    name = socket.gethostname()
    try:
        namespace = int(Path("/proc/self/ns/pid").readlink().name.strip("pid:[]"))
        if Path("/proc/self").readlink().name == str(os.getpid()):
            return name if namespace == _FIRST_NAMESPACE else f"{name} (pid namespace {namespace})"
    except (OSError, ValueError):
        pass
    return f"{name} (pid namespace unknown, process {os.getpid()}-{_NONCE})"


def notify(**variables: str) -> None:
    """Tell the service manager how this service is, where one asks for it (``Type=notify``, ``$NOTIFY_SOCKET``).

    Args:
        variables: Of sd_notify(3): ``READY="1"``, ``STATUS="..."``, ``STOPPING="1"``; values are one line each.
    """
    place = os.environ.get("NOTIFY_SOCKET", "")
    address = f"\0{place[1:]}" if place.startswith("@") else place  # of Linux's abstract names (unix(7))
    text = "\n".join(f"{name}={value}" for name, value in variables.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        if address:
            sender.sendto(text.encode(), socket.MSG_DONTWAIT, address)  # a manager that does not listen holds up nobody


def fields(pid: int) -> list[str] | None:
    """Fields of ``/proc/<pid>/stat`` from the third on, the state; None for a process that is gone."""
    stat = _stat(pid)
    return None if stat is None else stat.rpartition(")")[2].split()  # the second, the name, may hold brackets


def started(pid: int) -> int | None:
    """Start time of a running process in clock ticks since boot; None for a missing one and for a zombie.

    A killed JVM shows its first thread as a zombie while others still hold files and ports: that one runs yet.
    """
    stat = fields(pid)
    if stat is None or (stat[_STATE] in {"Z", "X"} and int(stat[_THREADS]) <= 1):
        return None
    return int(stat[_START_TIME])


def name(pid: int) -> str:
    """Name of a process's program; empty when it is gone."""
    stat = _stat(pid)
    return "" if stat is None else stat.rpartition(")")[0].partition("(")[2]


def parent(pid: int) -> int:
    """Pid of a process's parent; 0 when it is gone."""
    stat = fields(pid)
    return 0 if stat is None else int(stat[_PARENT])


def _stat(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
