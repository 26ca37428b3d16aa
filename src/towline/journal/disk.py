"""Disk access of a journal: directory, lock, free space, and the system calls behind a class that a test can replace.

A write becomes durable by `fdatasync`, a new file name by `fsync` of its directory. A full disk raises `JournalFull`;
any other failed call ends the journal object [I6].
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

from annotated_types import Ge

from towline import files
from towline.errors import JournalError, JournalFailed, JournalFull, JournalLocked
from towline.files import check_owner
from towline.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from towline.journal.frames import Bytes


_IOV_MAX = 1024  # Linux: UIO_MAXIOV


class Disk:
    """File system calls of a journal; every method raises `OSError` as the system call does."""

    def create(self, path: Path) -> int:
        """Create a new file with mode 0600, whatever the umask, and return its descriptor."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, files.PRIVATE_MODE)
        os.fchmod(descriptor, files.PRIVATE_MODE)
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        """Write `buffers` by one `writev` call and return the number of bytes written, which may be short."""
        return os.writev(descriptor, buffers[:_IOV_MAX])

    def sync_data(self, descriptor: int) -> None:
        """Sync the content of a file (fdatasync)."""
        os.fdatasync(descriptor)

    def sync(self, descriptor: int) -> None:
        """Sync content and attributes of a new file (fsync)."""
        os.fsync(descriptor)

    def sync_directory(self, directory: Path) -> None:
        """Sync a directory, so that the names in it are durable."""
        files.sync_path(directory)

    def truncate(self, descriptor: int, size: int) -> None:
        """Truncate a file to `size` bytes and continue writing from there."""
        os.ftruncate(descriptor, size)
        os.lseek(descriptor, size, os.SEEK_SET)

    def rename(self, old_path: Path, new_path: Path) -> None:
        """Rename a file atomically, replacing an existing one."""
        old_path.replace(new_path)

    def remove(self, path: Path) -> None:
        """Unlink a file, if it exists; readers that have it mapped keep its content."""
        path.unlink(missing_ok=True)

    def free(self, directory: Path) -> int:
        """Return the free bytes of the file system that an unprivileged process may use."""
        stat = os.statvfs(directory)
        return stat.f_bavail * stat.f_frsize


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_FREE_DISK = "Free disk space; intake resumes by itself."


def journal_full(location: Path | str, problem: str, remedy: str = _FREE_DISK) -> JournalFull:
    """Return the error for a write without free disk space; nothing of it was written [I7]."""
    return JournalFull("TL-J02", str(location), problem, remedy)


@contextlib.contextmanager
def map_errors(location: Path, operation: str) -> Iterator[None]:
    """Raise `JournalFailed`, which ends this journal object, when a system call in the block fails [I6]."""
    try:
        yield
    except OSError as error:
        raise journal_failed(location, operation, error) from error


def journal_failed(location: Path, operation: str, error: OSError) -> JournalFailed:
    """Return the error for a failed system call, which ends this journal object [I6]."""
    problem = f"{operation} failed ({error.strerror}); messages not acknowledged before may be lost"
    remedy = "Check the disk and start again: recovery copies the valid frames to a new file."
    return JournalFailed("TL-J04", str(location), problem, remedy)


def write_all(disk: Disk, descriptor: int, buffers: Sequence[Bytes]) -> None:
    """Write every byte of `buffers`, continuing after short writes."""
    remaining_buffers = list(buffers)
    while remaining_buffers:
        byte_count = disk.write(descriptor, remaining_buffers)
        while remaining_buffers and byte_count >= len(remaining_buffers[0]):
            byte_count -= len(remaining_buffers.pop(0))
        if byte_count:
            remaining_buffers[0] = memoryview(remaining_buffers[0]).cast("B")[byte_count:]


def write_file(disk: Disk, path: Path, buffers: Sequence[Bytes]) -> int:
    """Write and sync a file under a temporary name, rename it, sync its directory; return the file's descriptor.

    A crash in between leaves the old state and a temporary file that the next opening removes.

    Raises:
        JournalFull: TL-J02, no free space; nothing changed.
        JournalFailed: TL-J04, a system call failed.
    """
    temporary_path = path.with_suffix(TEMPORARY_SUFFIX)
    descriptor = -1
    try:
        with map_errors(path, "writing a new segment"):
            try:
                descriptor = disk.create(temporary_path)
                write_all(disk, descriptor, buffers)
            except OSError as error:
                if error.errno in NO_ROOM:
                    raise journal_full(path.parent, f"no room for a new segment ({error.strerror})") from error
                raise
            disk.sync(descriptor)
            disk.rename(temporary_path, path)
            disk.sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        with contextlib.suppress(OSError):
            disk.remove(temporary_path)
        raise
    return descriptor


SEGMENT_SUFFIX = ".seg"
TEMPORARY_SUFFIX = ".tmp"  # removed at the next opening, never acknowledged
_SEGMENT_NAME = re.compile(r"(\d{20})-(\d{10})\.seg")


class SegmentName(NamedTuple):
    """File name of a segment. The sequence distinguishes files with the same first offset, and shows missing ones."""

    sequence: int
    first_offset: int

    def path(self, directory: Path) -> Path:
        """Return the path of the segment file."""
        return directory / f"{self.first_offset:020d}-{self.sequence:010d}{SEGMENT_SUFFIX}"


def prepare_directory(directory: Path, disk: Disk) -> None:
    """Create the directory, durable and with mode 0700. An existing one keeps its mode; files are 0600.

    Every parent directory is synced too: whoever created the state directory may not have synced it, and a power
    failure would remove the journal with it.

    Raises:
        ConfigError: TL-J23, the directory belongs to another user.
        JournalError: TL-J01, the directory can't be created or written to.
    """
    check_owner(directory)
    try:
        missing_directories = [path for path in (directory, *directory.parents) if not path.exists()]
        for path in reversed(missing_directories):
            path.mkdir(mode=0o700, exist_ok=True)
            path.chmod(0o700)
        for path in directory.absolute().parents:
            with contextlib.suppress(
                PermissionError
            ):  # a directory that can't be listed was not created for the journal
                disk.sync_directory(path)
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(0, "no right to write here")
        os.listdir(directory)  # noqa: PTH208 a file in its place shows here
    except OSError as error:
        raise _unusable_directory(directory, "the journal directory can't be used", error) from error


def segment_names(directory: Path) -> list[SegmentName]:
    """Return the segment names in the order in which they were written; none without a directory.

    Raises:
        JournalError: TL-J09, a file has the suffix of a segment, but not its name pattern.
        OSError: The directory can't be read.
    """
    names = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in directory.iterdir():  # glob would take an unreadable directory for an empty one
            if match := _SEGMENT_NAME.fullmatch(path.name):
                names.append(SegmentName(int(match[2]), int(match[1])))
            elif path.name.endswith(SEGMENT_SUFFIX):
                problem = "is not a segment file of this journal format"
                raise JournalError("TL-J09", str(path), problem, "Move it away, or give another directory.")
    return sorted(names)


_CHECK_INTERVAL_BYTES = 8 << 20  # free space is read once per so many bytes: far below any sensible guard
_MIN_SEGMENTS = 8  # a size limit holds at least this many segments, so that removing whole ones satisfies it
_RESERVE_FILE = "reserve"
_RESERVE_BYTES = 1 << 16  # space for the watermarks on a full disk, so that committed rows can always be removed


@dataclass(frozen=True)
class Limits:
    """Disk space limits of a journal; sizes in bytes.

    Attributes:
        max_bytes: Most bytes of all segments together, no limit by default. Beyond it rows are refused. While no row
            waits, a frame that is larger than the limit is accepted.
        min_free_bytes: Bytes that must stay free on the file system; below it rows are refused.
        segment_bytes: Size at which a new segment file starts.
        retain_bytes: Most bytes of committed segments that are retained for a replay.
    """

    max_bytes: Annotated[int, Ge(1 << 20)] | None = None
    min_free_bytes: Annotated[int, Ge(0)] = 512 << 20
    segment_bytes: Annotated[int, Ge(64 << 10)] = 64 << 20
    retain_bytes: Annotated[int, Ge(0)] = 0


class DiskSpace:
    """Disk space of one journal directory."""

    def __init__(self, directory: Path, limits: Limits, disk: Disk) -> None:
        self._directory = directory
        self.limits = limits
        self._disk = disk
        #: Bytes written since free space was read; the first check reads it.
        self._unchecked_bytes = _CHECK_INTERVAL_BYTES
        #: Size at which a new segment starts.
        self.segment_bytes = limits.segment_bytes
        if limits.max_bytes is not None:
            self.segment_bytes = min(limits.segment_bytes, limits.max_bytes // _MIN_SEGMENTS)

    def check(self, used_bytes: int, new_bytes: int, *, apply_limit: bool = True) -> None:
        """Refuse `new_bytes` above the size limit or the free disk space; without `apply_limit` above the latter only.

        Raises:
            JournalFull: TL-J02.
        """
        limits = self.limits
        if apply_limit and limits.max_bytes is not None and used_bytes + new_bytes > limits.max_bytes:
            problem = f"{used_bytes:,} of at most {limits.max_bytes:,} bytes are used, {new_bytes:,} more don't fit"
            raise journal_full(self._directory, problem, "Intake resumes after a commit; or raise the limit.")
        self._unchecked_bytes += new_bytes
        if self._unchecked_bytes >= _CHECK_INTERVAL_BYTES:
            free = self._disk.free(self._directory)
            if free - new_bytes < limits.min_free_bytes:
                # Rounded to a megabyte: the value changes all the time, and each different text is logged again.
                required_mb = limits.min_free_bytes / 1e6
                problem = f"{free / 1e6:,.0f} MB are free on this disk, {required_mb:,.0f} MB must stay free"
                raise journal_full(self._directory, problem)
            self._unchecked_bytes = 0

    def available_bytes(self, used_bytes: int) -> int:
        """Return the bytes that may still be written: by the journal's limit or the free disk space, whichever is less.

        Raises:
            OSError: The free space of the file system is unknown.
        """
        limits = self.limits
        free = self._disk.free(self._directory) - limits.min_free_bytes
        return max(0, free if limits.max_bytes is None else min(free, limits.max_bytes - used_bytes))

    def release_reserve_if_low(self) -> None:
        """Free the reserve file on a nearly full disk, because recovery may have to copy a segment."""
        if self._disk.free(self._directory) < self.limits.segment_bytes:
            self.release_reserve()

    def release_reserve(self) -> None:
        """Remove the reserve file, to free space for a write that must succeed."""
        self._disk.remove(self._directory / _RESERVE_FILE)

    def create_reserve(self) -> None:
        """Create the reserve file, if it is missing."""
        path = self._directory / _RESERVE_FILE
        with contextlib.suppress(OSError):  # the reserve is a convenience for a full disk
            if not path.exists():
                files.replace(
                    path, os.urandom(_RESERVE_BYTES), sync=False
                )  # random bytes: no file system compresses them


_LOCK_FILE = "lock"
_LOCK_BYTES = 63
_LOCK_PROBLEM = "the journal can't be locked here"
#: The lock file may be removed between its opening and the lock; so many times in a row is no coincidence.
_MAX_LOCK_ATTEMPTS = 100
#: Lock files held by this process, with pid (a fork inherits the table) and descriptor.
_OWN_LOCKS: dict[tuple[int, int], tuple[int, int]] = {}


class Lock:
    """Advisory lock on the lock file of a journal directory, held until `release` or the end of the process [I8].

    The lock is on a file, not on its name: removing or replacing the file, or the directory around it, lets a second
    owner in. So the holder checks regularly that the name still refers to its file.

    Raises:
        JournalLocked: TL-J03, another process, or another journal object of this one, holds the lock.
        JournalError: TL-J01, the file can't be created, or this file system has no locks.
    """

    def __init__(self, directory: Path) -> None:
        path = directory.absolute() / _LOCK_FILE
        self._path = os.fspath(path)
        try:
            for _ in range(_MAX_LOCK_ATTEMPTS):
                self._descriptor = files.open_lock(path)
                try:
                    self._acquire(directory)
                    self.check()
                except JournalFailed:
                    self.release()  # the file was renamed or removed since it was opened: it excludes nobody
                except BaseException:
                    self.release()
                    raise
                else:
                    _OWN_LOCKS[self._file_id] = os.getpid(), self._descriptor
                    return
        except OSError as error:
            raise _unusable_directory(directory, _LOCK_PROBLEM, error) from error
        raise _unusable_directory(directory, _LOCK_PROBLEM, OSError(0, "the lock file is removed repeatedly"))

    def _acquire(self, directory: Path) -> None:
        self._file_id = _file_id(os.fstat(self._descriptor))
        if not files.try_lock(self._descriptor):
            raise self._locked_error(directory)
        os.fchmod(self._descriptor, 0o600)
        text = f"pid {os.getpid()} since {datetime.now().astimezone().isoformat(' ', 'seconds')}"
        os.pwrite(
            self._descriptor, text.ljust(_LOCK_BYTES).encode() + b"\n", 0
        )  # overwrites the previous holder's text

    def _locked_error(self, directory: Path) -> JournalLocked:
        """Return the error that names the lock's holder, which may be another object of this process."""
        if _OWN_LOCKS.get(self._file_id, (0, 0))[0] == os.getpid():
            problem = "this process has it open already, in another Publisher or gateway"
            remedy = "Close that one first, or give each a directory of its own."
            return JournalLocked("TL-J03", str(directory), problem, remedy)
        text = os.pread(self._descriptor, _LOCK_BYTES, 0).decode("ascii", "replace").strip()
        holder = printable(text) or "another process"
        remedy = "One gateway or Publisher per directory: stop that one, or give this one another directory."
        return JournalLocked("TL-J03", str(directory), f"locked by {holder}", remedy)

    def check(self) -> None:
        """Check that the name of the lock file still refers to the locked file.

        Rows that were durable before this call returns are visible to any later owner. Costs a microsecond.

        Raises:
            JournalFailed: TL-J11, the file was removed or replaced: another process may own the directory.
        """
        try:
            stat, reason = os.stat(self._path), "replaced"  # noqa: PTH116  # before each acknowledgement
            if (stat.st_dev, stat.st_ino) == self._file_id:
                return
        except OSError as error:
            reason = f"removed ({error.strerror})"
        raise JournalFailed(
            "TL-J11",
            self._path,
            f"the lock file was {reason} while this process owned the directory; another process may own it now, so "
            "nothing more is acknowledged here",
            "Stop the other user of this directory and start again. Never replace the files of a running process.",
        )

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor >= 0:
            if _OWN_LOCKS.get(self._file_id) == (os.getpid(), self._descriptor):
                del _OWN_LOCKS[self._file_id]
            os.close(self._descriptor)
            self._descriptor = -1


def _file_id(stat: os.stat_result) -> tuple[int, int]:
    """Return device and inode number, which are unique while a descriptor is open."""
    return stat.st_dev, stat.st_ino


def _unusable_directory(directory: Path, problem: str, error: OSError) -> JournalError:
    remedy = "Give a directory on a local disk that this user may write to."
    return JournalError("TL-J01", str(directory), f"{problem} ({error.strerror})", remedy)
