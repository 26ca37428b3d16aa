"""The query of a line from Kafka to MQTT: Spark's own Kafka source → mapping → outbox, dead letters to Kafka.

Its topics are looked at before it starts [I17], because Spark compares offsets alone: a topic made anew that is longer
than the old one is read on from the old one's offset without a word, and one that is gone ends the query, whether
records of it were unread or not. So the ids of topics are held against those noted beside the offsets, and of one that
is gone the checkpoint says whether all was delivered: a batch that took fewer records than it was allowed to took all
there were (`KafkaMicroBatchStream.rateLimit`).

What the line says in Spark SQL becomes columns beside those of its records, which the task that writes renders
(`towline.bridge.messages`). They are rendered before that, in a task of its own, only where Spark has to know what
became of them: where several writers have a part of the MQTT topics each, and where a failure notice says in SQL why a
record was refused.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import ValidationError

from towline.bridge.config.model import DownLine
from towline.bridge.config.rules import message_problems
from towline.bridge.config.tables import DownlinkSection, KafkaPattern
from towline.bridge.downlink.sink import DEAD_LETTERS, FORMAT, LINE_NAME, MESSAGES, MQTT, WAYS_OUT, DownlinkSink
from towline.bridge.kafka_source import java_client
from towline.bridge.lines.account import add_spark_counts
from towline.bridge.lines.evidence import awaited, kafka_offsets, places_of, read_checkpoint, status_of
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.query import LineQuery
from towline.bridge.lines.recovery import again_command, examine
from towline.bridge.lines.statements import COUNTER, apply
from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, KafkaError
from towline.gateway.access import Access
from towline.kafka.admin import KafkaAdmin, check_ids, keep_ids, kept_ids, remade
from towline.kafka.options import SinkSettings

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from towline.bridge.lines.evidence import Evidence, KafkaOffsets

#: Seconds to wait for Kafka here, on the driver's main thread: other lines wait as long.
GLANCE_S: Final = 4.0
_CREATE: Final = "Create it, and the line goes on by itself; or take it out of the file."
#: The ways out of what can't be read any more, also where a batch was begun; and of one whose topic is gone.
_GO_ON: Final = 'Set on_data_loss = "go_on" and start again, to go on with what is left; or begin again: {}.'
_STUCK: Final = (
    "A batch was begun with them, and Spark would wait for a topic that is gone. Begin again behind the last batch "
    "that is done: {}; of the one that was begun, what is in the outbox comes twice."
)


class TopicFindings(NamedTuple):
    """What is known of a line's topics.

    Attributes:
        ids: Of those that are there.
        remarks: What a person should know, a line each.
        gone: Whether it stands in topics that it does not read any more, and misses no record of them.
    """

    ids: Mapping[str, str] = {}
    remarks: tuple[str, ...] = ()
    gone: bool = False


def ways_out(line: DownLine, file: str) -> str:
    """What to do about a topic that was made anew."""
    return (
        'To read the new one from its beginning, set starting_offsets = "earliest" (the default) and run: '
        f'{again_command(line, file)}; from its end, set starting_offsets = "latest" and run the same. Other topics go '
        "on behind the last batch that is done; of a batch that was begun, what is in the outbox comes twice."
    )


def look_at_topics(
    line: DownLine, file: str, evidence: Evidence, client: Mapping[str, str], limit: int
) -> TopicFindings:
    """Hold the topics against the checkpoint, and note their ids before the first offset of them is known.

    Args:
        line: As its next batch is read.
        file: The bridge's, as a command names it.
        evidence: What the checkpoint says.
        client: Unresolved.
        limit: Records that its last batches took at most.

    Raises:
        KafkaError: TL-B03, a topic that the line names is not there; TL-B06, a topic was made anew, or is gone and had
            records that were not read; TL-K01, no answer to a line that has no offsets yet.
        JournalError: TL-J20, the ids can't be noted.
    """
    logs, where = Checkpoint(str(line.checkpoint)), f'line "{line.name}"'
    before, begun = _batch(line.checkpoint, evidence.planned)
    stood = begun if evidence.decided else {**before, **begun}
    kept, cluster = kept_ids(logs) if stood else {}, KafkaAdmin(client, GLANCE_S)
    try:
        named = line.topics or list(filter(line.reads, cluster.info().topics))
        ids = cluster.ids({*named, *stood})
    except KafkaError:
        if not stood:
            raise
        return TopicFindings()  # Spark waits longer for Kafka, and the sink looks before the tasks of each batch
    check_ids(where, ways_out(line, file), stood, kept, ids)
    if missing := sorted(set(line.topics) - set(ids)):
        what = f"{where} reads {', '.join(missing)}, and Kafka has no such topic"
        raise KafkaError("TL-B03", client["bootstrap.servers"], what, _CREATE)
    gone = {name: at for name, at in stood.items() if name not in ids or not line.reads(name)}
    lost = {name: "" if name in ids else _unread(name, evidence, line.checkpoint, limit) for name in gone}
    texts, stops = [text for text in lost.values() if text], line.on_data_loss == "stop"
    stuck = not evidence.decided and any(_ranges(before, begun, name) for name in gone if lost[name])
    if stops and gone and not evidence.decided and not texts:
        texts = _overtaken(client, before, {name: at for name, at in begun.items() if name not in gone})
    if texts and (stuck or stops):
        what = f"Kafka no longer has records that the line had not read: {'; '.join(texts)}"
        raise KafkaError("TL-B06", where, what, (_STUCK if stuck else _GO_ON).format(again_command(line, file)))
    if not stood:
        line.checkpoint.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_ids(logs, ids)
    remarks = []
    for name, at in gone.items():
        known = f"lost are {lost[name]}" if lost[name] else "all that is known of it was delivered"
        why = "is not read any more" if name in ids else f"is gone from Kafka; {known}"
        remarks.append(f'topic "{name}", read up to {", ".join(f"offset {end:,}" for end in at.values())}, {why}')
    if unknown := ", ".join(sorted(name for name, one in ids.items() if not one)):
        what = "this Kafka gives none, so a topic that is deleted and made again is not recognised"
        remarks.append(f"topic ids unknown ({unknown}): {what}")
    return TopicFindings(ids, tuple(remarks), gone=bool(gone))


def _unread(name: str, evidence: Evidence, checkpoint: Path, limit: int) -> str:
    """What of a topic that is gone was not delivered, as far as the checkpoint says; "" for nothing."""
    before, begun = _batch(checkpoint, evidence.planned)
    if not evidence.decided and name in begun:
        return _told(name, _ranges(before, begun, name))
    start, end = _batch(checkpoint, evidence.done)  # where the query began, and no record was taken, if none is done
    taken = [one for each in end for one in _ranges(start, end, each)]
    # Each partition with records gives a batch one at least, and the share of each is rounded.
    idle = not _ranges(start, end, name) or sum(b - a for _, a, b in taken) + len(taken) < limit
    if idle and evidence.done is not None:
        return ""
    last = ", ".join(f"{at:,}" for at in end.get(name, {}).values())
    return f'topic "{name}" behind offset {last}, where more records were, or may have been'


def _overtaken(client: Mapping[str, str], start: KafkaOffsets, end: KafkaOffsets) -> list[str]:
    """Records of a batch that Kafka has deleted: while topics are gone Spark is not asked to stop at that."""
    lost = []
    for name in end:
        ranges = _ranges(start, end, name)
        firsts = KafkaAdmin(client).first_offsets(name, [int(part) for part, _, _ in ranges])
        late = [(part, a, min(b, firsts[int(part)])) for part, a, b in ranges if firsts[int(part)] > a]
        lost += [_told(name, late)] if late else []
    return lost


def _batch(checkpoint: Path, number: int | None) -> tuple[KafkaOffsets, KafkaOffsets]:
    """Where a batch begins and ends; without one, where the query began."""
    return kafka_offsets(checkpoint, number - 1 if number else None), kafka_offsets(checkpoint, number)


def _ranges(start: KafkaOffsets, end: KafkaOffsets, name: str) -> list[tuple[str, int, int]]:
    """Partitions of a topic with records in a batch: number, first offset, offset after the last."""
    begins = start.get(name, {})
    return [(part, begins.get(part, 0), to) for part, to in end.get(name, {}).items() if to > begins.get(part, 0)]


def _told(name: str, ranges: list[tuple[str, int, int]]) -> str:
    return "; ".join(f'offsets {a:,} to {b - 1:,} of topic "{name}", partition {part}' for part, a, b in ranges)


#: The start of a partition, and its end, as Spark's Kafka source takes them.
_EARLIEST: Final = -2
_LATEST: Final = -1
#: What does not decide which record becomes which row of a batch that was begun: it is as the file says now.
_UNDECIDING: Final = ("name", "starting_offsets", "on_data_loss", "confirm", "trigger_interval_s")


class DownlinkQuery(LineQuery[DownLine]):
    """The query of a downlink."""

    _findings = TopicFindings()
    #: It finishes a batch without the topics that are gone.
    _passes = False

    def _begun(self, mapping: str) -> DownLine | None:
        return begun_line(self.line, mapping) if _section(mapping) else None

    def _prepared(self, spark: SparkSession) -> tuple[DataStreamWriter, Identity]:
        spark.dataSource.register(DownlinkSink)
        line, file, identity = self.line, str(self.bridge.file), Identity.of(self.bridge, self.line)
        evidence = read_checkpoint(line.checkpoint)
        identity = examine(line, file, identity, evidence)
        limit = begun_line(line, identity.mapping).max_messages_per_trigger
        evidence = read_checkpoint(line.checkpoint)  # it may begin anew behind what is done
        self._findings = look_at_topics(line, file, evidence, self.bridge.kafka.client(), limit)
        self.remarks = self._findings.remarks
        # While a topic is missing Spark stops at a batch that was planned without it; all else was looked at.
        self._passes = self._findings.gone and not evidence.decided
        self._finishes = self._finishes or self._passes
        identity = _with_mapping(line, identity, evidence)
        records, transform = self._records(spark, identity), _transform(line)
        rows = apply(records, line, self._messages(identity), transform, parallelism=line.parallelism)
        return rows.writeStream.format(FORMAT).options(**self._both_sinks(identity)), identity

    def count_spark(self, progress: Mapping[str, Any]) -> None:
        """Count what Spark took of Kafka, beside what the writer was given of it.

        Observed are the rows of the attempt of each task that counts (`apply`). ``numInputRows`` counts a task twice
        whose output was lost with its executor behind a shuffle (`ProgressContext`: the `SQLMetric` ``numOutputRows``).
        """
        observed = (progress.get("observedMetrics") or {}).get(COUNTER)
        source: Mapping[str, Any] = next(iter(progress.get("sources") or []), {})
        if observed is None:
            return
        taken = int(observed["rows"] or 0)
        start, end = _offsets(source.get("startOffset")), _offsets(source.get("endOffset"))
        room = sum(offset - start.get(place, 0) for place, offset in end.items()) if start else taken
        transforms = self.line.transform is not None

        def numbers(sink: Counter[str]) -> dict[str, int]:
            fewer = taken - sink["records"]
            known = {"removed": max(0, fewer)} if transforms else {"unlike": fewer}
            return {"taken": taken, "beyond": max(0, taken - room), **known}

        add_spark_counts(self.line.checkpoint, progress["batchId"], numbers)

    def _messages(self, identity: Identity) -> str:
        """What the line's records become, as `towline.bridge.messages.message_table` takes it."""
        line = self.line
        more = {"line": line.name, "qos": line.qos, "limit": identity.packet_limit}
        return json.dumps({**line.rendering(), **more, "send_controls": line.control_characters == "send"})

    def _records(self, spark: SparkSession, identity: Identity) -> DataFrame:
        line = self.line
        pattern = line.from_.pattern if isinstance(line.from_, KafkaPattern) else None
        options = {
            **self._reading(),
            "subscribe" if pattern is None else "subscribePattern": pattern or ",".join(line.topics),
            "startingOffsets": self._starting(identity),
            "failOnDataLoss": str(line.on_data_loss == "stop" and not self._passes).lower(),
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
            "kafka.isolation.level": self.line.isolation_level,
            "includeHeaders": "true",
            "groupIdPrefix": f"towline-{self.bridge.name}-{self.line.name}",
        }

    def _starting(self, identity: Identity) -> str:
        """Where a query without a checkpoint begins; with one, Spark asks that."""
        line = self.line
        if not identity.offsets:
            start = line.starting_offsets
            return start if isinstance(start, str) else json.dumps(start)
        if identity.query:
            return json.dumps(identity.offsets)
        topics = KafkaAdmin(self.bridge.kafka.client()).info().topics  # Spark wants every partition
        start, stood = line.starting_offsets, dict(identity.offsets)
        for name in remade(identity.topic_ids, self._findings.ids):  # they begin as the file says
            latest = dict.fromkeys(map(str, range(topics[name])), _LATEST) if start == "latest" else {}
            stood[name] = start.get(name, {}) if isinstance(start, dict) else latest
        return json.dumps(covering(stood, topics, line))

    def _both_sinks(self, identity: Identity) -> dict[str, str]:
        """The options of `towline.bridge.downlink.sink`, which hands rows to MQTT and dead letters to Kafka."""
        line = self.line
        mqtt = {
            **self._gateway_options(),
            "guarantee": line.guarantee.value,
            "qos": str(line.qos),
            "confirm": line.confirm,
            "retryAttempts": "-1",  # a full outbox is no reason to fail: the batch waits for room [I7]
        }
        kafka = {
            **self.bridge.sink_options(line, identity.sink),
            # Counted as dead letters, so they must not be lost with any guarantee.
            "guarantee": line.guarantee.value if line.guarantee.value == "exactly_once" else "at_least_once",
            **({"deadLetterTopic": line.dead_letter_topic} if line.dead_letter_topic else {}),
        }
        topics = {LINE_NAME: f'line "{line.name}"', WAYS_OUT: ways_out(line, str(self.bridge.file))}
        topics[MESSAGES] = self._messages(identity)
        return topics | {MQTT + k: v for k, v in mqtt.items()} | {DEAD_LETTERS + k: v for k, v in kafka.items()}


def _with_mapping(line: DownLine, identity: Identity, evidence: Evidence) -> Identity:
    """The identity with the settings of the next batches, durable before there is one; the same while one is undecided.

    The outbox may have a part of a batch that a crash interrupted, and Kafka its dead letters [I10]: so it is finished
    by what decided which record becomes a row when it was begun. Raises TL-G01 when the gateway does not answer.
    """
    if not evidence.decided:
        return identity
    (status,) = awaited(places_of([str(line.gateway.state_dir)], Access()), status_of, own=True)
    online = status.get("state") == "online"  # only then the broker's word is known, and None means no limit
    limit = int(status.get("broker_max_packet_bytes") or 0) if online else identity.packet_limit
    return identity.noted(line.gateway.state_dir, mapping=mapping_of(line), packet_limit=limit)


def mapping_of(line: DownLine) -> str:
    """A line's settings as JSON."""
    return line.model_dump_json(by_alias=True, exclude_defaults=True, include=set(DownlinkSection.model_fields))


def begun_line(line: DownLine, mapping: str) -> DownLine:
    """The line as its last batches were begun, by the mapping of its identity; "" for a line that never ran.

    A mapping that this version refuses says nothing.
    """
    begun = _section(mapping)
    decided = [name for name in DownlinkSection.model_fields if begun and name not in _UNDECIDING]
    return line.model_copy(update={name: getattr(begun, name) for name in decided})


def _section(mapping: str) -> DownlinkSection | None:
    with suppress(ValidationError):
        section = DownlinkSection.model_validate_json(mapping)
        return None if any(message_problems(section)) else section
    return None


def covering(
    stood: Mapping[str, Mapping[str, int]], topics: Mapping[str, int], section: DownlinkSection
) -> dict[str, dict[str, int]]:
    """Offsets for every partition there is now of a line that stood somewhere; one added since begins at its start."""
    return {
        name: {str(part): stood.get(name, {}).get(str(part), _EARLIEST) for part in range(count)}
        for name, count in topics.items()
        if section.reads(name)
    }


def _transform(line: DownLine) -> Callable[[DataFrame], DataFrame] | None:
    """The user's function, TL-C78; a module beside the bridge file counts too."""
    if line.transform is None:
        return None
    module, _, name = line.transform.partition(":")
    try:
        function: Callable[[DataFrame], DataFrame] = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a module that ends the process would end all lines
        what = f'transform "{line.transform}" can\'t be loaded ({type(error).__name__}: {error})'
        raise ConfigError("TL-C78", f'line "{line.name}"', what, "Correct the name, or install the module.") from error
    return function


def find_modules(file: Path) -> None:
    """Let a transform be a module beside the bridge file."""
    place = str(file.parent)
    if place not in sys.path:
        sys.path.append(place)


def _offsets(place: Any) -> dict[tuple[str, str], int]:
    """Offsets by topic and partition, as Spark's Kafka source reports them."""
    parts = [(topic, one) for topic, one in place.items() if isinstance(one, dict)] if isinstance(place, dict) else []
    return {(topic, part): at for topic, one in parts for part, at in one.items() if isinstance(at, int)}
