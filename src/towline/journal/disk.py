"""The few file system calls a journal makes, as a port, so that a test can let the n-th of them fail.

The rules that make a write durable are here, one call each: data by `fdatasync`, a new name by `fsync` of its
directory. Whoever calls decides what a failure means [I6].
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from towline import files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from towline.journal.frames import Bytes

__all__ = ["Disk"]

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

    def allocate(self, path: Path, size: int) -> None:
        """Take `size` bytes of the disk for a file that is only there to be given back."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.PRIVATE)
        try:
            os.fchmod(descriptor, files.PRIVATE)
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(descriptor)
