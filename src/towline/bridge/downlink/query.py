"""The query of a line from Kafka to MQTT: Spark's own Kafka source → mapping → outbox, dead letters to Kafka."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from towline.bridge.config.downlink import DownlinkSection, KafkaPattern
from towline.bridge.downlink.sink import FORMAT, LETTERS, MQTT, DownlinkSink
from towline.bridge.downlink.sql import DownlinkStatements, apply
from towline.bridge.runtime.identity import Identity
from towline.bridge.runtime.javaclient import java_client
from towline.bridge.runtime.recount import recounted
from towline.bridge.runtime.recovery import Evidence, examine, gateway_status, mapping_problem, read_checkpoint
from towline.bridge.uplink.sql import Letters
from towline.errors import ConfigError
from towline.guarantee import policy
from towline.kafka.admin import reachable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from towline.bridge.config.model import Bridge, DownLine
    from towline.bridge.runtime.downaccount import DownCounts

__all__ = ["covering", "facts", "find_modules", "recount", "start"]

#: The start of a partition, as Spark's Kafka source takes it.
_EARLIEST = -2
#: What a pattern does not find [Kafka: Topic.INTERNAL_TOPICS].
_UNLISTED = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})


def start(
    spark: SparkSession, bridge: Bridge, line: DownLine, counters: tuple[str, str], sink: Mapping[str, str]
) -> StreamingQuery:
    """Start the query of a line.

    Args:
        spark: The session, with the jars of Spark's Kafka source.
        bridge: The file.
        line: Which line.
        counters: Names of the observed metrics.
        sink: What a Kafka sink of this line is told, but for its sink id.

    Raises:
        TowlineError: TL-B22, TL-B25, TL-B27, checkpoint and line do not belong together; TL-C76 to TL-C78.
        pyspark.errors.AnalysisException: For SQL that is none over the columns of a record.
    """
    spark.dataSource.register(DownlinkSink)
    identity = Identity.read(line.gateway.state_dir) or Identity.new(bridge.name, line.name)
    seen = read_checkpoint(line.checkpoint)
    identity = _begun(line, bridge, examine(line, bridge.file, identity, seen), seen)
    rows = apply(_records(spark, bridge, line, identity), _way(line, identity), *counters, transform=_transform(line))
    writer = _sink(rows.writeStream, bridge, line, {"sinkId": identity.sink, **sink})
    query = (
        writer.queryName(line.name)
        .option("checkpointLocation", str(line.checkpoint))
        .trigger(processingTime=f"{line.trigger_interval_s:g} seconds")
        .start()
    )
    identity.started(query, line)
    return query


def recount(spark: SparkSession, bridge: Bridge, line: DownLine, counts: DownCounts) -> Iterator[dict[str, Any]]:
    """Reports of the line's committed batches that are not in `counts`, made anew; none where that can't be done.

    Call it before `start`, which may begin with another mapping.
    """
    identity, seen = Identity.read(line.gateway.state_dir), read_checkpoint(line.checkpoint)
    if identity is None or identity.query != seen.query or identity.mapping not in _mappings(line):
        return  # another line's batches, or made with another mapping than the line has now

    def read(options: Mapping[str, str]) -> DataFrame:
        return spark.read.format("kafka").options(**_reading(bridge, line), **options).load()

    def mapped(frame: DataFrame, rows: Any, kept: Any) -> DataFrame:
        return apply(frame, _way(line, identity), rows, kept, transform=_transform(line))

    yield from recounted(line.checkpoint, seen, counts, read, mapped)


def _way(line: DownLine, identity: Identity) -> DownlinkStatements:
    """The mapping that the identity names, which may be the former one until a batch is done."""
    letters = Letters(line.dead_letter_topic, identity.sink) if line.dead_letter_topic else None
    return DownlinkStatements(
        _mappings(line).get(identity.mapping, line.section),
        line.name,
        line.qos,
        identity.packet_limit,
        letters,
        line.parallelism,
    )


def _begun(line: DownLine, bridge: Bridge, identity: Identity, seen: Evidence) -> Identity:
    """The identity with the mapping of the next batches, durable before there is one.

    A batch that was begun is finished with the mapping it was begun with: the outbox may have the first of its rows,
    and knows them by their number [I10]. So what decides which record becomes a row is fixed from one start to the
    next, and changes only where no batch is undecided.
    """
    mappings = _mappings(line)
    digest = next(iter(mappings))
    if not seen.decided:
        mapping_problem(line, bridge.file, identity, seen, identity.mapping if identity.mapping in mappings else digest)
        return identity
    status = gateway_status(line.gateway.state_dir)
    online = status.get("state") == "online"  # only then the broker's word is known, and None means no limit
    limit = int(status.get("broker_max_packet_bytes") or 0) if online else identity.packet_limit
    begun = replace(identity, mapping=digest, packet_limit=limit)
    begun.save(line.gateway.state_dir)
    return begun


def _sections(line: DownLine) -> tuple[DownlinkSection, DownlinkSection]:
    """What is made of a record: as the line says it now, and as it was before control characters were looked at.

    A batch that was begun in the second way is finished in it.
    """
    now = line.section.model_copy(update={"control_characters": line.control_characters})
    return now, now.model_copy(update={"control_characters": "send"})


def _mappings(line: DownLine) -> dict[str, DownlinkSection]:
    """What may be made of a record, by digest, as this version and those before have it; the present one first."""
    return {digest(section): section for digest in (_digest, _former_digest) for section in _sections(line)}


#: What does not decide which record becomes which row of a batch that was begun.
_UNDECIDING = {"name", "starting_offsets", "confirm", "max_messages_per_trigger", "trigger_interval_s"}


def _digest(section: DownlinkSection) -> str:
    """Changes with whatever decides which record becomes which row.

    Of what differs from the defaults, so that a later version with one more key finds the same; a default must not
    change its meaning then.
    """
    said = section.model_dump_json(exclude=_UNDECIDING, exclude_defaults=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


#: Keys that were added since the digest is no longer one of every key: the versions before did not write them down.
_SINCE: set[str] = set()


def _former_digest(section: DownlinkSection) -> str:
    """The same of an earlier version: a batch that it began can be finished by this one."""
    unsaid = {"control_characters"} if section.control_characters == "send" else set()
    return hashlib.sha256(section.model_dump_json(exclude=_SINCE | unsaid).encode()).hexdigest()[:16]


def _records(spark: SparkSession, bridge: Bridge, line: DownLine, identity: Identity) -> DataFrame:
    section = line.section
    pattern = section.from_.pattern if isinstance(section.from_, KafkaPattern) else None
    options = {
        **_reading(bridge, line),
        "subscribe" if pattern is None else "subscribePattern": pattern or ",".join(section.topics),
        "startingOffsets": _again(bridge, line, identity) or _starting(section.starting_offsets),
        "failOnDataLoss": str(section.on_data_loss == "stop").lower(),
        "maxOffsetsPerTrigger": str(line.max_messages_per_trigger),
    }
    return spark.readStream.format("kafka").options(**options).load()


def _reading(bridge: Bridge, line: DownLine) -> dict[str, str]:
    """Options of Spark's Kafka source, whichever records are asked for."""
    return {
        **{f"kafka.{name}": value for name, value in java_client(bridge.kafka.client()).items()},
        # Spark's source shows uncommitted and aborted records without it.
        "kafka.isolation.level": policy(line.guarantee).isolation,
        "includeHeaders": "true",
        "groupIdPrefix": f"towline-{bridge.name}-{line.name}",
    }


def _again(bridge: Bridge, line: DownLine, identity: Identity) -> str:
    """Where a line that begins again begins, "" for one that does not: for all partitions, as Spark demands."""
    if not identity.offsets or identity.query:
        return identity.offsets  # with a checkpoint Spark asks that
    return json.dumps(covering(json.loads(identity.offsets), reachable(bridge.kafka.client()).topics, line.section))


def covering(
    known: Mapping[str, Mapping[str, int]], topics: Mapping[str, int], section: DownlinkSection
) -> dict[str, dict[str, int]]:
    """Offsets for every partition there is now; one that was added since begins at its start.

    Args:
        known: Where the line stood, by topic and partition.
        topics: Number of partitions of every topic of the cluster.
        section: What the line reads.
    """
    return {
        name: {str(part): known.get(name, {}).get(str(part), _EARLIEST) for part in range(count)}
        for name, count in topics.items()
        if section.reads(name) and name not in _UNLISTED
    }


def _starting(said: str | dict[str, dict[str, int]]) -> str:
    return said if isinstance(said, str) else json.dumps(said)


def _sink(writer: DataStreamWriter, bridge: Bridge, line: DownLine, letters: Mapping[str, str]) -> DataStreamWriter:
    mqtt = {
        "gateway": str(line.gateway.state_dir),
        "guarantee": line.guarantee.value,
        "qos": str(line.qos),
        "confirm": line.section.confirm,
        "retryAttempts": "-1",  # a full outbox is no reason to fail: the batch waits for room [I7]
    }
    kafka = {
        **{f"kafka.{name}": value for name, value in bridge.kafka.client().items()},
        **letters,
        # Counted as dead letters, so they must not be lost with any guarantee.
        "guarantee": line.guarantee.value if line.guarantee.value == "exactly_once" else "at_least_once",
        **({"deadLetterTopic": line.dead_letter_topic} if line.dead_letter_topic else {}),
    }
    both = {**{MQTT + k: v for k, v in mqtt.items()}, **{LETTERS + k: v for k, v in kafka.items()}}
    return writer.format(FORMAT).options(**both)


def _transform(line: DownLine) -> Callable[[DataFrame], DataFrame] | None:
    """The user's function; a module beside the bridge file is found too.

    Raises:
        ConfigError: TL-C78 when it can't be had.
    """
    if line.section.transform is None:
        return None
    module, _, name = line.section.transform.partition(":")
    try:
        found: Callable[[DataFrame], DataFrame] = getattr(importlib.import_module(module), name)
    except Exception as error:
        what = f'transform "{line.section.transform}" can\'t be loaded ({type(error).__name__}: {error})'
        raise ConfigError("TL-C78", f'line "{line.name}"', what, "Correct the name, or install the module.") from error
    return found


def find_modules(file: Path) -> None:
    """Let a transform be a module beside the bridge file."""
    place = str(file.parent)
    if place not in sys.path:
        sys.path.append(place)


def facts(progress: Mapping[str, Any]) -> dict[str, Any]:
    """What the account needs of a query's progress, beside what all lines need: query and distance to the end."""
    source: Mapping[str, Any] = next(iter(progress.get("sources") or []), {})
    end, latest = _offsets(source.get("endOffset")), _offsets(source.get("latestOffset"))
    return {
        "query": progress.get("id", ""),
        "behind": sum(max(0, offset - end.get(place, offset)) for place, offset in latest.items()) if latest else None,
    }


def _offsets(told: Any) -> dict[tuple[str, str], int]:
    """Offsets by topic and partition, as Spark's Kafka source tells them."""
    if not isinstance(told, dict):
        return {}
    parts = [(topic, one) for topic, one in told.items() if isinstance(one, dict)]
    return {(topic, part): at for topic, one in parts for part, at in one.items() if isinstance(at, int)}
