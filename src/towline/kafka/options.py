"""The options of ``format("kafka_transactional")``: Spark's Kafka sink's own, and the guarantee."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from towline.errors import ConfigError
from towline.guarantee import POLICIES, Guarantee, policy
from towline.kafka.clientconfig import check_client
from towline.kafka.javanames import translated
from towline.kafka.reserved import reserved
from towline.options import SPARKS, Format, Option, between, truth, whole, without_properties

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from towline.options import Given

__all__ = ["FORMAT", "SinkSettings"]

#: Name of the format, and the place an error about its options names.
FORMAT: Final = "kafka_transactional"

_QUEUE: Final = "queue.buffering.max.kbytes"

#: Other names of one setting (librdkafka's CONFIGURATION.md).
ALIASES: Final = MappingProxyType(
    {
        "request.required.acks": "acks",
        "message.send.max.retries": "retries",
        "max.in.flight.requests.per.connection": "max.in.flight",
    }
)

#: Larger batches and a little patience: 0.6 instead of 2 us a record in the broker (measured, 100 B, 3 partitions).
#: The queue holds a few Spark batches; murmur2_random places keys where Java, Spark and Hono place them.
TUNING: Final = MappingProxyType(
    {
        "linger.ms": "20",
        "batch.size": "1000000",
        "queue.buffering.max.messages": "500000",
        "queue.buffering.max.kbytes": "262144",
        "partitioner": "murmur2_random",
        "reconnect.backoff.ms": "20",
        "reconnect.backoff.max.ms": "1000",
    }
)


#: Bytes of a request to a Kafka that takes less than a larger one in a second. Five are on the way at a time.
_SLOW_REQUEST: Final = 64 << 10


@dataclass(frozen=True, kw_only=True)
class SinkSettings:
    """The validated options of one sink; picklable, and free of secrets [I12].

    Attributes:
        guarantee: ``exactly_once``, ``at_least_once`` or ``at_most_once``.
        servers: ``bootstrap.servers`` as written, for messages.
        timeout_s: Seconds within which Kafka must have confirmed a record.
        client: Unresolved librdkafka configuration, complete but for callbacks.
        topic: Topic of every record; None when the column ``topic`` names it.
        include_headers: Whether the column ``headers`` is written, if there is one.
        dead_letter_topic: Where records go that can't be written; None: they stop the query.
        sink_id: Names the sink in transactional ids and markers; None for the id of the query. In foreachBatch it ends
            in the option ``topic``, so one name may stand for all outputs of a query.
        batch: Number of the batch of a write in foreachBatch, whose repeats are skipped; None for a stream and for a
            batch query that is written as often as it is run.
        parallelism: Transactions of a batch; with 1, and `gather` off, its query must bring one partition.
        gather: Whether the driver writes the rows of all tasks in one transaction: exactly once, and no `parallelism`
            was given.
        prefix: What transactional ids and the marker topic begin with.
        marker_topic: The compacted topic of the markers; None for ``<prefix>.<sink id>.markers``.
        create_marker_topic: Whether it is created when it is missing.
        verify: Whether a skipped batch is compared with its marker; None for "if parallelism > 1, or the
            source's offsets were not compared".
        source_topics: Whether the query reads topics of the same Kafka with Spark's source, whose ids are then kept.
        spool_memory: Bytes of a task's rows kept in memory.
        spool_disk: Bytes of a task's rows kept on disk beyond that; None for what the disk holds.
    """

    guarantee: str
    servers: str
    timeout_s: float
    client: Mapping[str, str] = field(hash=False)
    topic: str | None = None
    include_headers: bool = True
    dead_letter_topic: str | None = None
    sink_id: str | None = None
    batch: int | None = None
    parallelism: int = 1
    gather: bool = False
    prefix: str = "towline"
    marker_topic: str | None = None
    create_marker_topic: bool = True
    verify: bool | None = None
    source_topics: bool = False
    spool_memory: int = 64 << 20
    spool_disk: int | None = None

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

    def in_requests_of(self, rate: float) -> SinkSettings:
        """These settings for a Kafka that takes so many bytes a second: with large requests each would take long."""
        usual = self.client.get("batch.size", "1000000")
        if rate >= int(usual):
            return self
        return replace(self, client={**self.client, "batch.size": str(min(int(usual), _SLOW_REQUEST))})

    def markers_of(self, sink_id: str) -> str:
        """The topic of a sink's markers."""
        return self.marker_topic or f"{self.prefix}.{sink_id}.markers"

    def transactional_id(self, sink_id: str, partition: int) -> str:
        """The id that fences older writers of a partition."""
        return f"{self.prefix}.{sink_id}.{partition}"

    def reserves(self, topic: str) -> bool:
        """Whether a row must not name this topic."""
        return _reserves(self.prefix, self.marker_topic)(topic) is not None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkSettings:
        """Validate an option map; keys in any case.

        Raises:
            ConfigError: TL-C01 unknown option, TL-C40 the guarantee, TL-C41 a contradiction to the guarantee, TL-C47
                a value of another kind, and what `check_client` raises.
        """
        texts = {key.lower(): text for key, text in without_properties(options).items()}
        kafka = {key.removeprefix("kafka."): texts.pop(key) for key in [k for k in texts if k.startswith("kafka.")]}
        if "" in kafka:
            do = "Name a property of Kafka's client after the dot."
            raise ConfigError("TL-C01", FORMAT, 'unknown option "kafka."', do)
        given = _FORMAT.read({**texts, **_delivery_timeout(kafka, texts)})
        guarantee: str = given.value("guarantee", Guarantee.EXACTLY_ONCE.value)
        timeout_s: float = given.value("deliveryTimeout", policy(guarantee).kafka_timeout_s)
        _check_promise(guarantee, kafka)
        _check_belonging(guarantee, given)
        kafka, written = translated(kafka, FORMAT)
        client = {**TUNING, **policy(guarantee).kafka, **kafka, "message.timeout.ms": str(int(timeout_s * 1000))}
        _check_queue(client, kafka)
        if policy(guarantee).transactions:
            client.setdefault("transaction.timeout.ms", client["message.timeout.ms"])
            _check_clock(client)
        check_client(client, FORMAT, written=written)
        settings = cls(
            guarantee=guarantee,
            servers=client["bootstrap.servers"],
            timeout_s=timeout_s,
            client=client,
            gather=policy(guarantee).transactions and "parallelism" not in given,
            **{**given.values(_FORMAT.options), "sink_id": _sink_id(given)},
        )
        settings._check_reserved()
        return settings

    def _check_reserved(self) -> None:
        for option, name in (("topic", self.topic), ("deadLetterTopic", self.dead_letter_topic)):
            if name is not None and self.reserves(name):
                what = f'option "{option}" names "{name}", which is reserved for markers or internal to Kafka'
                raise ConfigError("TL-C95", FORMAT, what, "Choose another topic.")


@functools.cache
def _reserves(prefix: str, marker_topic: str | None) -> Callable[[str], re.Match[str] | None]:
    return re.compile(reserved([marker_topic] if marker_topic else [], prefix)).fullmatch


def _check_belonging(guarantee: str, given: Given) -> None:
    """Refuse options that mean nothing under this promise."""
    for option in _FORMAT.options:
        if option.name not in given or guarantee in option.guarantees:
            continue
        if len(option.guarantees) == 1:
            what = f'option "{option.name}" belongs to guarantee exactly_once, this one is {guarantee}'
            raise ConfigError("TL-C41", FORMAT, what, "Leave it out, or choose exactly_once.")
        what = f'option "{option.name}" contradicts guarantee {guarantee}, which gives records up'
        raise ConfigError("TL-C41", FORMAT, what, "Leave it out, or choose another guarantee.")


def _sink_id(given: Given) -> str | None:
    name: str | None = given.value("sinkId")
    if "batchId" not in given:
        return name
    if name is None:
        do = 'Add option("sinkId", NAME): the same at each start of the query, and of no other query.'
        raise ConfigError("TL-C200", FORMAT, 'option "batchId" needs the option "sinkId"', do)
    return f"{name}.{given.value('topic')}" if "topic" in given else name


def _delivery_timeout(kafka: dict[str, str], texts: Mapping[str, str]) -> dict[str, str]:
    """``kafka.delivery.timeout.ms``, Java's name for what bounds a delivery, taken out and as ``deliveryTimeout``."""
    name = "delivery.timeout.ms"
    if name not in kafka:
        return {}
    if "deliverytimeout" in texts:
        what = f'options "kafka.{name}" and "deliveryTimeout" say the same thing'
        raise ConfigError("TL-C41", FORMAT, what, "Give one of the two.")
    text = kafka.pop(name).strip()
    if not text.isascii() or not text.isdecimal() or not 1000 <= int(text[:9]) <= 900_000:
        what = f'option "kafka.{name}" must be 1000 to 900000 milliseconds, not "{text}"'
        raise ConfigError("TL-C47", FORMAT, what, "Change it: Kafka ends a transaction after 15 minutes at most.")
    return {"deliverytimeout": str(int(text) / 1000)}


def _check_queue(client: dict[str, str], kafka: Mapping[str, str]) -> None:
    """A queue that one record fills would never take it, or take one record at a time."""
    most = client.get("message.max.bytes", "").strip()
    if most.isdecimal() and _QUEUE not in kafka:
        client[_QUEUE] = str(max(int(client[_QUEUE]), 2 * int(most) // 1024))


def _check_clock(client: Mapping[str, str]) -> None:
    """A record must not outlive its transaction; librdkafka would lower its time-out in silence."""
    clock = client["transaction.timeout.ms"].strip()
    if clock.isdecimal() and int(clock) < int(client["message.timeout.ms"]):
        raise ConfigError(
            "TL-C41",
            FORMAT,
            f'option "kafka.transaction.timeout.ms" = {clock} is shorter than deliveryTimeout, '
            f"{int(client['message.timeout.ms']) / 1000:g} s",
            "Lower deliveryTimeout, or raise kafka.transaction.timeout.ms.",
        )


def _check_promise(guarantee: str, kafka: Mapping[str, str]) -> None:
    accepts = policy(guarantee).kafka_accepts
    for name, value in kafka.items():
        setting = ALIASES.get(name, name)
        if setting == "transactional.id":
            raise ConfigError(
                "TL-C41",
                FORMAT,
                f'option "kafka.{name}" can not be set, the guarantee decides about transactions',
                "Leave it out.",
            )
        if setting == "message.timeout.ms":
            raise ConfigError(
                "TL-C41", FORMAT, f'option "kafka.{name}" is set by deliveryTimeout', "Use deliveryTimeout, in seconds."
            )
        if setting in accepts and value.strip().lower() not in accepts[setting]:
            allowed = " or ".join(sorted(accepts[setting]))
            raise ConfigError(
                "TL-C41",
                FORMAT,
                f'option "kafka.{name}" = {value} contradicts guarantee {guarantee}',
                f"It needs {allowed}: leave the option out.",
            )
        if setting == "retries" and guarantee != "at_most_once" and value.strip() == "0":
            raise ConfigError(
                "TL-C41", FORMAT, f'option "kafka.{name}" = 0 contradicts guarantee {guarantee}', "Leave it out."
            )


#: Kafka's rule for names of topics (org.apache.kafka.common.internals.Topic); 200 leave room for what is added.
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
#: More partitions than a sink can sensibly have; each has a marker and a transactional id.
MOST_PARTITIONS: Final = 1000


def _guarantee(text: str) -> str:
    if text not in POLICIES:
        words = "exactly_once (the default), at_least_once (nothing lost) and at_most_once (nothing doubled)"
        raise ConfigError("TL-C40", FORMAT, f'"{text}" is not a guarantee', f"Choose between {words}.")
    return text


def _topic(text: str) -> str:
    if not text:
        raise ValueError("is empty; Name a topic, or leave it out and give a column topic.")
    return text


def _name(text: str) -> str:
    if not _NAME.fullmatch(text) or text in (".", ".."):
        raise ValueError(f'is "{text}", which is no name for Kafka; Use 1 to 200 of the characters a-z A-Z 0-9 . _ -')
    return text


def _wrong(option: Option, text: str, problem: str) -> ConfigError:
    what, _, do = problem.partition("; ")
    if what.startswith("it is "):
        what = f'must be {what.removeprefix("it is ")}, not "{text}"'
    return ConfigError("TL-C47", FORMAT, f'option "{option.name}" {what}', do or "Correct it.")


_EXACTLY_ONCE: Final = frozenset({Guarantee.EXACTLY_ONCE})
_NO_LOSS: Final = frozenset({Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE})
#: Spark's Kafka sink's own options, and ours; ``sinkId`` names the sink in dead letters too. `Option.into` names fields
#: of `SinkSettings`. Options about transactions mean nothing without them.
_FORMAT: Final = Format(
    FORMAT,
    (
        Option("topic", _topic, "topic"),
        Option("includeHeaders", truth, "include_headers"),
        Option("guarantee", _guarantee),
        Option("deliveryTimeout", between(1, 900, "1 to 900 seconds")),
        Option("deadLetterTopic", _name, "dead_letter_topic", _NO_LOSS),
        Option("sinkId", _name, "sink_id"),
        Option("batchId", whole(0, 1 << 63), "batch", _EXACTLY_ONCE),
        Option("parallelism", whole(1, MOST_PARTITIONS), "parallelism", _EXACTLY_ONCE),
        Option("transactionalIdPrefix", _name, "prefix", _EXACTLY_ONCE),
        Option("markerTopic", _name, "marker_topic", _EXACTLY_ONCE),
        Option("createMarkerTopic", truth, "create_marker_topic", _EXACTLY_ONCE),
        Option("verifyOnSkip", truth, "verify", _EXACTLY_ONCE),
        Option("verifySourceTopics", truth, "source_topics"),
        Option("spoolMemoryBytes", whole(0, 1 << 40), "spool_memory", _EXACTLY_ONCE),
        Option("spoolDiskBytes", whole(0, 1 << 50), "spool_disk", _EXACTLY_ONCE),
    ),
    _wrong,
    hint="Known here: {} and kafka.*.",
    ignored=SPARKS,
    also=("kafka.bootstrap.servers",),
)
#: Every option, as users write it.
NAMES: Final = _FORMAT.names
