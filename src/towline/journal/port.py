"""What a journal asks of the place where its rows and its state are kept: the disk is one, a Kafka topic another.

A store keeps rows in order and a `JournalState` beside them. Every change is one step that is there whole or not at
all, and durable when the call returns unless it says otherwise; a store that went on from a copy shows it [I14].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from towline.journal.state import Changes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from towline.journal.frames import Bytes, Kind
    from towline.journal.reading import RowSlice
    from towline.journal.room import Limits
    from towline.journal.state import JournalState
    from towline.timing import Histogram

__all__ = ["NO_CHANGES", "JournalStore", "Ownership"]

NO_CHANGES: Final = Changes()


class Ownership(Protocol):
    """The right to change what is stored, which one process has at a time [I8]."""

    def check(self) -> None:
        """See that it is still ours.

        Raises:
            JournalFailed: Another process may have it: nothing more may be acknowledged.
        """

    def release(self) -> None:
        """Let another process have it; a second call does nothing."""


class JournalStore(Protocol):
    """Rows and the state that belongs to them, opened by one owner.

    Attributes:
        schema: Of the rows.
        state: What a snapshot would hold now. Its dicts but `held` are replaced, never changed, so that readers need
            no lock.
        end: The next offset, every row below it durable; set last, so that whoever sees it finds the rows.
        syncs: How long it took to make each change durable.
        bytes_written: Bytes stored since this opening, those that were removed since included.
    """

    schema: Any
    state: JournalState
    end: int
    syncs: Histogram
    bytes_written: int

    @property
    def sync_kind(self) -> str:
        """What `syncs` counts: ``fdatasync`` or ``transaction``."""

    @property
    def bytes_waiting(self) -> int:
        """Bytes of rows that are not committed, about."""

    @property
    def room_left(self) -> int | None:
        """Bytes that may still come before there is no room; None for no limit of ours."""

    @property
    def first(self) -> int:
        """The oldest offset that can be read."""

    @property
    def committed(self) -> int:
        """The smallest watermark of all consumers; the first offset when there is none."""

    @property
    def limits(self) -> Limits:
        """How much room it may take."""

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of what is stored."""

    def count(self, increments: Mapping[str, int]) -> None:
        """Add to counters of the ledger; any thread. Their totals become durable with the next frame."""

    def append(self, batch: Any, changes: Changes) -> None:
        """Make rows and changes durable, in one step.

        Raises:
            JournalFull: No room, or the store can't be reached; the same call may succeed later [I7].
            JournalFailed: Nothing of it is promised; the store must not be used again [I6].
        """

    def write(self, kind: Kind, payload: Bytes, changes: Changes = NO_CHANGES, *, durable: bool) -> object:
        """Make a frame without rows durable, with its changes; raises as `append` does."""

    def write_watermarks(self, changes: Changes = NO_CHANGES) -> bool:
        """Write the consumers' watermarks with changes; not synced by itself. Whether it is written."""

    def set_consumers(self, consumers: dict[str, int]) -> None:
        """Replace the watermarks, and remove what no consumer waits for."""

    def remove_committed(self, retain: int | None = None) -> bool:
        """Remove what no consumer waits for, oldest first; whether there was anything."""

    def sync(self) -> None:
        """Make durable what was written without a sync of its own."""

    def finish(self) -> None:
        """Write the counters that only memory has, and make everything durable."""

    def close(self) -> None:
        """Let go; nothing is written. A second call does nothing."""

    def pieces(self, start: int, end: int) -> Iterator[RowSlice]:
        """Yield the rows from `start` to `end` as they were appended, cut at the ends [I4].

        Raises:
            JournalDamaged: Rows are not as they were written; nothing of them is handed out.
            JournalError: TL-J07, they were removed meanwhile.
        """

    def after_bytes(self, start: int, end: int, max_bytes: int) -> int:
        """How far so many stored bytes reach from row `start`, at most to `end`."""

    def bytes_between(self, start: int, end: int) -> int:
        """How many stored bytes the rows from `start` to `end` are, counted as `after_bytes` counts them."""

    def origin_below(self, offset: int) -> str:
        """Which opening of the journal wrote the row below an offset that can be read from; "" for unknown."""
