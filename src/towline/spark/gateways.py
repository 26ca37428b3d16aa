"""All gateways of one stream: who answers, who is away, and which rows of whom the next batch has; in the runner only.

Each gateway is asked on a thread of its own, because a long poll holds its call: the first answer with rows wakes the
reader, the others' polls go on and are still good for the next call while their gateway's place is the same. What an
answer means is decided on the reader's thread alone. A gateway that is away holds back nobody's rows but its own. One
gateway is a list of one.

What is planned stands in the checkpoint, as the places where the batch ends. All else follows from start, end and the
options alone, so that a batch comes again as it was [I4].
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, GatewayError, GatewayUnreachable, JournalFailed, TowlineError
from towline.gateway.access import REFUSALS
from towline.gateway.client import Lease, interruptible
from towline.gateway.endpoint import GatewayEndpoint
from towline.spark.link import PATIENCE_S, patiently
from towline.spark.offsets import GATEWAYS_OPTION, JournalPlace, Position, check_distinct
from towline.spark.pace import BatchLimit
from towline.spark.reader import Slice, divided, ranges_between, slices_of
from towline.spark.tally import pace_of
from towline.threads import guarded_thread, later
from towline.timing import Backoff

if TYPE_CHECKING:
    from towline.gateway.client import GatewayClient
    from towline.spark.link import GatewayPlace, ReadPlan

#: Pause before a gateway that is away is asked again, in seconds.
_PAUSE_S: Final = 0.25
#: The same for one that refuses: each try is counted there, and a file has to be changed first.
_REFUSED_PAUSE_S: Final = 5.0
#: A refusal is logged again after so many seconds: nobody but a person ends it.
_REMIND_S: Final = 60.0
#: How long a new reader waits for the one before it to end, in seconds: a stopped query's process needs a moment.
TAKEOVER_S = 5.0
#: A poll that has been unanswered for so long, in seconds, is at a gateway without rows: one that has some answers at
#: once. So much may a batch wait for the gateways beside the first that answered.
GRACE_S: Final = 0.02
#: The same, at least, for one that is known to have rows: it has twice as long as its last answer took, up to `MEET_S`.
FAR_S: Final = 1.0
#: How long a new query waits for the other gateways once one has answered, and a query that starts again for the first,
#: in seconds.
MEET_S: Final = 5.0

#: Keeps a wait for no poll at all from ending at once.
_NEVER: Final[futures.Future[Any]] = futures.Future()

_LOG = logging.getLogger("towline.spark")
_T = TypeVar("_T")


def is_refusal(error: TowlineError) -> bool:
    """Whether a gateway and this query do not let each other in, by token or certificate."""
    return isinstance(error, GatewayError) and error.code in REFUSALS


def is_absence(error: TowlineError) -> bool:
    """Whether an error holds back the rows of that gateway only: this passes by itself, or by a file that is changed.

    A journal that is not the checkpoint's, or another reader's lease, stops the query: to go on would be to forget rows
    silently.
    """
    return isinstance(error, (GatewayUnreachable, JournalFailed)) or is_refusal(error)


class Absence(NamedTuple):
    """Why a source does without a gateway; `since` in seconds since 1970, the other times on `time.monotonic`."""

    error: TowlineError
    since: float
    again_at: float
    logged_at: float


class Question(NamedTuple):
    """What a poll asks: commit up to ``safe``, and tell what lies beyond ``here`` within the limits of a batch."""

    here: JournalPlace
    safe: int
    max_rows: int | None = None
    max_bytes: int | None = None


class Offer(NamedTuple):
    """Rows that the next batch may have, their bytes in the journal, where they end there, and where that ends."""

    rows: int
    size: int
    end: JournalPlace
    tip: int


class SourceGateway:
    """One gateway of a source: the connection to it, and whether it is there.

    Args:
        lease: Of the reader, the same at all gateways of the list: one that stands there twice fences off nobody.

    Attributes:
        entry: Where the rows begin that a query without a place there gets; None until it was met.
        absence: None while it is there.
        tip: Offset after the newest row it told of.
        poll: The answer that is on its way; None when it was taken.
        began: When it was asked, on `time.monotonic`.
        late_since: Since when it has been asked for rows that it is known to have; 0 for not.
        took: Seconds that its last answer with such rows took.
    """

    def __init__(self, place: GatewayPlace, plan: ReadPlan, lease: Lease) -> None:
        self.place = place
        self.entry: JournalPlace | None = None
        self.absence: Absence | None = None
        self.tip = 0
        self.poll: futures.Future[Offer | None] | None = None
        self.began = self.late_since = self.took = 0.0
        self._question: Question | None = None
        self._plan = plan
        self._lease = lease
        #: None before the first connection, and after one was given up; one thread at a time makes one.
        self._client: GatewayClient | None = None
        self._connecting = threading.Lock()
        self._released = threading.Event()
        self._keeping = guarded_thread(self._keep, "keep-gateway", again_s=1.0)

    @property
    def called(self) -> str:
        """What a person calls it: its name, as far as it was met, and its place."""
        return f"{self.entry.gateway} ({self.place.text})" if self.entry else self.place.text

    def ask(self, question: Question | None, timeout_s: float) -> None:
        """Begin to `wait`, without a question only to meet it; unless the same poll is on its way, or it rests."""
        now = time.monotonic()
        due = question is not None and question.max_rows != 0 and self.tip > question.here.offset
        self.late_since = (self.late_since or now) if due else 0.0
        if self.poll and self._question == question:
            return
        self.poll, self._question, self.began = None, question, now
        if self.absence is None or self.began >= self.absence.again_at:
            call = partial(self.wait, question, timeout_s) if question else partial(self._call, lambda _: None)
            self.poll = later(call, f"gateway {self.place.text}")

    def heard(self) -> Offer | None:
        """Take its answer, if that has come; an absence is logged, and no answer.

        Raises:
            TowlineError: What the gateway said, unless it is an absence.
        """
        if self.poll is None or not self.poll.done():
            return None
        poll, self.poll, self.late_since = self.poll, None, 0.0
        try:
            offer = poll.result()
        except TowlineError as error:
            if not is_absence(error):
                raise
            self._miss(error)
            return None
        if self.absence is not None:
            since = datetime.fromtimestamp(self.absence.since).astimezone()
            _LOG.warning("gateway %s is back; it was away since %s", self.called, f"{since:%H:%M:%S}")
            self.absence = None
        self.tip = offer.tip if offer else self.tip
        return offer

    def _miss(self, error: TowlineError) -> None:
        """Do without it for now, and say so: silence once, a refusal each minute; later it is asked again."""
        now, before, refused = time.monotonic(), self.absence, is_refusal(error)
        since, logged_at = (before.since, before.logged_at) if before else (time.time(), now)
        if before is None or is_refusal(before.error) is not refused or (refused and now - logged_at >= _REMIND_S):
            logged_at = now
            how, code, do = ("held back", error.code, f". {error.do}") if refused else ("away", "TL-G54", "")
            others = ", the others' go on" if len(self._plan.gateways) > 1 else ""
            what = "gateway %s is %s: %s; its messages wait there%s%s   [%s]"
            _LOG.warning(what, self.called, how, error.what, others, do, code)
        self.absence = Absence(error, since, now + (_REFUSED_PAUSE_S if refused else _PAUSE_S), logged_at)

    def wait(self, question: Question, timeout_s: float) -> Offer:
        """Connect, and start the gateway where that is ours to do; ask, which takes the lease, and wait for rows.

        Raises:
            Fenced: TL-G03 when another living reader has the lease; as `GatewayClient.wait`.
            GatewayUnreachable: No gateway answers; the next call connects again.
        """
        here, safe, max_rows, max_bytes = question
        place: dict[str, Any] = {"start": here.offset, "journal": here.journal, "incarnation": here.incarnation}
        limits: dict[str, Any] = {"safe": safe, "max_rows": max_rows, "max_bytes": max_bytes}

        def ask(client: GatewayClient) -> Offer:
            window = client.wait(self._lease, **place, **limits, timeout_s=timeout_s)
            if self.place.remote and timeout_s and window.end > here.offset:
                # The token that let the poll in may be refused since.
                window = client.wait(self._lease, **place, **limits, timeout_s=0.0)
            end = here.moved(window.end, window.incarnation)
            return Offer(window.end - here.offset, window.size, end, window.tip)

        began, due = time.monotonic(), self.tip > here.offset
        offer = self._call(ask)
        if due:
            self.took = time.monotonic() - began
        return offer

    def slices(self, start: int, end: JournalPlace, sizes: Sequence[int]) -> list[Slice]:
        """A range of its journal as tasks get it, in parts of these sizes. Raises as `wait`."""

        def cut(client: GatewayClient) -> list[Slice]:
            if self.entry and self.entry.journal != end.journal:  # the gateway refuses it
                client.wait(self._lease, end.offset, journal=end.journal, timeout_s=0.0, safe=0)
            return slices_of(client, self.place, start, end, sizes)

        return self._call(cut)

    def report(self, queued: int) -> dict[str, Any]:
        """What it says of itself within a second, what waits, and why it is away; plain values."""
        status: Mapping[str, Any] = {}
        if self.absence is None and (client := self._client):
            with contextlib.suppress(GatewayError):  # the next poll tells it better
                status = client.status(timeout_s=1.0)
        report = {key: value for key, value in status.items() if isinstance(value, bool | int | float | str)}
        if trouble := (status.get("last_error") or {}).get("text"):
            report["last_error"] = trouble
        if absence := self.absence:
            report["away_since"] = datetime.fromtimestamp(absence.since, UTC).isoformat(timespec="seconds")
            report["last_error"] = absence.error.what
            if is_refusal(absence.error):
                report |= {"refused": True, "last_error": f"{absence.error.what}. {absence.error.do}"}
        return {**report, "tip": self.tip, "queued": queued}

    def release(self) -> None:
        """Give the lease back and close; never commits anything, and connects no more."""
        self._released.set()
        if client := self._client:
            with contextlib.suppress(GatewayError):
                client.release(self._lease)
            self._drop(client)

    def _call(self, call: Callable[[GatewayClient], _T]) -> _T:
        """Call while signals are handled; a connection that may be what is wrong is not used again."""

        def attempt() -> _T:
            with self._connecting:
                client = self._client or self._connected()
            try:
                return call(client)
            except TowlineError as error:
                if is_absence(error):  # the next connection is made with the files as they are then
                    self._drop(client)
                raise

        return interruptible(attempt)

    def _connected(self) -> GatewayClient:
        client = self.place.connect()
        if self.place.settings and not self._keeping.is_alive():
            self._keeping.start()
        try:
            status = client.hold(self._lease, patience_s=TAKEOVER_S)
            entry = self._plan.entry(client, status, self.place.text, "committed")
        except BaseException:
            client.close()
            raise
        self._client, self.tip, self.entry = client, max(self.tip, status["end"]), entry
        if self._released.is_set():  # meanwhile: what comes now would be a reader that nobody stops
            self.release()
            raise GatewayUnreachable("TL-G01", self.place.text, "its reader was stopped", "Start the query again.")
        return client

    def _keep(self) -> None:
        """Start the gateway again when it has ended, also while a batch runs and nobody asks for it."""
        pauses = Backoff(first=0.5, most=10.0)
        while not self._released.wait(pauses.next()):
            endpoint = GatewayEndpoint.read(Path(self.place.text))
            if endpoint is None or endpoint.process.gone():
                with contextlib.suppress(TowlineError):  # the next poll tells it
                    self.place.connect().close()
            else:
                pauses.reset()

    def _drop(self, client: GatewayClient) -> None:
        """Forget a connection, unless a newer one is there; the next call makes a new one."""
        if self._client is client:
            self._client = None
            client.close()


class BatchPlanner:
    """Plans the batches of one stream.

    Attributes:
        gateways: Those of the list.
        ends: Where the query ends in each journal (AvailableNow); None for a query without an end.
        planned: Begin and end of the batch that was planned last, or is planned anew as more comes; None before the
            first.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        lease = Lease(plan.consumer)
        self.gateways = tuple(SourceGateway(place, plan, lease) for place in plan.places)
        #: Gateways that were taken out of the list, and are asked whether they may go; by place.
        self._former: dict[str, SourceGateway] = {}
        self.ends: dict[str, int] | None = None
        self.planned: tuple[Position, Position] | None = None
        #: In how many batches one after the other a gateway had no part, for want of room.
        self._left_out = Counter[SourceGateway]()
        self._order_logged = False
        #: What Kafka takes in time; None where the checkpoint with the sink's word of it is not known.
        self._pace = BatchLimit(partial(pace_of, Checkpoint(plan.checkpoint))) if plan.checkpoint else None

    def release(self) -> None:
        """Give all leases back; commits nothing. One that is away has none, and is asked for none any more."""
        for gateway in (*self.gateways, *self._former.values()):
            gateway.release()

    def meet(self) -> None:
        """Take the leases of at least one gateway, and of whoever answers soon.

        Raises:
            TowlineError: What the first of those that are away says, if all are.
        """
        self._ask({}, PATIENCE_S, MEET_S)
        if all(one.absence or not one.entry for one in self.gateways):
            silence = GatewayUnreachable("TL-G01", self.gateways[0].place.text, "no gateway answers", "Is it running?")
            raise next((one.absence.error for one in self.gateways if one.absence), silence)

    def fix_end(self) -> None:
        """End the query at what is durable now at each gateway that answers; one that does not has no part in it."""
        self.meet()
        self.ends = {one.entry.journal: one.tip for one in self.gateways if one.entry}

    def ended(self, here: Position) -> bool:
        """Whether a query with an end is there."""
        return self.ends is not None and not any(map(self._left, here.places))

    def _left(self, place: JournalPlace) -> int:
        """How many rows a query with an end has behind a place."""
        return max(0, (self.ends or {}).get(place.journal, 0) - place.offset)

    def beginning(self) -> Position:
        """Where a query without a checkpoint begins, at each gateway that answers."""
        self.meet()
        return Position(tuple(one.entry for one in self.gateways if one.entry))

    def next(self, here: Position, safe: Position, limit: ReadLimit, patience_s: float) -> Position:
        """The end of the next batch within the limit; ``here`` itself when nothing is new.

        Args:
            here: End of the last batch in the commit log.
            safe: Up to where each gateway may remove rows, ``here`` or one before it.
            limit: Of the batch, all gateways together.
            patience_s: Longest wait for rows, in seconds.

        Raises:
            ConfigError: TL-G50 to TL-G52, the list of gateways can't be.
            TowlineError: What a gateway said.
        """
        if self._pace and not (self.planned and here.places == self.planned[0].places):
            self._pace.next()
        if not any(one.entry for one in self.gateways):
            self._ask({}, max(patience_s, MEET_S))
            patience_s = 0.0
        places = {one: self._place_of(one.entry, here) for one in self.gateways if one.entry}
        left = [place.gateway for place in self._taken_out(here, places.values()) if self._may_leave(place, safe)]
        # Where gateways begin that have no place yet; their rows come with the next batch, and none behind the end.
        entries = [one.entry for one, place in places.items() if one.entry and not place]
        joining = [entry for entry in entries if self.ends is None or entry.journal in self.ends]
        rows, size = self._limits(limit)
        questions: dict[SourceGateway, Question] = {}
        for one, place in places.items():
            if place:
                most = rows if self.ends is None else _least(rows, self._left(place))
                questions[one] = Question(replace(place, at=one.place.text), safe.offset_in(place.journal), most, size)
        offers = self._ask(questions, 0.0 if left or joining else patience_s)
        moved = [question.here for question in questions.values()] + self._shared(questions, offers, rows, size)
        there = here.having(*moved, *joining).without(*left)
        self.planned = here, there
        away = [one for one, question in questions.items() if one.absence and self._left(question.here)]
        if there == here and away:  # the query does not end without their rows
            self._ask({away[0]: questions[away[0]]}, PATIENCE_S)
            if away[0].absence:
                raise away[0].absence.error
            return self.next(here, safe, limit, patience_s)
        return there

    def _place_of(self, entry: JournalPlace, here: Position) -> JournalPlace | None:
        """The place of a gateway that was met: it is known by its journal; one of another journal it refuses."""
        # The option ``gateway`` names no list that another one could have joined.
        only = here.places[0] if not self._plan.gateways and len(here.places) == 1 else None
        own = (place for place in here.places if place.journal == entry.journal)
        return next(own, None) or here.place(entry.gateway) or only

    def _limits(self, limit: ReadLimit) -> tuple[int | None, int | None]:
        """Rows and bytes; Spark has no limit of both in one, and gets all where it wants that (Trigger.Once)."""
        if not isinstance(limit, ReadMaxRows):
            return None, None
        return limit.max_rows, _least(self._plan.max_bytes, self._pace.bytes if self._pace else None)

    def _shared(
        self, questions: Mapping[SourceGateway, Question], offers: Mapping[SourceGateway, Offer], *limits: int | None
    ) -> list[JournalPlace]:
        """Where the batch ends at the gateways that have rows in it, together within its limits."""

        def ask(one: SourceGateway, rows: int | None, size: int | None) -> Offer | None:
            question = questions[one]
            try:
                return one.wait(question._replace(max_rows=_least(rows, question.max_rows), max_bytes=size), 0.0)
            except TowlineError as error:
                if not is_absence(error):
                    raise
                return None  # the next poll tells it

        offers = {one: offer for one, offer in offers.items() if _useful(questions[one], offer)}
        taken = share(offers, self._left_out, limits, ask)
        self._left_out = Counter({one: self._left_out[one] + 1 for one in offers.keys() - taken.keys()})
        if self._pace and taken:
            self._pace.planned(sum(offer.size for offer in taken.values()))
        return [offer.end for offer in taken.values()]

    @property
    def cut_short(self) -> bool:
        """Whether more waits than the planned batch takes, by its limits."""
        return any(self._queued(one) for one in self.gateways if not one.absence)

    def _queued(self, gateway: SourceGateway) -> int:
        """How many rows wait at a gateway beyond the planned batch."""
        place = self._place_of(gateway.entry, self.planned[1]) if self.planned and gateway.entry else None
        return max(0, gateway.tip - place.offset) if place else 0

    def _ask(
        self, questions: Mapping[SourceGateway, Question], patience_s: float, grace_s: float = 0.0
    ) -> dict[SourceGateway, Offer]:
        """Commit at each gateway and wait until one has rows; without questions, until one is there.

        The others then have a grace, at least `grace_s` seconds. Without patience, until each that has a question and
        is not away has answered. A poll with the same question that is on its way from the call before is waited for.
        One that has ended is asked again, whatever it found: its gateway may have gone since, and the batch with it.
        Those that were never met are looked for beside.
        """
        asked = {**dict.fromkeys(one for one in self.gateways if not one.entry), **questions}
        deadline = time.monotonic() + (patience_s or PATIENCE_S)
        offers: dict[SourceGateway, Offer] = {}

        def over_due(one: SourceGateway) -> bool:
            if one.late_since:
                return now - one.late_since >= max(grace_s, FAR_S, min(MEET_S, 2 * one.took))
            return now - one.began >= max(grace_s, GRACE_S)

        self._heard(asked)
        while True:
            for one in asked.keys() - offers.keys():
                one.ask(asked[one], min(patience_s, max(0.0, deadline - time.monotonic())))
            offers |= {one: offer for one, offer in self._heard(asked).items() if offer.rows or not patience_s}
            now = time.monotonic()
            polls = [one for one in questions or asked if one.poll and not one.absence]
            useful = (_useful(questions[one], offer) for one, offer in offers.items())
            news = any(useful) if questions else any(one.entry and not one.absence for one in self.gateways)
            over = all(map(over_due, polls)) if news else not patience_s and not polls
            if over or now >= deadline:
                return offers
            # Not only an answer ends a wait: polls grow older than the grace, and who was away is asked again.
            rests = [one.absence.again_at - now for one in asked if one.absence and not one.poll]
            pause = max(0.0, min(deadline - now, GRACE_S if news else 1.0, *rests))
            futures.wait([_NEVER, *(one.poll for one in asked if one.poll)], pause, futures.FIRST_COMPLETED)

    def _heard(self, asked: Iterable[SourceGateway]) -> dict[SourceGateway, Offer]:
        """The answers that have come; what is wrong is raised, that two are one before whatever else they say."""
        check_distinct(one.entry for one in self.gateways if one.entry)
        offers: dict[SourceGateway, Offer] = {}
        errors: list[TowlineError] = []
        for one in asked:
            try:
                if offer := one.heard():
                    offers[one] = offer
            except TowlineError as error:
                errors.append(error)
        away = [(one.called, one.absence.error) for one in self.gateways if one.absence]
        refused = [(called, error) for called, error in away if is_refusal(error)]
        if len(refused) == len(self.gateways):  # only a person can help then
            (_, first), *others = refused
            why = "; ".join(f"{called}: {error.what}" for called, error in refused)
            what = f"no gateway of the list lets this query in ({why})"
            raise GatewayError(first.code, GATEWAYS_OPTION, what, first.do) if others else first
        if errors:
            raise errors[0]
        return offers

    def report(self) -> dict[str, Any] | None:
        """What each gateway says of itself, and what waits in all of them; None where there is nothing to say.

        Of a source with the option ``gateway`` it is what that one says.
        """
        told = [one for one in self.gateways if one.entry or one.absence]
        parts = {one.entry.gateway if one.entry else one.place.text: one.report(self._queued(one)) for one in told}
        if not self._plan.gateways:
            part = next(iter(parts.values()), {})
            return part if part.keys() - {"tip", "queued"} else None
        away = [name for name, part in parts.items() if "away_since" in part]  # warned of when it went
        errors = [part["last_error"] for name, part in parts.items() if "last_error" in part and name not in away]
        totals = {key: sum(part[key] for part in parts.values()) for key in ("tip", "queued")}
        trouble = {"last_error": errors[0]} if errors else {}
        return {**totals, **trouble, "away": sorted(away), "gateways": dict(sorted(parts.items()))}

    def _taken_out(self, here: Position, listed: Iterable[JournalPlace | None]) -> list[JournalPlace]:
        """The places of gateways that are not in the list.

        One that was not met yet is known by where it is; if it is not, it may be any of those that are left.
        """
        unmet = {one.place.text for one in self.gateways if not one.entry}
        others = [place for place in here.places if place not in listed]
        complete = unmet <= {place.at for place in others}
        return [place for place in others if place.at not in unmet] if complete else []

    def _may_leave(self, place: JournalPlace, safe: Position) -> bool:
        """Whether a gateway may leave the checkpoint: all that it holds is in the commit log, and surely so."""
        if place.gateway in self._plan.removed:
            _LOG.warning("gateway %s leaves the checkpoint unasked, as removedGateways says", place.gateway)
            return True
        gateway, safe_offset = self._at(place.at), safe.offset_in(place.journal)
        try:
            offer = gateway.wait(Question(place, safe_offset), 0.0)
        except TowlineError as error:
            if not is_absence(error):
                raise
            why = "does not let this query in" if is_refusal(error) else "does not answer"
            what = f"whether messages wait there is not known: {place.at} {why} ({error.what})"
            do = (
                f"Put it back until none wait; or give up what it may hold: removedGateways={place.gateway} "
                f'(in a bridge file, removed_gateways = ["{place.gateway}"]).'
            )
            raise _still_needed("TL-G51", place.gateway, what, do) from error
        if waiting := max(0, offer.tip - place.offset):
            do = "Put it back, let it take in nothing more and carry what it has; with none waiting it can go."
            raise _still_needed("TL-G52", place.gateway, f"{waiting:,} messages wait at {place.at}", do)
        if safe_offset < place.offset:
            return False  # in the commit log, and not yet surely so: the next call
        self._former.pop(place.at).release()
        return True

    def _at(self, text: str) -> SourceGateway:
        """The gateway at a place: one of the list, or a former one, which is asked the same way."""
        listed = next((one for one in self.gateways if one.place.text == text), None)
        lease = Lease(self._plan.consumer)  # ends when that gateway leaves, and it may be asked again
        return listed or self._former.setdefault(text, SourceGateway(self._plan.at(text), self._plan, lease))

    def slices(self, here: Position, there: Position) -> list[Slice]:
        """The partitions of the batch between two positions: always the same, with the same rows.

        Raises:
            Fenced: TL-G04, a gateway serves another journal.
            GatewayUnreachable: TL-G53, a gateway that has rows of the batch is away.
        """
        ranges, plan = ranges_between(here, there), self._plan
        sizes = divided([end.offset - start for start, end in ranges], plan.min_partitions, plan.max_records)
        if any(len(each) > 1 for each in sizes) and not self._order_logged:
            self._order_logged = True
            _LOG.warning(
                "a batch has several partitions of one gateway (minPartitions, maxRecordsPerPartition): the order of a "
                "device's messages holds only where one task reads them all, as after coalesce(1)"
            )
        slices = [part for rows, each in zip(ranges, sizes, strict=True) for part in self._cut(*rows, each)]
        idle = there.places[0]
        return slices or [Slice(plan.place, idle.journal, idle.offset, idle.offset, idle.incarnation)]

    def _cut(self, start: int, end: JournalPlace, sizes: Sequence[int]) -> list[Slice]:
        if end.at not in {one.place.text for one in self.gateways} and not all(one.entry for one in self.gateways):
            self.meet()  # it may have moved
        met = (one for one in self.gateways if one.entry and self._place_of(one.entry, Position((end,))))
        gateway = next(met, None) or self._at(end.at)
        try:
            return patiently(partial(gateway.slices, start, end, sizes), patience_s=PATIENCE_S)
        except TowlineError as error:
            if not is_absence(error):
                raise
            rows = f"its messages {start:,} to {end.offset - 1:,}"
            what = f"it is away ({error.what}), and a batch that was begun needs {rows}"
            way = error.do if is_refusal(error) else f"Start it at {gateway.place.text}."
            do = f"Nothing is lost, and the batch is then served as it was planned. {way}"
            raise GatewayUnreachable("TL-G53", f'gateway "{end.gateway}"', what, do) from error


def _still_needed(code: str, gateway: str, what: str, do: str) -> ConfigError:
    return ConfigError(code, GATEWAYS_OPTION, f'gateway "{gateway}" is no longer in the list, and {what}', do)


def _useful(question: Question, offer: Offer) -> bool:
    """Whether a batch can have rows of an offer: a gateway gives one row also where a query that is at its end asks."""
    return bool(offer.rows) and question.max_rows != 0


def _least(*limits: int | None) -> int | None:
    """The least of limits, of which None is none."""
    return min((limit for limit in limits if limit is not None), default=None)


def share(
    offers: Mapping[_T, Offer],
    left_out: Mapping[_T, int],
    limits: Sequence[int | None],
    ask: Callable[[_T, int | None, int | None], Offer | None],
) -> dict[_T, Offer]:
    """Share both limits of a batch among gateways, max-min: as equal as can be, and nobody more than waits.

    One after the other gets all that waits there, or an even part of what is left, who has least first: its messages
    never wait behind another's backlog. Before all others comes who was left out longest, and what comes first is taken
    whatever its size: one huge message passes, and nobody starves, however small the limits are.

    Args:
        offers: What waits, as far as the whole batch could take it.
        left_out: In how many batches in a row each had no part.
        limits: Most rows and most bytes.
        ask: Asks one for an offer within limits, of one row at least; None where it is away.
    """
    left = [math.inf if limit is None else limit for limit in limits]
    parts = {one: max(offer.rows / left[0], offer.size / left[1]) for one, offer in offers.items()}
    taken: dict[_T, Offer] = {}
    order = sorted(offers, key=lambda one: (-left_out.get(one, 0), parts[one]))
    for number, one in zip(range(len(order), 0, -1), order, strict=True):
        even, offer = [most / number for most in left], offers[one]
        too_large = len(order) > 1 and (offer.rows > even[0] or offer.size > even[1])
        cut = ask(one, *(None if most == math.inf else max(1, int(most)) for most in even)) if too_large else offer
        if cut and (not taken or (cut.rows <= left[0] and cut.size <= left[1])):
            taken[one], left = cut, [left[0] - cut.rows, left[1] - cut.size]
    return taken
