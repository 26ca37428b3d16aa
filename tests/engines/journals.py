"""Where the tests of a journal's port find their journal: on disk, or in Kafka."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from tests.unit.journal import support
from tests.unit.journal.support import ROOMY, SCHEMA
from towline.journal import Disk, Journal, Limits, Outbox
from towline.landing.opening import open_journal
from towline.landing.place import LandingPlace
from towline.landing.topics import NewTopics

__all__ = ["Clock", "DiskShelf", "KafkaShelf", "Sending", "Shelf"]


class Shelf(ABC):
    """A place for one journal, which is opened again and again."""

    @abstractmethod
    def open(self, limits: Limits = ROOMY) -> Journal:
        """Open the journal, or make one."""

    def crash(self, journal: Journal) -> None:
        """Leave it as a kill would."""
        support.crash(journal)

    def outbox(self, limits: Limits = ROOMY, clock: Callable[[], float] | None = None) -> Outbox:
        """Open it as an outbox."""
        journal = self.open(limits)
        return Outbox(journal) if clock is None else Outbox(journal, clock)


class DiskShelf(Shelf):
    """A directory."""

    def __init__(self, directory: Path, disk: Disk | None = None) -> None:
        self.directory = directory
        self._disk = disk

    def open(self, limits: Limits = ROOMY) -> Journal:
        return Journal.open(self.directory, schema=SCHEMA, limits=limits, disk=self._disk)


class KafkaShelf(Shelf):
    """A landing topic and a state topic of their own."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.place = LandingPlace({"bootstrap.servers": bootstrap}, name)

    def open(self, limits: Limits = ROOMY) -> Journal:
        return open_journal(self.place, schema=SCHEMA, limits=limits, create=NewTopics())


class Sending:
    """Reads an outbox as the gateway's sending thread does."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.cursor = outbox.done.watermark
        self.left: list[int] = []

    def turn(self) -> list[int]:
        """Send what may leave; return it."""
        sent: list[int] = []
        self.outbox.settle()
        while following := self.outbox.following(self.cursor):
            start, self.cursor = following
            for batch in self.outbox.read(start, self.cursor):
                for number in batch.column("offset").to_pylist():
                    if start not in self.outbox.done:
                        sent.append(number)
                        self.outbox.finish([start])
                    start += 1
        self.outbox.flush()
        self.left += sent
        return sent


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now
