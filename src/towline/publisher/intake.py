"""What comes in: messages of any thread on their way to the disk thread, and that thread's work.

Everything is bounded: messages and bytes that wait, and bytes of a frame, so that no message is in the way of another.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from towline.delivery.outrows import arrived, rows_of
from towline.errors import JournalFull, PublisherError
from towline.journal import Outbox, largest_frame
from towline.publisher.receipt import Lifecycle, Log, PendingMessage
from towline.timing import Stamp

#: Messages stored in one frame, at most.
_GROUP: Final = 10_000
#: Messages that may wait for the disk thread, before `publish` waits; and their bytes, of more than one message.
_QUEUED: Final = 20_000
_QUEUED_BYTES: Final = 64 << 20
#: How often a full disk or outbox is tried again, in seconds.
_ROOM_RETRY: Final = 0.2


class Intake:
    """The queue before the disk, and the disk thread.

    Args:
        life: Of the publisher.
        outbox: Takes the messages.
        refuses: Refuse what finds the outbox full, instead of waiting.
        max_bytes: Of the outbox; None for no limit but the disk.
        wake: Called when messages are durable.

    Attributes:
        full_since: Why nothing is stored; None while there is room.
    """

    def __init__(
        self,
        life: Lifecycle,
        outbox: Outbox,
        *,
        refuses: bool,
        max_bytes: int | None,
        wake: Callable[[], None],
    ) -> None:
        self._life = life
        self._outbox = outbox
        self._refuses = refuses
        #: of the messages of one frame, where there are several
        self._group_bytes = largest_frame(max_bytes)
        self._wake = wake
        self._queue: deque[PendingMessage] = deque()
        self._bytes = 0
        #: what the disk thread is at work on
        self._group: list[PendingMessage] = []
        #: that work waits for room, and a message may be taken out of it
        self._held = False
        self._log = Log()
        self.full_since: JournalFull | None = None

    def __len__(self) -> int:
        return len(self._queue) + bool(self._group)

    @property
    def crowded(self) -> bool:
        """`put` would wait."""
        return not self._room() or self.full_since is not None

    def _room(self) -> bool:
        return len(self._queue) < _QUEUED and (self._bytes < _QUEUED_BYTES or not self._queue)

    def _judged(self) -> bool:
        """What becomes of a message is known now: it is taken, or refused for good."""
        over = self._life.closing or self._life.dead is not None
        return over or self._room() or (self._refuses and self.full_since is not None)

    # -- any thread --

    def put(self, message: PendingMessage, deadline: float | None = None) -> None:
        """Queue a message; `deadline` as `time.monotonic` has it, None for never.

        Raises:
            PublisherError: TL-O01 no room, TL-O30 none until the deadline, TL-O02 closed, TL-O08 another process,
                TL-O10 it would have to wait on the publisher's own thread.
            TowlineError: Why the publisher has ended.
        """
        life = self._life
        life.check()
        with life.changed:
            if not self._judged():
                life.may_wait()
                left = None if deadline is None else deadline - time.monotonic()
                life.changed.wait_for(self._judged, left)
            if life.dead is not None:
                raise life.dead
            if life.closing:
                raise life.closed()
            if self._refuses and self.full_since is not None:
                raise _outbox_full(life.directory, self.full_since)
            if not self._room():
                raise _not_taken(life.directory, self.full_since)
            self._queue.append(message)
            self._bytes += message.size
            if not self._group:
                life.changed.notify_all()

    def stored(self, message: PendingMessage, deadline: float) -> None:
        """Wait until a queued message is durable; at the deadline take it back, unless it is being written.

        Raises:
            PublisherError: TL-O30, it was taken back.
            TowlineError: Why it is not stored.
        """
        life, stage = self._life, message.receipt.on_disk
        with life.settling():
            while not stage.done():
                left = deadline - time.monotonic()
                if left <= 0 and self._take_back(message):
                    message.fail(_not_taken(life.directory, self.full_since))
                    break
                life.changed.wait(left if left > 0 else None)
        stage.result()

    def _take_back(self, message: PendingMessage) -> bool:
        if message in self._queue:
            self._queue.remove(message)
            self._bytes -= message.size
        elif self._held and message in self._group:
            self._group.remove(message)
        else:
            return False
        return True

    # -- the disk thread --

    def run(self) -> None:
        """Store what is queued until the publisher is closed and nothing is left."""
        while group := self._next_group():
            self._store(group)

    def _next_group(self) -> list[PendingMessage]:
        changed = self._life.changed
        with changed:
            self._group = []
            changed.notify_all()
            while not self._queue and not self._life.closing:
                changed.wait()
            group, size = self._group, 0
            while (
                self._queue and len(group) < _GROUP and (not group or size + self._queue[0].size <= self._group_bytes)
            ):
                group.append(self._queue.popleft())
                size += group[-1].size
            self._bytes -= size
            return group

    def _store(self, group: list[PendingMessage]) -> None:
        while group:  # less of it, or nothing, after a wait for room
            rows = arrived(rows_of([message.fields for message in group]), Stamp.now())
            try:
                end = self._outbox.append(rows).end
            except JournalFull as error:
                if not self._hold_back(group, error):
                    return
            else:
                if self.full_since is not None:
                    self.full_since = None
                    self._log.info("there is room again; messages are taken")
                with self._life.settling():
                    self._life.stored(group, end - len(group))
                    self._wake()
                return

    def _hold_back(self, group: list[PendingMessage], error: JournalFull) -> bool:
        """Wait for room, or refuse the group; whether to try again."""
        life = self._life
        if self.full_since is None and not self._refuses:
            self._log.warning("no room; publish waits", directory=life.directory, why=error.what, code="TL-O01")
        with life.settling():
            self.full_since = error
            if self._refuses or life.closing:
                self._fail(group, _outbox_full(life.directory, error))
                self.full_since = None
                return False
            self._held = True
            life.changed.notify_all()
            life.changed.wait(_ROOM_RETRY)
            self._held = False
        return True

    def fail(self, error: BaseException, *, group: bool) -> None:
        """Nothing of what waits will be stored, nor the group if the disk thread has died; with the condition held."""
        self._fail([*(self._group if group else ()), *self._queue], error)
        self._queue.clear()
        self._bytes = 0
        if group:
            self._group = []

    @staticmethod
    def _fail(messages: list[PendingMessage], failure: BaseException) -> None:
        for message in messages:
            message.fail(failure)


def _not_taken(directory: Path, full: JournalFull | None) -> PublisherError:
    """The error of a message that found no room in time."""
    why = f"no room: {full.what}" if full else "the disk can't keep up"
    what = f"the message was not taken within its timeout ({why})"
    return PublisherError("TL-O30", str(directory), what, full.do if full else "Publish it again later.")


def _outbox_full(directory: Path, error: JournalFull) -> PublisherError:
    """The error of a message that finds no room."""
    return PublisherError("TL-O01", str(directory), f"the outbox is full: {error.what}", error.do)
