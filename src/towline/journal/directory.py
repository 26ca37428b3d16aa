"""The directory of a journal: who may read it, and what its files are called."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from towline.errors import JournalError
from towline.ownership import check_owner

if TYPE_CHECKING:
    from pathlib import Path

    from towline.journal.disk import Disk

__all__ = ["UNFINISHED", "Name", "prepare", "segment_names"]

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
        _sync_above(directory, disk)
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(0, "no right to write here")
        os.listdir(directory)  # noqa: PTH208 a file in its place shows here
    except OSError as error:
        raise JournalError(
            "TL-J01",
            str(directory),
            f"can't keep a journal here ({error.strerror})",
            "Give a directory on a local disk that this user may write to.",
        ) from error


def _sync_above(directory: Path, disk: Disk) -> None:
    for path in directory.absolute().parents:
        with contextlib.suppress(PermissionError):  # a directory that we can't even list is none that was made for us
            disk.sync_directory(path)


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
