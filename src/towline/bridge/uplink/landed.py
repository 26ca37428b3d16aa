"""The rows of a line whose inbox is in Kafka: read by Spark's own Kafka source, without the gateway.

What the checkpoint says is offsets of the landing topic. The account counts rows, whose numbers stand in the records;
between them lie the ends of transactions. How far the query is done its consumer group says
(`towline.landing.followers`), once the batch's entry in the commit log is on the disk [I5]: so the journal's owner
hears of it wherever it runs.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.kafka_source import java_client
from towline.bridge.config.model import CONSUMER
from towline.bridge.lines.evidence import Evidence, kafka_offsets, read_checkpoint
from towline.checkpoint import Checkpoint
from towline.errors import TowlineError
from towline.guarantee import policy
from towline.landing import followers, lookup
from towline.landing.place import LandingPlace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

    from towline.bridge.config.model import Bridge, Line
    from towline.bridge.lines.identity import Identity

__all__ = ["KEY_SCHEMA", "LandedRows", "columns", "place_of"]

#: The key of a row's record in Spark's words (`towline.landing.records`): bytes in base64, times in microseconds.
KEY_SCHEMA: Final = (
    "topic string, qos byte, retain boolean, duplicate boolean, content_type string, payload_is_utf8 boolean, "
    "response_topic string, correlation_data string, user_properties array<struct<key: string, value: string>>, "
    "message_expiry_seconds long, subscription_ids array<int>, received_at long, gateway string, offset long"
)
#: Ends of batches that are remembered: Spark tells of its last 100 again.
_KNOWN: Final = 1000
#: Columns of a row that are not in the key as they are.
_MADE: Final = {
    "payload": "value",
    "correlation_data": "unbase64(row.correlation_data)",
    "received_at": "timestamp_micros(row.received_at)",
}


def columns(names: list[str]) -> list[str]:
    """Spark SQL for the columns of a row, over ``row``, the parsed key, and ``value``."""
    return [f"{_MADE.get(name, f'row.{name}')} AS {name}" for name in names]


def place_of(line: Line) -> LandingPlace:
    """Where a line has its inbox in Kafka."""
    landing = line.gateway.landing
    assert landing is not None
    return LandingPlace(landing.client, landing.name or line.gateway.name, landing.partition)


class LandedRows:
    """Where the query of one line reads.

    Args:
        bridge: The file.
        line: With an inbox in Kafka.
    """

    def __init__(self, bridge: Bridge, line: Line) -> None:
        self._bridge, self._line, self._place = bridge, line, place_of(line)
        #: offset where a batch of this process ended -> how many rows lie before it: Spark tells of batches again, when
        #: what they had is removed
        self._ends: dict[int, int] = {}
        #: up to where the journal's owner was told
        self._said = -1
        #: rows with a QoS below this one are served once, and so not below this offset, where batches were begun before
        self._once_below = policy(line.guarantee).once_below
        self._fresh = 0

    @property
    def journal(self) -> str:
        """What the account calls the journal."""
        return self._place.topic

    def read(self, spark: SparkSession, identity: Identity, planned_end: int) -> DataFrame:
        """The rows as the ``mqtt`` source gives them, but for those that are never served twice.

        Args:
            spark: The session.
            identity: Of the line.
            planned_end: Where the batch ends that was begun last.
        """
        from towline.schema import ROW_SCHEMA  # noqa: PLC0415 - pyarrow is needed by now

        options = {
            **{f"kafka.{name}": value for name, value in java_client(self._bridge.kafka.client()).items()},
            "kafka.isolation.level": "read_committed",
            "assign": json.dumps({self._place.topic: [self._place.partition]}),
            "startingOffsets": self._starting(identity),
            "failOnDataLoss": "true",
            "maxOffsetsPerTrigger": str(self._line.max_messages_per_trigger),
            "groupIdPrefix": f"towline-{self._bridge.name}-{self._line.name}",
        }
        records = spark.readStream.format("kafka").options(**options).load()
        self._fresh, once_below = max(planned_end, identity.handed), self._once_below
        again = f"offset >= {self._fresh} OR row.qos >= {once_below}" if once_below else "true"
        parsed = f"from_json(CAST(key AS STRING), '{KEY_SCHEMA}', map('mode', 'FAILFAST')) AS row"
        rows = records.selectExpr(parsed, "value", "offset").where(again)
        return rows.selectExpr(*columns(ROW_SCHEMA.names))

    def _begin(self, batch: int) -> int | None:
        """The offset where a batch begins; the first one where the query began."""
        return self._offset(kafka_offsets(self._line.checkpoint, batch - 1 if batch else None))

    def rows_of(self, batch: int) -> tuple[int, int]:
        """The rows of a batch, from the first to the one after the last; 0 and 0 for what is not there any more."""
        begin, end = self._begin(batch), self._end(batch)
        if begin is None or end is None:
            return 0, 0
        try:
            return self.row_of(begin), self.row_of(end)
        except TowlineError:
            return 0, 0

    def _starting(self, identity: Identity) -> str:
        """Where a query without a checkpoint begins: where its former one stood, or behind what is done."""
        if identity.offsets:
            return identity.offsets
        done = lookup.done_before(self._place, CONSUMER)
        return "earliest" if done is None else json.dumps({self._place.topic: {str(self._place.partition): done}})

    def evidence(self) -> Evidence:
        """What the checkpoint and Kafka say, in offsets of the landing partition.

        Raises:
            KafkaError: TL-K01.
            JournalError: As `towline.landing.lookup.done_before`.
        """
        seen = read_checkpoint(self._line.checkpoint)
        first, end = lookup.bounds(self._place)
        done = lookup.done_before(self._place, CONSUMER)
        planned_end, done_end = self._end(seen.planned), self._end(seen.done)
        if done_end is not None:  # it may have ended before it could say so
            Checkpoint(str(self._line.checkpoint)).sync()
            self._say(done_end)
        return replace(
            seen,
            journal=self.journal if seen.planned is not None else "",
            planned_end=planned_end or 0,
            done_end=done_end,
            gateway_journal=self.journal,
            committed=done or 0,
            first=first,
            tip=end,
        )

    def _end(self, batch: int | None) -> int | None:
        return None if batch is None else self._offset(kafka_offsets(self._line.checkpoint, batch))

    def _offset(self, place: Any) -> int | None:
        """The offset of the landing partition in one of Spark's offsets."""
        own = place.get(self._place.topic) if isinstance(place, dict) else None
        offset = own.get(str(self._place.partition)) if isinstance(own, dict) else None
        return offset if isinstance(offset, int) else None

    def done(self, source: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """A batch is in the commit log: say so to the journal's owner, and tell the account which rows it had.

        Args:
            source: What Spark's progress says of its source.
            rows: How many rows the batch had; those that are not served again are among them, unless the line counts
                its rows behind the source (``parallelism``).
        """
        begin, end = self._offset(source.get("startOffset")), self._offset(source.get("endOffset"))
        counted: dict[str, Any] = {"journal": self.journal, "start": None, "end": None}
        if end is None:
            return counted
        with self._told():  # the account tells what nobody counted
            counted = self._counted(begin, end, rows)
        # Not before: the owner may remove the rows then.
        with self._told():  # the next batch says it too
            if end > self._said:
                Checkpoint(str(self._line.checkpoint)).sync()
                self._say(end)
        return counted

    def _counted(self, begin: int | None, end: int, rows: int) -> dict[str, Any]:
        left_out = self._left_out(begin, end)
        rows += left_out if self._line.parallelism > 1 else 0
        if end not in self._ends:
            self._ends[end] = self.row_of(end) if begin is None else self.row_of(begin) + rows
        while len(self._ends) > _KNOWN:
            del self._ends[next(iter(self._ends))]
        last = self._ends[end]
        return {"journal": self.journal, "start": last - rows, "end": last, "rows": rows - left_out}

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Write down what Kafka did not do."""
        try:
            yield
        except TowlineError as error:
            sys.stderr.write(f"--- line {self._line.name}\n{error}\n")

    def _left_out(self, begin: int | None, end: int) -> int:
        """How many rows of a batch are not served again; Spark does not say where the first one begins."""
        if begin is None:
            begin = self._offset(kafka_offsets(self._line.checkpoint, None)) or 0
        upto = min(end, self._fresh) if self._once_below else 0
        return lookup.count_below(self._place, begin, upto, self._once_below) if begin < upto else 0

    def handed_once(self, batch: int) -> int:
        """How many rows of a batch are never served twice.

        Raises:
            TowlineError: As `towline.landing.lookup.count_below`.
        """
        begin, end = self._begin(batch) or 0, self._end(batch) or 0
        return lookup.count_below(self._place, begin, end, self._once_below)

    def _say(self, offset: int) -> None:
        followers.commit(self._place, CONSUMER, offset)
        self._said = max(self._said, offset)

    def row_of(self, offset: int) -> int:
        """How many rows lie before an offset.

        Raises:
            KafkaError: TL-K01.
            JournalError: TL-J07 those behind it were removed, TL-J33 there was never such an offset.
        """
        known = self._ends.get(offset)
        return lookup.row_at(self._place, offset) if known is None else known
