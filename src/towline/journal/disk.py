"""What a journal does to its disk: directory, lock, room, and the few system calls, a port that a test can let fail.

The rules that make a write durable are here: data by `fdatasync`, a new name by `fsync` of its directory. A disk
without room is `full`, any other failed call ends the journal object [I6].
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

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from towline.journal.frames import Bytes


_IOV_MAX = 1024  # Linux: UIO_MAXIOV


class Disk:
    """The real file system; every method raises `OSError` as the system call does."""

    def create(self, path: Path) -> int:
        """Create a new file that only its owner reads, whatever the umask, and return its descriptor."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, files.PRIVATE)
        os.fchmod(descriptor, files.PRIVATE)
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        """Write what the kernel takes of `buffers` at once and return the number of bytes, which may be short."""
        return os.writev(descriptor, buffers[:_IOV_MAX])

    def sync_data(self, descriptor: int) -> None:
        """Make the content of a file durable."""
        os.fdatasync(descriptor)

    def sync(self, descriptor: int) -> None:
        """Make content and attributes of a new file durable."""
        os.fsync(descriptor)

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""
        files.sync_directory(directory)

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut a file to `size` bytes and write on from there."""
        os.ftruncate(descriptor, size)
        os.lseek(descriptor, size, os.SEEK_SET)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its name in one step, over an older one if there is one."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """Take a file's name away; readers that have it mapped keep its content."""
        path.unlink(missing_ok=True)

    def free(self, directory: Path) -> int:
        """Return how many bytes a file of ours may still take on this file system."""
        stat = os.statvfs(directory)
        return stat.f_bavail * stat.f_frsize


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def full(
    where: Path | str, what: str, do: str = "Free some disk; intake goes on by itself when there is room."
) -> JournalFull:
    """Return the error for a write that found no room; nothing of it stays [I7]."""
    return JournalFull("TL-J02", str(where), what, do)


@contextlib.contextmanager
def failing(where: Path, what: str) -> Iterator[None]:
    """Turn a failed system call into the end of this journal object [I6]."""
    try:
        yield
    except OSError as error:
        raise failed(where, what, error) from error


def failed(where: Path, what: str, error: OSError) -> JournalFailed:
    """Return the error for a system call whose failure ends this journal object [I6]."""
    what = f"{what} failed ({error.strerror}); what was not acknowledged before is not promised"
    do = "Check the disk and start again: recovery copies what is valid into a new file."
    return JournalFailed("TL-J04", str(where), what, do)


def write_all(disk: Disk, descriptor: int, buffers: Sequence[Bytes]) -> None:
    """Write every byte; a short write goes on where it stopped."""
    left = list(buffers)
    while left:
        written = disk.write(descriptor, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = memoryview(left[0]).cast("B")[written:]


def new_file(disk: Disk, path: Path, buffers: Sequence[Bytes]) -> int:
    """Write a whole file under another name, sync it, give it its name, sync the directory; return its descriptor.

    A crash in between leaves the old state and a file that the next opening removes.

    Raises:
        JournalFull: TL-J02, no room; nothing changed.
        JournalFailed: TL-J04, a system call failed.
    """
    unfinished = path.with_suffix(UNFINISHED)
    descriptor = -1
    try:
        with failing(path, "writing a new segment"):
            try:
                descriptor = disk.create(unfinished)
                write_all(disk, descriptor, buffers)
            except OSError as error:
                if error.errno in NO_ROOM:
                    raise full(path.parent, f"no room for a new segment ({error.strerror})") from error
                raise
            disk.sync(descriptor)
            disk.rename(unfinished, path)
            disk.sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        with contextlib.suppress(OSError):
            disk.remove(unfinished)
        raise
    return descriptor


SUFFIX = ".seg"
UNFINISHED = ".tmp"  # a file that has not got its name yet: never acknowledged, removed at the next opening
_PATTERN = re.compile(r"(\d{20})-(\d{10})\.seg")


class Name(NamedTuple):
    """A segment's name. The sequence distinguishes segments that begin at the same row, and shows holes."""

    sequence: int
    first: int

    def path(self, directory: Path) -> Path:
        """Return where the segment lies."""
        return directory / f"{self.first:020d}-{self.sequence:010d}{SUFFIX}"


def prepare(directory: Path, disk: Disk) -> None:
    """Make the directory, readable by its owner only, and durable. One that exists keeps its mode; files are 0600.

    Every directory above it is synced too: whoever made the state directory a moment ago did not care to, and a power
    failure would take the journal with it.

    Raises:
        ConfigError: TL-J23, it belongs to another user.
        JournalError: TL-J01, it can't be made or written to.
    """
    check_owner(directory)
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
            path.chmod(0o700)
        for path in directory.absolute().parents:
            with contextlib.suppress(PermissionError):  # one that we can't even list is none that was made for us
                disk.sync_directory(path)
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(0, "no right to write here")
        os.listdir(directory)  # noqa: PTH208 a file in its place shows here
    except OSError as error:
        raise _unusable(directory, "can't keep a journal here", error) from error


def segment_names(directory: Path) -> list[Name]:
    """Return the names of the segments in the order in which they were written; none where there is no directory.

    Raises:
        JournalError: TL-J09, a file has a segment's suffix, but not its form of name.
        OSError: The directory can't be read.
    """
    names = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in directory.iterdir():  # glob would take one that can't be read for empty
            if match := _PATTERN.fullmatch(path.name):
                names.append(Name(int(match[2]), int(match[1])))
            elif path.name.endswith(SUFFIX):
                what, do = "is no segment of a journal of this format", "Move it away, or give another directory."
                raise JournalError("TL-J09", str(path), what, do)
    return sorted(names)


_CHECK_BYTES = 8 << 20  # free space is asked for once in so many bytes: far below any sensible guard
_SHARE = 8  # a size limit holds at least so many segments, so that it can be met by removing whole ones
_RESERVE = "reserve"
_RESERVE_BYTES = 1 << 16  # room for the watermarks on a full disk, so that committed rows can always be removed


@dataclass(frozen=True)
class Limits:
    """How much disk a journal may take; sizes in bytes, bounds are what a configuration may say.

    Attributes:
        max_bytes: Most bytes of all segments together, no limit by default. Beyond it nothing is taken, unless no row
            waits: a frame that is larger than the limit by itself is taken then.
        min_free_bytes: What must stay free on the file system, or nothing is taken.
        segment_bytes: A new file is begun when this one would grow beyond it.
        retain_bytes: Committed segments are kept up to this size in all, for a replay.
    """

    max_bytes: Annotated[int, Ge(1 << 20)] | None = None
    min_free_bytes: Annotated[int, Ge(0)] = 512 << 20
    segment_bytes: Annotated[int, Ge(64 << 10)] = 64 << 20
    retain_bytes: Annotated[int, Ge(0)] = 0


class Room:
    """The room in one directory."""

    def __init__(self, directory: Path, limits: Limits, disk: Disk) -> None:
        self._directory = directory
        self.limits = limits
        self._disk = disk
        #: Bytes written since the file system was asked for its free space; asked for with the first.
        self._unasked = _CHECK_BYTES
        #: The size at which a new segment is begun.
        self.segment_bytes = limits.segment_bytes
        if limits.max_bytes is not None:
            self.segment_bytes = min(limits.segment_bytes, limits.max_bytes // _SHARE)

    def check(self, used: int, more: int, *, limited: bool = True) -> None:
        """Refuse `more` bytes that don't fit beside those used by all segments; if not `limited`, by the disk alone.

        Raises:
            JournalFull: TL-J02.
        """
        limits = self.limits
        if limited and limits.max_bytes is not None and used + more > limits.max_bytes:
            what = f"{used:,} of at most {limits.max_bytes:,} bytes are used, {more:,} more don't fit"
            raise full(self._directory, what, "Intake goes on when rows are committed; or raise the limit.")
        self._unasked += more
        if self._unasked >= _CHECK_BYTES:
            free = self._disk.free(self._directory)
            if free - more < limits.min_free_bytes:
                # To a megabyte: it changes from moment to moment, and each text that differs is said once more.
                wanted = limits.min_free_bytes / 1e6
                what = f"{free / 1e6:,.0f} MB are free on this disk, {wanted:,.0f} MB must stay free"
                raise full(self._directory, what)
            self._unasked = 0

    def left(self, used: int) -> int:
        """Bytes that may be written beside those used: by the journal's own limit or the disk's, whichever is less.

        Raises:
            OSError: The file system does not tell.
        """
        limits = self.limits
        left = self._disk.free(self._directory) - limits.min_free_bytes
        return max(0, left if limits.max_bytes is None else min(left, limits.max_bytes - used))

    def prepare(self) -> None:
        """Let a disk that is nearly full be recovered on: a segment may have to be copied."""
        if self._disk.free(self._directory) < self.limits.segment_bytes:
            self.use_reserve()

    def use_reserve(self) -> None:
        """Give the reserve to what must be written now."""
        self._disk.remove(self._directory / _RESERVE)

    def reserve(self) -> None:
        """Set the reserve apart, where there is none."""
        reserve = self._directory / _RESERVE
        with contextlib.suppress(OSError):  # a convenience for the day when the disk is full
            if not reserve.exists():
                files.replace(reserve, os.urandom(_RESERVE_BYTES), synced=False)  # no file system makes it smaller


_LOCK_FILE = "lock"
_LOCK_BYTES = 63
_NO_LOCK = "the journal's lock can't be taken here"
#: A lock file can be removed between its opening and the lock on it; this often in a row is no coincidence.
_TRIES = 100
#: Lock files that are held here, by which process and descriptor: a fork inherits the table, and containers repeat the
#: pids that stand in the files.
_HELD: dict[tuple[int, int], tuple[int, int]] = {}


class Lock:
    """The lock file of a journal directory, held until `release`: an advisory lock, which the kernel takes back [I8].

    The lock is on a file, not on its name: somebody who removes or replaces the file, or the directory around it, lets
    a second owner in. So the holder looks again and again whether the name still means its file.

    Raises:
        JournalLocked: TL-J03, another process, or another journal object of this one, holds it.
        JournalError: TL-J01, the file can't be made, or this file system has no locks.
    """

    def __init__(self, directory: Path) -> None:
        path = directory.absolute() / _LOCK_FILE
        self._name = os.fspath(path)
        try:
            for _ in range(_TRIES):
                self._descriptor = files.open_lock(path)
                try:
                    self._take(directory)
                    self.check()
                except JournalFailed:
                    self.release()  # the file has another name, or none, since it was opened: it locks nobody out
                except BaseException:
                    self.release()
                    raise
                else:
                    _HELD[self._file] = os.getpid(), self._descriptor
                    return
        except OSError as error:
            raise _unusable(directory, _NO_LOCK, error) from error
        raise _unusable(directory, _NO_LOCK, OSError(0, "the lock file is removed again and again"))

    def _take(self, directory: Path) -> None:
        #: what is locked
        self._file = _file(os.fstat(self._descriptor))
        if not files.locked(self._descriptor):
            raise self._taken(directory)
        os.fchmod(self._descriptor, 0o600)
        text = f"{os.getpid()} {datetime.now().astimezone().isoformat()}"
        os.pwrite(self._descriptor, text.ljust(_LOCK_BYTES).encode() + b"\n", 0)  # over all of the last holder's

    def _taken(self, directory: Path) -> JournalLocked:
        """Say who holds the lock; this process may, by another object."""
        if _HELD.get(self._file, (0, 0))[0] == os.getpid():
            what = "this process has it open already, in another Publisher or gateway"
            advice = "Close that one first, or give each a directory of its own."
            return JournalLocked("TL-J03", str(directory), what, advice)
        holder = _holder(os.pread(self._descriptor, 100, 0).decode("ascii", "replace"))
        advice = "One gateway or Publisher per directory: stop that one, or give this one another directory."
        return JournalLocked("TL-J03", str(directory), f"locked by {holder}", advice)

    def check(self) -> None:
        """See that the lock file is still the one that is locked.

        What was made durable before this returns, no other owner has missed. One system call, about a microsecond.

        Raises:
            JournalFailed: TL-J11, it was removed or replaced: another process may own the directory.
        """
        try:
            stat, why = os.stat(self._name), "replaced"  # noqa: PTH116  # before each acknowledgement
            if (stat.st_dev, stat.st_ino) == self._file:
                return
        except OSError as error:
            why = f"removed ({error.strerror})"
        raise JournalFailed(
            "TL-J11",
            self._name,
            f"the lock file was {why} while this process owned the directory; another process may own it now, so "
            "nothing more is acknowledged here",
            "Stop whoever else uses this directory and start again. Never replace the files of a running process.",
        )

    def release(self) -> None:
        """Let another process have it; a second call does nothing."""
        if self._descriptor >= 0:
            if _HELD.get(self._file) == (os.getpid(), self._descriptor):
                del _HELD[self._file]
            os.close(self._descriptor)
            self._descriptor = -1


def _file(stat: os.stat_result) -> tuple[int, int]:
    """What identifies a file; no other gets the same numbers while a descriptor is open."""
    return stat.st_dev, stat.st_ino


def _unusable(directory: Path, what: str, error: OSError) -> JournalError:
    do = "Give a directory on a local disk that this user may write to."
    return JournalError("TL-J01", str(directory), f"{what} ({error.strerror})", do)


def _holder(text: str) -> str:
    """Return who holds the lock, in words; the file may be half written."""
    try:
        pid, since = text.split()
        moment = datetime.fromisoformat(since).astimezone()
    except ValueError:
        return "another process"
    today = moment.date() == datetime.now().astimezone().date()
    return f"the process with pid {int(pid)} (since {moment:{'%H:%M' if today else '%Y-%m-%d %H:%M'}})"
