"""Rows out of a landing partition, by their numbers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import TopicPartition

from towline.errors import JournalDamaged, JournalError
from towline.journal.reading import RowSlice
from towline.kafka import admin, faults
from towline.landing.place import LOOK_S, LandingPlace, consumer_of, unread
from towline.landing.records import number_at, rows_of

if TYPE_CHECKING:
    from towline.landing.places import RowPlaces

__all__ = ["RowReader"]

#: Most rows and bytes that are fetched at a time; whoever reads holds a few of them.
_ROWS: Final = 1000
_BYTES: Final = 8 << 20
#: Seconds without a record before reading is given up.
_PATIENCE_S: Final = 5.0
_POLL_S: Final = 0.2
#: Kilobytes that librdkafka keeps ahead of the reader.
_AHEAD_KB: Final = "4096"


class RowReader:
    """Finds and reads rows; any thread.

    Args:
        place: The partition.
        schema: Of the rows.
        places: What is known of where rows lie; learns more.
    """

    def __init__(self, place: LandingPlace, schema: Any, places: RowPlaces) -> None:
        self._place, self._schema = place, schema
        self.places = places
        #: guards the consumer and where it stands
        self._lock = threading.Lock()
        self._consumer: Any = None
        #: the row that the consumer gives next, if it stands anywhere
        self._next: int | None = None

    def pieces(self, start: int, end: int) -> Iterator[RowSlice]:
        """Yield the rows from `start` to `end`.

        Raises:
            JournalDamaged: TL-J05, a row is not where it should be.
            JournalFull: TL-J32, Kafka does not give them now.
        """
        while start < end:
            records = self._fetch(start, end)
            rows = rows_of(records, self._schema)
            start += len(records)
            yield RowSlice(rows, sum(len(key) + len(value or b"") for key, value in records))

    def _fetch(self, start: int, end: int) -> list[tuple[bytes, bytes | None]]:
        with self._lock:
            try:
                if self._next != start:
                    self._seek(start)
                return self._take(start, end)
            except faults.FOREIGN as problem:
                self._drop()
                raise unread(
                    self._place.where, f"rows from {start:,} on can't be read: {faults.reason(problem)}"
                ) from None
            except BaseException:
                self._drop()
                raise

    def _take(self, start: int, end: int) -> list[tuple[bytes, bytes | None]]:
        """The next rows, where the consumer stands."""
        records: list[tuple[bytes, bytes | None]] = []
        size, want = 0, min(_ROWS, end - start)
        deadline = time.monotonic() + _PATIENCE_S
        while len(records) < want and size < _BYTES:
            message = self._poll(start, deadline)
            number = self._number(message)
            if number != start + len(records):
                raise self._damaged(start + len(records), message)
            if not records:
                self.places.learn(number, message.offset())
            records.append((message.key(), message.value()))
            size += len(message.key()) + len(message.value() or b"")
        self._next = start + len(records)
        return records

    def _seek(self, row: int) -> None:
        """Let the consumer stand before a row: from a bound below it, as far ahead as rows are missing, and again."""
        if self._consumer is None:
            self._consumer = consumer_of(self._place.client, {"queued.max.messages.kbytes": _AHEAD_KB})
        topic, partition = self._place.rows.topic, self._place.rows.partition
        first, _ = admin.watermarks(self._consumer, self._place.rows, LOOK_S)
        offset = max(self.places.offset_of(row), first)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            self._consumer.assign([TopicPartition(topic, partition, offset)])
            message = self._poll(row, deadline)
            number = self._number(message)
            if number > row:
                raise self._damaged(row, message)
            if number == row:
                break
            offset = message.offset() + row - number
        self._consumer.assign([TopicPartition(topic, partition, message.offset())])

    def first_from(self, offset: int, end: int) -> int:
        """The number of the first row at or after an offset of the partition; `end` where there is none.

        Raises:
            JournalFull: TL-J32, Kafka does not answer.
            JournalError: TL-J33, the partition has never come so far.
        """
        with self._lock:
            self._next = None
            try:
                if self._consumer is None:
                    self._consumer = consumer_of(self._place.client, {"queued.max.messages.kbytes": _AHEAD_KB})
                first, stable = admin.watermarks(self._consumer, self._place.rows, LOOK_S)
                if offset > stable:
                    raise self._beyond(offset, stable)
                topic, partition = self._place.rows.topic, self._place.rows.partition
                self._consumer.assign([TopicPartition(topic, partition, max(first, min(offset, stable)))])
                deadline = time.monotonic() + (_PATIENCE_S if offset < stable else 0.0)
                while offset < stable:
                    message = self._consumer.poll(_POLL_S)
                    if message is not None and message.error() is None:
                        return self._number(message)
                    position = self._consumer.position([self._place.rows])[0].offset
                    if position >= stable or time.monotonic() > deadline:
                        break
            except faults.FOREIGN as problem:
                self._drop()
                raise unread(self._place.where, f"offset {offset:,} can't be read: {faults.reason(problem)}") from None
        return end

    def _beyond(self, offset: int, end: int) -> JournalError:
        what = f"offset {offset:,} was read and committed, and the topic ends at {end:,}: it was made anew, or restored"
        do = "Bring the topics back from the same backup, or start the query with a new checkpoint directory."
        return JournalError("TL-J33", self._place.where, what, do)

    def _poll(self, row: int, deadline: float) -> Any:
        while True:
            message = self._consumer.poll(_POLL_S)
            if message is not None and message.error() is None:
                return message
            if message is not None:
                why = faults.reason(message.error())
                raise unread(self._place.where, f"rows from {row:,} on can't be read: {why}")
            if time.monotonic() > deadline:
                raise unread(self._place.where, f"rows from {row:,} on did not come within {_PATIENCE_S:g} s")

    def _number(self, message: Any) -> int:
        return number_at(self._place.where, message.offset(), message.key())

    def _damaged(self, row: int, message: Any) -> JournalError:
        what = f"row {row:,} is missing: row {self._number(message):,} is at offset {message.offset():,}"
        do = "Was something deleted by hand, or by retention.ms? Rows that were not committed before that are lost."
        return JournalDamaged("TL-J05", self._place.where, what, do)

    def _drop(self) -> None:
        consumer, self._consumer, self._next = self._consumer, None, None
        if consumer is not None:
            with contextlib.suppress(*faults.FOREIGN, RuntimeError):
                consumer.close()

    def close(self) -> None:
        """Let go of the connection; a second call does nothing."""
        with self._lock:
            self._drop()
