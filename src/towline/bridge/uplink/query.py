"""The query of a line from MQTT to Kafka: gateway → routes → Kafka."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.model import BATCH_BYTES, Line
from towline.bridge.lines.evidence import range_of, read_checkpoint
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.query import COUNTER, KEPT_COUNTER, LineQuery, source_of
from towline.bridge.lines.recovery import examine
from towline.bridge.uplink.counting import COUNTS, reasons
from towline.bridge.uplink.packing import plain_routes
from towline.bridge.uplink.recovery import gather, handed_out, offset_of, starting
from towline.bridge.uplink.source import FORMAT
from towline.bridge.uplink.sql import Repeats, apply
from towline.checkpoint import Checkpoint
from towline.guarantee import Guarantee, policy
from towline.kafka.options import SinkSettings
from towline.kafka.resetting import set_markers
from towline.spark import tally

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = ["CONSUMER", "UplinkQuery"]

#: Name under which the bridge reads a gateway.
CONSUMER: Final = "bridge"


_ARROW_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
#: The value with which Spark does not ask for the size of an Arrow batch after every row, which costs a fifth of its
#: work (`BatchedPythonArrowInput.writeSizedBatch`). Micro-batches are small enough: the gateway knows their size.
_UNLIMITED: Final = (1 << 31) - 1
#: With records packed, rows are few and large, and the sink begins with the first before the last is read.
PACKED_BYTES: Final = 1 << 20


class UplinkQuery(LineQuery[Line]):
    """The query of an uplink."""

    #: Where a checkpoint without a batch begins, which Spark does not report of its first; None before the start.
    _began: int | None = None

    def _conf(self) -> dict[str, str]:
        limited = self.line.max_bytes_per_trigger > BATCH_BYTES
        most = PACKED_BYTES if self._packs else BATCH_BYTES if limited else _UNLIMITED
        return {_ARROW_BYTES: str(most)}

    def _prepared(self, spark: SparkSession) -> tuple[DataStreamWriter, Identity]:
        line, identity = self.line, self._identity()
        evidence = gather(line, CONSUMER, identity)
        identity = examine(line, self.bridge.file, identity, evidence, self._set_markers)
        handed = handed_out(identity, evidence)
        if handed != identity.handed:
            identity = replace(identity, handed=handed)
            identity.save(line.gateway.state_dir)  # the next start finds a checkpoint, and asks for the same
        begin = starting(line, identity, evidence)
        self._began = offset_of(begin, evidence)
        if evidence.planned is not None and not evidence.decided and policy(line.guarantee).gives_up:
            tally.begun_before(Checkpoint(str(line.checkpoint)), evidence.planned)
        rows = self.source(spark, begin, handed)
        writer = (
            self.records(rows, identity)
            .writeStream.format("kafka_transactional")
            .option("guarantee", line.guarantee.value)
            .options(**self._sink_options(identity))
        )
        return writer, identity

    def _sink_options(self, identity: Identity) -> dict[str, str]:
        own = {"deadLetterTopic": str(self.line.dead_letter_topic)} if self._sink_counts() else {}
        return super()._sink_options(identity) | own

    def _sink_counts(self) -> bool:
        """Whether the sink writes dead letters, and alone counts them: at_most_once gives up what Kafka refuses."""
        return bool(self.line.dead_letter_topic) and policy(self.line.guarantee).serves_again

    def _set_markers(self, identity: Identity, batch: int) -> None:
        """Make a batch the last one that the line's sink has written.

        Raises:
            KafkaError: As `towline.kafka.resetting.set_markers`.
        """
        set_markers(SinkSettings.parse(self._sink_options(identity)), identity.sink, batch)

    def source(self, spark: SparkSession, begin: str, handed: int = 0) -> DataFrame:
        """The rows that the line's gateway gives.

        Args:
            spark: The session.
            begin: Where a query without a checkpoint begins, as the source's option ``startingOffset``.
            handed: Offset below which rows may have been handed to Kafka before, as its option ``repeatedBelow``.
        """
        line, routes = self.line, self._packs
        reader = spark.readStream.format("mqtt")
        if routes:
            reader = spark.readStream.format(FORMAT).option("routes", routes)
            reader = reader.option("signed", str(self._sink_counts()).lower())
        return (
            reader.options(**self._gateway_options())
            .option("consumer", CONSUMER)
            .option("guarantee", line.guarantee.value)
            .option("maxMessagesPerTrigger", line.max_messages_per_trigger)
            .option("maxBytesPerTrigger", line.max_bytes_per_trigger)
            .option("startingOffset", begin)
            .option("repeatedBelow", handed)
            .option("checkpointLocation", str(line.checkpoint))
            .option("eventTime", str(line.within is not None).lower())
            .load()
        )

    def records(self, rows: DataFrame, identity: Identity) -> DataFrame:
        """The records of the line: mapped, repeats dropped, in as many parts as it has writers."""
        line = self.line
        return apply(
            rows,
            line.routes,
            dead_letters=self._dead_letters(identity),
            repeats=Repeats(line.within, line.guarantee is Guarantee.EXACTLY_ONCE) if line.within else None,
            counters=(COUNTER, KEPT_COUNTER),
            sink_counts=self._sink_counts(),
            parallelism=line.parallelism,
            packed=self._packs is not None,
        )

    @cached_property
    def _packs(self) -> str | None:
        """Its routes, where most of its messages need no SQL."""
        return plain_routes(self.line)

    def unreported(self, spark: SparkSession, counts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Reports on the batches that are done: offsets say their rows, the sink knows its dead letters.

        One on all of them, and before that one on each that was run again without all of its rows: what it was not
        given is given up, and not in Kafka.
        """
        del spark, counts
        line = self.line
        identity, evidence = Identity.read(line.gateway.state_dir), read_checkpoint(line.checkpoint)
        if identity is None or identity.query != evidence.query or evidence.done is None or not evidence.done_end:
            return  # another line's batches, or none
        report = {"query": evidence.query, "journal": evidence.journal, "rows": 0, "observed": {}, "gives_up": False}
        checkpoint = Checkpoint(str(line.checkpoint))
        for batch in tally.run_again(checkpoint):
            given, (start, end) = tally.given_at(checkpoint, batch), range_of(checkpoint, batch)
            if batch <= evidence.done and given is not None and end:
                part = {"batch": batch, "start": start, "end": end, "rows": given, "gives_up": True}
                yield self._with_dead_letters({**report, **part})
        yield self._with_dead_letters({**report, "batch": evidence.done, "end": evidence.done_end})

    def report(self, progress: Mapping[str, Any]) -> dict[str, Any]:
        """What the account takes of a batch: journal and offsets, and repeats, which are rows that did not come out."""
        report, source = super().report(progress), source_of(progress)
        begin, end = _gateway_offset(source.get("startOffset")), _gateway_offset(source.get("endOffset"))
        start = begin.get("offset", self._began)
        report |= {"journal": end.get("journal", ""), "start": start, "end": end.get("offset")}
        if self._packs and start is not None:  # Spark counts rows, of which one may hold many messages
            report["rows"] = end.get("offset", start) - start
        return self._with_dead_letters(self._with_left_out(report, progress))

    def _with_left_out(self, report: dict[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
        """A report that says why rows did not come to the sink, which knows how many did."""
        line, rows = self.line, report["rows"]
        given = tally.given_at(Checkpoint(str(line.checkpoint)), report["batch"]) if rows else 0
        if given is None:  # as a batch that nobody heard of
            return {**report, "rows": 0, "observed": {}, "gives_up": False}
        observed: dict[str, int] = dict(report["observed"])
        late = sum(int(one.get("numRowsDroppedByWatermark") or 0) for one in progress.get("stateOperators") or [])
        left = rows - given - late - sum(observed.get(name, 0) for name in COUNTS)
        why = reasons(line.routes, dead_letters=line.dead_letter_topic is not None, repeats=line.within is not None)
        unknown = [name for name in why if name not in observed]
        named = {unknown[0]: left} if len(unknown) == 1 else {}
        return {**report, "observed": {**observed, **named, "late": late, "astray": left - sum(named.values())}}

    def _with_dead_letters(self, report: dict[str, Any]) -> dict[str, Any]:
        """A report with the sink's own count of dead letters: that knows those which Kafka would have refused, too."""
        if not self._sink_counts():
            return report
        observed = {name: count for name, count in report["observed"].items() if name != "dead_lettered"}
        dead_letters = tally.sum_at(Checkpoint(str(self.line.checkpoint)), report["batch"])
        return {**report, "observed": observed, "letters": dead_letters}


def _gateway_offset(place: Any) -> dict[str, Any]:
    """The one gateway's part of a source offset (`towline.spark.offsets`)."""
    gateways = place.get("gateways", {}) if isinstance(place, dict) else {}
    return next(iter(gateways.values()), {})
