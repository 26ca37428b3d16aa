"""Dead letters on their way again: each at most once, whatever happens in between.

One transaction writes the mended records to their topics and, into the dead-letter topic, a mark that names the dead
dead letters they came from (`towline.bridge.deadletters.dlq`).

Each transaction has a producer of its own, whose `init_transactions` comes before the marks are read [I9]: a replay
that died is committed or aborted by then, one that still runs is fenced, and a commit request that arrives late is
refused (KIP-890; `towline.kafka.transactions`).
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, Final

from towline.bridge.deadletters.dlq import MARK, DeadLetterTopic, Entry, Wanted
from towline.bridge.deadletters.remap import Mapper, Remapped
from towline.errors import KafkaError
from towline.kafka.admin import topic_facts
from towline.kafka.clientconfig import largest_message
from towline.kafka.columns import Rows
from towline.kafka.options import SinkSettings
from towline.kafka.reserved import reserved
from towline.kafka.screening import RecordLimits, fault_of
from towline.kafka.transactions import Indefinite, take

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Replay", "replay"]

#: Dead dead letters of one transaction.
CHUNK: Final = 500
#: Bytes of them at which it ends earlier: they and their records are kept in memory.
_CHUNK_BYTES: Final = 16 * 1024 * 1024
#: Seconds for one transaction; the broker aborts it then by itself.
_TRANSACTION_S: Final = 60
#: The lines' own says how long *their* transactions may take.
_CLOCK: Final = "transaction.timeout.ms"


@dataclass(slots=True)
class Replay:
    """What a replay did, or would do.

    Attributes:
        mended: Letters whose record was written, by topic.
        filtered: Letters that a ``where`` leaves out now.
        dead: Letters that stay, by why.
    """

    mended: Counter[str] = field(default_factory=Counter)
    filtered: int = 0
    dead: Counter[str] = field(default_factory=Counter)

    @property
    def letters(self) -> int:
        """How many were looked at."""
        return self.mended.total() + self.filtered + self.dead.total()

    def add(self, outcome: Remapped) -> None:
        """Count one dead letter."""
        if outcome.why:
            self.dead[outcome.why] += 1
        elif outcome.record is None:
            self.filtered += 1
        else:
            self.mended[outcome.record[0]] += 1

    def include(self, other: Replay) -> None:
        """Count what was done on another topic too."""
        self.mended += other.mended
        self.filtered += other.filtered
        self.dead += other.dead


def replay(
    ledger: DeadLetterTopic,
    wanted: Wanted,
    spark: Callable[[], SparkSession],
    *,
    limit: int | None = None,
    dry_run: bool = False,
) -> Replay:
    """Put the mended dead letters of a topic back on their way; each dead letter at most once, also over crashes.

    Args:
        ledger: The dead-letter topic.
        wanted: Which dead letters.
        spark: Makes a session, for routes with a ``where``.
        limit: At most so many; None for all.
        dry_run: Write nothing.

    Raises:
        KafkaError: TL-K01; TL-B30 when a transaction failed, TL-B31 when another writer's stays open: what was
            not committed waits as before.
    """
    mappers = {line.name: Mapper(line, spark) for line in ledger.lines.values()}
    done = Replay()
    entries = ledger.entries(wanted)
    # Counts under the fence: what the search takes for waiting may have been replayed (see `waiting`).
    left = sys.maxsize if limit is None else limit
    while chunk := _chunk(entries, min(left, CHUNK)):
        if dry_run:
            outcomes = _outcomes(ledger, mappers, chunk)
        else:
            with contextlib.closing(_Writer(ledger)) as writer:
                chunk = ledger.waiting(chunk)
                outcomes = _outcomes(ledger, mappers, chunk)
                writer.write(ledger.topic, chunk, outcomes)
        left -= len(chunk)
        for outcome in outcomes:
            done.add(outcome)
    return done


def _chunk(entries: Iterator[Entry], limit: int) -> list[Entry]:
    """The next dead letters, as many as one transaction carries and no more than the limit."""
    made: list[Entry] = []
    size = 0
    for entry in islice(entries, limit):
        made.append(entry)
        size += len(entry.dead_letter.value or b"")
        if size > _CHUNK_BYTES:
            break
    return made


def _outcomes(ledger: DeadLetterTopic, mappers: Mapping[str, Mapper], chunk: list[Entry]) -> list[Remapped]:
    """The fate of each dead letter, and whether Kafka takes what it becomes."""
    found: dict[int, Remapped] = {}
    for name, mapper in mappers.items():
        mine = [i for i, entry in enumerate(chunk) if (line := ledger.line_of(entry.dead_letter)) and line.name == name]
        found |= dict(zip(mine, mapper.outcomes([chunk[i].dead_letter for i in mine]), strict=True))
    topics = {outcome.record[0] for outcome in found.values() if outcome.record}
    most = largest_message(ledger.client)
    taken = re.compile(reserved([ledger.topic]))
    free = {topic for topic in topics if not taken.fullmatch(topic)}
    limits = RecordLimits(
        topic_facts(ledger.client, free), most, None, int(time.time() * 1000), lambda t: bool(taken.fullmatch(t))
    )
    return [_checked(found[i], limits) for i in range(len(chunk))]


def _checked(outcome: Remapped, limits: RecordLimits) -> Remapped:
    fault = fault_of(outcome.record, limits) if outcome.record else None
    return outcome if fault is None else Remapped(why=f"topic {outcome.record[0]}: {fault.detail}")  # type: ignore[index] # there is a record


class _Writer:
    """A transactional producer for one transaction, the sink's own; whoever starts later fences it."""

    def __init__(self, ledger: DeadLetterTopic) -> None:
        client = {f"kafka.{name}": value for name, value in ledger.client.items() if name != _CLOCK}
        settings = SinkSettings.parse({"deliveryTimeout": str(_TRANSACTION_S), **client})
        # Of the topic alone: bridges that share one may both take a dead letter for theirs.
        self._servers = settings.servers
        with self._one_error():
            self._producer = take(settings, f"towline.dlq.{ledger.topic}", {})

    def write(self, topic: str, chunk: list[Entry], outcomes: list[Remapped]) -> None:
        """One transaction: the records, and the marks of the dead letters they came from.

        Raises:
            KafkaError: TL-B30, nothing of it counts, or nobody knows whether it does: the next replay finds out.
        """
        settled = [entry for entry, outcome in zip(chunk, outcomes, strict=True) if not outcome.why]
        if not settled:
            return
        records = [outcome.record for outcome in outcomes if outcome.record is not None]
        records += [(topic, b"", None, partition, None, None, 0, [(MARK, mark)]) for partition, mark in _marks(settled)]
        with self._one_error():
            self._producer.begin()
            self._producer.write(Rows(len(records), 0, frozenset(), iter(records)))
            self._producer.commit()

    def close(self) -> None:
        """Let go of the producer; what was not committed is aborted."""
        self._producer.close()

    @contextlib.contextmanager
    def _one_error(self) -> Iterator[None]:
        try:
            yield
        except (KafkaError, Indefinite) as problem:
            error = problem.told if isinstance(problem, Indefinite) else problem
            what = f"Kafka did not take what was replayed: {error.what}"
            do = "Run it again: what was replayed is left out then, the rest waits as before."
            raise KafkaError("TL-B30", self._servers, what, do) from None


def _marks(entries: Iterable[Entry]) -> Iterator[tuple[int, bytes]]:
    """Partition and mark, for each partition with dead letters that are settled."""
    places = sorted((entry.partition, entry.offset) for entry in entries)
    for partition, group in groupby(places, key=lambda place: place[0]):
        ranges: list[list[int]] = []
        for _, offset in group:
            if ranges and ranges[-1][1] == offset - 1:
                ranges[-1][1] = offset
            else:
                ranges.append([offset, offset])
        yield partition, json.dumps({"v": 1, "offsets": ranges}, separators=(",", ":")).encode()
