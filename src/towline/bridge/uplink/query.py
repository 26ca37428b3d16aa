"""The query of a line from MQTT to Kafka: where it begins, and gateway → routes → Kafka."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.model import CONSUMER, Line
from towline.bridge.config.tables import BATCH_BYTES
from towline.bridge.lines.account import add_spark_counts, begin_totals
from towline.bridge.lines.evidence import (
    Evidence,
    awaited,
    gateway_status,
    places_of,
    read_checkpoint,
    status_of,
)
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.query import LineQuery
from towline.bridge.lines.recovery import CheckpointSettings, examine, problem, refusal
from towline.bridge.routes import to_json
from towline.bridge.uplink.inforce import KeptRoutes
from towline.bridge.uplink.sink import MESSAGES, RECORDS
from towline.bridge.uplink.statements import Statements
from towline.checkpoint import Checkpoint
from towline.gateway.access import is_remote
from towline.gateway.identity import is_other
from towline.guarantee import policy
from towline.kafka.markerstore import set_markers
from towline.kafka.options import SinkSettings
from towline.spark.offsets import JournalPlace, places_at

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from towline.gateway.access import Access
    from towline.gateway.client import GatewayClient


def gather(line: Line, access: Access, identity: Identity) -> tuple[Evidence, dict[str, Evidence]]:
    """Read a line's checkpoint and ask its gateways; those that are away are done without.

    A query without a checkpoint that begins behind what was carried needs the gateways it was carried from: each knows
    alone whether its journal is still the same.

    Returns:
        What the checkpoint says, whoever serves its journals; and the same with each gateway that answered, by name.

    Raises:
        GatewayError: None of the gateways that are needed answers.
    """
    seen, logs = read_checkpoint(line.checkpoint), Checkpoint(str(line.checkpoint))
    planned, done = places_at(logs, seen.planned), places_at(logs, seen.done)
    begun = identity.begins if seen.planned is None else ()
    where = places_of(line.gateways or [str(line.gateway.state_dir)], access)
    told = awaited(where, lambda client: _asked(client, planned or begun), every=bool(begun), own=not line.gateways)
    parts = {}
    for status, incarnation in told:
        place, behind = _own(planned, status), _own(done, status)
        parts[str(status["name"])] = replace(
            seen,
            journal=place.journal if place else "",
            planned_end=place.offset if place else 0,
            incarnation=place.incarnation if place else "",
            done_end=behind.offset if behind else None,
            gateway_journal=str(status["journal"]),
            committed=int(status["consumers"].get(CONSUMER, 0)),
            first=int(status["first"]),
            tip=int(status["end"]),
            written_by=incarnation,
        )
    return seen, parts


def belong(line: Line, file: Path | str, identity: Identity, parts: Mapping[str, Evidence]) -> None:
    """See that the checkpoint and the journal of each gateway that answered belong together.

    Raises:
        TowlineError: TL-B22 to TL-B25, TL-B50, TL-B52, TL-B53, with both ways out.
    """
    settings = CheckpointSettings.of(line, identity)
    for name, part in sorted(parts.items()):
        if reason := problem(identity, part, settings):
            code, what, way = reason
            raise refusal(line, file, code, f"gateway {name}: {what}" if line.gateways else what, way)


def beginnings(line: Line, identity: Identity, parts: Mapping[str, Evidence]) -> dict[str, int]:
    """The offsets where a query without a checkpoint begins, by gateway, when these say what they said."""
    # A line that begins again may have written the uncommitted rows already, and at_most_once doubles nothing.
    gives_up = not policy(line.guarantee).serves_again and identity.generation > 1
    starts = {}
    for name, part in parts.items():
        place = _of_journal(identity.begins, part.gateway_journal)
        starts[name] = part.tip if gives_up else max(part.first, part.committed)
        other = place and is_other(place.incarnation, part.written_by, place.offset, part.first)
        if place and not other and place.offset <= part.tip:
            starts[name] = max(place.offset, part.committed)
    return starts


def oldest_waiting(line: Line) -> float | None:
    """When the oldest message came that waits in the line's journal, in seconds since 1970; None where none waits.

    0 where that is not known: of gateways elsewhere, and of one that does not answer.
    """
    status = None if line.gateways else gateway_status(line.gateway.state_dir)
    return 0.0 if status is None else status.get("oldest")


def _asked(client: GatewayClient, places: Iterable[JournalPlace]) -> tuple[Mapping[str, Any], str]:
    status = status_of(client)
    place = _own(places, status)
    return status, client.incarnation(place.offset) if place else ""


def _own(places: Iterable[JournalPlace], status: Mapping[str, Any]) -> JournalPlace | None:
    """The place of a gateway: that of its journal, else that under its name, which is then another journal's."""
    named = next((place for place in places if place.gateway == status["name"]), None)
    return _of_journal(places, str(status["journal"])) or named


def _of_journal(places: Iterable[JournalPlace], journal: str) -> JournalPlace | None:
    return next((place for place in places if place.journal == journal), None)


_ARROW_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
#: The value with which Spark does not ask for the size of an Arrow batch after every row, which costs a fifth of its
#: work (`BatchedPythonArrowInput.writeSizedBatch`). Micro-batches are small enough: the gateway knows their size.
_UNLIMITED: Final = (1 << 31) - 1
#: Of Spark's state store: rows that it has dropped because one of their key had come before.
_REPEATS: Final = "numDroppedDuplicateRows"


class UplinkQuery(LineQuery[Line]):
    """The query of an uplink."""

    #: The batch that was begun before this start, and is served empty; None for none.
    _empty: int | None = None

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
        seen, parts = gather(line, access, former)
        belong(line, file, former, parts)
        identity = examine(line, file, former, seen, self._set_markers)
        new = seen.planned is None
        if identity.generation != former.generation:  # it begins anew behind what is done
            seen, parts = gather(line, access, identity)
        begin, again = beginnings(line, identity, parts), policy(line.guarantee).serves_again
        if new:
            first = [JournalPlace(name, one.gateway_journal, begin[name]) for name, one in parts.items()]
            begin_totals(line.checkpoint, first, gives_up=not again)
        elif seen.done is not None:
            begin_totals(line.checkpoint, places_at(Checkpoint(str(line.checkpoint)), seen.done), batch=seen.done)
        if not again and not seen.decided:
            self._empty = seen.planned
        return self._writer(self.source(spark, begin), identity), identity

    def _writer(self, rows: DataFrame, identity: Identity) -> DataStreamWriter:
        own = {
            "routes": self._routes,
            "letters": self.line.dead_letter_topic or "",
            "dedupes": str(self.line.within is not None).lower(),
            "empty": "" if self._empty is None else str(self._empty),
        }
        return self.prepared(rows).writeStream.format(RECORDS).options(**own, **self._sink_options(identity))

    def sink_settings(self) -> SinkSettings:
        """What the sink of the line's next start is told; no connection is made."""
        return SinkSettings.parse(self._sink_options(Identity.of(self.bridge, self.line)))

    def _sink_options(self, identity: Identity) -> dict[str, str]:
        keeps = self.line.dead_letter_topic and policy(self.line.guarantee).serves_again
        own = {"deadLetterTopic": str(self.line.dead_letter_topic)} if keeps else {}
        return {"guarantee": self.line.guarantee.value, **self.bridge.sink_options(self.line, identity.sink), **own}

    def _set_markers(self, identity: Identity, batch: int) -> None:
        """Make a batch the last one that the line's sink has written."""
        set_markers(SinkSettings.parse(self._sink_options(identity)), identity.sink, batch)

    def source(self, spark: SparkSession, begin: Mapping[str, int]) -> DataFrame:
        """The rows that the line's gateways give.

        Args:
            spark: The session.
            begin: By gateway, where a query without a checkpoint begins.
        """
        line, reader = self.line, spark.readStream.format(MESSAGES).option("writers", self.line.parallelism)
        if self._statements.needed:
            reader = reader.option("routes", self._routes).option("values", json.dumps(self._statements.values))
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

    def count_spark(self, progress: Mapping[str, Any]) -> None:
        """Count the rows that Spark dropped as repeats, or as late, beside those that the sink has not got."""
        if self.line.within is None:
            return
        operators = progress.get("stateOperators") or []
        late = sum(int(one.get("numRowsDroppedByWatermark") or 0) for one in operators)
        repeats = sum(int((one.get("customMetrics") or {}).get(_REPEATS) or 0) for one in operators)
        add_spark_counts(
            self.line.checkpoint,
            progress["batchId"],
            lambda sink: {"deduplicated": repeats, "late": late, "dropped": sink["dropped"]},
        )
