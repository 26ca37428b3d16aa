"""The account of a line: no message leaves the ledger without a counted reason [I11].

Two witnesses count apart: the gateway knows what it received, what is on disk and which offset is committed; the bridge
counts what Spark saw in each committed batch. The account brings them together and says whether they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol, Self

__all__ = ["Counts", "LineAccount", "account", "sum_of", "unseen", "verdict"]


#: Counts that Spark takes in every batch.
_OBSERVED: Final = ("filtered", "unrouted", "fallback", "dead_lettered", "deduplicated", "late")


@dataclass(frozen=True, slots=True)
class Counts:
    """What the committed batches of a line held, by journal offsets, over restarts.

    Attributes:
        journal: Id of the journal the offsets belong to.
        since: Offset where counting began; None before the first batch.
        upto: Offset after the last counted row.
        batch: Last counted batch.
        rows: Rows Spark saw.
        filtered: Left out by a ``where``.
        unrouted: Taken by no route.
        fallback: Sent to a fallback topic.
        dead_lettered: Sent to the dead-letter topic, because they could not be mapped or Kafka would refuse them.
        deduplicated: Dropped as repeats.
        late: Dropped by the state store as older than its watermark, which no row should be.
        missed: Rows of batches that were committed while nobody listened (the bridge ended in between), or that were
            skipped because the marker said that Kafka has them.
        skipped: Rows of a repeated batch that guarantee at_most_once served empty.
        query: Id of the query whose sink told of dead letters last.
        told: Part of `dead_lettered` that it told of.
    """

    journal: str = ""
    since: int | None = None
    upto: int = 0
    batch: int = -1
    rows: int = 0
    filtered: int = 0
    unrouted: int = 0
    fallback: int = 0
    dead_lettered: int = 0
    deduplicated: int = 0
    late: int = 0
    missed: int = 0
    skipped: int = 0
    query: str = ""
    told: int = 0

    def add(self, progress: Mapping[str, Any]) -> Self:
        """Count a committed batch; one that was counted before changes nothing.

        Args:
            progress: A report of the driver: ``journal``, ``batch``, ``rows``, ``start``, ``end``, ``observed``,
                ``gives_up`` (whether rows that a batch did not show were given up, or are in Kafka); where the sink
                counts dead letters, ``query`` and ``letters`` (of all its batches up to this one).
        """
        counted = self._batch(progress)
        if (letters := progress.get("letters")) is None:
            return counted
        query = str(progress["query"])
        before = counted.told if query == counted.query else 0
        total = max(before, int(letters))
        return replace(counted, query=query, told=total, dead_lettered=counted.dead_lettered + total - before)

    def _batch(self, progress: Mapping[str, Any]) -> Self:
        journal = str(progress.get("journal", ""))
        if journal != self.journal:  # another journal: its offsets begin anew
            return (
                type(self)(journal=journal)._batch(progress)  # noqa: SLF001 - its own
                if self.since is not None
                else replace(self, journal=journal)._batch(progress)  # noqa: SLF001 - its own
            )
        end, observed = progress.get("end"), progress.get("observed") or {}
        rows = int(observed.get("rows", progress.get("rows") or 0))
        if end is None:
            return self
        start = progress.get("start")
        start = end - rows if start is None else start
        since = start if self.since is None else self.since
        before = start if self.since is None else self.upto
        if end <= before:
            return replace(self, since=since, upto=max(before, self.upto), batch=progress["batch"])
        unseen = max(0, end - start - rows)
        given_up = unseen if progress.get("gives_up", True) else 0
        return replace(
            self,
            since=since,
            upto=end,
            batch=progress["batch"],
            rows=self.rows + rows,
            missed=self.missed + max(0, start - before) + unseen - given_up,
            skipped=self.skipped + given_up,
            **{name: getattr(self, name) + int(observed.get(name, 0)) for name in _OBSERVED},
        )

    @property
    def agree(self) -> bool:
        """Whether the rows are as many as the offsets."""
        return self.since is None or self.upto - self.since == self.rows + self.missed + self.skipped

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """From `as_json`; unknown keys are left out."""
        return cls(**{key: value for key, value in values.items() if key in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class LineAccount:
    """Where every message of a line is.

    Attributes:
        received: Messages taken from the broker over the journal's life.
        in_kafka: Written to their Kafka topics and committed, fallback topics included.
        filtered: Left out by a ``where``.
        unrouted: Taken by no route.
        skipped: Given up by at_most_once after a crash.
        waiting: On disk, not yet in Kafka.
        arriving: Received, not yet on disk and not acknowledged.
        dead_lettered: In the dead-letter topic.
        deduplicated: Recognised as repeats: by a dedupe key, or by an open QoS 2 packet id.
        adds_up: Whether the parts are the whole, and both witnesses agree.
        why_not: What does not agree, or "".
        uncounted: Part of `in_kafka` that no report of Spark told of: a ``where`` may have left some of it out.
    """

    received: int
    in_kafka: int
    filtered: int
    unrouted: int
    skipped: int
    waiting: int
    arriving: int
    adds_up: bool
    why_not: str = ""
    uncounted: int = 0
    dead_lettered: int = 0
    deduplicated: int = 0

    @property
    def carried(self) -> int:
        """What is where it was to go."""
        return self.in_kafka

    @property
    def words(self) -> tuple[str, str]:
        """What `received` and `carried` are called."""
        return "received", "in Kafka"

    def sentence(self) -> str:
        """The sum in one line, and whether it holds."""
        return f"{self.sum()}   {verdict(self)}"

    def sum(self) -> str:
        """The sum; parts that are zero are left out, but for the three that matter."""
        rest = {
            "filtered": self.filtered,
            "unrouted": self.unrouted,
            "given up": self.skipped,
            "dead-lettered": self.dead_lettered,
            "deduplicated": self.deduplicated,
            "arriving": self.arriving,
        }
        carried = f"in Kafka {self.in_kafka:,}{unseen(self.uncounted)}"
        return f"received {self.received:,} = {sum_of(carried, rest, self.waiting)}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Sum(Protocol):
    """An account of either direction, as far as its verdict goes."""

    @property
    def adds_up(self) -> bool:
        """Whether the parts are the whole."""

    @property
    def why_not(self) -> str:
        """Empty when they are."""


def sum_of(carried: str, rest: Mapping[str, int], waiting: int) -> str:
    """The parts of a sum; those of `rest` that are zero are left out."""
    others = (f"{name} {count:,}" for name, count in rest.items() if count)
    return " + ".join([carried, *others, f"waiting {waiting:,}"])


def unseen(uncounted: int) -> str:
    """The remark on rows that a skipped batch carried; empty for none."""
    return f" ({uncounted:,} of them uncounted)" if uncounted else ""


def verdict(told: Sum) -> str:
    """Whether the sum holds, and why not."""
    return "adds up ✓" if told.adds_up else f"does not add up ✗ ({told.why_not})"


def account(gateway: Mapping[str, Any], counts: Counts) -> LineAccount:
    """Bring both witnesses together.

    Args:
        gateway: The answer to the action ``status``: ``received``, ``end``, ``committed``, ``deduplicated`` ...
        counts: What the bridge counted.
    """
    end, received = int(gateway["end"]), int(gateway["received"])
    # What the broker sent again under an open QoS 2 id was answered and not stored [I3].
    repeats = int(gateway.get("deduplicated", 0))
    # The status is not one instant: rows may become durable between reading `received` and `end`.
    received = max(received, end + repeats)
    told = int(gateway["committed"])
    # The gateway learns of a commit with the next `latestOffset`, the bridge right after the batch.
    committed = max(told, min(counts.upto, end))
    elsewhere = counts.dead_lettered + counts.deduplicated + counts.late
    left_out = counts.filtered + counts.unrouted + counts.skipped + elsewhere
    why_not = ""
    if counts.upto > end:
        why_not = f"Spark committed up to {counts.upto:,}, the journal ends at {end:,}: was it restored from a copy?"
    elif not counts.agree:
        why_not = f"offsets {counts.since:,} to {counts.upto:,} gave {counts.rows + counts.missed:,} rows"
    elif counts.late:
        why_not = f"{counts.late:,} rows were lost: Spark took them for late. That should not happen; please report it"
    return LineAccount(
        received=received,
        in_kafka=committed - left_out,
        filtered=counts.filtered,
        unrouted=counts.unrouted,
        skipped=counts.skipped,
        waiting=end - committed,
        arriving=received - end - repeats,
        adds_up=not why_not,
        why_not=why_not,
        uncounted=committed - counts.rows - counts.skipped if counts.agree and not why_not else 0,
        dead_lettered=counts.dead_lettered,
        deduplicated=counts.deduplicated + repeats,
    )
