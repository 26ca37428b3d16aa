"""One owner per directory: an advisory lock that the kernel takes back when its holder dies [I8]."""

from __future__ import annotations

import fcntl
import os
from datetime import datetime
from typing import TYPE_CHECKING

from towline.errors import JournalError, JournalLocked

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Lock"]

NAME = "lock"
_LENGTH = 63


class Lock:
    """The lock file of a journal directory, held from the moment it is made until `release`.

    Args:
        directory: The journal's directory; it must exist.

    Raises:
        JournalLocked: TL-J03, another process, or another journal object of this one, holds it.
        JournalError: TL-J01, the file can't be made, or this file system has no locks.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / NAME
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(directory, error) from error
        try:
            self._take(directory)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take(self, directory: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(self._descriptor, 0o600)
            text = f"{os.getpid()} {datetime.now().astimezone().isoformat()}"
            os.pwrite(self._descriptor, text.ljust(_LENGTH).encode() + b"\n", 0)  # over the last holder's, all of it
        except BlockingIOError as error:
            holder = _holder(os.pread(self._descriptor, 100, 0).decode("ascii", "replace"))
            advice = "One gateway per state directory: stop that one, or give this one another directory."
            raise JournalLocked("TL-J03", str(directory), f"locked by {holder}", advice) from error
        except OSError as error:
            raise _unusable(directory, error) from error

    def release(self) -> None:
        """Let the next one in; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


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
