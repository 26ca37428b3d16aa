"""What a publisher's threads, its callers and the stages of its messages share."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from towline.errors import TowlineError
from towline.publisher.errors import closed, died, elsewhere, own_thread

if TYPE_CHECKING:
    from towline.publisher.receipt import Completion

__all__ = ["Lifecycle"]


class Lifecycle:
    """One publisher, from the first message to the end.

    Args:
        directory: Names it in errors.

    Attributes:
        changed: Guards everything of the publisher's that its threads share, and is notified of every change.
        kept: Holds the stages that have callbacks, though nobody else may hold them.
        closing: No more messages are taken.
        ended: The threads are gone.
        dead: Why nothing works any more; None while it does.
        threads: Those of the publisher, which must not wait for each other.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.changed = threading.Condition()
        self.kept: set[Completion[Any]] = set()
        self.closing = False
        self.ended = False
        self.dead: TowlineError | None = None
        self.threads: tuple[threading.Thread, ...] = ()
        self._pid = os.getpid()

    @property
    def inherited(self) -> bool:
        """This process is a copy made by ``fork``, without the publisher's threads and with locks as they stood."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Refuse a process that has no publisher, before any lock is touched.

        Raises:
            PublisherError: TL-O08.
        """
        if self.inherited:
            raise elsewhere(self.directory, self._pid)

    def may_wait(self) -> None:
        """Refuse a wait that nothing would end.

        Raises:
            PublisherError: TL-O08 in another process, TL-O10 on a thread of the publisher's own.
        """
        self.check()
        if threading.current_thread() in self.threads:
            raise own_thread(self.directory)

    def fail(self, error: BaseException) -> TowlineError:
        """Note, with the condition held, why nothing works any more; returns what others get."""
        if self.dead is None:
            self.dead = error if isinstance(error, TowlineError) else died(self.directory, error)
        return self.dead

    @property
    def over(self) -> TowlineError | None:
        """Why nothing comes of a wait any more; None while something may."""
        return self.dead or (closed(self.directory) if self.ended else None)
