"""Which rows of which gateway the next batch has, and who serves those of a batch that was planned; in the runner only.

What is planned stands in the checkpoint, as the places where the batch ends. All else follows from start, end and the
options alone, so that a batch comes again as it was [I4].

The limits hold for the batch, and are shared max-min: whoever has little waiting gets all of it, the others share what
is left evenly. So messages of a quiet gateway never wait behind another's backlog, as they would by shares in
proportion to it, and nobody gets more than waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, GatewayError, GatewayUnreachable
from towline.gateway.client import CALL_S, interruptible
from towline.kafka.pace import BatchLimit
from towline.spark.gateways import LIST, Question, SourceGateway, SourceGateways, foreign, is_absence, is_refusal
from towline.spark.link import PATIENCE_S, patiently
from towline.spark.offsets import JournalPlace, Position
from towline.spark.readplan import Slice, divided, ranges_between, slices_of
from towline.spark.tally import pace_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from towline.gateway.client import Window
    from towline.spark.readplan import JournalRange, ReadPlan

_LOG = logging.getLogger("towline.spark")
_T = TypeVar("_T")


class BatchPlanner:
    """Plans the batches of one stream.

    Args:
        plan: What the reader was told.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self.gateways = SourceGateways(plan.places, plan.consumer)
        #: Where the query ends in each journal (AvailableNow); None for a query without an end.
        self._ends: dict[str, int] | None = None
        #: Grows with each batch: whose turn it is to get what can't be divided.
        self._turn = 0
        #: Where the planned batch ends at each gateway.
        self._reached: dict[SourceGateway, int] = {}
        self._told_of_order = False
        #: Tickets of the planned batch: by journal and by where each of its slices begins and ends.
        self._tickets: dict[tuple[str, tuple[tuple[int, int], ...]], list[str]] = {}
        #: What Kafka takes in time; None where the checkpoint with the sink's word of it is not known.
        self._pace = BatchLimit(partial(pace_of, Checkpoint(plan.checkpoint))) if plan.checkpoint else None
        self._slow: int | None = None
        #: Where the batch begins that was planned last, or is planned anew as more comes.
        self._begin: tuple[JournalPlace, ...] | None = None

    # -- begin and end -------------------------------------------------------------------------------------------

    def fix_end(self) -> None:
        """End the query at what is durable now at each gateway that answers."""
        self.gateways.meet()
        self._ends = {one.lease.journal: one.lease.tip for one in self.gateways.all if one.lease}

    def ended(self, here: Position) -> bool:
        """Whether a query with an end is there."""
        return self._ends is not None and all(place.offset >= self._end(place) for place in here.places)

    def _end(self, place: JournalPlace) -> int:
        """Where the query ends at a gateway; one that did not answer when the end was fixed has no part in it."""
        return place.offset if self._ends is None else self._ends.get(place.journal, place.offset)

    def beginning(self) -> Position:
        """Where a query without a checkpoint begins, at each gateway that answers."""
        self.gateways.meet()
        return Position(tuple(patiently(partial(self._entry, one)) for one in self.gateways.all if one.lease))

    def _entry(self, one: SourceGateway) -> JournalPlace:
        """Where the rows of a gateway begin that has no place yet."""
        lease = one.open()
        offset = self._plan.beginning(lease.name, lease.first, lease.tip, lease.committed, "committed")
        return JournalPlace(lease.name, lease.journal, offset, one.incarnation(offset), one.place.text)

    # -- the next batch ------------------------------------------------------------------------------------------

    def next(self, here: Position, safe: Position | None, limit: ReadLimit, patience_s: float) -> Position:
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
        if self._pace and here.places != self._begin:
            self._begin, self._slow = here.places, self._pace.next()
        if not any(one.lease for one in self.gateways.all):
            self.gateways.ask({}, patience_s)
            patience_s = 0.0
        known, former = self._known(here)
        left = [place.gateway for place in former if self._may_leave(place, safe)]
        news = bool(left) or bool(self._newcomers(known))
        placed = {one: replace(place, at=one.place.text) for one, place in known.items()}
        questions = {one: self._question(place, safe, limit) for one, place in placed.items()}
        answers = self.gateways.ask(questions, 0.0 if news else patience_s)
        moved = self._admitted(questions, answers, limit)
        there = here.having(*placed.values()).having(*moved).having(*self._joining(here)).without(*left)
        there = self._readable(here, there)
        self._reached |= {one: spot.offset for one in known if (spot := there.place(known[one].gateway))}
        if there == here and (missing := self._missing(known)):
            self.gateways.meet(missing)  # a query with an end does not end without its rows
            return self.next(here, safe, limit, patience_s)
        return there

    def cut_short(self, there: Position) -> bool:
        """Whether more waits than the planned batch takes, by its limits."""
        places = ((one, there.place(one.name)) for one in self.gateways.all if one.absence is None)
        return any(place is not None and one.tip > place.offset for one, place in places)

    def _known(self, here: Position) -> tuple[dict[SourceGateway, JournalPlace], list[JournalPlace]]:
        """The gateways that were met, each with its place, and the places of gateways that are not in the list.

        A gateway is known by its journal. One that was not met yet is known by where it is; if it is not, it may be
        any of those that are left.

        Raises:
            Fenced: TL-G04, a gateway serves another journal than it did.
        """
        found: dict[SourceGateway, JournalPlace] = {}
        for one in self.gateways.all:
            if one.lease and (place := self._place_of(one, here)):
                if place.journal != one.lease.journal:
                    raise foreign(place, one.lease.journal)
                found[one] = place
        unmet = {one.place.text for one in self.gateways.all if not one.lease}
        others = [place for place in here.places if place not in found.values()]
        waited_for = {place.at for place in others} & unmet
        return found, [place for place in others if place.at not in unmet] if waited_for == unmet else []

    def _place_of(self, one: SourceGateway, here: Position) -> JournalPlace | None:
        assert one.lease is not None
        by_journal = next((place for place in here.places if place.journal == one.lease.journal), None)
        # The option ``gateway`` names no list that another one could have joined.
        only = here.places[0] if not self._plan.gateways and len(here.places) == 1 else None
        return by_journal or here.place(one.lease.name) or only

    def _newcomers(self, known: Mapping[SourceGateway, JournalPlace]) -> list[SourceGateway]:
        """Gateways that were met and have no place yet; none where the query has an end they have no part in."""
        met = [one for one in self.gateways.all if one.lease and one not in known]
        return [one for one in met if self._ends is None or one.journal in self._ends]

    def _joining(self, here: Position) -> list[JournalPlace]:
        """Where newcomers begin, those met in this call too; their rows come with the next batch."""
        entries = []
        for one in self._newcomers(self._known(here)[0]):
            try:
                entries.append(interruptible(partial(self._entry, one)))
            except GatewayError as error:
                if not is_absence(error):
                    raise
                self.gateways.forget(one, error)  # gone again: another time
        return entries

    def _question(self, place: JournalPlace, safe: Position | None, limit: ReadLimit) -> Question:
        max_rows, max_bytes = self._limits(limit)
        if self._ends is not None:
            left = max(1, self._end(place) - place.offset)
            max_rows = left if max_rows is None else min(max_rows, left)
        return Question(place, _safe(place, safe), max_rows, max_bytes)

    def _limits(self, limit: ReadLimit) -> tuple[int | None, int | None]:
        """Rows and bytes; Spark has no limit of both in one, and gets all where it wants that (Trigger.Once)."""
        if isinstance(limit, ReadAllAvailable):
            return None, None
        most = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._plan.max_bytes
        least = min((one for one in (most, self._slow) if one is not None), default=None)
        return limit.max_rows if isinstance(limit, ReadMaxRows) else None, least

    def _admitted(
        self, questions: Mapping[SourceGateway, Question], answers: Mapping[SourceGateway, Window], limit: ReadLimit
    ) -> list[JournalPlace]:
        """Where the batch ends at the gateways that have rows in it."""
        found = {one: self._window(questions[one], window) for one, window in answers.items()}
        windows = {one: window for one, window in found.items() if questions[one].has_news(window)}
        if len(windows) > 1:  # one alone was asked for no more than the batch may have
            windows = self._shared(questions, windows, limit)
        if self._pace and windows:
            self._pace.planned(sum(window.size for window in windows.values()))
        return [questions[one].here.moved(window.end, window.incarnation) for one, window in windows.items()]

    def _window(self, question: Question, window: Window) -> Window:
        """A window that does not go beyond the query's end."""
        if self._ends is None or window.end <= self._end(question.here):
            return window
        return replace(window, end=question.here.offset)  # the end is reached, and one row was asked for

    def _shared(
        self, questions: Mapping[SourceGateway, Question], windows: Mapping[SourceGateway, Window], limit: ReadLimit
    ) -> dict[SourceGateway, Window]:
        """The windows of all gateways, cut so that together they are within the limits of a batch."""
        max_rows, max_bytes = self._limits(limit)
        self._turn += 1
        ones = [one for one in self.gateways.all if one in windows]
        offers = [Offer(windows[one].end - questions[one].here.offset, windows[one].size) for one in ones]
        taken: dict[SourceGateway, Window] = {}
        cut: dict[SourceGateway, Question] = {}
        for one, offer, got in zip(ones, offers, admit(offers, max_rows, max_bytes, self._turn), strict=True):
            if got.rows == offer.rows and got.size is None:
                taken[one] = windows[one]
            elif got.rows and got.size != 0:
                most = questions[one].max_bytes if got.size is None else got.size
                cut[one] = replace(questions[one], max_rows=got.rows, max_bytes=most)
        if cut:
            taken |= self.gateways.ask(cut, 0.0, CALL_S)
        ordered = [one for one in ones if one in taken]
        fits = fitting([max(1, taken[one].size) for one in ordered], max_bytes, self._turn)
        return {one: taken[one] for one, fit in zip(ordered, fits, strict=True) if fit}

    def _missing(self, known: Iterable[SourceGateway]) -> SourceGateway | None:
        """A gateway that is away while the query's end is not reached there."""
        ends = self._ends or {}
        short = (one for one in known if self._reached.get(one, 0) < ends.get(one.journal, 0))
        return next((one for one in short if one.absence), None)

    # -- gateways that were taken out of the list ----------------------------------------------------------------

    def _may_leave(self, place: JournalPlace, safe: Position | None) -> bool:
        """Whether a gateway may leave the checkpoint: all that it holds is in the commit log, and surely so.

        Raises:
            ConfigError: TL-G51, it can't be asked. TL-G52, messages wait there.
        """
        if place.gateway in self._plan.removed:
            _LOG.warning("gateway %s leaves the checkpoint unasked, as removedGateways says", place.gateway)
            return True
        one, question = self.gateways.former(self._plan.at(place.at)), Question(place, _safe(place, safe))
        try:
            window = interruptible(partial(one.wait, question, 0.0))
        except GatewayError as error:
            if not is_absence(error):
                raise
            said = "does not let this query in" if is_refusal(error) else "does not answer"
            raise ConfigError(
                "TL-G51",
                LIST,
                f'gateway "{place.gateway}" is no longer in the list, and whether messages wait there is not known: '
                f"{place.at} {said} ({error.what})",
                f"Put it back until none wait; or give up what it may hold: removedGateways={place.gateway} "
                f'(in a bridge file, removed_gateways = ["{place.gateway}"]).',
            ) from error
        if window.tip > place.offset:
            waiting = window.tip - place.offset
            raise ConfigError(
                "TL-G52",
                LIST,
                f'gateway "{place.gateway}" is no longer in the list, and {waiting:,} messages wait at {place.at}',
                "Put it back, let it take in nothing more and carry what it has; with none waiting it can go.",
            )
        if question.safe < place.offset:
            return False  # in the commit log, and not yet surely so: the next call
        self.gateways.let_go(one)
        return True

    # -- the partitions of a planned batch -----------------------------------------------------------------------

    def slices(self, here: Position, there: Position, *, watermark_ms: int | None) -> list[Slice]:
        """The partitions of the batch between two positions: always the same, with the same rows.

        Args:
            here: Its start.
            there: Its end.
            watermark_ms: The query's watermark, for rows with an event time.

        Raises:
            Fenced: TL-G04, a gateway serves another journal.
            GatewayUnreachable: TL-G53, a gateway that has rows of the batch is away.
        """
        parts = self._parts(here, there)
        if any(len(bounds) > 1 for _, bounds in parts) and not self._told_of_order:
            self._told_of_order = True
            _LOG.warning(
                "a batch has several partitions of one gateway (minPartitions, maxRecordsPerPartition): the order of a "
                "device's messages holds only where one task reads them all, as after coalesce(1)"
            )
        made = [cut for rows, bounds in parts for cut in self._cut(rows, bounds, watermark_ms)]
        idle = there.places[0]
        return made or [Slice(self._plan.place, idle.journal, idle.offset, idle.offset, idle.incarnation, watermark_ms)]

    def _cut(self, rows: JournalRange, bounds: tuple[tuple[int, int], ...], watermark_ms: int | None) -> list[Slice]:
        one = self._match(rows.end) if (rows.end.journal, bounds) in self._tickets else None
        one = one or self._holder(rows)
        tickets = self._patiently(rows, one, partial(self._signed, one, rows.end, bounds))
        return slices_of(one.place, rows.end, bounds, tickets, watermark_ms)

    def _parts(self, here: Position, there: Position) -> list[tuple[JournalRange, tuple[tuple[int, int], ...]]]:
        """What a batch has of each gateway, and where each slice of it begins and ends."""
        ranges = ranges_between(here, there)
        sizes = divided([one.rows for one in ranges], self._plan.min_partitions, self._plan.max_records)
        return [(one, one.bounds(each)) for one, each in zip(ranges, sizes, strict=True)]

    def _readable(self, here: Position, there: Position) -> Position:
        """The batch without the rows of gateways that would not let its tasks in.

        A poll may have been let in with a token that is refused since, and a batch that was begun can't do without its
        rows. So the tickets are asked for before it is planned.
        """
        self._tickets = {}
        for rows, bounds in self._parts(here, there):
            one, before = self._match(rows.end), here.place(rows.end.gateway)
            if one is None or before is None or not one.place.remote:
                continue
            try:
                interruptible(partial(self._signed, one, rows.end, bounds))
            except GatewayError as error:
                if not is_absence(error):
                    raise
                self.gateways.miss(one, error)
                return self._readable(here, there.having(before))
        return there

    def _signed(self, one: SourceGateway, end: JournalPlace, bounds: tuple[tuple[int, int], ...]) -> list[str]:
        key = (end.journal, bounds)
        if key not in self._tickets:
            self._tickets[key] = one.tickets(end, bounds)
        return self._tickets[key]

    def _holder(self, rows: JournalRange) -> SourceGateway:
        """Who has the rows: a gateway of the list, or a former one, which serves the batch that was begun with it."""
        end = rows.end
        one = self._match(end)
        if one is None and any(not other.lease for other in self.gateways.all):
            self.gateways.meet()
            one = self._match(end)
        one = one or self.gateways.former(self._plan.at(end.at))
        lease = self._patiently(rows, one, one.open)
        if lease.journal != end.journal:
            raise foreign(end, lease.journal)
        return one

    def _match(self, end: JournalPlace) -> SourceGateway | None:
        met = [one for one in self.gateways.all if one.journal]
        here = next((one for one in met if one.journal == end.journal), None)
        here = here or next((one for one in met if one.name == end.gateway), None)
        return here or next((one for one in self.gateways.all if end.at == one.place.text), None)

    def _patiently(self, rows: JournalRange, one: SourceGateway, call: Callable[[], _T]) -> _T:
        try:
            return patiently(lambda: interruptible(call), patience_s=PATIENCE_S)
        except GatewayError as error:
            if not is_absence(error):
                raise
            end = rows.end
            way = error.do if is_refusal(error) else f"Start it at {one.place.text}."
            raise GatewayUnreachable(
                "TL-G53",
                f'gateway "{end.gateway}"',
                f"it is away ({error.what}), and a batch that was begun needs its messages {rows.start:,} to "
                f"{end.offset - 1:,}",
                f"Nothing is lost, and the batch is then served as it was planned. {way}",
            ) from error

    # -- the report ----------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any] | None:
        """What each gateway says of itself, and what waits in all of them; None where there is nothing to say.

        Of a source with the option ``gateway`` it is what that one says.
        """
        statuses = self.gateways.statuses()
        known = {one.name or one.place.text: one for one in self.gateways.all if one.name or one.absence}
        parts = {name: self._told(one, statuses.get(one, {})) for name, one in sorted(known.items(), key=itemgetter(0))}
        if not self._plan.gateways:
            part = next(iter(parts.values()), {})
            return part if part.keys() - {"tip", "queued"} else None
        away = [name for name, part in parts.items() if "away_since" in part]  # warned of when it went
        errors = [part["last_error"] for name, part in parts.items() if "last_error" in part and name not in away]
        totals = {key: sum(part[key] for part in parts.values()) for key in ("tip", "queued")}
        trouble = {"last_error": errors[0]} if errors else {}
        return {**totals, **trouble, "away": away, "gateways": parts}

    def _told(self, one: SourceGateway, status: Mapping[str, Any]) -> dict[str, Any]:
        said = {key: value for key, value in status.items() if isinstance(value, bool | int | float | str)}
        if trouble := (status.get("last_error") or {}).get("text"):
            said["last_error"] = trouble
        if one.absence is not None:
            since = datetime.fromtimestamp(one.away_since, UTC).isoformat(timespec="seconds")
            refused, error = is_refusal(one.absence), one.absence
            said |= {"away_since": since, "last_error": f"{error.what}. {error.do}" if refused else error.what}
            said |= {"refused": True} if refused else {}
        return {**said, "tip": one.tip, "queued": max(0, one.tip - self._reached.get(one, one.tip))}


def _safe(place: JournalPlace, safe: Position | None) -> int:
    """Up to where a gateway may remove rows; 0 where its journal was another one."""
    before = safe and safe.place(place.gateway)
    return before.offset if before and before.journal == place.journal else 0


class Offer(NamedTuple):
    """What waits at one gateway, as far as the whole batch could take it; or what the batch takes of that.

    Attributes:
        rows: At least 0; of what is taken, at most what was offered.
        size: Their bytes as they lie in the journal; of what is taken the most that they may be, None where the rows
            say it already, and 0 where nothing is.
    """

    rows: int
    size: int | None


def shares(waiting: Sequence[int], limit: int | None, turn: int = 0) -> list[int]:
    """Share a limit max-min: as equal as can be, and nobody more than waits.

    Args:
        waiting: What waits at each, at least 0.
        limit: Of all together; None for none.
        turn: Who gets the first of what can't be divided, a number from 0; one that grows with each batch lets nobody
            starve, however small the limit is.

    Returns:
        A share for each. Together they are the limit, or all that waits.
    """
    if limit is None or sum(waiting) <= limit:
        return list(waiting)
    given, left, count = [0] * len(waiting), limit, len(waiting)
    ascending = sorted(range(count), key=lambda one: waiting[one])
    for done, one in enumerate(ascending):
        even = left // (count - done)
        if waiting[one] > even:  # and so have all after it
            rest = sorted(ascending[done:], key=lambda other: (other - turn) % count)
            extra = left - even * len(rest)
            for place, other in enumerate(rest):
                given[other] = even + (place < extra)
            break
        given[one] = waiting[one]
        left -= waiting[one]
    return given


def admit(offers: Sequence[Offer], max_rows: int | None, max_bytes: int | None, turn: int = 0) -> list[Offer]:
    """Share both limits of a batch among gateways, rows first: their bytes then share the other limit.

    Args:
        offers: What waits at each.
        max_rows: Most rows of the batch; None for no limit.
        max_bytes: Most bytes of the batch; None for no limit.
        turn: As `shares`.
    """
    rows = shares([offer.rows for offer in offers], max_rows, turn)
    sizes = [-(-(size or 0) * got // count) if count else 0 for (count, size), got in zip(offers, rows, strict=True)]
    granted = shares(sizes, max_bytes, turn)
    return [Offer(count, None if got >= size else got) for count, size, got in zip(rows, sizes, granted, strict=True)]


def fitting(sizes: Sequence[int], max_bytes: int | None, turn: int = 0) -> list[bool]:
    """Which ranges go into the batch, once their sizes are known: a gateway gives one row at least, however large.

    Args:
        sizes: Bytes of what each would give; 0 for nothing.
        max_bytes: Most bytes of the batch; None for no limit.
        turn: Who is asked first, as `shares`; the first with anything is taken whatever its size, so that one huge
            message passes, and ten of them one after the other.
    """
    taken, total = [False] * len(sizes), 0
    for one in sorted(range(len(sizes)), key=lambda other: (other - turn) % len(sizes)):
        if sizes[one] and (max_bytes is None or not total or total + sizes[one] <= max_bytes):
            taken[one] = True
            total += sizes[one]
    return taken
