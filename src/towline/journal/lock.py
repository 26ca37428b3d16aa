"""One owner per directory: an advisory lock that the kernel takes back when its holder dies [I8].

The lock is on a file, not on its name: somebody who removes or replaces the file, or the directory around it, lets a
second owner in. So the holder looks again and again whether the name still means its file.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING

from towline import files
from towline.errors import JournalError, JournalFailed, JournalLocked

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Lock"]

NAME = "lock"
_LENGTH = 63
#: A lock file can be removed between its opening and the lock on it; this often in a row is no coincidence.
_TRIES = 100
#: Lock files that are held here, and by which process: a fork inherits the table, and containers repeat the pids that
#: stand in the files.
_HELD: dict[tuple[int, int], int] = {}


class Lock:
    """The lock file of a journal directory, held until `release`.

    Args:
        directory: The journal's directory; it must exist.

    Raises:
        JournalLocked: TL-J03, another process, or another journal object of this one, holds it.
        JournalError: TL-J01, the file can't be made, or this file system has no locks.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory.absolute() / NAME
        #: What is locked, once it is; None before.
        self._file: tuple[int, int] | None = None
        for _ in range(_TRIES):
            try:
                self._descriptor = files.open_lock(self._path)
            except OSError as error:
                raise _unusable(directory, error) from error
            try:
                self._take(directory)
                self._file = _file(os.fstat(self._descriptor))
                self.check()
                _HELD[self._file] = os.getpid()
            except JournalFailed:
                self.release()  # the file has another name, or none, since it was opened: it locks nobody out
            except BaseException:
                self.release()
                raise
            else:
                return
        raise _unusable(directory, OSError(0, "the lock file is removed again and again"))

    def _take(self, directory: Path) -> None:
        try:
            if not files.locked(self._descriptor):
                raise self._taken(directory)
            os.fchmod(self._descriptor, 0o600)
            text = f"{os.getpid()} {datetime.now().astimezone().isoformat()}"
            os.pwrite(self._descriptor, text.ljust(_LENGTH).encode() + b"\n", 0)  # over the last holder's, all of it
        except OSError as error:
            raise _unusable(directory, error) from error

    def _taken(self, directory: Path) -> JournalLocked:
        """Say who holds the lock; this process may, by another object."""
        if _HELD.get(_file(os.fstat(self._descriptor))) == os.getpid():
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
            identity, why = _file(self._path.stat()), "replaced"
        except OSError as error:
            identity, why = None, f"removed ({error.strerror})"
        if identity != self._file:
            raise JournalFailed(
                "TL-J11",
                str(self._path),
                f"the lock file was {why} while this process owned the directory; another process may own it now, so "
                "nothing more is acknowledged here",
                "Stop whoever else uses this directory and start again. Never replace the files of a running process.",
            )

    def release(self) -> None:
        """Let another process have it; a second call does nothing."""
        if self._descriptor >= 0:
            if self._file is not None:
                _HELD.pop(self._file, None)
            os.close(self._descriptor)
            self._descriptor = -1


def _file(stat: os.stat_result) -> tuple[int, int]:
    """What identifies a file; no other gets the same numbers while a descriptor is open."""
    return stat.st_dev, stat.st_ino


def _unusable(directory: Path, error: OSError) -> JournalError:
    return JournalError(
        "TL-J01",
        str(directory),
        f"the journal's lock can't be taken here ({error.strerror})",
        "Give a directory on a local disk that this user may write to.",
    )


def _holder(text: str) -> str:
    """Return who holds the lock, in words; the file may be half written."""
    try:
        pid, since = text.split()
        moment = datetime.fromisoformat(since).astimezone()
    except ValueError:
        return "another process"
    today = moment.date() == datetime.now().astimezone().date()
    return (
        f"the process with pid {int(pid)} (since {moment:%H:%M})"
        if today
        else f"the process with pid {int(pid)} (since {moment:%Y-%m-%d %H:%M})"
    )
