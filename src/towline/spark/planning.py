"""Which rows of which gateway the next batch has, and who serves those of a batch that was planned; in the runner only.

What is planned stands in the checkpoint, as the places where the batch ends. All else follows from start, end and the
options alone, so that a batch comes again as it was [I4].

The limits hold for the batch, and are shared max-min: whoever has little waiting gets all of it, the others share what
is left evenly. So messages of a quiet gateway never wait behind another's backlog, as they would by shares in
proportion to it, and nobody gets more than waits.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, GatewayError, GatewayUnreachable
from towline.gateway.client import CALL_S
from towline.kafka.pace import BatchLimit
from towline.spark.gateways import LIST, Question, SourceGateways, foreign, has_news, is_absence, is_refusal
from towline.spark.link import PATIENCE_S, patiently
from towline.spark.offsets import JournalPlace, Position
from towline.spark.readplan import Slice, divided, ranges_between
from towline.spark.tally import pace_of

if TYPE_CHECKING:
    from towline.gateway.client import Window
    from towline.spark.gateways import SourceGateway
    from towline.spark.readplan import JournalRange, ReadPlan

_LOG = logging.getLogger("towline.spark")


class BatchPlanner:
    """Plans the batches of one stream.

    Args:
        plan: What the reader was told.

    Attributes:
        gateways: Those that it reads.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self.gateways = SourceGateways(plan)
        #: Where the query ends in each journal (AvailableNow); None for a query without an end.
        self._ends: dict[str, int] | None = None
        #: Grows with each batch: whose turn it is to get what can't be divided.
        self._turn = 0
        self._order_logged = False
        #: What Kafka takes in time; None where the checkpoint with the sink's word of it is not known.
        self._pace = BatchLimit(partial(pace_of, Checkpoint(plan.checkpoint))) if plan.checkpoint else None
        self._slow: int | None = None
        #: Where the batch begins that was planned last, or is planned anew as more comes.
        self._begin: tuple[JournalPlace, ...] | None = None

    # -- begin and end -------------------------------------------------------------------------------------------

    def fix_end(self) -> None:
        """End the query at what is durable now at each gateway that answers."""
        self.gateways.meet()
        self._ends = {gateway.journal: gateway.tip for gateway in self.gateways.all if gateway.entry}

    def ended(self, here: Position) -> bool:
        """Whether a query with an end is there."""
        return self._ends is not None and all(place.offset >= self._end(place) for place in here.places)

    def _end(self, place: JournalPlace) -> int:
        """Where the query ends at a gateway; one that did not answer when the end was fixed has no part in it."""
        return place.offset if self._ends is None else self._ends.get(place.journal, place.offset)

    def beginning(self) -> Position:
        """Where a query without a checkpoint begins, at each gateway that answers."""
        self.gateways.meet()
        return Position(tuple(gateway.entry for gateway in self.gateways.all if gateway.entry))

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
        if not any(gateway.entry for gateway in self.gateways.all):
            self.gateways.ask({}, patience_s)
            patience_s = 0.0
        placed, former = self._places(here)
        left = [place.gateway for place in former if self._may_leave(place, safe)]
        questions = {
            gateway: self._question(replace(place, at=gateway.place.text), safe, limit)
            for gateway, place in placed.items()
        }
        answers = self.gateways.ask(questions, 0.0 if left or self._joining(here) else patience_s)
        moved = [question.here for question in questions.values()] + self._admitted(questions, answers, limit)
        there = here.having(*moved, *self._joining(here)).without(*left)
        for gateway, place in placed.items():
            if end := there.place(place.gateway):
                gateway.reached = end.offset
        if there == here and (missing := self._missing(placed)):
            self.gateways.meet(missing)  # a query with an end does not end without its rows
            return self.next(here, safe, limit, patience_s)
        return there

    @property
    def cut_short(self) -> bool:
        """Whether more waits than the planned batch takes, by its limits."""
        return any(one.tip > one.reached for one in self.gateways.all if one.reached is not None and not one.absence)

    def _places(self, here: Position) -> tuple[dict[SourceGateway, JournalPlace], list[JournalPlace]]:
        """The gateways that were met, each with its place, and the places of gateways that are not in the list.

        One that was not met yet is known by where it is; if it is not, it may be any of those that are left.

        Raises:
            Fenced: TL-G04, a gateway serves another journal than it did.
        """
        placed = {one: place for one in self.gateways.all if one.entry and (place := self._place_of(one, here))}
        unmet = {one.place.text for one in self.gateways.all if not one.entry}
        others = [place for place in here.places if place not in placed.values()]
        complete = unmet <= {place.at for place in others}
        return placed, [place for place in others if place.at not in unmet] if complete else []

    def _place_of(self, gateway: SourceGateway, here: Position) -> JournalPlace | None:
        """The place of a gateway that was met: it is known by its journal.

        Raises:
            Fenced: TL-G04, the place under its name is in another journal.
        """
        place = next((place for place in here.places if place.journal == gateway.journal), None)
        # The option ``gateway`` names no list that another one could have joined.
        only = here.places[0] if not self._plan.gateways and len(here.places) == 1 else None
        place = place or here.place(gateway.name) or only
        if place is not None and place.journal != gateway.journal:
            raise foreign(place, gateway.journal)
        return place

    def _joining(self, here: Position) -> list[JournalPlace]:
        """Where gateways begin that were met and have no place yet; their rows come with the next batch.

        There are none where the query has an end they have no part in.
        """
        met = [one for one in self.gateways.all if self._ends is None or one.journal in self._ends]
        return [one.entry for one in met if one.entry and self._place_of(one, here) is None]

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
        """Where the batch ends at the gateways that have rows in it, together within its limits."""
        windows = {
            gateway: answers[gateway]
            for gateway, question in questions.items()
            if gateway in answers and has_news(question, answers[gateway])
            # At the end of the query one row is asked for all the same.
            if self._ends is None or answers[gateway].end <= self._end(question.here)
        }
        if len(windows) > 1:  # one alone was asked for no more than the batch may have
            windows = self._shared(questions, windows, *self._limits(limit))
        if self._pace and windows:
            self._pace.planned(sum(window.size for window in windows.values()))
        return [questions[one].here.moved(window.end, window.incarnation) for one, window in windows.items()]

    def _shared(
        self,
        questions: Mapping[SourceGateway, Question],
        windows: Mapping[SourceGateway, Window],
        max_rows: int | None,
        max_bytes: int | None,
    ) -> dict[SourceGateway, Window]:
        """The windows of all gateways, those that are cut asked for anew."""
        self._turn += 1
        offers = [Offer(window.end - questions[one].here.offset, window.size) for one, window in windows.items()]
        grants = dict(zip(windows, admit(offers, max_rows, max_bytes, self._turn), strict=True))
        whole = {one: windows[one] for one, grant in grants.items() if grant is None}
        cut = {
            one: replace(questions[one], max_rows=grant.rows, max_bytes=grant.size or questions[one].max_bytes)
            for one, grant in grants.items()
            if grant is not None and grant.rows and grant.size != 0
        }
        taken = whole | (self.gateways.ask(cut, 0.0, CALL_S) if cut else {})
        ordered = [one for one in windows if one in taken]
        fits = fitting([max(1, taken[one].size) for one in ordered], max_bytes, self._turn)
        return {one: taken[one] for one, fit in zip(ordered, fits, strict=True) if fit}

    def _missing(self, gateways: Iterable[SourceGateway]) -> SourceGateway | None:
        """A gateway that is away while the query's end is not reached there."""
        ends = self._ends or {}
        return next((one for one in gateways if one.absence and (one.reached or 0) < ends.get(one.journal, 0)), None)

    # -- gateways that were taken out of the list ----------------------------------------------------------------

    def _may_leave(self, place: JournalPlace, safe: Position | None) -> bool:
        """Whether a gateway may leave the checkpoint: all that it holds is in the commit log, and surely so.

        Raises:
            ConfigError: TL-G51, it can't be asked. TL-G52, messages wait there.
        """
        if place.gateway in self._plan.removed:
            _LOG.warning("gateway %s leaves the checkpoint unasked, as removedGateways says", place.gateway)
            return True
        gateway, question = self.gateways.former(self._plan.at(place.at)), Question(place, _safe(place, safe))
        try:
            window = gateway.wait(question, 0.0)
        except GatewayError as error:
            if not is_absence(error):
                raise
            why = "does not let this query in" if is_refusal(error) else "does not answer"
            raise ConfigError(
                "TL-G51",
                LIST,
                f'gateway "{place.gateway}" is no longer in the list, and whether messages wait there is not known: '
                f"{place.at} {why} ({error.what})",
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
        self.gateways.let_go(gateway)
        return True

    # -- the partitions of a planned batch -----------------------------------------------------------------------

    def slices(self, here: Position, there: Position) -> list[Slice]:
        """The partitions of the batch between two positions: always the same, with the same rows.

        Raises:
            Fenced: TL-G04, a gateway serves another journal.
            GatewayUnreachable: TL-G53, a gateway that has rows of the batch is away.
        """
        ranges = ranges_between(here, there)
        sizes = divided([rows.rows for rows in ranges], self._plan.min_partitions, self._plan.max_records)
        if any(len(each) > 1 for each in sizes) and not self._order_logged:
            self._order_logged = True
            _LOG.warning(
                "a batch has several partitions of one gateway (minPartitions, maxRecordsPerPartition): the order of a "
                "device's messages holds only where one task reads them all, as after coalesce(1)"
            )
        slices = [part for rows, each in zip(ranges, sizes, strict=True) for part in self._cut(rows, each)]
        idle = there.places[0]
        return slices or [Slice(self._plan.place, idle.journal, idle.offset, idle.offset, idle.incarnation)]

    def _cut(self, rows: JournalRange, sizes: Sequence[int]) -> list[Slice]:
        gateway, end = self._holder(rows.end), rows.end
        try:
            return patiently(partial(gateway.slices, rows, sizes), patience_s=PATIENCE_S)
        except GatewayError as error:
            if not is_absence(error):
                raise
            way = error.do if is_refusal(error) else f"Start it at {gateway.place.text}."
            raise GatewayUnreachable(
                "TL-G53",
                f'gateway "{end.gateway}"',
                f"it is away ({error.what}), and a batch that was begun needs its messages {rows.start:,} to "
                f"{end.offset - 1:,}",
                f"Nothing is lost, and the batch is then served as it was planned. {way}",
            ) from error

    def _holder(self, end: JournalPlace) -> SourceGateway:
        """Who has rows: a gateway of the list, or a former one, which serves the batch that was begun with it."""
        gateway = self._listed(end)
        if gateway is None and not all(one.entry for one in self.gateways.all):
            self.gateways.meet()
            gateway = self._listed(end)
        return gateway or self.gateways.former(self._plan.at(end.at))

    def _listed(self, end: JournalPlace) -> SourceGateway | None:
        """The gateway of the list that has a place; one that was not met yet is known by where it is."""
        alone = Position((end,))
        met = next((one for one in self.gateways.all if one.entry and self._place_of(one, alone)), None)
        return met or next((one for one in self.gateways.all if end.at == one.place.text), None)

    # -- the report ----------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any] | None:
        """What each gateway says of itself, and what waits in all of them; None where there is nothing to say.

        Of a source with the option ``gateway`` it is what that one says.
        """
        known = {one.name or one.place.text: one for one in self.gateways.all if one.name or one.absence}
        parts = {name: known[name].report() for name in sorted(known)}
        if not self._plan.gateways:
            part = next(iter(parts.values()), {})
            return part if part.keys() - {"tip", "queued"} else None
        away = [name for name, part in parts.items() if "away_since" in part]  # warned of when it went
        errors = [part["last_error"] for name, part in parts.items() if "last_error" in part and name not in away]
        totals = {key: sum(part[key] for part in parts.values()) for key in ("tip", "queued")}
        trouble = {"last_error": errors[0]} if errors else {}
        return {**totals, **trouble, "away": away, "gateways": parts}


def _safe(place: JournalPlace, safe: Position | None) -> int:
    """Up to where a gateway may remove rows; 0 where its journal was another one."""
    before = safe and safe.place(place.gateway)
    return before.offset if before and before.journal == place.journal else 0


class Offer(NamedTuple):
    """What waits at one gateway, as far as the whole batch could take it; or what the batch takes of that.

    Attributes:
        rows: At least 0.
        size: Their bytes as they lie in the journal; of what is taken the most that they may be, None where the rows
            say it already.
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
    # The largest share that everybody who waits for more may have.
    level = bisect_right(range(limit + 1), limit, key=lambda share: sum(min(share, one) for one in waiting)) - 1
    given = [min(level, one) for one in waiting]
    short = [at for at, one in enumerate(waiting) if one > level]
    for at in sorted(short, key=lambda at: (at - turn) % len(waiting))[: limit - sum(given)]:
        given[at] += 1
    return given


def admit(offers: Sequence[Offer], max_rows: int | None, max_bytes: int | None, turn: int = 0) -> list[Offer | None]:
    """Share both limits of a batch among gateways, rows first: their bytes then share the other limit.

    Args:
        offers: What waits at each.
        max_rows: Most rows of the batch; None for no limit.
        max_bytes: Most bytes of the batch; None for no limit.
        turn: As `shares`.

    Returns:
        What the batch takes of each; None for all of it.
    """
    rows = shares([offer.rows for offer in offers], max_rows, turn)
    sizes = [-(-(size or 0) * got // count) if count else 0 for (count, size), got in zip(offers, rows, strict=True)]
    granted = shares(sizes, max_bytes, turn)
    grants = [Offer(count, None if got >= size else got) for count, size, got in zip(rows, sizes, granted, strict=True)]
    return [None if grant == (offer.rows, None) else grant for grant, offer in zip(grants, offers, strict=True)]


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
