"""The options of ``format("kafka_transactional")``: Spark's Kafka sink's own, and the guarantee."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

from annotated_types import Ge, Le

from towline.errors import ConfigError
from towline.guarantee import Guarantee, policy
from towline.kafka.clientconfig import check_client, translated
from towline.kafka.deadletters import reserved
from towline.options import SPARKS, Format, OptionText, options_of, size, without_properties

if TYPE_CHECKING:
    from towline.options import Given

__all__ = ["FORMAT", "SinkSettings"]

#: Name of the format, and the place an error about its options names.
FORMAT: Final = "kafka_transactional"

_QUEUE: Final = "queue.buffering.max.kbytes"

#: Other names of one setting (librdkafka's CONFIGURATION.md).
ALIASES: Final[Mapping[str, str]] = {
    "request.required.acks": "acks",
    "message.send.max.retries": "retries",
    "max.in.flight.requests.per.connection": "max.in.flight",
}

#: Larger batches and a little patience: 0.6 instead of 2 us a record in the broker (measured, 100 B, 3 partitions).
#: The queue holds a few Spark batches; murmur2_random places keys where Java, Spark and Hono place them.
TUNING: Final[Mapping[str, str]] = {
    "linger.ms": "20",
    "batch.size": "1000000",
    "queue.buffering.max.messages": "500000",
    "queue.buffering.max.kbytes": "262144",
    "partitioner": "murmur2_random",
    "reconnect.backoff.ms": "20",
    "reconnect.backoff.max.ms": "1000",
}


#: Kafka's rule for names of topics (org.apache.kafka.common.internals.Topic); 200 leave room for what is added.
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
#: More partitions than a sink can sensibly have; each has a marker and a transactional id.
MOST_PARTITIONS: Final = 1000


def _topic(text: str) -> str:
    if not text:
        raise ValueError("is empty; name a topic, or leave it out and give a column topic")
    return text


def _name(text: str) -> str:
    if not _NAME.fullmatch(text) or text in (".", ".."):
        raise ValueError("is no name for Kafka; use 1 to 200 of the characters a-z A-Z 0-9 . _ -")
    return text


_KafkaName = Annotated[str, OptionText(read=_name)]


@dataclass(frozen=True, kw_only=True)
class SinkSettings:
    """The validated options of one sink; picklable, and free of secrets [I12].

    Attributes:
        guarantee: ``exactly_once`` (the default), ``at_least_once`` or ``at_most_once`` (docs/exactly-once.md).
        servers: ``bootstrap.servers`` as written, for messages.
        timeout_s: Seconds, 1 to 900, that Kafka may take for a batch that it takes at its usual rate; at least once:
            how long it may take nothing (docs/kafka.md#a-kafka-that-is-slow). Default 60, at most once 5.
        client: Unresolved librdkafka configuration, complete but for callbacks.
        topic: Topic of every record; default the column ``topic`` names it.
        include_headers: Whether the column ``headers`` is written, if there is one.
        dead_letter_topic: Where records go that Kafka would refuse, every byte and with the reason; without it they
            stop the query.
        sink_id: Names the sink in transactional ids and markers, in dead letters too; default the id of the query. In
            foreachBatch it ends in the option ``topic``, so one name may stand for all outputs of a query.
        batch: With ``sinkId``, ``df.write`` and exactly once: number of the batch of a write in foreachBatch, whose
            repeats are skipped (docs/exactly-once.md#in-foreachbatch).
        parallelism: Exactly once: partitions of a batch, each its own transaction, written by its task; 1 needs
            ``.coalesce(1)``, more ``.repartition(N, key)``. Without it the driver writes one transaction
            (docs/exactly-once.md#one-partition-or-n).
        gather: Whether the driver writes the rows of all tasks in one transaction: exactly once, and no `parallelism`
            was given.
        prefix: What transactional ids and the marker topic begin with: what ACLs are written for.
        marker_topic: The topic of the markers, compacted, a partition for each of ``parallelism``, one a sink; default
            ``<prefix>.<sink id>.markers``.
        create_marker_topic: Whether it is created when it is missing.
        verify: Whether count and checksum of a batch that is skipped are compared with its marker; where it is off no
            checksum is taken. Default where ``parallelism`` is over 1, with ``batchId``, and where the checkpoint is
            not on a local disk.
        source_topics: The query reads topics of the same Kafka with Spark's Kafka source: their ids are kept in the
            checkpoint, and one that was deleted and made again stops the query (TL-B06) instead of being read from the
            old one's offset. With any guarantee; needs a checkpoint on a local disk.
        spool_memory: Bytes of a task's rows kept in memory until its transaction opens.
        spool_disk: And on disk (``TMPDIR``) beyond that; default what the disk holds. A planned batch does not shrink:
            a limit it exceeds stops the query until the limit is raised.
    """

    guarantee: Guarantee
    servers: str
    timeout_s: Annotated[float, Ge(1), Le(900), OptionText("deliveryTimeout")]
    client: Mapping[str, str] = field(hash=False)
    topic: Annotated[str, OptionText(read=_topic)] | None = None
    include_headers: bool = True
    dead_letter_topic: _KafkaName | None = None
    sink_id: _KafkaName | None = None
    batch: Annotated[int, Ge(0), Le(1 << 63), OptionText("batchId")] | None = None
    parallelism: Annotated[int, Ge(1), Le(MOST_PARTITIONS)] = 1
    gather: bool = False
    prefix: Annotated[str, OptionText("transactionalIdPrefix", _name)] = "towline"
    marker_topic: _KafkaName | None = None
    create_marker_topic: bool = True
    verify: Annotated[bool, OptionText("verifyOnSkip")] | None = None
    source_topics: Annotated[bool, OptionText("verifySourceTopics")] = False
    spool_memory: Annotated[int, Ge(0), OptionText("spoolMemoryBytes", size)] = 64 << 20
    spool_disk: Annotated[int, Ge(0), OptionText("spoolDiskBytes", size)] | None = None

    def verifies(self, *, same_offsets: bool) -> bool:
        """Whether the rows of a skipped batch are compared with its marker.

        Args:
            same_offsets: The hash of the source's offsets was held against the marker's: it is the same batch. Where it
                is not at hand, as on an object store, two copies of one checkpoint may have run on with other batches
                of one number, and only the rows tell them apart.
        """
        return self.parallelism > 1 or not same_offsets if self.verify is None else self.verify

    @property
    def budget_s(self) -> float:
        """Seconds that a batch should take at most, so that one that Kafka takes more slowly is still in time."""
        return self.timeout_s / 4

    def markers_of(self, sink_id: str) -> str:
        """The topic of a sink's markers."""
        return self.marker_topic or f"{self.prefix}.{sink_id}.markers"

    def transactional_id(self, sink_id: str, partition: int) -> str:
        """The id that fences older writers of a partition."""
        return f"{self.prefix}.{sink_id}.{partition}"

    def reserves(self, topic: str) -> bool:
        """Whether a row must not name this topic."""
        return self._reserved.fullmatch(topic) is not None

    @functools.cached_property
    def _reserved(self) -> re.Pattern[str]:
        return re.compile(reserved(filter(None, [self.marker_topic]), self.prefix))

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkSettings:
        """Validate an option map; keys in any case.

        Raises:
            ConfigError: TL-C01 unknown option, TL-C21 a value that can't be, TL-C41 a contradiction to the guarantee,
                and what `check_client` raises.
        """
        texts = {key.lower(): text for key, text in without_properties(options).items()}
        kafka = {key.removeprefix("kafka."): texts.pop(key) for key in [k for k in texts if k.startswith("kafka.")]}
        given = _FORMAT.read(texts)
        own = given.values(_OPTIONS)
        guarantee: Guarantee = own.setdefault("guarantee", Guarantee.EXACTLY_ONCE)
        _check_promise(guarantee, given, kafka)
        kafka, written = translated(kafka, FORMAT)
        if (deadline := kafka.pop("message.timeout.ms", None)) is not None:  # Java's delivery.timeout.ms
            if "deliveryTimeout" in given:
                raise _contradiction('options "kafka.delivery.timeout.ms" and "deliveryTimeout" say the same thing')
            own["timeout_s"] = int(deadline) / 1000
        timeout_s: float = own.setdefault("timeout_s", policy(guarantee).kafka_timeout_s)
        client = {**TUNING, **policy(guarantee).kafka, **kafka, "message.timeout.ms": str(int(timeout_s * 1000))}
        most = client.get("message.max.bytes", "").strip()
        if most.isdecimal() and _QUEUE not in kafka:  # one that a record fills would never take it, or one at a time
            client[_QUEUE] = str(max(int(client[_QUEUE]), 2 * int(most) // 1024))
        if policy(guarantee).transactions:
            clock = client.setdefault("transaction.timeout.ms", client["message.timeout.ms"]).strip()
            if clock.isdecimal() and int(clock) < timeout_s * 1000:  # librdkafka would lower the other in silence
                what = (
                    f'option "kafka.transaction.timeout.ms" = {clock} is shorter than deliveryTimeout, {timeout_s:g} s'
                )
                raise _contradiction(what, "Lower deliveryTimeout, or raise kafka.transaction.timeout.ms.")
        check_client(client, FORMAT, written=written)
        own["sink_id"] = _sink_id(given)
        gather = policy(guarantee).transactions and "parallelism" not in given
        settings = cls(servers=client["bootstrap.servers"], client=client, gather=gather, **own)
        for option, name in (("topic", settings.topic), ("deadLetterTopic", settings.dead_letter_topic)):
            if name is not None and settings.reserves(name):
                what = f'option "{option}" names "{name}", which is reserved for markers or internal to Kafka'
                raise ConfigError("TL-C95", FORMAT, what, "Choose another topic.")
        return settings


def _contradiction(what: str, do: str = "Give one of the two.") -> ConfigError:
    return ConfigError("TL-C41", FORMAT, what, do)


def _check_promise(guarantee: Guarantee, given: Given, kafka: Mapping[str, str]) -> None:
    """Refuse options that mean nothing under this guarantee, and settings of the client that contradict it."""
    for option in (one for one in _OPTIONS if one.name in given):
        if option.path[0] in _EXACTLY_ONCE and guarantee != Guarantee.EXACTLY_ONCE:
            what = f'option "{option.name}" belongs to guarantee exactly_once, this one is {guarantee}'
            raise _contradiction(what, "Leave it out, or choose exactly_once.")
        if option.path[0] in _NO_LOSS and guarantee == Guarantee.AT_MOST_ONCE:
            what = f'option "{option.name}" contradicts guarantee {guarantee}, which gives records up'
            raise _contradiction(what, "Leave it out, or choose another guarantee.")
    accepts = policy(guarantee).kafka_accepts
    for name, value in kafka.items():
        setting, word = ALIASES.get(name, name), value.strip().lower()
        what, do = f"= {value} contradicts guarantee {guarantee}", "Leave it out."
        if setting == "transactional.id":
            what = "can not be set, the guarantee decides about transactions"
        elif setting == "message.timeout.ms":
            what, do = "is set by deliveryTimeout", "Use deliveryTimeout, in seconds."
        elif word not in accepts.get(setting, {word}):
            do = f"It needs {' or '.join(sorted(accepts[setting]))}: leave the option out."
        elif not (setting == "retries" and word == "0" and guarantee != Guarantee.AT_MOST_ONCE):
            continue
        raise _contradiction(f'option "kafka.{name}" {what}', do)


def _sink_id(given: Given) -> str | None:
    name: str | None = given.value("sinkId")
    if "batchId" not in given:
        return name
    if name is None:
        do = 'Add option("sinkId", NAME): the same at each start of the query, and of no other query.'
        raise ConfigError("TL-C200", FORMAT, 'option "batchId" needs the option "sinkId"', do)
    return f"{name}.{given.value('topic')}" if "topic" in given else name


#: Settings that mean nothing without transactions, and those that mean nothing where records are given up.
_EXACTLY_ONCE: Final = frozenset(
    {
        "batch", "parallelism", "prefix", "marker_topic", "create_marker_topic", "verify",
        "spool_memory", "spool_disk",
    }
)  # fmt: skip
_NO_LOSS: Final = frozenset({"dead_letter_topic"})
#: Spark's Kafka sink's own options, and ours.
_OPTIONS: Final = tuple(options_of(SinkSettings, leave_out={"servers", "client", "gather"}))
_FORMAT: Final = Format(
    FORMAT,
    _OPTIONS,
    hint="Known here: {} and kafka.*.",
    ignored=SPARKS,
    also=("kafka.bootstrap.servers",),
)
#: Every option, as users write it.
NAMES: Final = _FORMAT.names
