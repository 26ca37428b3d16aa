"""What this machine says of itself: file systems, the time of a sync, memory, limits, its clock. The thin edge.

Linux: proc(5), statvfs(3), adjtimex(2), cgroups of both versions. What another system lacks is None, which is a row of
its own or none, and never a guess.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from towline import files
from towline.doctor.kafka.wanted import PROBE

__all__ = [
    "FileSystem",
    "HostMemory",
    "Syncs",
    "cores",
    "file_system",
    "host_memory",
    "nearest",
    "open_files",
    "synchronised",
    "syncs",
]

#: What is written before each sync, and how often; no longer than `_SYNC_S` in all.
_SYNC_BYTES: Final = 4096
_SYNCS: Final = 100
_SYNC_S: Final = 2.0
#: Of ``status`` of adjtimex(2): nothing disciplines the clock.
_STA_UNSYNC: Final = 0x0040
_UNLIMITED: Final = 1 << 60


@dataclass(frozen=True, kw_only=True)
class FileSystem:
    """Where a directory is, or will be.

    Attributes:
        directory: What was asked about.
        there: The nearest directory above it that exists, or itself.
        device: Number of the file system; two directories with one share its room.
        kind: As Linux names it: ``ext4``, ``nfs4``, ``tmpfs``; empty where it can't be told.
        mounted: Where.
        read_only: Nothing can be written.
        writable: This user may write here.
        mode: Permission bits; None where the directory is not there yet.
        own: The directory belongs to this user; True where it is not there yet.
        free: Bytes that a file of ours may still take.
        size: Bytes in all.
        inodes: Files that may still be made; None where the file system does not count them.
    """

    directory: Path
    there: Path
    device: int
    kind: str
    mounted: str
    read_only: bool
    writable: bool
    mode: int | None
    own: bool
    free: int
    size: int
    inodes: int | None


@dataclass(frozen=True)
class Syncs:
    """How long fdatasync took, in seconds, after each of some appended blocks.

    Attributes:
        times: In order of size; empty where the file could not be written.
        why: What the system said then.
    """

    times: tuple[float, ...]
    why: str = ""

    def at(self, share: float) -> float:
        """The time that this share of the syncs did not exceed, such as 0.99."""
        return self.times[min(len(self.times) - 1, int(len(self.times) * share))]


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of memory.

    Attributes:
        total: What this machine has, or what its cgroup allows, whichever is less.
        available: What can be had without swapping, within that.
        grouped: Whether a cgroup sets the limit.
        commit: What may still be promised to processes, where the kernel promises no more than there is
            (vm.overcommit_memory = 2); None where it does.
    """

    total: int
    available: int
    grouped: bool = False
    commit: int | None = None


def nearest(directory: Path) -> Path:
    """The directory itself, or the nearest above it that exists."""
    return next(one for one in (directory, *directory.parents) if one.is_dir())


def file_system(directory: Path) -> FileSystem:
    """Look at the place of a directory, without making it.

    Raises:
        OSError: It can't be looked at.
    """
    there = nearest(directory)
    stat, room = there.stat(), os.statvfs(there)
    kind, mounted = _mount(stat.st_dev)
    exists = there == directory
    return FileSystem(
        directory=directory,
        there=there,
        device=stat.st_dev,
        kind=kind,
        mounted=mounted,
        read_only=bool(room.f_flag & os.ST_RDONLY),
        writable=os.access(there, os.W_OK | os.X_OK),
        mode=stat.st_mode & 0o777 if exists else None,
        own=not exists or stat.st_uid == os.geteuid(),
        free=room.f_bavail * room.f_frsize,
        size=room.f_blocks * room.f_frsize,
        inodes=room.f_favail if room.f_files else None,
    )


def _mount(device: int) -> tuple[str, str]:
    """Kind and place of a mounted file system, proc(5) ``mountinfo``; the last of two on one place counts."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = ("", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            front, _, back = line.partition(" - ")
            fields = front.split(" ")
            if len(fields) > 4 and fields[2] == wanted and back:
                found = (back.split(" ")[0], fields[4].replace("\\040", " "))
    return found


def syncs(
    directory: Path,
    sync: Callable[[int], None] = os.fdatasync,
    clock: Callable[[], float] = time.perf_counter,
) -> Syncs:
    """Append blocks to a file and make each durable, as the journal does; the file is removed again.

    Args:
        directory: Where; it exists.
        sync: Makes a descriptor's content durable. Injected in tests.
        clock: Seconds.
    """
    times: list[float] = []
    try:
        handle, name = tempfile.mkstemp(prefix=f"{PROBE}-", dir=directory)
    except OSError as error:
        return Syncs((), files.why(error))
    begin = clock()
    try:
        while len(times) < _SYNCS and clock() - begin < _SYNC_S:
            os.write(handle, bytes(_SYNC_BYTES))
            before = clock()
            sync(handle)
            times.append(clock() - before)
    except OSError as error:
        return Syncs((), files.why(error))
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)
    return Syncs(tuple(sorted(times)))


def synchronised() -> bool | None:
    """Whether something disciplines this machine's clock (NTP, PTP), by adjtimex(2); None where it can't be told."""
    buffer = ctypes.create_string_buffer(512)  # struct timex has 208 bytes at most
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = libc.adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    # modes, then longs offset, freq, maxerror, esterror, then int status: modes is padded to a long.
    place = 5 * ctypes.sizeof(ctypes.c_long)
    status = int.from_bytes(buffer.raw[place : place + 4], "little")
    return not status & _STA_UNSYNC


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Memory of this machine, within the cgroup of this process.

    Args:
        root: Where proc and sys are.
    """
    told = _meminfo(root / "proc/meminfo")
    total, available = told.get("MemTotal", 0), told.get("MemAvailable", 0)
    limit, used = _cgroup(root)
    grouped = limit is not None and limit < total
    if grouped and limit is not None:
        total, available = limit, min(available, max(0, limit - used))
    commit = None
    with contextlib.suppress(OSError, ValueError):
        if int((root / "proc/sys/vm/overcommit_memory").read_text()) == 2:
            commit = max(0, told.get("CommitLimit", 0) - told.get("Committed_AS", 0))
    return HostMemory(total=total, available=available, grouped=grouped, commit=commit)


def _meminfo(file: Path) -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) * 1024
    return found


def _cgroup(root: Path) -> tuple[int | None, int]:
    """The tightest limit of this process's cgroups and what is used under it; version 2, else version 1."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found += _limits(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                found += _limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(found, default=(None, 0))


def _limits(base: Path, path: str, most: str, used: str) -> list[tuple[int, int]]:
    """What a group and those above it allow; a container sees its own group as the topmost."""
    found = []
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        group = base.joinpath(*parts[:depth])
        with contextlib.suppress(OSError, ValueError):
            limit = int((group / most).read_text())
            if limit < _UNLIMITED:
                found.append((limit, int((group / used).read_text())))
    return found


def cores(root: Path = Path("/")) -> float:
    """Cores that this process may use: by its affinity, and by the quota of its cgroup (version 2).

    Args:
        root: Where proc and sys are.
    """
    count = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, int(quota) / int(period))
    return count


def open_files() -> tuple[int, int]:
    """How many files a process may have open: now, and at most; -1 for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(-1 if value == resource.RLIM_INFINITY else value for value in (soft, hard))  # type: ignore[return-value]
