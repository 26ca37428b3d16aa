"""Removes what nobody needs any more, in the background: whoever commits does not wait for Kafka to delete."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

import structlog

from towline.errors import TowlineError
from towline.kafka import admin

if TYPE_CHECKING:
    from confluent_kafka import TopicPartition

    from towline.landing.place import LandingPlace

__all__ = ["Trimmer"]

#: Shortest time between two requests, in seconds: DeleteRecords moves a mark in each replica.
_EVERY_S: Final = 1.0
#: Shortest time between two lines that say that they fail, in seconds.
_REPORT_EVERY_S: Final = 600.0


class Trimmer:
    """Sends DeleteRecords.

    What can't be removed now is with the next removal, or the next opening's; nothing depends on it.

    Args:
        place: Of the journal.
    """

    def __init__(self, place: LandingPlace) -> None:
        self._place = place
        #: topic and partition -> offset below which everything may go; guarded by `_changed`
        self._wanted: dict[tuple[str, int], int] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._log = structlog.get_logger("towline.gateway").bind(line=place.name)
        #: when a failure may be told again, on `time.monotonic`
        self._report_at = 0.0

    def below(self, place: TopicPartition, offset: int) -> None:
        """Let what lies below an offset go, in a moment."""
        if offset <= 0:
            return
        with self._changed:
            key = (place.topic, place.partition)
            self._wanted[key] = max(offset, self._wanted.get(key, 0))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trim", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closing.is_set())
                wanted, self._wanted = self._wanted, {}
            if wanted and not self._closing.is_set():
                self._delete(wanted)
            self._closing.wait(_EVERY_S)

    def _delete(self, wanted: dict[tuple[str, int], int]) -> None:
        try:
            admin.delete_below(self._place.client, wanted)
        except TowlineError as error:
            if time.monotonic() >= self._report_at:  # such as a user that may not delete: the topics grow
                self._report_at = time.monotonic() + _REPORT_EVERY_S
                what = "what is committed can't be removed from Kafka yet"
                self._log.warning(what, code=error.code, reason=str(error), topics=sorted({name for name, _ in wanted}))
            with self._changed:
                for key, offset in wanted.items():
                    self._wanted[key] = max(offset, self._wanted.get(key, 0))

    def close(self) -> None:
        """Ask for nothing more."""
        self._closing.set()
        with self._changed:
            self._changed.notify()
