"""One owner's transactions: rows and frame of each are there together or not at all, and nobody else's come between.

What an error means (exactly_once.md, KIP-98): a transaction whose end is not known for certain is found out about by
the next producer of the same transactional id. Before it is started the state partition is looked at: an owner that
finds a newer one there has lost the journal and ends. So a newer owner is not fenced by one that it has fenced, and of
two that live only the newest goes on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final, NamedTuple

from towline.errors import JournalFailed, KafkaError, TowlineError
from towline.kafka import faults
from towline.kafka.columns import Rows
from towline.kafka.transactions import Indefinite, Transactional
from towline.landing.place import LandingPlace, end_of, scan
from towline.landing.statelog import Assembler, StateFrame

if TYPE_CHECKING:
    from towline.kafka.options import SinkSettings

__all__ = ["Committer", "Mended", "OutRecord", "Undecided", "lost"]

#: Seconds that a caller waits for a producer that is being made anew, before it is told that there is no room.
WAIT_S: Final = 2.0

#: topic, value, key, partition
OutRecord = tuple[str, bytes | None, bytes, int]


class Undecided(Exception):
    """Whether a transaction is committed is not known; `Committer.mend` finds it out.

    Args:
        told: Why, for people.
    """

    def __init__(self, told: KafkaError) -> None:
        super().__init__(told)
        self.told = told


class Mended(NamedTuple):
    """What a new producer of the same owner found.

    Attributes:
        frames: Committed since the owner last knew.
        state_end: The end of the state partition then.
        rows_end: The end of the landing partition then.
    """

    frames: Sequence[StateFrame]
    state_end: int
    rows_end: int


def lost(where: str, epoch: int, other: int) -> JournalFailed:
    """The end of an owner that finds another one."""
    what = (
        f"another gateway has taken over: opening {other} of this journal goes on, ours is {epoch}; nothing more is "
        "acknowledged here"
    )
    if other < epoch:
        what = f"the gateway that this one took for dead lives: opening {other} of this journal goes on, ours is void"
    do = "That one goes on with everything that was acknowledged. Start this one again with --standby to wait for it."
    return JournalFailed("TL-J31", where, what, do)


def _committed(producer: Transactional, records: Sequence[OutRecord]) -> bool:
    """Write and commit; whether the producer may serve another transaction. One that failed is closed.

    Raises:
        Undecided: What became of it is not known.
    """
    try:
        producer.begin()
        producer.write(Rows(len(records), 0, frozenset(record[0] for record in records), iter(records)))
        producer.commit()
    except Indefinite as problem:
        told = problem.told
    except KafkaError as problem:  # fenced: by a newer owner, or by a clock that ran out
        told = problem
    else:
        return producer.healthy
    with contextlib.suppress(*faults.FOREIGN):
        producer.close()
    raise Undecided(told)


class Committer:
    """The transactions of one opening.

    Args:
        place: Where.
        settings: What its producer is told.

    Attributes:
        opening: Epoch and incarnation that are ours; a frame of another one behind `state_end` means that we have lost.
        state_end: The state partition is known up to here, or farther; behind it are none but our own frames.
        trouble: Why Kafka can't be used now; None while it can.
    """

    def __init__(self, place: LandingPlace, settings: SinkSettings) -> None:
        self._place, self._settings = place, settings
        self._producer: Transactional | None = None
        self.opening = (0, "")
        self.state_end = 0
        self.trouble: KafkaError | None = None
        self._worker = ThreadPoolExecutor(1, "commit")
        #: a transaction that nobody waits for any more
        self._running: Future[bool] | None = None
        self._mending: threading.Thread | None = None
        self._outcome: Mended | TowlineError | None = None

    @property
    def ready(self) -> bool:
        """There is a producer that nothing is wrong with."""
        return self._producer is not None

    def start(self) -> None:
        """Fence whoever was the owner; what it had begun is committed or aborted when this returns.

        Raises:
            KafkaError: TL-K01, TL-K20.
        """
        self._discard()
        producer = Transactional(self._settings, self._place.transactional_id, {})
        try:
            producer.start()
        except BaseException:
            producer.close()
            raise
        self._producer = producer

    def commit(self, records: Sequence[OutRecord]) -> None:
        """Write records in one transaction; when this returns they are there.

        It is done on another thread: whoever calls has a connection to keep alive, and waits a moment only.

        Raises:
            Undecided: They may be there or not; the producer is gone.
        """
        producer = self._producer
        assert producer is not None
        job = self._worker.submit(_committed, producer, records)
        try:
            healthy = job.result(WAIT_S)
        except TimeoutError:
            self._producer, self._running = None, job
            raise Undecided(faults.undecided(self._place.servers, WAIT_S, "no answer")) from None
        except Undecided:
            self._producer = None
            raise
        self.trouble = None
        if not healthy:  # a late request of this transaction could end the next one (KIP-890)
            self._discard()

    def mend(self, wait_s: float = WAIT_S) -> Mended | None:
        """A new producer and what was committed, once it is known; None as long as Kafka does not tell.

        Raises:
            JournalFailed: TL-J31, another owner has begun.
        """
        if self._mending is None:
            self._outcome = None
            self._mending = threading.Thread(target=self._mend, name="mend", daemon=True)
            self._mending.start()
        self._mending.join(wait_s)
        if self._mending.is_alive():
            return None
        self._mending, outcome = None, self._outcome
        if isinstance(outcome, Mended):
            self.trouble = None
            return outcome
        if isinstance(outcome, KafkaError):
            self.trouble = outcome
            return None
        assert outcome is not None
        raise outcome

    def _mend(self) -> None:
        try:
            if self._running is not None:
                wait([self._running])  # its producer has to be gone
                self._running = None
            self.look()
            self.start()
            frames, state_end = self.look()
            _, rows_end = end_of(self._place.client, self._place.rows)
            self._outcome = Mended(frames, state_end, rows_end)
        except TowlineError as error:
            self._outcome = error
        except Exception as error:  # noqa: BLE001 - a thread's, told by whoever waits
            self._outcome = JournalFailed("TL-J04", self._place.where, f"Kafka's client failed ({error!r})")

    def look(self) -> tuple[list[StateFrame], int]:
        """The frames that were committed since the last one that is known, and the end of the partition.

        Raises:
            JournalFailed: TL-J31, one is of another owner.
            KafkaError: TL-K01.
        """
        scanned = scan(self._place.client, self._place.state, self.state_end)
        assembler, frames = Assembler(self._place.where), list[StateFrame]()
        for offset, key, value in scanned.records:
            frame = assembler.take(key, value, offset)
            if frame is not None:
                frames.append(frame)
        for frame in frames:
            found = (frame.header.epoch, frame.label.incarnation)
            if found != self.opening:  # a newer owner, or an older one that has gone on since this one read the state
                raise lost(self._place.where, self.opening[0], found[0])
        return frames, scanned.end

    def _discard(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(*faults.FOREIGN):
                producer.close()

    def close(self) -> None:
        """Let go; an open transaction is aborted."""
        self._discard()
        self._worker.shutdown(wait=False)

    def drop(self) -> None:
        """Let go as a kill would: what was begun is left for the next owner."""
        self._producer = None
        self._worker.shutdown(wait=False)
