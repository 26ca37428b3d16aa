"""Dead letters on their way again: what they become with the bridge file as it is now, each at most once.

Spark is started only for lines whose routes say something in SQL. One transaction writes the mended records to their
topics and, into the dead-letter topic, a mark that names the dead letters they came from
(`towline.bridge.deadletters.dlq`).

Each transaction has a producer of its own, whose `init_transactions` comes before the marks are read [I9]: a replay
that died is committed or aborted by then, one that still runs is fenced, and a commit request that arrives late is
refused (KIP-890; `towline.kafka.producers`).
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from towline.bridge.config.model import Line
from towline.bridge.deadletters.dlq import MARK, DeadLetterTopic, Entry, Wanted
from towline.bridge.routes import FAULT, OUTCOME, RecordColumns, RouteTable, RowOutcome
from towline.bridge.uplink.statements import Statements, of_schema
from towline.errors import KafkaError
from towline.kafka.admin import KafkaAdmin
from towline.kafka.clientconfig import largest_message
from towline.kafka.columns import Rows
from towline.kafka.deadletters import DeadLetter, Reason, reserved
from towline.kafka.options import SinkSettings
from towline.kafka.producers import Indefinite, take
from towline.kafka.properties import TRACE_CONTEXT, user_property
from towline.kafka.screening import RecordLimits, fault_of
from towline.schema import ROW_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from towline.bridge.config.model import AnyLine

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: Largest numbers of the columns; what is larger was not written by a gateway.
_QOS, _EXPIRY, _SUBSCRIPTION, _MOMENT, _OFFSET = 2, 0xFFFFFFFF, 268_435_455, 1 << 57, (1 << 63) - 1
_DECIMAL: Final = re.compile(rb"[0-9]{1,19}")
#: Letters that are not the message: no route can make of them what it was.
_NOT_WHOLE: Final = {
    Reason.PACKET_TOO_LARGE: "too large for the gateway's max_packet_bytes; its publisher has to send it again",
    Reason.TOO_MANY_PROPERTIES: "more than 1,000 properties; its value is the MQTT packet, for a program of yours",
}


@dataclass(frozen=True, slots=True)
class Remapped:
    """The fate of one dead letter; with neither record nor reason a ``where`` leaves it out now.

    Attributes:
        record: Arguments of ``produce``: topic, value, key, partition, None, None, timestamp in ms, headers.
        why: Why it is still dead; "" for others.
    """

    record: tuple[Any, ...] | None = None
    why: str = ""


def row_of(dead_letter: DeadLetter) -> dict[str, Any] | None:
    """The source's row that a dead letter was; None if it is not from MQTT, or its properties were not kept."""
    headers = [one for one in dead_letter.headers if one[0].startswith("mqtt.") or one[0] in TRACE_CONTEXT]
    known: Mapping[str, bytes | None] = dict(reversed(headers))
    topic = _text(known.get("mqtt.topic"))
    if topic is None:
        return None
    users = [{"key": key, "value": _text(value)} for name, value in headers if (key := user_property(name)) is not None]
    form = _text(known.get("mqtt.payload-format"))
    return {
        "topic": topic,
        "payload": dead_letter.value,
        "qos": _number(known.get("mqtt.qos"), _QOS),
        "retain": known.get("mqtt.retain") == b"true",
        "duplicate": known.get("mqtt.duplicate") == b"true",
        "content_type": _text(known.get("mqtt.content-type")),
        "payload_is_utf8": None if form is None else form == "1",
        "response_topic": _text(known.get("mqtt.response-topic")),
        "correlation_data": known.get("mqtt.correlation-data"),
        "user_properties": users or None,
        "message_expiry_seconds": _number(known.get("mqtt.message-expiry"), _EXPIRY),
        "subscription_ids": [
            number
            for name, value in headers
            if name == "mqtt.subscription-id" and (number := _number(value, _SUBSCRIPTION)) is not None
        ]
        or None,
        "received_at": _EPOCH + timedelta(microseconds=_number(known.get("mqtt.received-at"), _MOMENT) or 0),
        "gateway": _text(known.get("mqtt.gateway")),
        "offset": _number(known.get("mqtt.offset"), _OFFSET),
    }


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _number(value: bytes | None, most: int) -> int | None:
    number = int(value) if value is not None and _DECIMAL.fullmatch(value) else None
    return number if number is None or number <= most else None


class Mapper:
    """Maps the dead letters of one line; those of a downlink go back to Kafka, where the line takes them once more.

    Args:
        line: Its routes.
        spark: Makes the session that evaluates their SQL; called at most once, and only where there is some.
    """

    def __init__(self, line: AnyLine, spark: Callable[[], SparkSession]) -> None:
        routes = line.routes if isinstance(line, Line) else ()
        self._maps = isinstance(line, Line)
        self._statements, self._table = Statements(routes), RouteTable(routes)
        self._spark = spark

    def outcomes(self, dead_letters: Sequence[DeadLetter]) -> list[Remapped]:
        """The fate of each, in order."""
        rows = {
            index: row
            for index, dead_letter in enumerate(dead_letters)
            if self._maps and dead_letter.reason not in _NOT_WHOLE and (row := row_of(dead_letter)) is not None
        }
        mapped = dict(zip(rows, self._mapped([*rows.values()]), strict=True))
        return [mapped.get(index) or _as_it_was(dead_letter) for index, dead_letter in enumerate(dead_letters)]

    def _mapped(self, rows: list[dict[str, Any]]) -> Iterator[Remapped]:
        if not rows:
            return
        batch = pa.RecordBatch.from_pylist(rows, schema=ROW_SCHEMA)
        if self._statements.needed:
            batch = self._evaluated(self._table.routed(batch, self._statements.values))
        made = self._table.render(batch)
        records = RecordColumns().rows(made, any_topic=True).records
        for code, fault, record in zip(*(made.column(n).to_pylist() for n in (OUTCOME, FAULT)), records, strict=True):
            outcome = RowOutcome(code)
            if outcome.reason:
                yield Remapped(why=f"it is refused: {fault}" if outcome is RowOutcome.REJECTED else fault)
            else:
                yield Remapped(None if outcome < RowOutcome.RENDERED else record)

    def _evaluated(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows with what Spark says of them."""
        frame = self._spark().createDataFrame(pa.Table.from_batches([rows]))
        (batch,) = self._statements.applied(frame, tolerant=True).toArrow().combine_chunks().to_batches()
        return of_schema(batch)


def _as_it_was(dead_letter: DeadLetter) -> Remapped:
    """A record that was mapped well and could not be written; what was wrong with it is left to Kafka."""
    if (why := _NOT_WHOLE.get(dead_letter.reason)) or dead_letter.topic is None:
        return Remapped(why=why or "it names no topic")
    partition = -1 if dead_letter.partition is None or dead_letter.reason is Reason.PARTITION else dead_letter.partition
    moment = 0 if dead_letter.timestamp is None or dead_letter.reason is Reason.TIMESTAMP else dead_letter.timestamp
    headers = list(dead_letter.headers) or None
    return Remapped((dead_letter.topic, dead_letter.value, dead_letter.key, partition, None, None, moment, headers))


# -- each at most once ------------------------------------------------------------------------------------------------

#: Dead letters of one transaction.
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
        KafkaAdmin(ledger.client).facts(free), most, None, int(time.time() * 1000), lambda t: bool(taken.fullmatch(t))
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
