"""What the broker refused for good, kept aside with its reason code: a journal of its own, made when it is needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from towline.errors import JournalFull
from towline.gateway.outrows import REFUSED_SCHEMA
from towline.journal import Journal, Limits

__all__ = ["Refused", "read_refused"]

#: Beyond it refused messages are counted and logged, and no longer kept.
_LIMITS: Final = Limits(max_bytes=256 << 20, min_free_bytes=64 << 20, segment_bytes=16 << 20)


class Refused:
    """The place aside.

    Args:
        directory: Of its journal; made with the first message.
        log: Takes ``warning(event, **facts)``.
    """

    def __init__(self, directory: Path, log: Any) -> None:
        self._directory = directory
        self._log = log
        self._journal: Journal | None = None

    def keep(self, messages: Iterable[tuple[pa.RecordBatch, int, int]]) -> None:
        """Keep messages, durable on return: each a row of the outbox, its number, and the reason code.

        After a crash a message may be here twice, under one number. A full disk, or a full journal, keeps nothing more.

        Raises:
            JournalFailed: TL-J04, the disk failed.
            JournalError: The journal can't be opened.
        """
        columns: list[pa.RecordBatch] = []
        for row, number, reason in messages:
            extra = [pa.array([number], pa.int64()), pa.array([reason], pa.int16())]
            columns.append(pa.RecordBatch.from_arrays([*row.columns, *extra], schema=REFUSED_SCHEMA))
        try:
            if self._journal is None:
                self._journal = Journal.open(self._directory, schema=REFUSED_SCHEMA, limits=_LIMITS)
            self._journal.append(pa.concat_batches(columns))
        except JournalFull as error:
            self._log.warning("refused messages not kept", reason=str(error), code=error.code)

    def close(self) -> None:
        """Close the journal, if there is one."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def read_refused(directory: Path) -> list[dict[str, Any]]:
    """The refused messages, by number, with ``number`` and ``reason``; each number once.

    Raises:
        JournalLocked: TL-J03, a gateway has it open.
    """
    if not directory.exists():
        return []
    journal = Journal.open(directory, schema=REFUSED_SCHEMA, limits=_LIMITS)
    try:
        rows = [row for batch in journal.read(journal.first, journal.end) for row in batch.to_pylist()]
        return sorted({row["number"]: row for row in rows}.values(), key=lambda row: row["number"])
    finally:
        journal.close()
