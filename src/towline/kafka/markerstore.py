"""The compacted topic that keeps a sink's markers: one partition for each partition of the sink.

A topic of its own for each sink, because the reader goes to the last stable offset: another sink's open transaction on
the same partition would hold it up. Read with read_committed, after `init_transactions` [I9], and from the leader: its
end is asked for (ListOffsets), and a partition that reads back shorter has not been read. An end from elsewhere, such
as a follower's that lags, would show the marker before the last one, and the last batch would be written twice.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from towline.errors import KafkaError
from towline.kafka import faults, screening
from towline.kafka.admin import KafkaAdmin, comes, watermarks
from towline.kafka.clientconfig import connect, lent
from towline.kafka.markers import BEFORE_FIRST, Marker
from towline.kafka.options import FORMAT
from towline.kafka.producers import AttemptFailed, Transactional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from towline.kafka.admin import TopicFacts
    from towline.kafka.markers import Situation
    from towline.kafka.options import SinkSettings
    from towline.sinks import Task

#: Records looked at from the end in the first try: a marker, the control records of its transaction, and some more.
_BACK: Final = 16
#: What a reader of markers, or of dead letters, is told beside the client's settings; it commits nothing.
READER: Final[Mapping[str, Any]] = {
    # Kafka may send one that names its rack to a follower, whose end is behind the leader's (KIP-392).
    "client.rack": "",
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "earliest",  # what retention takes away meanwhile must not hide what follows
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 1,  # the end of the partition is an empty fetch, which Kafka answers after this
}
#: Settings of the marker topic: small segments, so that a reader after months still starts near the end.
_CONFIG: Final = {"cleanup.policy": "compact", "segment.bytes": str(16 << 20)}


class MarkerStore:
    """Reads a sink's markers; they are written by `Transactional.mark`."""

    def __init__(self, settings: SinkSettings, sink_id: str) -> None:
        self._settings = settings
        self.sink_id = sink_id
        self.topic = settings.markers_of(sink_id)
        self.cluster = KafkaAdmin(settings.client, settings.timeout_s)

    def key(self, partition: int) -> str:
        """Key of a partition's marker."""
        return f"{self.sink_id}/{partition}"

    @property
    def command(self) -> str:
        """How ``towline kafka marker`` is told where the markers are."""
        settings = self._settings
        command = f"--kafka {settings.servers} --sink {self.sink_id}"
        if self.topic != f"towline.{self.sink_id}.markers":
            command += f" --marker-topic {self.topic}"
        if settings.prefix != "towline":
            command += f" --prefix {settings.prefix}"
        return command

    def mismatch(self, found: Situation, marker: Marker | None, task: Task) -> KafkaError:
        """The error of a situation in which nothing is written: TL-K10 to TL-K18."""
        marker, to = marker or Marker(BEFORE_FIRST, 1, writer="unknown"), (task.batch or 0) - 1
        place: dict[str, Any] = {"topic": self.topic, "command": self.command, "n": self._settings.parallelism}
        words = {**place, "m": marker, "t": task, "after": marker.batch + 1, "to": to}
        code, what, do = found.value
        return KafkaError(code, self._where, what.format(**words), do.format(**words))

    def changed(self, marker: Marker, rows: int, task: Task) -> KafkaError:
        """TL-K16: a batch that is to be skipped has other rows than the one that was written."""
        versus = "but not the same" if rows == marker.rows else f"{marker.rows:,} were written"
        place = f"partition {task.partition}: {rows:,} rows, {versus}"
        what = f"batch {task.batch} is in Kafka, and its replay brings other rows ({place})"
        do = (
            "Run one query on a checkpoint, not two copies of it; use the same program, a source that serves the same "
            "rows for the same offsets, and no rand(); or accept what was written: verifyOnSkip=false, once."
        )
        return KafkaError("TL-K16", self._where, what, do)

    @property
    def _where(self) -> str:
        return f"sink {self.sink_id} on {self._settings.servers}"

    def ensure(self) -> None:
        """See that the topic is there and keeps its records; create it if that is wanted.

        Raises:
            KafkaError: TL-K22 missing, not compacted or too few partitions; TL-K09 it can't be created; TL-K01.
        """
        facts, wanted = self._facts(), self._settings.parallelism
        if facts is None and self._settings.create_marker_topic:
            self.cluster.create({self.topic: wanted}, config=_CONFIG)
            # In a cluster the next broker that is asked may not know it yet.
            facts = comes(self._facts, self._settings.timeout_s, pause_s=0.1)
        command = f"kafka-topics.sh --bootstrap-server {self._settings.servers}"
        if facts is None:
            what = f'the marker topic "{self.topic}" does not exist, or this user may not see it'
            do = f"Create it: {command} --create --topic {self.topic} --partitions {wanted}"
            raise self._unusable(what, f"{do} --config cleanup.policy=compact")
        if facts.policy and facts.policy.strip() != "compact":
            what = f'the marker topic "{self.topic}" has cleanup.policy={facts.policy}, which forgets markers'
            raise self._unusable(what, "Set it to compact.")
        if facts.partitions < wanted:
            what = f'the marker topic "{self.topic}" has {facts.partitions} partitions'
            do = f"{command} --alter --topic {self.topic} --partitions {wanted}"
            raise self._unusable(f"{what}, parallelism {wanted} needs as many", do)

    def _facts(self) -> TopicFacts | None:
        return screening.facts_of(self._settings, [self.topic]).get(self.topic)

    def _unusable(self, what: str, do: str) -> KafkaError:
        screening.forget(self._settings)  # a person mends it now
        return KafkaError("TL-K22", self._settings.servers, what, do)

    def read(self, partition: int, *, damaged: bool = False) -> Marker | None:
        """The last committed marker of a partition; None if there is none, or it was removed.

        Where one may be `damaged`, it is none if it can't be understood.

        Raises:
            KafkaError: TL-K01 no answer in time, TL-K22 it can't be read or understood, TL-K27 it ends before its
                leader's end, or before an end that was seen.
        """
        place = TopicPartition(self.topic, partition)
        began = time.monotonic()
        try:
            # One of the process: a new connection for every batch would cost 10 ms.
            with lent(_consumers, frozenset(self._settings.client.items()), self._consumer) as consumer:
                value = self._last(consumer, place)
                consumer.unassign()  # else it would go on fetching between batches
        except faults.FOREIGN as problem:
            waited, why = time.monotonic() - began, faults.reason(problem)
            raise faults.unreachable(self._settings.servers, waited, why, rows=True) from None
        try:
            return None if value is None else Marker.from_json(value)
        except ValueError as problem:
            if damaged:
                return None
            what = f'the marker "{self.key(partition)}" in "{self.topic}" can not be understood: {problem}'
            do = "Let nothing else write to that topic; a newer Towline reads newer markers."
            raise self._unusable(what, do) from None

    def _consumer(self) -> Any:
        """A reader of markers; it joins no group and commits nothing."""
        own = {**READER, "group.id": f"towline-{uuid.uuid4()}", "error_cb": lambda _error: None}
        return connect(Consumer, self._settings.client, own, FORMAT)

    def _last(self, consumer: Any, place: TopicPartition) -> bytes | None:
        """Value of the last record with our key, looking ever further back from the last stable offset."""
        deadline = time.monotonic() + self._settings.timeout_s
        # Asks the leader, for the last stable offset: librdkafka says its isolation level in ListOffsets (KIP-98).
        low, high = watermarks(consumer, place, self._settings.timeout_s)
        known = (self._settings.servers, self.topic, place.partition)
        if high < _ends.get(known, 0):
            raise self._short(place, f"ends at {high}, and ended at {_ends[known]} before")
        _ends[known] = high
        back = _BACK
        while high > low:
            start = max(low, high - back)
            found, value = self._scan(consumer, place, (start, high), deadline)
            if found or start == low:
                return value
            back *= 16
        return None

    def _scan(
        self, consumer: Any, place: TopicPartition, between: tuple[int, int], deadline: float
    ) -> tuple[bool, bytes | None]:
        """Whether our key is there from the first offset on, and its last value; complete at the leader's end only."""
        start, leaders_end = between
        end = start
        key = self.key(place.partition).encode()
        found, value = False, None
        consumer.assign([TopicPartition(place.topic, place.partition, start)])
        while True:
            message = consumer.poll(0.5)
            if message is None:
                if time.monotonic() > deadline:
                    raise self._short(place, f"could be read up to {end}, and its leader has {leaders_end}")
                continue
            error = message.error()
            name = "" if error is None else error.name()
            end = max(end, message.offset() or 0) if name else message.offset()
            if name == "_PARTITION_EOF" and end >= leaders_end:  # else who answered is behind: the rest is to come
                return found, value
            # librdkafka asks for the coordinator of a group that is joined and committed to by nobody.
            if name not in {"", "_PARTITION_EOF", "GROUP_AUTHORIZATION_FAILED"}:
                raise KafkaException(error)
            if not name and message.key() == key:
                found, value = True, message.value()

    def _short(self, place: TopicPartition, what: str) -> KafkaError:
        """Nothing is decided by a marker that may not be the last one."""
        told = f'partition {place.partition} of the marker topic "{self.topic}" {what}'
        do = (
            "If it stays: was there an unclean leader election? Start the application again if the topic was made anew."
        )
        return KafkaError("TL-K27", self._settings.servers, told, do)

    def read_all(self) -> dict[int, Marker | None]:
        """The markers of all partitions of the topic, none if there is no such topic; raises as `read`."""
        return {partition: self.read(partition) for partition in range(self.cluster.info().topics.get(self.topic, 0))}

    def rewrite(
        self, partition: int, revise: Callable[[Marker | None], Marker | None], *, damaged: bool = False
    ) -> Marker | None:
        """Write a marker in a transaction of its own; older producers of the partition are fenced before.

        Args:
            partition: Of the sink.
            revise: Makes it, None to remove it, of the last one, when all that older producers wrote is decided [I9].
            damaged: As for `read`.

        Raises:
            KafkaError: As `read`; TL-K20, TL-K21; what ``revise`` raises, and then nothing is written.
        """
        producer = Transactional(self._settings, self._settings.transactional_id(self.sink_id, partition))
        try:
            marker = revise(self.read(partition, damaged=damaged))
            producer.begin()
            producer.mark(self.topic, partition, self.key(partition), marker)
            producer.commit()
        except AttemptFailed as problem:
            raise problem.final from None
        finally:
            producer.close()
        return marker

    def reset(self, batch: int | None) -> dict[int, Marker | None]:
        """Set the marker of every partition by hand; a query that still runs is fenced, and stops.

        Args:
            batch: The batch that is to count as written; -1 for "none yet"; None to remove the markers.

        Returns:
            The markers as they are now, of as many partitions as the sink is to have. Totals go on, but for those of a
            marker that can't be understood; a removed one takes them along.

        Raises:
            KafkaError: TL-K01, TL-K20, TL-K22; the partitions before the failing one are set.
        """
        self.ensure()
        count = self._settings.parallelism

        def revised(before: Marker | None) -> Marker | None:
            return None if batch is None else Marker(batch, count).following(before)

        markers = {partition: self.rewrite(partition, revised, damaged=True) for partition in range(count)}
        self.cluster.settled(self.topic)  # who looks next sees what was set
        return markers


#: Servers, topic and partition -> the highest end this process has seen: Kafka takes back nothing that it committed.
_ends: Final[dict[tuple[str, str, int], int]] = {}
#: Process id and client configuration -> consumer.
_consumers: Final[dict[tuple[int, Any], Any]] = {}
