"""The query of a line from MQTT to Kafka: gateway → routes → Kafka."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.model import BATCH_BYTES, CONSUMER, Line
from towline.bridge.lines.evidence import read_checkpoint
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.notes import add_spark_counts, begin_totals
from towline.bridge.lines.query import LineQuery
from towline.bridge.lines.recovery import examine
from towline.bridge.routes import to_json
from towline.bridge.uplink.inforce import KeptRoutes
from towline.bridge.uplink.recovery import beginnings, belong, gather, offsets_of, oldest_waiting
from towline.bridge.uplink.sink import RECORDS
from towline.bridge.uplink.source import ROUTED, SLICES
from towline.bridge.uplink.statements import Statements
from towline.checkpoint import Checkpoint
from towline.gateway.access import is_remote
from towline.guarantee import policy
from towline.kafka.markerstore import set_markers
from towline.kafka.options import SinkSettings
from towline.spark.offsets import JournalPlace, places_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


__all__ = ["UplinkQuery"]

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
        seen = gather(line, access, former)
        belong(line, file, former, seen)
        identity = examine(line, file, former, seen.checkpoint, self._set_markers)
        new = seen.checkpoint.planned is None
        if identity.generation != former.generation:  # it begins anew behind what is done
            seen = gather(line, access, identity)
        begin, again = offsets_of(beginnings(line, identity, seen), seen), policy(line.guarantee).serves_again
        done = seen.checkpoint.done
        if new:
            first = [JournalPlace(name, one.gateway_journal, begin[name]) for name, one in seen.parts.items()]
            begin_totals(line.checkpoint, first, gives_up=not again)
        elif done is not None:
            begin_totals(line.checkpoint, places_at(Checkpoint(str(line.checkpoint)), done), batch=done)
        if not again and not seen.checkpoint.decided:
            self._empty = seen.checkpoint.planned
        return self._writer(self.source(spark, begin), identity), identity

    def _writer(self, rows: DataFrame, identity: Identity) -> DataStreamWriter:
        own = {
            "routes": self._routes,
            "letters": self.line.dead_letter_topic or "",
            "dedupes": str(self.line.within is not None).lower(),
            "empty": "" if self._empty is None else str(self._empty),
        }
        return self.prepared(rows).writeStream.format(RECORDS).options(**own, **self._guaranteed_sink(identity))

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

    def source(self, spark: SparkSession, begin: Mapping[str, int]) -> DataFrame:
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
