"""The query of a line from MQTT to Kafka: gateway → routes → Kafka."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.model import BATCH_BYTES, CONSUMER, Line
from towline.bridge.lines.evidence import places_at, read_checkpoint
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.query import LineQuery, source_of
from towline.bridge.lines.recovery import examine
from towline.bridge.routes import to_json
from towline.bridge.uplink.account import ranges_of
from towline.bridge.uplink.inforce import KeptRoutes
from towline.bridge.uplink.recovery import beginnings, belong, gather, offsets_of, oldest_waiting
from towline.bridge.uplink.sink import RECORDS
from towline.bridge.uplink.source import ROUTED, SLICES
from towline.bridge.uplink.statements import Statements
from towline.checkpoint import Checkpoint
from towline.gateway.access import is_remote
from towline.guarantee import policy
from towline.kafka.markers import BEFORE_FIRST
from towline.kafka.markerstore import set_markers
from towline.kafka.options import SinkSettings
from towline.spark import tally
from towline.spark.offsets import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from towline.bridge.lines.evidence import Evidence
    from towline.spark.offsets import JournalPlace

__all__ = ["UplinkQuery"]

_ARROW_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
#: The value with which Spark does not ask for the size of an Arrow batch after every row, which costs a fifth of its
#: work (`BatchedPythonArrowInput.writeSizedBatch`). Micro-batches are small enough: the gateway knows their size.
_UNLIMITED: Final = (1 << 31) - 1
#: Why messages are not given to the sink, as its note says it.
_LEFT_OUT: Final = ("filtered", "undecided", "unrouted")
#: Of a report of which nobody knows more than which offsets it is about.
_UNHEARD: Final[Mapping[str, Any]] = MappingProxyType({"rows": 0, "observed": {}, "gives_up": False, "known": False})
#: Of a report of a batch that was served empty.
_GIVEN_UP: Final[Mapping[str, Any]] = MappingProxyType({"rows": 0, "observed": {}, "gives_up": True, "known": True})
#: Of Spark's state store: rows that it has dropped because one of their key had come before.
_REPEATS: Final = "numDroppedDuplicateRows"


class UplinkQuery(LineQuery[Line]):
    """The query of an uplink."""

    #: By gateway, where a checkpoint without a batch begins, which Spark does not report of its first.
    _begun: Mapping[str, int] = MappingProxyType({})
    #: The same by journal; none where the checkpoint has batches.
    _first: Mapping[str, int] = MappingProxyType({})

    def ran_last(self) -> UplinkQuery:
        """By the routes of its last start.

        Raises:
            ConfigError: TL-C171, what they were can't be read.
        """
        former = KeptRoutes.read(self.line.gateway.state_dir)
        return self if former is None else UplinkQuery(self.bridge, former.applied(self.line))

    def in_force(self) -> UplinkQuery:
        """By these routes and the retired ones; before that the batch that was begun with others.

        Raises:
            ConfigError: TL-C171, what the routes were can't be read.
        """
        line, state_dir = self.line, self.line.gateway.state_dir  # the rules are those of `KeptRoutes`
        self._mended()
        decided = read_checkpoint(line.checkpoint).decided
        former = KeptRoutes.read(state_dir)
        oldest = oldest_waiting(line) if former is not None and former.retired else None
        kept = KeptRoutes.of(line, former, time.time(), oldest)
        query = self if kept.applied(line) == line else UplinkQuery(self.bridge, kept.applied(line))
        if former is not None and not decided and former.finishes(query.line):
            query = UplinkQuery(self.bridge, former.applied(line))
            query._finishes = True
            sys.stderr.write(f"--- line {line.name}\nthe batch that was begun is finished by the former routes\n")
        elif kept != former and (decided or former is None):
            kept.save(state_dir)  # before there is a batch that was begun so
        return query

    def _conf(self) -> dict[str, str]:
        limited = self.line.max_bytes_per_trigger > BATCH_BYTES
        return {_ARROW_BYTES: str(BATCH_BYTES if limited else _UNLIMITED)}

    def _prepared(self, spark: SparkSession) -> tuple[DataStreamWriter, Identity]:
        line, file, access = self.line, str(self.bridge.file), self.bridge.gateway.access()
        former = Identity.of(self.bridge, line)
        seen = gather(line, access, former)
        belong(line, file, former, seen)
        identity = examine(line, file, former, seen.checkpoint, self._set_markers)
        new = seen.checkpoint.planned is None
        if identity.generation != former.generation:  # it begins anew behind what is done
            seen = gather(line, access, identity)
        begin = beginnings(line, identity, seen)
        self._begun = offsets_of(begin, seen)
        self._first = {one.gateway_journal: self._begun[name] for name, one in seen.parts.items()} if new else {}
        self._note_begun(seen.checkpoint)
        return self._writer(self.source(spark, begin), identity), identity

    def _note_begun(self, evidence: Evidence) -> None:
        """Note whether a batch that was begun is served again or empty."""
        if evidence.planned is not None and not evidence.decided:
            again = policy(self.line.guarantee).serves_again
            tally.note_empty(Checkpoint(str(self.line.checkpoint)), evidence.planned, empty=not again)

    def _writer(self, rows: DataFrame, identity: Identity) -> DataStreamWriter:
        letters = self.line.dead_letter_topic or ""
        writer = (
            self.prepared(rows).writeStream.format(RECORDS).option("routes", self._routes).option("letters", letters)
        )
        return writer.options(**self._guaranteed_sink(identity))

    def _guaranteed_sink(self, identity: Identity) -> dict[str, str]:
        return {"guarantee": self.line.guarantee.value, **self._sink_options(identity)}

    def sink_settings(self) -> SinkSettings:
        """What the sink of the line's next start is told; no connection is made."""
        return SinkSettings.parse(self._guaranteed_sink(Identity.of(self.bridge, self.line)))

    def _sink_options(self, identity: Identity) -> dict[str, str]:
        keeps = self.line.dead_letter_topic and policy(self.line.guarantee).serves_again
        own = {"deadLetterTopic": str(self.line.dead_letter_topic)} if keeps else {}
        return self.bridge.sink_options(self.line, identity.sink) | own

    def _set_markers(self, identity: Identity, batch: int) -> None:
        """Make a batch the last one that the line's sink has written."""
        set_markers(SinkSettings.parse(self._sink_options(identity)), identity.sink, batch)

    def source(self, spark: SparkSession, begin: Mapping[str, str | int]) -> DataFrame:
        """The rows that the line's gateways give.

        Args:
            spark: The session.
            begin: By gateway, where a query without a checkpoint begins.
        """
        line, reader = self.line, spark.readStream.format(SLICES).option("writers", self.line.parallelism)
        if self._statements.needed:
            reader = spark.readStream.format(ROUTED).option("routes", self._routes)
            reader = reader.option("values", json.dumps(self._statements.values))
        return (
            reader.options(**self._gateway_options())
            .option("consumer", CONSUMER)
            .option("guarantee", line.guarantee.value)
            .option("maxMessagesPerTrigger", line.max_messages_per_trigger)
            .option("maxBytesPerTrigger", line.max_bytes_per_trigger)
            .option("maxTriggerDelayMs", line.max_trigger_delay_ms)
            .option("startingOffset", json.dumps(begin) if line.gateways else str(*begin.values()))
            .option("checkpointLocation", str(line.checkpoint))
            .option("eventTime", str(line.within is not None).lower())
            .load()
        )

    def _gateway_options(self) -> dict[str, str]:
        """How Spark finds the line's gateway, or its gateways elsewhere."""
        line = self.line
        if not line.gateways:
            return super()._gateway_options()
        remote = any(map(is_remote, line.gateways))
        removed = {"removedGateways": ",".join(line.removed_gateways)} if line.removed_gateways else {}
        known = self.bridge.gateway.options() if remote else {}
        return {"gateways": json.dumps(line.gateways), **removed, **known}

    def prepared(self, rows: DataFrame) -> DataFrame:
        """What the task that writes gets: the slices, or rows with what the line's SQL says of them."""
        if not self._statements.needed:
            return rows
        return self._statements.applied(rows, tolerant=self.line.dead_letter_topic is not None)

    @cached_property
    def _statements(self) -> Statements:
        line = self.line
        return Statements(line.routes, line.within, line.parallelism)

    @cached_property
    def _routes(self) -> str:
        return to_json(self.line.routes)

    def unreported(self, counts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Reports on the batches that are done: offsets say their rows, the sink knows its dead letters.

        One on all of them, and before that one on each that was served empty: its rows are given up.
        """
        line = self.line
        identity = Identity.read(line.gateway.state_dir)
        evidence = read_checkpoint(line.checkpoint)
        if identity is None or identity.query != evidence.query:
            return  # another line's batches
        yield from self._passed_over(identity, counts)
        if evidence.done is None:
            return
        report, logs = {"query": evidence.query, **_UNHEARD}, Checkpoint(str(line.checkpoint))
        for batch in tally.served_empty(logs):
            if batch <= evidence.done and (ends := places_at(logs, batch)):
                begun = places_at(logs, batch - 1) if batch else identity.begins or _at_zero(line, ends)
                yield self._with_the_sink({**report, **_GIVEN_UP, "batch": batch, **ranges_of(begun, ends)})
        if ends := places_at(logs, evidence.done):
            yield self._with_the_sink({**report, "batch": evidence.done, **ranges_of((), ends)})

    def _passed_over(self, identity: Identity, counts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What a line that began again has not counted and does not read any more: given up, or carried before."""
        known = {journal: upto for journal, (_, upto) in counts.get("spans", {}).items()}
        left = {one.journal: (known.get(one.journal, one.offset), one.offset) for one in identity.begins}
        if spans := {journal: span for journal, span in left.items() if span[0] < span[1]}:
            gives_up = not policy(self.line.guarantee).serves_again
            yield {"query": "", "batch": BEFORE_FIRST, "spans": spans, **_UNHEARD, "gives_up": gives_up}

    def begun(self) -> dict[str, Any] | None:
        """Where the first batch of a checkpoint begins: that is where counting begins."""
        spans = {journal: (offset, offset) for journal, offset in self._first.items()}
        return {"query": "", "batch": BEFORE_FIRST, "spans": spans, **_UNHEARD} if spans else None

    def report(self, progress: Mapping[str, Any]) -> dict[str, Any]:
        """What the account takes of a batch: its range of each journal, and why rows did not come to the sink."""
        report, source = super().report(progress), source_of(progress)
        begin, end = _places(source.get("startOffset")), _places(source.get("endOffset"))
        if source.get("startOffset") is None:
            begin = tuple(replace(place, offset=self._begun.get(place.gateway, place.offset)) for place in end)
        ranges = ranges_of(begin, end)
        rows = self._messages(report["rows"], sum(upto - start for start, upto in ranges["spans"].values()))
        return self._with_the_sink(self._with_left_out({**report, **ranges, "rows": rows}, progress))

    def _messages(self, rows: int, offsets: int) -> int:
        """How many messages a batch had: what Spark counted, as far as that says it (`LineQuery.report`).

        A slice is one row. A task that ran again gave the same rows, all there are, or the batch has failed (TL-G62):
        so more rows than offsets are as many as offsets.
        """
        return min(rows, offsets) if self._statements.needed or not rows else offsets

    def _with_left_out(self, report: dict[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
        """A report that says why rows did not come to the sink, which knows how many did."""
        checkpoint, batch, rows = Checkpoint(str(self.line.checkpoint)), report["batch"], report["rows"]
        given = tally.given_at(checkpoint, batch) if rows else 0
        if given is None:  # as a batch that nobody heard of
            return {**report, **_UNHEARD}
        operators = progress.get("stateOperators") or []
        late = sum(int(one.get("numRowsDroppedByWatermark") or 0) for one in operators)
        repeats = sum(int((one.get("customMetrics") or {}).get(_REPEATS) or 0) for one in operators)
        left = tally.left_out_at(checkpoint, batch) if rows else {}
        missing = sum(count for why, count in left.items() if why in _LEFT_OUT)
        astray = rows - given - late - repeats - missing
        return {**report, "observed": {**left, "deduplicated": repeats, "late": late, "astray": astray}}

    @cached_property
    def _reasons(self) -> list[str]:
        """Why rows may not come to the sink."""
        line = self.line
        asks = any(route.where is not None for route in line.routes)
        possible = {
            "filtered": asks,
            "undecided": asks,
            # A topic that no route takes may come of a subscription that the line has given up since.
            "unrouted": line.dead_letter_topic is None,
            "deduplicated": line.within is not None,
        }
        return [reason for reason, may in possible.items() if may]

    def _with_the_sink(self, report: dict[str, Any]) -> dict[str, Any]:
        """A report with the sink's own word: what became of its rows, and its own count of dead letters.

        It knows those that Kafka would have refused, too.
        """
        given_up = [] if policy(self.line.guarantee).serves_again else ["skipped"]
        # Of several gateways nobody has told where the checkpoint began.
        begins = not self.line.gateways
        report = self._with_sums({**report, "reasons": [*self._reasons, *given_up]}, from_the_first=begins)
        if not self.line.dead_letter_topic:
            return report
        return {
            **report,
            "letters": tally.sum_at(Checkpoint(str(self.line.checkpoint)), report["batch"]),
        }


def _places(offset: Any) -> tuple[JournalPlace, ...]:
    """The places of a source offset; none where there is no offset."""
    return Position.parse(offset).places if isinstance(offset, dict) else ()


def _at_zero(line: Line, ends: Iterable[JournalPlace]) -> tuple[JournalPlace, ...]:
    """Where the first batch began at a gateway of the line's own; of several nobody knows who joined with it."""
    return () if line.gateways else tuple(replace(place, offset=0) for place in ends)
