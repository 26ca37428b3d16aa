"""The journals of one gateway in Kafka: waiting for them, opening them, saying that one lives, giving them back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from towline.errors import GatewayError, JournalFailed, JournalFull, KafkaError
from towline.journal import Journal, Limits
from towline.landing.followers import Followers
from towline.landing.opening import open_journal
from towline.landing.place import LandingPlace
from towline.landing.signs import Signs, SignWatch, StandbyVerdict
from towline.landing.store import KafkaStore
from towline.landing.topics import NewTopics, Topics, ensure

__all__ = ["Owner", "OwnerConfig"]

#: Seconds between two looks of a standby.
_LOOK_S: Final = 0.2
#: Seconds between two lines that say that Kafka is awaited.
_SAY_S: Final = 30.0


@dataclass(frozen=True)
class OwnerConfig:
    """What a gateway wants of Kafka.

    Attributes:
        line: As the log has it.
        place: Of the inbox.
        schema: Of its rows.
        limits: Of its rows.
        create: How missing topics are made.
        consumers: Whose groups are followed.
        outbox: Schema and limits of its outbox; None for none.
        standby: Wait for as long as another owner lives; otherwise that one is in the way.
        patience: ``silence_s`` and ``offline_s`` of `Lookout`, where they are not the usual ones.
    """

    line: str
    place: LandingPlace
    schema: Any
    limits: Limits
    create: NewTopics | None = None
    consumers: tuple[str, ...] = ()
    outbox: tuple[Any, Limits] | None = None
    standby: bool = False
    patience: Mapping[str, float] | None = None

    @property
    def outgoing(self) -> LandingPlace:
        """Where the outbox is."""
        return LandingPlace(self.place.client, f"{self.place.name}.outbox", self.place.partition)


class Owner:
    """Has the journals of one gateway, after `take`.

    Args:
        wanted: Which.
        stopped: Set to give up waiting.
        reachable: Whether the broker of MQTT can be reached from here.

    Attributes:
        inbox: Open after `take`.
        outgoing: The journal of the outbox, open after `take` where one is wanted.
    """

    def __init__(self, wanted: OwnerConfig, stopped: threading.Event, reachable: Callable[[], bool]) -> None:
        self._wanted, self._stopped, self._reachable = wanted, stopped, reachable
        self._log = structlog.get_logger("towline.gateway").bind(line=wanted.line)
        self.inbox: Journal
        self.outgoing: Journal | None = None
        self._signs: Signs | None = None
        self._followers: Followers | None = None

    def take(self) -> bool:
        """Wait for the journals' turn and open them; False when it was given up.

        Raises:
            KafkaError: TL-K01, TL-K09, TL-K20.
            ConfigError: TL-J35.
            GatewayError: TL-J38, another owner lives, and this is no standby.
            JournalError: As `open_journal`.
        """
        wanted = self._wanted
        topics = self._ensured(wanted.place)
        outgoing = self._ensured(wanted.outgoing) if wanted.outbox else None
        while (verdict := self._wait()) is not None:
            began = time.monotonic()
            try:
                self._open(topics, outgoing)
            except (JournalFull, JournalFailed, KafkaError) as error:
                if not wanted.standby or (isinstance(error, JournalFailed) and error.code != "TL-J31"):
                    raise
                self._log.warning("not taken over", code=error.code, reason=str(error))
                self._stopped.wait(_LOOK_S)
            else:
                self._log.info(
                    "journal taken",
                    reason=verdict.value,
                    seconds=round(time.monotonic() - began, 3),
                    epoch=self.inbox.epoch,
                    rows=self.inbox.end,
                )
                return True
        return False

    def _ensured(self, place: LandingPlace) -> Topics:
        topics = ensure(place, self._wanted.create)
        for text in topics.weak:
            self._log.warning(text, code="TL-J37")
        return topics

    def _wait(self) -> StandbyVerdict | None:
        """Look until it is time to try; None when it was given up."""
        watch = SignWatch(self._wanted.place, self._wanted.patience or {}, self._reachable)
        said = False
        try:
            while (verdict := watch.look()) is StandbyVerdict.WAIT:
                if watch.fresh and not self._wanted.standby:
                    assert watch.sign is not None
                    what = f"{watch.sign.who} has this line's journal in Kafka and lives"
                    do = "Stop that one first, or start this one with --standby, so that it waits and takes over."
                    raise GatewayError("TL-J38", self._wanted.place.where, what, do)
                if watch.fresh and not said and watch.sign is not None:
                    said = True
                    self._log.info("standing by", owner=watch.sign.who, epoch=watch.sign.epoch)
                if self._stopped.wait(_LOOK_S):
                    return None
        finally:
            watch.close()
        return verdict

    def _open(self, topics: Topics, outgoing: Topics | None) -> None:
        wanted = self._wanted
        self.inbox = open_journal(wanted.place, schema=wanted.schema, limits=wanted.limits, repeats=True, topics=topics)
        try:
            followers = Followers(wanted.place, self.inbox, self._store.number_from, wanted.consumers)
            followers.look()
            followers.close()
            if wanted.outbox is not None:
                schema, limits = wanted.outbox
                self.outgoing = open_journal(wanted.outgoing, schema=schema, limits=limits, topics=outgoing)
        except BaseException:
            self.inbox.close()
            raise

    @property
    def _store(self) -> KafkaStore:
        store = self.inbox._store  # noqa: SLF001 - made here
        assert isinstance(store, KafkaStore)
        return store

    def start(
        self, online: Callable[[], bool], on_commit: Callable[[], None], on_failure: Callable[[Any], None]
    ) -> None:
        """Say that this owner lives, and follow the consumers' groups, from now on."""
        wanted = self._wanted
        self._signs = Signs(wanted.place, (self.inbox.epoch, self.inbox.incarnation), online)
        if wanted.consumers:
            self._followers = Followers(
                wanted.place,
                self.inbox,
                self._store.number_from,
                wanted.consumers,
                on_commit=on_commit,
                on_failure=on_failure,
            )
            self._followers.start()

    def verify(self) -> None:
        """See that the journal is still ours.

        Raises:
            JournalFailed: TL-J31, it is another's.
            JournalFull: TL-J30, Kafka can't be asked now.
        """
        self.inbox.append(self.inbox.no_rows, notes={"verified": int(time.time())})

    def close(self, *, ended: bool) -> None:
        """Say no more; with `ended`, after the journals were closed, let a standby know that it need not wait."""
        if self._followers is not None:
            self._followers.close()
        if self._signs is not None:
            self._signs.close(ended=ended)
