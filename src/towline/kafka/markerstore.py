"""Store of a sink's markers: a compacted topic with one partition per partition of the sink.

Each sink has its own topic, because the reader goes to the last stable offset: another sink's open transaction in the
same partition would block it. Read with read_committed, after `init_transactions` [I9], and from the leader: the reader
asks for the end offset (ListOffsets), and repeats until it has read up to there. The end offset of a lagging follower
would show the marker before the last one, and the last batch would be written twice.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from towline.errors import KafkaError
from towline.kafka import faults, recordcheck
from towline.kafka.admin import KafkaAdmin, wait_until, watermarks
from towline.kafka.clientconfig import connect, pooled_client
from towline.kafka.markers import NO_BATCH, Marker
from towline.kafka.options import FORMAT
from towline.kafka.producers import AttemptError, TransactionalProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from towline.kafka.admin import TopicLimits
    from towline.kafka.markers import MarkerVerdict
    from towline.kafka.options import SinkSettings
    from towline.sinks import Task

#: Records from the end that the first scan reads: a marker, the control records of its transaction, and some more.
_FIRST_SCAN: Final = 16
#: Settings of a consumer of markers, or of dead letters; it commits nothing.
READER_CONFIG: Final[Mapping[str, Any]] = {
    # Kafka may send a consumer with a rack to a follower, whose end offset lags behind the leader's (KIP-392).
    "client.rack": "",
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "earliest",  # where retention deletes records meanwhile, read on behind them
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 1,  # the end of the partition is an empty fetch, which Kafka answers after this
}
#: Settings of the marker topic: small segments, so that a reader after months still starts near the end.
_TOPIC_CONFIG: Final = {"cleanup.policy": "compact", "segment.bytes": str(16 << 20)}


class MarkerStore:
    """Reader of a sink's markers; `TransactionalProducer.write_marker` writes them."""

    def __init__(self, settings: SinkSettings, sink_id: str) -> None:
        self._settings = settings
        self.sink_id = sink_id
        self.topic = settings.marker_topic_of(sink_id)
        self.admin = KafkaAdmin(settings.client, settings.timeout_s)

    def key(self, partition: int) -> str:
        """Return the record key of a partition's marker."""
        return f"{self.sink_id}/{partition}"

    @property
    def command_options(self) -> str:
        """Options of ``towline kafka marker`` for this sink."""
        options, prefix = f"--kafka {self._settings.servers} --sink {self.sink_id}", self._settings.prefix
        return options if prefix == "towline" else f"{options} --prefix {prefix}"

    def mismatch_error(self, verdict: MarkerVerdict, marker: Marker | None, task: Task) -> KafkaError:
        """Return the error of a marker that forbids to write: TL-K10 to TL-K18."""
        marker, to = marker or Marker(NO_BATCH, 1, writer="unknown"), (task.batch or 0) - 1
        sink: dict[str, Any] = {"topic": self.topic, "command": self.command_options, "n": self._settings.parallelism}
        values = {**sink, "m": marker, "t": task, "after": marker.batch + 1, "to": to}
        code, problem, remedy = verdict.value
        return KafkaError(code, self._location, problem.format(**values), remedy.format(**values))

    def changed_rows_error(self, marker: Marker, rows: int, task: Task) -> KafkaError:
        """Return TL-K16: the replay of a batch has other rows than the batch in Kafka."""
        comparison = "but not the same" if rows == marker.rows else f"{marker.rows:,} were written"
        row_counts = f"partition {task.partition}: {rows:,} rows, {comparison}"
        problem = f"batch {task.batch} is in Kafka, and its replay brings other rows ({row_counts})"
        remedy = (
            "Run one query on a checkpoint, not two copies of it; use the same program, a source that serves the same "
            "rows for the same offsets, and no rand(); or accept what was written: verifyOnSkip=false, once."
        )
        return KafkaError("TL-K16", self._location, problem, remedy)

    @property
    def _location(self) -> str:
        return f"sink {self.sink_id} on {self._settings.servers}"

    def ensure_topic(self) -> None:
        """Check that the marker topic exists and is compacted; create it if it is missing.

        Raises:
            KafkaError: TL-K22 missing, not compacted or too few partitions; TL-K09 it can't be created; TL-K01.
        """
        limits, partitions = self._topic_limits(), self._settings.parallelism
        if limits is None:
            self.admin.create({self.topic: partitions}, config=_TOPIC_CONFIG)
            # In a cluster the next broker may not know the topic yet.
            limits = wait_until(self._topic_limits, self._settings.timeout_s, pause_s=0.1)
        if limits is None:
            problem = "does not exist, or this user may not see it"
        elif limits.partitions < partitions or limits.cleanup_policy.strip() not in ("", "compact"):
            problem = f"has {limits.partitions} partitions and cleanup.policy={limits.cleanup_policy}"
        else:
            return
        command = f"kafka-topics.sh --bootstrap-server {self._settings.servers} --create --topic {self.topic}"
        remedy = f"Markers need {partitions} at least, and compact alone: {command} --partitions {partitions}"
        problem = f'the marker topic "{self.topic}" {problem}'
        raise self._unusable_error(problem, f"{remedy} --config cleanup.policy=compact")

    def _topic_limits(self) -> TopicLimits | None:
        return recordcheck.topic_limits(self._settings, [self.topic]).get(self.topic)

    def _unusable_error(self, problem: str, remedy: str) -> KafkaError:
        recordcheck.forget_limits(self._settings)  # the operator changes them now
        return KafkaError("TL-K22", self._settings.servers, problem, remedy)

    def read_marker(self, partition: int, *, ignore_damaged: bool = False) -> Marker | None:
        """Return the last committed marker of a partition; None if there is none.

        With `ignore_damaged`, a marker that can't be decoded counts as none.

        Raises:
            KafkaError: TL-K01 no answer in time, TL-K22 it can't be read or decoded, TL-K27 the log ends before its
                leader's end offset, or before an end offset seen earlier.
        """
        tp = TopicPartition(self.topic, partition)
        started_at = time.monotonic()
        try:
            # One per process: a new connection for every batch would cost 10 ms.
            with pooled_client(_consumers, frozenset(self._settings.client.items()), self._new_consumer) as consumer:
                value = self._last_value(consumer, tp)
                consumer.unassign()  # else it would go on fetching between batches
        except faults.CLIENT_ERRORS as error:
            waited_s, reason = time.monotonic() - started_at, faults.error_text(error)
            raise faults.unreachable_error(self._settings.servers, waited_s, reason, rows=True) from None
        try:
            return None if value is None else Marker.from_json(value)
        except ValueError as error:
            if ignore_damaged:
                return None
            problem = f'the marker "{self.key(partition)}" in "{self.topic}" can not be understood: {error}'
            remedy = "Let nothing else write to that topic; a newer Towline reads newer markers."
            raise self._unusable_error(problem, remedy) from None

    def _new_consumer(self) -> Any:
        """Create a consumer of markers; it joins no group and commits nothing."""
        config = {**READER_CONFIG, "group.id": f"towline-{uuid.uuid4()}", "error_cb": lambda _error: None}
        return connect(Consumer, self._settings.client, config, FORMAT)

    def _last_value(self, consumer: Any, tp: TopicPartition) -> bytes | None:
        """Return the value of the partition's last marker, scanning ever further back from the last stable offset."""
        deadline = time.monotonic() + self._settings.timeout_s
        # Asks the leader for the last stable offset: librdkafka sends its isolation level in ListOffsets (KIP-98).
        low, high = watermarks(consumer, tp, self._settings.timeout_s)
        end_key = (self._settings.servers, self.topic, tp.partition)
        if high < _highest_ends.get(end_key, 0):
            raise self._truncated_error(tp, f"ends at {high}, and ended at {_highest_ends[end_key]} before")
        _highest_ends[end_key] = high
        scan_records = _FIRST_SCAN
        while high > low:
            start = max(low, high - scan_records)
            value = self._scan(consumer, tp, (start, high), deadline)
            if value is not None or start == low:
                return value
            scan_records *= 16
        return None

    def _scan(self, consumer: Any, tp: TopicPartition, offset_range: tuple[int, int], deadline: float) -> bytes | None:
        """Return the last value of the marker key in an offset range up to the leader's end; None if there is none."""
        start, leader_end = offset_range
        end = start
        key = self.key(tp.partition).encode()
        value: bytes | None = None
        consumer.assign([TopicPartition(tp.topic, tp.partition, start)])
        while True:
            message = consumer.poll(0.5)
            if message is None:
                if time.monotonic() > deadline:
                    raise self._truncated_error(tp, f"could be read up to {end}, and its leader has {leader_end}")
                continue
            error = message.error()
            name = "" if error is None else error.name()
            end = max(end, message.offset() or 0) if name else message.offset()
            if name == "_PARTITION_EOF" and end >= leader_end:  # else a lagging follower answered: the rest is to come
                return value
            # librdkafka looks up the coordinator of the group, though nobody joins it or commits to it.
            if name not in {"", "_PARTITION_EOF", "GROUP_AUTHORIZATION_FAILED"}:
                raise KafkaException(error)
            if not name and message.key() == key:
                value = message.value() or value

    def _truncated_error(self, tp: TopicPartition, detail: str) -> KafkaError:
        """Return TL-K27: the log is shorter than expected, so the last marker is not certain."""
        problem = f'partition {tp.partition} of the marker topic "{self.topic}" {detail}'
        remedy = "If it stays: was there an unclean leader election? If the topic was recreated, restart the process."
        return KafkaError("TL-K27", self._settings.servers, problem, remedy)

    def read_markers(self) -> dict[int, Marker | None]:
        """Return the markers of all partitions of the topic, empty if it does not exist; raises as `read_marker`."""
        count = self.admin.info().topics.get(self.topic, 0)
        return {partition: self.read_marker(partition) for partition in range(count)}

    def rewrite(
        self, partition: int, revise: Callable[[Marker | None], Marker], *, ignore_damaged: bool = False
    ) -> Marker:
        """Write a marker in a separate transaction; fences older producers of the partition first.

        Args:
            partition: Partition of the sink.
            revise: Returns the new marker for the last one; called when the transactions of older producers are decided
                [I9].
            ignore_damaged: As for `read_marker`.

        Raises:
            KafkaError: As `read_marker`; TL-K20, TL-K21; errors of ``revise``, and then nothing is written.
        """
        producer = TransactionalProducer(self._settings, self._settings.transactional_id(self.sink_id, partition))
        try:
            marker = revise(self.read_marker(partition, ignore_damaged=ignore_damaged))
            producer.begin()
            producer.write_marker(self.topic, partition, self.key(partition), marker)
            producer.commit()
        except AttemptError as error:
            raise error.final_error from None
        finally:
            producer.close()
        return marker

    def reset(self, batch: int) -> dict[int, Marker]:
        """Set the marker of every partition by hand; a query that still runs is fenced, and stops.

        Args:
            batch: The batch that is to count as written; -1 for "none yet".

        Returns:
            The new markers by partition of the sink. Totals are kept, except those of a marker that can't be decoded.

        Raises:
            KafkaError: TL-K01, TL-K20, TL-K22; the partitions before the failing one are set.
        """
        self.ensure_topic()
        count = self._settings.parallelism

        def reset_marker(previous: Marker | None) -> Marker:
            return Marker(batch, count).with_totals_after(previous)

        markers = {partition: self.rewrite(partition, reset_marker, ignore_damaged=True) for partition in range(count)}
        self.admin.wait_for_open_transactions(self.topic)  # the next reader sees the new markers
        return markers


#: Servers, topic and partition -> the highest end offset seen by this process: a committed record never vanishes.
_highest_ends: Final[dict[tuple[str, str, int], int]] = {}
#: Process id and client configuration -> consumer.
_consumers: Final[dict[tuple[int, Any], Any]] = {}
