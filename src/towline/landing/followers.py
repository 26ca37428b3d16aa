"""Who reads the landing topic says how far it is done as Kafka's consumers do: by the offset of its group.

So it reaches the journal wherever that is open, even when it is open nowhere, and Kafka's own tools show the lag. A
group has no members; its offset is written by one process (`commit`) and read by the journal's owner.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaException, TopicPartition

from towline.errors import JournalError, JournalFailed, KafkaError, TowlineError
from towline.kafka import faults
from towline.landing.place import LOOK_S, LandingPlace, consumer_of

if TYPE_CHECKING:
    from towline.journal import Journal

__all__ = ["Followers", "commit", "committed_of", "group_of"]

#: Seconds between two looks at the groups.
_EVERY_S: Final = 1.0


def group_of(place: LandingPlace, consumer: str) -> str:
    """The name of a consumer's group."""
    return f"towline.{place.name}.{consumer}"


def commit(place: LandingPlace, consumer: str, offset: int) -> None:
    """Say that a consumer is done with everything below an offset of the landing partition; durable on return.

    Raises:
        KafkaError: TL-K01, it could not be said.
    """
    began = time.monotonic()
    client = _client(place, consumer)
    try:
        where = TopicPartition(place.topic, place.partition, offset)
        client.commit(offsets=[where], asynchronous=False)
    except faults.FOREIGN as problem:
        raise faults.unreachable(place.servers, time.monotonic() - began, faults.reason(problem)) from None
    finally:
        client.close()


def committed_of(place: LandingPlace, consumer: str) -> int | None:
    """The offset up to which a consumer is done; None where it has never said.

    Raises:
        KafkaError: TL-K01.
    """
    client = _client(place, consumer)
    try:
        return _committed(place, client)
    finally:
        client.close()


def _client(place: LandingPlace, consumer: str) -> Any:
    return consumer_of(place.client, {"group.id": group_of(place, consumer)})


def _committed(place: LandingPlace, client: Any) -> int | None:
    began = time.monotonic()
    try:
        found = client.committed([place.rows], timeout=LOOK_S)[0]
        if found.error is not None:  # "never said" would let a query begin with what it had
            raise KafkaException(found.error)
    except faults.FOREIGN as problem:
        raise faults.unreachable(place.servers, time.monotonic() - began, faults.reason(problem)) from None
    return found.offset if found.offset >= 0 else None


class Followers:
    """Carries what groups have committed into the journal; a thread of its own after `start`.

    Args:
        place: Where the journal lies.
        journal: The open journal.
        row_of: The number of the first row at or after an offset.
        consumers: Whose groups are followed.
        on_commit: Called when a watermark has moved.
        on_failure: Called when the journal is dead.
    """

    def __init__(
        self,
        place: LandingPlace,
        journal: Journal,
        row_of: Callable[[int], int],
        consumers: tuple[str, ...],
        *,
        on_commit: Callable[[], None] = lambda: None,
        on_failure: Callable[[TowlineError], None] = lambda _error: None,
    ) -> None:
        self._place, self._journal, self._row_of = place, journal, row_of
        self._on_commit, self._on_failure = on_commit, on_failure
        self._clients: Mapping[str, Any] = {name: _client(place, name) for name in consumers}
        #: consumer -> the newest offset that is in the journal
        self._done: dict[str, int] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> bool:
        """Carry on what is new; whether there was anything.

        Raises:
            KafkaError: TL-K01.
            JournalError: TL-J32, TL-J33: Kafka does not answer; an offset lies beyond the topic.
            JournalFailed: The journal is dead.
        """
        moved = False
        for name, client in self._clients.items():
            if name not in self._journal.consumers:
                self._journal.commit(name, self._journal.first)  # from now on nothing goes that it has not seen
            offset = _committed(self._place, client)
            if offset is None or offset <= self._done.get(name, -1):
                continue
            row = self._row_of(offset)
            if row > self._journal.consumers.get(name, -1):
                self._journal.commit(name, row)
                moved = True
            self._done[name] = offset
        return moved

    def start(self) -> None:
        """Look again and again."""
        self._thread = threading.Thread(target=self._run, name="followers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(_EVERY_S):
            try:
                if self.look():
                    self._on_commit()
            except JournalFailed as error:
                self._on_failure(error)
                return
            except JournalError as error:
                if error.code == "TL-J33":
                    self._on_failure(error)
                    return
            except KafkaError:
                continue  # it is away; the next look tells what is new

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        for client in self._clients.values():
            with contextlib.suppress(*faults.FOREIGN, RuntimeError):
                client.close()
