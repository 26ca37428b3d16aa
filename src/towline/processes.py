"""Identity and state of processes by pid and start time, since the kernel reuses pids; sd_notify."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

#: Places in `fields` of proc(5) ``stat``, whose third field is the first here.
_STATE_FIELD, _THREADS_FIELD, _START_TIME_FIELD = 0, 17, 19


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Unique identity of a process: pid, start time and host.

    Attributes:
        pid: Process id on ``host``.
        started: Start time in clock ticks since boot; 0 if the process did not exist.
        host: Host name; in a container with the number of its pid namespace, since containers may share a host name.
    """

    pid: int
    started: int
    host: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the identity of a process of this machine; ``started`` is 0 if it does not exist."""
        return cls(pid, start_time(pid) or 0, _host())

    def is_running(self) -> bool:
        """Return True if this very process runs on this machine."""
        return self == ProcessIdentity.of(self.pid)

    def has_ended(self) -> bool:
        """Return True if the process has certainly ended; False for a process on another host."""
        return self.host == _host() and start_time(self.pid) != self.started


#: Inode number of the pid namespace that a machine boots with (PROC_PID_INIT_INO, include/linux/proc_ns.h).
_FIRST_NAMESPACE: Final = 0xEFFFFFFC
#: Tells processes with one pid apart where their namespaces are not known.
_NONCE: Final = secrets.token_hex(4)


def _host() -> str:
    """Return this process's `ProcessIdentity.host`; unique if ``/proc`` is unreadable or of another namespace."""
    name = socket.gethostname()
    try:
        namespace = int(Path("/proc/self/ns/pid").readlink().name.strip("pid:[]"))
        if Path("/proc/self").readlink().name == str(os.getpid()):
            return name if namespace == _FIRST_NAMESPACE else f"{name} (pid namespace {namespace})"
    except (OSError, ValueError):
        pass
    return f"{name} (pid namespace unknown, process {os.getpid()}-{_NONCE})"


def notify(**variables: str) -> None:
    """Send a status to the service manager, if it asks for one (``Type=notify``, ``$NOTIFY_SOCKET``).

    Args:
        variables: Variables of sd_notify(3): ``READY="1"``, ``STATUS="..."``, ``STOPPING="1"``; values are one line
            each.
    """
    name = os.environ.get("NOTIFY_SOCKET", "")
    address = f"\0{name[1:]}" if name.startswith("@") else name  # of Linux's abstract names (unix(7))
    text = "\n".join(f"{name}={value}" for name, value in variables.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        if address:
            sender.sendto(text.encode(), socket.MSG_DONTWAIT, address)  # a manager that hangs holds up nobody


def stat_fields(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/<pid>/stat`` from the third (state) on; None if the process has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()  # the second, the name, may hold brackets


def start_time(pid: int) -> int | None:
    """Return the start time of a running process in clock ticks since boot; None for a missing process and a zombie.

    A killed JVM shows its first thread as a zombie while others still hold files and ports: that process still runs.
    """
    stat = stat_fields(pid)
    if stat is None or (stat[_STATE_FIELD] in {"Z", "X"} and int(stat[_THREADS_FIELD]) <= 1):
        return None
    return int(stat[_START_TIME_FIELD])
