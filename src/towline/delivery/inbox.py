"""What the gateway asks of a store for received messages: the port behind which the journal stands.

The disk is the only store today, because it goes on while Kafka is down. Another one (a replicated topic) has to keep
exactly this contract, and no more is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

__all__ = ["Inbox"]


class Inbox(Protocol):
    """An append-only sequence of rows, each named by its offset."""

    @property
    def end(self) -> int:
        """The next offset; every row below it is durable."""

    @property
    def first(self) -> int:
        """The oldest offset that can be read."""

    def read(self, start: int, end: int) -> Iterator[Any]:
        """Record batches with the rows from `start` to `end`."""

    @property
    def incarnation(self) -> str:
        """Names this opening of the store: another one that went on from a copy has another [I14]."""

    def incarnation_of(self, offset: int) -> str:
        """Which opening of the store wrote the row below `offset`; "" where none did, or it is not known [I14]."""

    @property
    def committed(self) -> int:
        """Every consumer has committed the rows below."""

    @property
    def session(self) -> Mapping[str, object]:
        """The broker session as last set; empty on a new store."""

    @property
    def ledger(self) -> Mapping[str, int]:
        """Counters that outlive the process."""

    @property
    def held(self) -> Mapping[int, tuple[int, int]]:
        """QoS 2 packet ids stored with their row and not released: number and digest of each [I3]."""

    @property
    def notes(self) -> Mapping[str, Any]:
        """What `append` was given last, by name."""

    def append(
        self,
        batch: pa.RecordBatch,
        *,
        held: Mapping[int, tuple[int, int]],
        released: Sequence[int],
        notes: Mapping[str, Any],
    ) -> int:
        """Store rows with the packet ids and notes that come and go with them, in one step; return the new end.

        Any of them may be missing; a note that is None goes [I2], [I3].

        Raises:
            JournalFull: No room; nothing was stored [I7].
            JournalFailed: The store must not be used again [I6].
        """

    def set_session(self, session: Mapping[str, object]) -> None:
        """Store the broker session; durable on return."""

    def count(self, **increments: int) -> None:
        """Add to counters of the ledger; durable with the next append."""
