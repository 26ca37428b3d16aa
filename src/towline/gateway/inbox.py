"""What the gateway asks of a store for received messages: the port behind which the journal stands.

The disk is the only store today, because it goes on while Kafka is down. Another one (a replicated topic) has to keep
exactly this contract, and no more is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import pyarrow as pa

__all__ = ["Inbox"]


class Inbox(Protocol):
    """An append-only sequence of rows, each named by its offset."""

    @property
    def end(self) -> int:
        """The next offset; every row below it is durable."""

    @property
    def committed(self) -> int:
        """Every consumer has committed the rows below."""

    @property
    def session(self) -> Mapping[str, object]:
        """The broker session as last set; empty on a new store."""

    @property
    def ledger(self) -> Mapping[str, int]:
        """Counters that outlive the process."""

    def append(self, batch: pa.RecordBatch) -> int:
        """Store rows and return the new end; durable on return [I2].

        Raises:
            JournalFull: No room; nothing was stored [I7].
            JournalFailed: The store must not be used again [I6].
        """

    def set_session(self, session: Mapping[str, object]) -> None:
        """Store the broker session; durable on return."""

    def count(self, **increments: int) -> None:
        """Add to counters of the ledger; durable with the next append."""
