"""Up to where an inbox may be cut: up to the last batch whose commit-log entry survives a power failure [I5].

``start`` of ``latestOffset`` says which batch is in the commit log, not that the entry is on the disk. Where the
checkpoint is known (option ``checkpointLocation``) its entry is synced first, 1 to 2 ms a batch. Elsewhere the whole
machine is synced in the background, sync(2), at most once a second, and the cut follows it: Spark does not tell a
source where its checkpoint is.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from towline.checkpoint import Checkpoint

if TYPE_CHECKING:
    from towline.spark.offsets import Position

__all__ = ["Cut"]

#: Shortest time between two syncs of the machine, in seconds, and their largest share of the time.
_EVERY_S = 1.0
_SHARE = 0.1


class Cut:
    """Tells how much of a stream's past is safe to forget; lives in the runner.

    Args:
        location: The query's checkpoint, or "" where it is not known.
    """

    def __init__(self, location: str) -> None:
        self._checkpoint = Checkpoint(location) if location else None
        self._safe: Position | None = None
        self._machine: _Machine | None = None

    def upto(self, here: Position, *, wait: bool = False) -> Position | None:
        """Up to where rows may be removed at each gateway, ``here`` or one before it; None when nothing may be yet.

        Args:
            here: End of the last batch in the commit log.
            wait: Sync before answering, whatever it takes: there will be no other call.

        Raises:
            JournalError: TL-J20, the checkpoint can't be made durable.
        """
        if self._safe is None or self._safe != here:
            if self._checkpoint is not None and self._checkpoint.ends_at(here.to_json(), done=True):
                self._checkpoint.sync()
                self._safe = here
            else:
                self._safe = self._synced(here, wait=wait)
        return self._safe

    def remember(self, there: Position) -> None:
        """Make durable that the batch up to ``there`` has been begun, so that it is never taken for a new one.

        Raises:
            JournalError: TL-J20, the checkpoint can't be made durable.
        """
        if self._checkpoint is not None and self._checkpoint.ends_at(there.to_json(), done=False):
            self._checkpoint.sync()
        else:
            os.sync()

    def _synced(self, here: Position, *, wait: bool) -> Position | None:
        if wait:
            os.sync()
            return here
        if self._machine is None:
            self._machine = _Machine()
        return self._machine.synced(here)


class _Machine:
    """Syncs every file system in the background. sync(2) waits for the disks, but tells no error."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted: Position | None = None
        self._done: Position | None = None
        threading.Thread(target=self._run, name="sync", daemon=True).start()

    def synced(self, here: Position) -> Position | None:
        """Ask for a sync after ``here``; the newest place that was asked for before a sync that has ended."""
        with self._changed:
            if self._wanted != here:
                self._wanted = here
                self._changed.notify()
            return self._done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted != self._done)
                wanted = self._wanted
            began = time.monotonic()
            os.sync()
            took = time.monotonic() - began
            with self._changed:
                self._done = wanted
            time.sleep(max(_EVERY_S, took / _SHARE) - took)
