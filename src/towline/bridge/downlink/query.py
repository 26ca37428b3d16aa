"""Spark query of a downlink: Spark's own Kafka source → mapping → outbox, dead letters to Kafka.

Its topics are checked before it starts [I17], because Spark compares offsets alone: a recreated topic that is longer
than the old one is read on from the old one's offset without an error, and a deleted topic ends the query, whether
records of it were unread or not. So topic ids are compared with those saved beside the offsets. For a deleted topic the
checkpoint shows whether all was delivered: a batch that took fewer records than it was allowed to took all there were
(`KafkaMicroBatchStream.rateLimit`).

The line's Spark SQL becomes columns beside those of its records, which the task that writes renders
(`towline.bridge.messages`). They are rendered before that, in a task of their own, only where Spark has to know the
outcome: where several writers have a part of the MQTT topics each, and where a failure notice has SQL for its reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.model import Downlink
from towline.bridge.config.rules import message_problems
from towline.bridge.config.tables import KafkaPattern
from towline.bridge.downlink.sink import FORMAT, LETTERS, LOCATION, MESSAGES, MQTT, REMEDY, DownlinkSink
from towline.bridge.kafka_source import java_client
from towline.bridge.lines.account import add_spark_counts
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.query import LineQuery
from towline.bridge.lines.recovery import check_resume, reset_command
from towline.bridge.lines.sql import ROW_METRICS, apply_downlink_sql
from towline.bridge.lines.statuses import endpoints_of, request_status, wait_for_answers
from towline.checkpoint import Checkpoint
from towline.errors import KafkaError
from towline.gateway.access import ClientAccess
from towline.kafka.admin import KafkaAdmin, check_topic_ids, recreated_topics, save_topic_ids, saved_topic_ids
from towline.kafka.options import SinkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from towline.kafka.admin import Offsets

#: Seconds to wait for Kafka here, on the driver's main thread: other lines wait as long.
METADATA_TIMEOUT_S: Final = 4.0
_CREATE: Final = "Create it, and the line goes on by itself; or take it out of the file."
#: Remedies for records that Kafka has deleted, and for an unfinished batch with a deleted topic.
_GO_ON: Final = 'Set on_data_loss = "go_on" and restart, to go on with the remaining ones; or reset the line: {}.'
_STUCK: Final = (
    "An unfinished batch has records of it, and Spark would wait for a deleted topic. Reset the line to the end of the "
    "last finished batch: {}; messages of the unfinished batch that are in the outbox are sent twice."
)


def _unread_records(name: str, checkpoint: Checkpoint, limit: int) -> str:
    """Describe the undelivered records of a deleted topic, as far as the checkpoint shows them; "" for none."""
    committed_batch = checkpoint.last_committed_batch()
    start, end = _batch_offsets(checkpoint, checkpoint.last_planned_batch())
    if not checkpoint.all_committed and name in end:
        return _ranges_text(name, _ranges(start, end, name))
    start, end = _batch_offsets(checkpoint, committed_batch)  # the start of the query if no batch is finished
    ranges = [topic_range for topic in end for topic_range in _ranges(start, end, topic)]
    # Each partition with records gives a batch at least one, and shares are rounded.
    read_to_end = not _ranges(start, end, name) or sum(high - low for _, low, high in ranges) + len(ranges) < limit
    if read_to_end and committed_batch is not None:
        return ""
    last_offsets = ", ".join(f"{offset:,}" for offset in end.get(name, {}).values())
    return f'topic "{name}" behind offset {last_offsets}, where it had, or may have had, more records'


def _deleted_records(client: Mapping[str, str], start: Offsets, end: Offsets) -> list[str]:
    """Describe records of a batch that Kafka has deleted: without topics Spark runs with failOnDataLoss=false."""
    texts = []
    for name in end:
        ranges = _ranges(start, end, name)
        first = KafkaAdmin(client).first_offsets(name, [int(n) for n, _, _ in ranges])
        deleted = [(n, low, min(high, first[int(n)])) for n, low, high in ranges if first[int(n)] > low]
        texts += [_ranges_text(name, deleted)] if deleted else []
    return texts


def _batch_offsets(checkpoint: Checkpoint, batch: int | None) -> tuple[Offsets, Offsets]:
    """Return start and end offsets of a batch; without a batch, the offsets at which the query began."""
    return checkpoint.kafka_offsets(batch - 1 if batch else None), checkpoint.kafka_offsets(batch)


def _ranges(start: Offsets, end: Offsets, name: str) -> list[tuple[str, int, int]]:
    """Return the offset ranges of a topic with records in a batch: partition, first offset, offset after the last."""
    lows, highs = start.get(name, {}), end.get(name, {}).items()
    return [(n, lows.get(n, 0), high) for n, high in highs if high > lows.get(n, 0)]


def _ranges_text(name: str, ranges: list[tuple[str, int, int]]) -> str:
    return "; ".join(f'offsets {low:,} to {high - 1:,} of topic "{name}", partition {n}' for n, low, high in ranges)


_EARLIEST, _LATEST = -2, -1  #: Start and end of a partition, as Spark's Kafka source takes them.
#: Settings that do not change the rows of an unfinished batch: the current file applies.
_SETTINGS_OF_FILE: Final = {
    *("name", "profile", "gateway", "listen", "mqtt", "outbox"),
    *("starting_offsets", "on_data_loss", "confirm", "trigger_interval_s"),
}


class DownlinkQuery(LineQuery[Downlink]):
    """Spark query of a downlink."""

    def _line_of_last_batch(self, mapping: str) -> Downlink | None:
        with suppress(ValueError):
            settings = self.line.model_dump(mode="json", by_alias=True, include=_SETTINGS_OF_FILE)
            former = Downlink.model_validate(json.loads(mapping) | settings)
            return None if any(message_problems(former)) else former
        return None

    def _line_of_next_batch(self, identity: Identity) -> tuple[Downlink, str]:  # noqa: ARG002 - used by uplinks
        # The outbox may have a part of a batch that a crash interrupted, and Kafka its dead letters [I10]: so the batch
        # is finished with the mapping it was started with.
        return self.line, self.line.model_dump_json(by_alias=True, exclude_defaults=True, exclude=_SETTINGS_OF_FILE)

    def _prepare_writer(self, spark: SparkSession) -> tuple[DataStreamWriter, Identity]:
        spark.dataSource.register(DownlinkSink)
        line, checkpoint = self.line, Checkpoint(str(self.line.checkpoint))
        identity = check_resume(self.bridge, line, Identity.of_line(self.bridge, line), checkpoint)
        limit = (self._line_of_last_batch(identity.mapping) or line).max_messages_per_trigger
        topic_ids, has_removed_topics = self._check_topics(checkpoint, limit)
        # While a topic is missing Spark stops at a batch that was planned without it; all other losses were checked.
        ignores_loss = has_removed_topics and not checkpoint.all_committed
        self._finish_only = self._finish_only or ignores_loss
        if self._mapping:
            limit = self._packet_limit(identity)
            identity = identity.update(line.gateway.state_dir, mapping=self._mapping, packet_limit=limit)
        fails_on_loss = line.on_data_loss == "stop" and not ignores_loss
        pattern = line.from_.pattern if isinstance(line.from_, KafkaPattern) else None
        source_options = {
            **self._source_options(),
            "subscribe" if pattern is None else "subscribePattern": pattern or ",".join(line.topics),
            "startingOffsets": self._starting_offsets(identity, topic_ids),
            "failOnDataLoss": str(fails_on_loss).lower(),
            "maxOffsetsPerTrigger": str(line.max_messages_per_trigger),
        }
        records = spark.readStream.format("kafka").options(**source_options).load()
        options = self._message_options(identity)
        rows = apply_downlink_sql(records, line, options)
        return rows.writeStream.format(FORMAT).options(**self._sink_options(identity)), identity

    def _check_topics(self, checkpoint: Checkpoint, limit: int) -> tuple[Mapping[str, str], bool]:
        """Check the topics [I17], and note `remarks`; return their ids, and whether some are not read any more."""
        line, location, client = self.line, f'line "{self.line.name}"', self.bridge.kafka.client_settings()
        start, end = _batch_offsets(checkpoint, checkpoint.last_planned_batch())
        all_committed = checkpoint.all_committed
        positions = end if all_committed else {**start, **end}
        saved_ids, admin = saved_topic_ids(checkpoint) if positions else {}, KafkaAdmin(client, METADATA_TIMEOUT_S)
        try:
            topics = line.topics or list(filter(line.reads, admin.info().topics))
            topic_ids = admin.topic_ids({*topics, *positions})
        except KafkaError:
            if not positions:
                raise
            return {}, False  # Spark waits longer for Kafka, and the sink checks before the tasks of each batch
        check_topic_ids(location, self._recreated_topic_remedy, positions, saved_ids, topic_ids)
        if missing_topics := sorted(set(line.topics) - set(topic_ids)):
            problem = f"{location} reads {', '.join(missing_topics)}, and Kafka has no such topic"
            raise KafkaError("TL-B03", client["bootstrap.servers"], problem, _CREATE)
        removed = {n: offsets for n, offsets in positions.items() if n not in topic_ids or not line.reads(n)}
        unread = {n: "" if n in topic_ids else _unread_records(n, checkpoint, limit) for n in removed}
        texts, stops_on_loss = [text for text in unread.values() if text], line.on_data_loss == "stop"
        unfinished = not all_committed and any(_ranges(start, end, name) for name in removed if unread[name])
        if stops_on_loss and removed and not all_committed and not texts:
            texts = _deleted_records(client, start, {name: of for name, of in end.items() if name not in removed})
        if texts and (unfinished or stops_on_loss):
            problem = f"Kafka no longer has records that the line had not read: {'; '.join(texts)}"
            remedy = (_STUCK if unfinished else _GO_ON).format(reset_command(line, self.bridge.file))
            raise KafkaError("TL-B06", location, problem, remedy)
        if not positions:  # before any offset is known
            line.checkpoint.mkdir(mode=0o700, parents=True, exist_ok=True)
            save_topic_ids(checkpoint, topic_ids)
        remarks = []
        for name, offsets in removed.items():
            loss_text = f"lost: {unread[name]}" if unread[name] else "all of its known records were delivered"
            reason = "is not read any more" if name in topic_ids else f"was deleted from Kafka; {loss_text}"
            read_to = ", ".join(f"offset {offset:,}" for offset in offsets.values())
            remarks.append(f'topic "{name}", read up to {read_to}, {reason}')
        if unknown := ", ".join(sorted(name for name, topic_id in topic_ids.items() if not topic_id)):
            problem = "this Kafka gives none, so a topic that is deleted and recreated is not recognised"
            remarks.append(f"topic ids unknown ({unknown}): {problem}")
        self.remarks = tuple(remarks)
        return topic_ids, bool(removed)

    @property
    def _recreated_topic_remedy(self) -> str:
        command = reset_command(self.line, self.bridge.file)
        return (
            'To read the new one from its beginning, set starting_offsets = "earliest" (the default) and run: '
            f'{command}; from its end, set starting_offsets = "latest" and run the same. Other topics go on after the '
            "last finished batch; messages of an unfinished batch that are in the outbox are sent twice."
        )

    def _packet_limit(self, identity: Identity) -> int:
        """Return the broker's largest packet, or the last known one; 0 for no limit. Raises TL-G01, no answer."""
        endpoints = endpoints_of([str(self.line.gateway.state_dir)], ClientAccess())
        (status,) = wait_for_answers(endpoints, request_status)
        online = status.get("state") == "online"  # only then the broker's limit is known, and None means no limit
        return int(status.get("broker_max_packet_bytes") or 0) if online else identity.packet_limit

    def count_spark(self, progress: Mapping[str, Any]) -> None:
        """Count the records that Spark read from Kafka, to compare with the records that the writer received.

        Observed metrics count the rows of one attempt per task (`apply_downlink_sql`). ``numInputRows`` counts a task
        twice whose output was lost with its executor behind a shuffle (`ProgressContext`: the `SQLMetric`
        ``numOutputRows``).
        """
        metrics = (progress.get("observedMetrics") or {}).get(ROW_METRICS)
        if metrics is not None:
            counts = {"taken": int(metrics["rows"] or 0)}
            add_spark_counts(self.line.checkpoint, progress["batchId"], counts, "records")

    def _message_options(self, identity: Identity) -> str:
        """Return the line's mapping as JSON options of `towline.bridge.messages.message_table`."""
        line = self.line
        extra = {"line": line.name, "qos": line.qos, "limit": identity.packet_limit}
        return json.dumps({**line.message_table_config(), **extra, "send_controls": line.control_characters == "send"})

    def source_settings(self) -> dict[str, str]:
        """Return the client settings of Spark's Kafka source, with Java's names, secrets as names of variables."""
        secrets: dict[str, str] = {}  # they are dropped
        return {k.removeprefix("kafka."): v for k, v in self._source_options(secrets).items() if k.startswith("kafka.")}

    def sink_settings(self) -> SinkSettings | None:
        """Return the settings of the dead-letter sink at the line's next start; None for a line without one."""
        if self.line.dead_letter_topic is None:
            return None
        return SinkSettings.parse(self._letter_options(Identity.of_line(self.bridge, self.line)))

    def _source_options(self, environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
        """Return options of Spark's Kafka source, except topics and offsets; `environ` as for `java_client`."""
        return {
            **{
                f"kafka.{name}": value
                for name, value in java_client(self.bridge.kafka.client_settings(), environ).items()
            },
            # Spark's source shows uncommitted and aborted records without it.
            "kafka.isolation.level": "read_committed",
            "includeHeaders": "true",
            "groupIdPrefix": f"towline-{self.bridge.name}-{self.line.name}",
        }

    def _starting_offsets(self, identity: Identity, topic_ids: Mapping[str, str]) -> str:
        """Return startingOffsets for a query without a checkpoint; with one, Spark uses the checkpoint."""
        line = self.line
        if not identity.offsets:
            start = line.starting_offsets
            return start if isinstance(start, str) else json.dumps(start)
        if identity.query:
            return json.dumps(identity.offsets)
        topics = KafkaAdmin(self.bridge.kafka.client_settings()).info().topics  # Spark needs every partition
        start, positions = line.starting_offsets, dict(identity.offsets)
        for name in recreated_topics(identity.topic_ids, topic_ids):  # they start at starting_offsets
            latest = dict.fromkeys(map(str, range(topics[name])), _LATEST) if start == "latest" else {}
            positions[name] = start.get(name, {}) if isinstance(start, dict) else latest
        partitions = {name: map(str, range(count)) for name, count in topics.items() if line.reads(name)}
        return json.dumps(
            {
                name: {number: positions.get(name, {}).get(number, _EARLIEST) for number in numbers}
                for name, numbers in partitions.items()
            }
        )

    def _sink_options(self, identity: Identity) -> dict[str, str]:
        """Return the options of `towline.bridge.downlink.sink`, which writes rows to MQTT and dead letters to Kafka."""
        line = self.line
        mqtt_options = {
            **self._gateway_options(),
            "guarantee": line.guarantee.value,
            "qos": str(line.qos),
            "confirm": line.confirm,
            "retryTimeout": "inf",  # a full outbox is no reason to fail: the batch waits for room [I7]
        }
        return {
            LOCATION: f'line "{line.name}"',
            REMEDY: self._recreated_topic_remedy,
            MESSAGES: self._message_options(identity),
            MQTT: json.dumps(mqtt_options),
            LETTERS: json.dumps(self._letter_options(identity)),
        }

    def _letter_options(self, identity: Identity) -> dict[str, str]:
        line = self.line
        return {
            **self.bridge.sink_options(line, identity.sink),
            # Counted as dead letters, so they must not be lost with any guarantee.
            "guarantee": line.guarantee.value if line.guarantee.value == "exactly_once" else "at_least_once",
            **({"deadLetterTopic": line.dead_letter_topic} if line.dead_letter_topic else {}),
        }
