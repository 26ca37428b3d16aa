"""The disk of a line in a bottle: what was not synced is lost in a crash, which may come at every boundary."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from towline.journal import Disk
from towline.journal.frames import Bytes

__all__ = ["Crash", "VolatileDisk"]


_PLENTY: Final = 1 << 40


class Crash(BaseException):  # nothing may catch it on its way
    """The process ends here."""


class VolatileDisk(Disk):
    """The real file system, of which a power failure leaves what was synced; waits for no device.

    Args:
        boundary: Called where the process may end.
    """

    def __init__(self, boundary: Callable[[], None]) -> None:
        self.no_room = False
        #: After a crash nothing happens any more, however much the journal still tidies up.
        self.off = False
        self._boundary = boundary
        self._paths: dict[int, Path] = {}
        #: Bytes written and bytes synced of each file.
        self._written: dict[Path, int] = {}
        self._synced: dict[Path, int] = {}
        self._unsynced_names: set[Path] = set()

    def power_loss(self, keep: float) -> None:
        """Lose what was not synced, but for a share `keep` of its bytes that had reached the disk by themselves."""
        self.off = True
        for path, written in self._written.items():
            if path in self._unsynced_names:
                path.unlink(missing_ok=True)
            elif path.exists():
                synced = self._synced.get(path, 0)
                os.truncate(path, synced + int((written - synced) * keep))

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._paths[descriptor] = path
        self._written[path] = self._synced[path] = 0
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        self._boundary()
        if self.no_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = super().write(descriptor, buffers)
        self._written[self._paths[descriptor]] += count
        self._boundary()
        return count

    def sync_data(self, descriptor: int) -> None:
        self._boundary()
        path = self._paths[descriptor]
        self._synced[path] = self._written[path]

    def sync(self, descriptor: int) -> None:
        self.sync_data(descriptor)

    def sync_directory(self, directory: Path) -> None:  # noqa: ARG002  # the signature is the port's
        self._boundary()
        self._unsynced_names.clear()

    def truncate(self, descriptor: int, size: int) -> None:
        super().truncate(descriptor, size)
        path = self._paths[descriptor]
        self._written[path] = size
        self._synced[path] = min(size, self._synced[path])

    def rename(self, old: Path, new: Path) -> None:
        self._boundary()
        super().rename(old, new)
        self._written[new], self._synced[new] = self._written.pop(old), self._synced.pop(old)
        self._paths = {d: new if p == old else p for d, p in self._paths.items()}
        self._unsynced_names.add(new)

    def remove(self, path: Path) -> None:
        if not self.off:
            super().remove(path)

    def free(self, directory: Path) -> int:  # noqa: ARG002
        return _PLENTY

    def allocate(self, path: Path, size: int) -> None:  # noqa: ARG002
        path.touch()
