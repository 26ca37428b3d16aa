"""Options of ``format("kafka_transactional")``: the options of Spark's Kafka sink, and the guarantee."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

from annotated_types import Ge, Le, MinLen

from towline.errors import ConfigError
from towline.guarantee import Guarantee, policy
from towline.kafka.clientconfig import check_client
from towline.kafka.deadletters import MARKER_TOPIC_SUFFIX, reserved_topics_pattern
from towline.options import (
    FormatOptions,
    Option,
    options_of,
    without_table_properties,
)

if TYPE_CHECKING:
    from towline.options import OptionValues

FORMAT: Final = "kafka_transactional"  #: Name of the format, and the location in errors about its options.

_QUEUE_KBYTES: Final = "queue.buffering.max.kbytes"

#: Other names of one setting (librdkafka's CONFIGURATION.md).
ALIASES: Final[Mapping[str, str]] = {
    "request.required.acks": "acks",
    "message.send.max.retries": "retries",
    "delivery.timeout.ms": "message.timeout.ms",
}

#: Larger batches and some linger: 0.6 instead of 2 us a record in the broker (measured, 100 B, 3 partitions). The queue
#: holds a few Spark batches; murmur2_random maps keys to the same partitions as Java, Spark and Hono.
CLIENT_DEFAULTS: Final[Mapping[str, str]] = {
    "linger.ms": "20",
    "batch.size": "1000000",
    "queue.buffering.max.messages": "500000",
    "queue.buffering.max.kbytes": "262144",
    "partitioner": "murmur2_random",
    "reconnect.backoff.ms": "20",
    "reconnect.backoff.max.ms": "1000",
}


#: Kafka's rule for names of topics (org.apache.kafka.common.internals.Topic); 200 leave room for prefix and suffix.
_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
#: More partitions than a sink can sensibly have; each has a marker and a transactional id.
MAX_PARALLELISM: Final = 1000


def _checked_name(text: str) -> str:
    if not _NAME_PATTERN.fullmatch(text) or text in (".", ".."):
        raise ValueError("is no name for Kafka; use 1 to 200 of the characters a-z A-Z 0-9 . _ -")
    return text


_KafkaName = Annotated[str, Option(parse=_checked_name)]


@dataclass(frozen=True, kw_only=True)
class SinkSettings:
    """Validated options of one sink; picklable, and free of secrets [I12].

    Attributes:
        guarantee: ``exactly_once`` (the default), ``at_least_once`` or ``at_most_once`` (docs/exactly-once.md).
        servers: ``bootstrap.servers`` as written, for error texts.
        timeout_s: Seconds, 1 to 900, that Kafka may take for a batch at its usual rate; at least once: how long it may
            accept nothing (docs/kafka.md#slow-kafka). Default 60, at most once 5.
        client: Unresolved librdkafka configuration, complete but for callbacks.
        topic: Topic of every record; default the column ``topic`` names it.
        include_headers: Whether the column ``headers`` is written, if there is one.
        dead_letter_topic: Topic of the records that Kafka would refuse, every byte and with the reason; without it they
            stop the query.
        sink_id: Names the sink in transactional ids, markers and dead letters; default the id of the query. In
            foreachBatch the option ``topic`` is appended, so one name may serve all outputs of a query.
        batch: With ``sinkId``, ``df.write`` and exactly once: number of the batch of a write in foreachBatch, whose
            repeats are skipped (docs/exactly-once.md#in-foreachbatch).
        parallelism: Exactly once: partitions of a batch, each its own transaction, written by its task; 1 needs
            ``.coalesce(1)``, more ``.repartition(N, key)``. Without it the driver writes one transaction
            (docs/exactly-once.md#one-partition-or-n).
        gather: Whether the driver writes the rows of all tasks in one transaction: exactly once, and no `parallelism`
            was given.
        prefix: Prefix of transactional ids and of the marker topic, ``<prefix>.<sink id>.markers``: the prefix for
            ACLs.
        verify: Whether count and checksum of a skipped batch are compared with its marker; where it is off no checksum
            is computed. Default where ``parallelism`` is over 1, with ``batchId``, and where the checkpoint is not on a
            local disk.
        source_topics: The query reads topics of the same Kafka with Spark's Kafka source: their ids are kept in the
            checkpoint, and a topic that was deleted and recreated stops the query (TL-B06) instead of being read from
            the old one's offset. With any guarantee; needs a checkpoint on a local disk.
    """

    guarantee: Guarantee
    servers: str
    timeout_s: Annotated[float, Ge(1), Le(900), Option("deliveryTimeout")]
    client: Mapping[str, str] = field(hash=False)
    topic: Annotated[str, MinLen(1)] | None = None
    include_headers: bool = True
    dead_letter_topic: _KafkaName | None = None
    sink_id: _KafkaName | None = None
    batch: Annotated[int, Ge(0), Le(1 << 63), Option("batchId")] | None = None
    parallelism: Annotated[int, Ge(1), Le(MAX_PARALLELISM)] = 1
    gather: bool = False
    prefix: Annotated[str, Option("transactionalIdPrefix", parse=_checked_name)] = "towline"
    verify: Annotated[bool, Option("verifyOnSkip")] | None = None
    source_topics: Annotated[bool, Option("verifySourceTopics")] = False

    def verifies(self, *, same_offsets: bool) -> bool:
        """Return whether the rows of a skipped batch are compared with its marker.

        Args:
            same_offsets: Whether the hash of the source's offsets equals the marker's, so that it is the same batch.
                Where there is no hash, as on an object store, two copies of one checkpoint may have run on with other
                batches of one number, and only the rows tell them apart.
        """
        return self.parallelism > 1 or not same_offsets if self.verify is None else self.verify

    @property
    def budget_s(self) -> float:
        """Target time of a batch in seconds: a quarter of the time-out, so that a slow batch still finishes."""
        return self.timeout_s / 4

    def marker_topic_of(self, sink_id: str) -> str:
        """Return the topic of a sink's markers."""
        return f"{self.prefix}.{sink_id}{MARKER_TOPIC_SUFFIX}"

    def transactional_id(self, sink_id: str, partition: int) -> str:
        """Return the transactional id of a partition, which fences its older writers."""
        return f"{self.prefix}.{sink_id}.{partition}"

    def is_reserved(self, topic: str) -> bool:
        """Return whether the topic is reserved, so that no row may name it."""
        return self._reserved_pattern.fullmatch(topic) is not None

    @functools.cached_property
    def _reserved_pattern(self) -> re.Pattern[str]:
        return re.compile(reserved_topics_pattern(prefix=self.prefix))

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkSettings:
        """Validate an option map; keys in any case.

        Raises:
            ConfigError: TL-C01 unknown option, TL-C21 an invalid value, TL-C41 a contradiction to the guarantee, and
                the errors of `check_client`.
        """
        texts = {key.lower(): text for key, text in without_table_properties(options).items()}
        client_options = {key.removeprefix("kafka."): texts.pop(key) for key in [*texts] if key.startswith("kafka.")}
        parsed_options = _FORMAT.parse(texts)
        values = parsed_options.values(_OPTIONS)
        guarantee: Guarantee = values.setdefault("guarantee", Guarantee.EXACTLY_ONCE)
        _check_guarantee(guarantee, parsed_options, client_options)
        timeout_s: float = values.setdefault("timeout_s", policy(guarantee).kafka_timeout_s)
        client = {**CLIENT_DEFAULTS, **policy(guarantee).kafka_settings, **client_options}
        client["message.timeout.ms"] = str(int(timeout_s * 1000))
        max_bytes = client.get("message.max.bytes", "").strip()
        # A queue that one record fills would take one record at a time, or never this one.
        if max_bytes.isdecimal() and _QUEUE_KBYTES not in client_options:
            client[_QUEUE_KBYTES] = str(max(int(client[_QUEUE_KBYTES]), 2 * int(max_bytes) // 1024))
        if policy(guarantee).transactions:
            client["transaction.timeout.ms"] = client["message.timeout.ms"]
        check_client(client, FORMAT)
        values["sink_id"] = _sink_id(parsed_options)
        gather = policy(guarantee).transactions and "parallelism" not in parsed_options
        settings = cls(servers=client["bootstrap.servers"], client=client, gather=gather, **values)
        for option, name in (("topic", settings.topic), ("deadLetterTopic", settings.dead_letter_topic)):
            if name is not None and settings.is_reserved(name):
                problem = f'option "{option}" names "{name}", which is reserved for markers or internal to Kafka'
                raise ConfigError("TL-C95", FORMAT, problem, "Choose another topic.")
        return settings


def _contradiction(problem: str, remedy: str) -> ConfigError:
    return ConfigError("TL-C41", FORMAT, problem, remedy)


def _check_guarantee(guarantee: Guarantee, parsed_options: OptionValues, client_options: Mapping[str, str]) -> None:
    """Refuse options without effect under this guarantee, and client settings that contradict it."""
    unusable_fields = frozenset[str]() if guarantee == Guarantee.EXACTLY_ONCE else _EXACTLY_ONCE_FIELDS
    if guarantee == Guarantee.AT_MOST_ONCE:
        unusable_fields |= {"dead_letter_topic"}  # it drops records
    for option in _OPTIONS:
        if option.name in parsed_options and option.path[0] in unusable_fields:
            problem = f'option "{option.name}" has no effect with guarantee {guarantee}'
            raise _contradiction(problem, "Leave it out, or choose another guarantee.")
    required = policy(guarantee).kafka_settings
    for name, value in client_options.items():
        setting, text = ALIASES.get(name, name), value.strip().lower()
        if setting == "transactional.id":
            problem, remedy = "can not be set, the guarantee decides about transactions", "Leave it out."
        elif setting in {"message.timeout.ms", "transaction.timeout.ms"}:
            problem, remedy = "is set by deliveryTimeout", "Use deliveryTimeout, in seconds."
        elif setting in _GUARANTEED and text != required.get(setting, text):
            problem, remedy = (
                f"= {value} contradicts guarantee {guarantee}",
                f"It needs {required[setting]}: leave it out.",
            )
        else:
            continue
        raise _contradiction(f'option "kafka.{name}" {problem}', remedy)


def _sink_id(parsed_options: OptionValues) -> str | None:
    name: str | None = parsed_options.value("sinkId")
    if "batchId" not in parsed_options:
        return name
    if name is None:
        remedy = 'Add option("sinkId", NAME): the same at each start of the query, and of no other query.'
        raise ConfigError("TL-C200", FORMAT, 'option "batchId" needs the option "sinkId"', remedy)
    return f"{name}.{parsed_options.value('topic')}" if "topic" in parsed_options else name


#: Client settings of the guarantee; of others that contradict idempotence librdkafka itself says so (TL-C45).
_GUARANTEED: Final = frozenset({"acks", "enable.idempotence", "retries"})
#: Options without effect without transactions.
_EXACTLY_ONCE_FIELDS: Final = frozenset({"batch", "parallelism", "prefix", "verify"})
#: The options of the sink, beside those of Spark's Kafka sink.
_OPTIONS: Final = tuple(options_of(SinkSettings, exclude={"servers", "client", "gather"}))
_FORMAT: Final = FormatOptions(
    FORMAT,
    _OPTIONS,
    unknown_hint="Known here: {} and kafka.*.",
    similar_names=("kafka.bootstrap.servers",),
)
NAMES: Final = _FORMAT.names  #: Every option, as users write it.
