"""The query of a line from Kafka to MQTT: Spark's own Kafka source → mapping → outbox, dead letters to Kafka."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from towline.bridge.config.downlink import DownlinkSection, KafkaPattern
from towline.bridge.config.kafka_source import java_client
from towline.bridge.config.model import DownLine
from towline.bridge.downlink.sink import DEAD_LETTERS, FORMAT, MESSAGES, MQTT, WAYS_OUT, WHERE, DownlinkSink
from towline.bridge.downlink.sql import COUNTER, apply
from towline.bridge.downlink.topics import TopicFindings, look_at_topics, ways_out
from towline.bridge.lines.evidence import awaited_status, read_checkpoint
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.notes import add_spark_counts
from towline.bridge.lines.query import LineQuery
from towline.bridge.lines.recovery import again_command, examine
from towline.errors import ConfigError
from towline.kafka.admin import reachable
from towline.kafka.options import SinkSettings
from towline.kafka.topicids import remade

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from towline.bridge.lines.evidence import Evidence

__all__ = ["DownlinkQuery", "begun_line", "covering", "find_modules", "mapping_of"]

#: The start of a partition, and its end, as Spark's Kafka source takes them.
_EARLIEST: Final = -2
_LATEST: Final = -1
#: What does not decide which record becomes which row of a batch that was begun: it is as the file says now.
_UNDECIDING: Final = ("name", "starting_offsets", "on_data_loss", "confirm", "trigger_interval_s", "listen")


class DownlinkQuery(LineQuery[DownLine]):
    """The query of a downlink."""

    _findings = TopicFindings()
    #: It finishes a batch without the topics that are gone.
    _passes = False

    def in_force(self) -> DownlinkQuery:
        """By the settings of the file, or those that a batch was begun with, until that is done.

        Raises:
            ConfigError: TL-C210, this version refuses those.
        """
        line, mapping = self.line, Identity.of(self.bridge, self.line).mapping
        self._mended()
        if read_checkpoint(line.checkpoint).decided:
            return DownlinkQuery(self.bridge, line)
        if mapping and _section(mapping) is None:
            what = "a batch was begun with settings that this version refuses"
            do = f"Finish it with the version before, or begin again: {again_command(line, self.bridge.file)}."
            raise ConfigError("TL-C210", f'line "{line.name}"', what, do)
        former = DownlinkQuery(self.bridge, begun_line(line, mapping))
        if former.line == begun_line(line, ""):
            return DownlinkQuery(self.bridge, line)
        former._finishes = True
        sys.stderr.write(f"--- line {line.name}\nthe batch that was begun is finished by the former settings\n")
        return former

    def _interval_s(self) -> float:
        return self.line.section.trigger_interval_s

    def _prepared(self, spark: SparkSession) -> tuple[DataStreamWriter, Identity]:
        spark.dataSource.register(DownlinkSink)
        line, file, identity = self.line, str(self.bridge.file), Identity.of(self.bridge, self.line)
        evidence = read_checkpoint(line.checkpoint)
        identity = examine(line, file, identity, evidence)
        limit = begun_line(line, identity.mapping).section.max_messages_per_trigger
        evidence = read_checkpoint(line.checkpoint)  # it may begin anew behind what is done
        self._findings = look_at_topics(line, file, evidence, self.bridge.kafka.client(), limit)
        self.remarks = self._findings.remarks
        # While a topic is missing Spark stops at a batch that was planned without it; all else was looked at.
        self._passes = self._findings.gone and not evidence.decided
        self._finishes = self._finishes or self._passes
        identity = _with_mapping(line, identity, evidence)
        records, messages, transform = self._records(spark, identity), self._messages(identity), _transform(line)
        rows = apply(records, line.section, messages, transform, parallelism=line.parallelism)
        return rows.writeStream.format(FORMAT).options(**self._both_sinks(identity)), identity

    def count_spark(self, progress: Mapping[str, Any]) -> None:
        """Count what Spark took of Kafka, beside what the writer was given of it.

        Observed are the rows of the attempt of each task that counts (`towline.bridge.downlink.sql.apply`).
        ``numInputRows`` has those of every attempt that ended well: behind a shuffle a task whose output was lost with
        its executor runs again, and Spark counts it twice (`ProgressContext`: the `SQLMetric` ``numOutputRows``).
        """
        observed = (progress.get("observedMetrics") or {}).get(COUNTER)
        source: Mapping[str, Any] = next(iter(progress.get("sources") or []), {})
        if observed is None:
            return
        taken = int(observed["rows"] or 0)
        start, end = _offsets(source.get("startOffset")), _offsets(source.get("endOffset"))
        room = sum(offset - start.get(place, 0) for place, offset in end.items()) if start else taken
        transforms = self.line.section.transform is not None

        def numbers(sink: Counter[str]) -> dict[str, int]:
            fewer = taken - sink["records"]
            known = {"removed": max(0, fewer)} if transforms else {"unlike": fewer}
            return {"taken": taken, "beyond": max(0, taken - room), **known}

        add_spark_counts(self.line.checkpoint, progress["batchId"], numbers)

    def _messages(self, identity: Identity) -> str:
        """What the line's records become, as `towline.bridge.messages.message_table` takes it."""
        line = self.line
        letters = line.dead_letter_topic and (line.dead_letter_topic, identity.sink)
        sends = line.control_characters == "send"
        more = {"line": line.name, "qos": line.qos, "limit": identity.packet_limit, "letters": letters or None}
        return json.dumps({**line.section.rendering(), **more, "send_controls": sends})

    def _records(self, spark: SparkSession, identity: Identity) -> DataFrame:
        line, section = self.line, self.line.section
        pattern = section.from_.pattern if isinstance(section.from_, KafkaPattern) else None
        options = {
            **self._reading(),
            "subscribe" if pattern is None else "subscribePattern": pattern or ",".join(section.topics),
            "startingOffsets": self._starting(identity),
            "failOnDataLoss": str(section.on_data_loss == "stop" and not self._passes).lower(),
            "maxOffsetsPerTrigger": str(line.max_messages_per_trigger),
        }
        return spark.readStream.format("kafka").options(**options).load()

    def source_settings(self) -> dict[str, str]:
        """What Spark's Kafka source is told, as Kafka's Java client names it, secrets as names of variables."""
        secrets: dict[str, str] = {}  # they go nowhere
        return {k.removeprefix("kafka."): v for k, v in self._reading(secrets).items() if k.startswith("kafka.")}

    def sink_settings(self) -> SinkSettings | None:
        """What the sink of dead letters is told at the line's next start; None for a line without one."""
        if self.line.dead_letter_topic is None:
            return None
        both = self._both_sinks(Identity.of(self.bridge, self.line)).items()
        return SinkSettings.parse({k.removeprefix(DEAD_LETTERS): v for k, v in both if k.startswith(DEAD_LETTERS)})

    def _reading(self, environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
        """Options of Spark's Kafka source, whichever records are asked for; `environ` as for `java_client`."""
        return {
            **{f"kafka.{name}": value for name, value in java_client(self.bridge.kafka.client(), environ).items()},
            # Spark's source shows uncommitted and aborted records without it.
            "kafka.isolation.level": self.line.section.isolation_level,
            "includeHeaders": "true",
            "groupIdPrefix": f"towline-{self.bridge.name}-{self.line.name}",
        }

    def _starting(self, identity: Identity) -> str:
        """Where a query without a checkpoint begins; with one, Spark asks that."""
        section = self.line.section
        if not identity.offsets:
            start = section.starting_offsets
            return start if isinstance(start, str) else json.dumps(start)
        if identity.query:
            return identity.offsets
        topics = reachable(self.bridge.kafka.client()).topics  # Spark wants every partition
        start, stood = section.starting_offsets, json.loads(identity.offsets)
        for name in remade(json.loads(identity.topic_ids), self._findings.ids):  # they begin as the file says
            latest = dict.fromkeys(map(str, range(topics[name])), _LATEST) if start == "latest" else {}
            stood[name] = start.get(name, {}) if isinstance(start, dict) else latest
        return json.dumps(covering(stood, topics, section))

    def _both_sinks(self, identity: Identity) -> dict[str, str]:
        """The options of `towline.bridge.downlink.sink`, which hands rows to MQTT and dead letters to Kafka."""
        line = self.line
        mqtt = {
            **self._gateway_options(),
            "guarantee": line.guarantee.value,
            "qos": str(line.qos),
            "confirm": line.section.confirm,
            "retryAttempts": "-1",  # a full outbox is no reason to fail: the batch waits for room [I7]
        }
        kafka = {
            **self.bridge.sink_options(line, identity.sink),
            # Counted as dead letters, so they must not be lost with any guarantee.
            "guarantee": line.guarantee.value if line.guarantee.value == "exactly_once" else "at_least_once",
            **({"deadLetterTopic": line.dead_letter_topic} if line.dead_letter_topic else {}),
        }
        topics = {WHERE: f'line "{line.name}"', WAYS_OUT: ways_out(line, str(self.bridge.file))}
        topics[MESSAGES] = self._messages(identity)
        return topics | {MQTT + k: v for k, v in mqtt.items()} | {DEAD_LETTERS + k: v for k, v in kafka.items()}


def _with_mapping(line: DownLine, identity: Identity, evidence: Evidence) -> Identity:
    """The identity with the settings of the next batches, durable before there is one; the same while one is undecided.

    The outbox may have a part of a batch that a crash interrupted, and Kafka its dead letters [I10]: so it is finished
    by what decided which record becomes a row when it was begun, whatever the file says by then.

    Raises:
        GatewayUnreachable: TL-G01 when the gateway does not answer for a while.
    """
    if not evidence.decided:
        return identity
    status = awaited_status(line.gateway.state_dir)
    online = status.get("state") == "online"  # only then the broker's word is known, and None means no limit
    limit = int(status.get("broker_max_packet_bytes") or 0) if online else identity.packet_limit
    begun = replace(identity, mapping=mapping_of(line), packet_limit=limit)
    begun.save(line.gateway.state_dir)
    return begun


def mapping_of(line: DownLine) -> str:
    """A line's settings as JSON, with what it leaves to its dead-letter topic filled in."""
    filled = {"control_characters": line.control_characters, "dead_letter_topic": line.dead_letter_topic or False}
    return line.section.model_copy(update=filled).model_dump_json(by_alias=True, exclude_defaults=True)


def begun_line(line: DownLine, mapping: str) -> DownLine:
    """The line as its last batches were begun.

    Args:
        line: As the file says it.
        mapping: Of its identity; "" for a line that never ran. One that this version refuses says nothing.
    """
    kept = _section(mapping) or DownlinkSection.model_validate_json(mapping_of(line))
    return line.model_copy(
        update={
            "section": kept.model_copy(update={name: getattr(line.section, name) for name in _UNDECIDING}),
            "guarantee": kept.guarantee,
            "parallelism": kept.parallelism,
            "dead_letter_topic": kept.dead_letter_topic or None,
        }
    )


def _section(mapping: str) -> DownlinkSection | None:
    try:
        return DownlinkSection.model_validate_json(mapping)
    except ValidationError:
        return None


def covering(
    stood: Mapping[str, Mapping[str, int]], topics: Mapping[str, int], section: DownlinkSection
) -> dict[str, dict[str, int]]:
    """Offsets for every partition there is now; one that was added since begins at its start.

    Args:
        stood: Where the line stood, by topic and partition.
        topics: Number of partitions of every topic of the cluster.
        section: What the line reads.
    """
    return {
        name: {str(part): stood.get(name, {}).get(str(part), _EARLIEST) for part in range(count)}
        for name, count in topics.items()
        if section.reads(name)
    }


def _transform(line: DownLine) -> Callable[[DataFrame], DataFrame] | None:
    """The user's function, TL-C78; a module beside the bridge file counts too."""
    if line.section.transform is None:
        return None
    module, _, name = line.section.transform.partition(":")
    try:
        function: Callable[[DataFrame], DataFrame] = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a module that ends the process would end all lines
        what = f'transform "{line.section.transform}" can\'t be loaded ({type(error).__name__}: {error})'
        raise ConfigError("TL-C78", f'line "{line.name}"', what, "Correct the name, or install the module.") from error
    return function


def find_modules(file: Path) -> None:
    """Let a transform be a module beside the bridge file."""
    place = str(file.parent)
    if place not in sys.path:
        sys.path.append(place)


def _offsets(place: Any) -> dict[tuple[str, str], int]:
    """Offsets by topic and partition, as Spark's Kafka source reports them."""
    if not isinstance(place, dict):
        return {}
    parts = [(topic, one) for topic, one in place.items() if isinstance(one, dict)]
    return {(topic, part): at for topic, one in parts for part, at in one.items() if isinstance(at, int)}
