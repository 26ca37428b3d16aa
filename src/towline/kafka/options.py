"""The options of ``format("kafka_transactional")``: Spark's Kafka sink's own, and the guarantee."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, overload

from towline.errors import ConfigError, did_you_mean
from towline.guarantee import POLICIES, Guarantee, policy
from towline.kafka.clientconfig import check_client
from towline.kafka.reserved import reserved

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FORMAT", "SinkSettings"]

#: Name of the format, and the place an error about its options names.
FORMAT: Final = "kafka_transactional"

#: Spellings for people; Spark hands options over in lower case.
NAMES: Final = (
    "topic",
    "includeHeaders",
    "guarantee",
    "deliveryTimeout",
    "deadLetterTopic",
    "sinkId",
    "parallelism",
    "transactionalIdPrefix",
    "markerTopic",
    "createMarkerTopic",
    "onMissingMarker",
    "verifyOnSkip",
    "producerReuse",
    "spoolMemoryBytes",
    "spoolDiskBytes",
)
#: Options that only exactly_once has.
TRANSACTIONAL: Final = NAMES[NAMES.index("parallelism") :]
#: Spark's own, which every sink is given.
SPARKS: Final = frozenset({"checkpointlocation", "queryname"})
_QUEUE: Final = "queue.buffering.max.kbytes"
_TIMEOUT_RANGE: Final = (1.0, 900.0)

#: Other names of one setting (librdkafka's CONFIGURATION.md).
ALIASES: Final = MappingProxyType(
    {
        "request.required.acks": "acks",
        "message.send.max.retries": "retries",
        "max.in.flight.requests.per.connection": "max.in.flight",
        "delivery.timeout.ms": "message.timeout.ms",
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


@dataclass(frozen=True)
class SinkSettings:
    """The validated options of one sink; picklable, and free of secrets [I12].

    Attributes:
        guarantee: ``exactly_once``, ``at_least_once`` or ``at_most_once``.
        servers: ``bootstrap.servers`` as written, for messages.
        topic: Topic of every record; None when the column ``topic`` names it.
        include_headers: Whether the column ``headers`` is written, if there is one.
        timeout_s: Seconds within which Kafka must have confirmed a record.
        client: Unresolved librdkafka configuration, complete but for callbacks.
        dead_letter_topic: Where records go that can't be written; None: they stop the query.
        sink_id: Names the sink in transactional ids and markers; None for the id of the query.
        parallelism: Partitions a batch may have; 1 makes it one transaction.
        prefix: What transactional ids and the marker topic begin with.
        marker_topic: The compacted topic of the markers; None for ``<prefix>.<sink id>.markers``.
        create_marker_topic: Whether it is created when it is missing.
        on_missing: What to do when a batch > 0 has no marker.
        verify: Whether a skipped batch is compared with its marker; None for "if parallelism > 1, or the
            source's offsets were not compared".
        reuse: Whether a producer that proved healthy serves the next transaction too.
        spool_memory: Bytes of a task's rows kept in memory.
        spool_disk: Bytes of a task's rows kept on disk beyond that; None for what the disk holds.
    """

    guarantee: str
    servers: str
    topic: str | None
    include_headers: bool
    timeout_s: float
    client: Mapping[str, str] = field(hash=False)
    dead_letter_topic: str | None = None
    sink_id: str | None = None
    parallelism: int = 1
    prefix: str = "towline"
    marker_topic: str | None = None
    create_marker_topic: bool = True
    on_missing: str = "fail"
    verify: bool | None = None
    reuse: bool = False
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
        given = {key.lower(): value for key, value in options.items() if key.lower() not in SPARKS}
        kafka = {key.removeprefix("kafka."): given.pop(key) for key in [k for k in given if k.startswith("kafka.")]}
        _check_names(given, kafka)
        guarantee = _guarantee(given.get("guarantee"))
        timeout_s = _seconds(given.get("deliverytimeout"), policy(guarantee).kafka_timeout_s)
        _check_promise(guarantee, kafka)
        _check_transactional(guarantee, given)
        client = {**TUNING, **policy(guarantee).kafka, **kafka, "message.timeout.ms": str(int(timeout_s * 1000))}
        _check_queue(client, kafka)
        if guarantee == "exactly_once":
            client.setdefault("transaction.timeout.ms", client["message.timeout.ms"])
            _check_clock(client)
        check_client(client, FORMAT)
        made = cls(
            guarantee=guarantee,
            servers=client["bootstrap.servers"],
            topic=_topic(given.get("topic")),
            include_headers=_flag(given.get("includeheaders"), default=True),
            timeout_s=timeout_s,
            client=client,
            dead_letter_topic=_name(given, "deadLetterTopic"),
            sink_id=_name(given, "sinkId"),
            parallelism=_whole(given, "parallelism", cls.parallelism, 1, MOST_PARTITIONS),
            prefix=_name(given, "transactionalIdPrefix") or cls.prefix,
            marker_topic=_name(given, "markerTopic"),
            create_marker_topic=_flag(given.get("createmarkertopic"), default=True, name="createMarkerTopic"),
            on_missing=_word(given, "onMissingMarker", ("fail", "replay", "skip")),
            verify=_flag(given.get("verifyonskip"), default=None, name="verifyOnSkip"),
            reuse=_word(given, "producerReuse", ("never", "healthy")) == "healthy",
            spool_memory=_whole(given, "spoolMemoryBytes", cls.spool_memory, 0, 1 << 40),
            spool_disk=_whole(given, "spoolDiskBytes", 0, 0, 1 << 50) if "spooldiskbytes" in given else None,
        )
        made._check_reserved()
        return made

    def _check_reserved(self) -> None:
        for option, name in (("topic", self.topic), ("deadLetterTopic", self.dead_letter_topic)):
            if name is not None and self.reserves(name):
                what = f'option "{option}" names "{name}", which is reserved for markers or internal to Kafka'
                raise ConfigError("TL-C95", FORMAT, what, "Choose another topic.")


@functools.cache
def _reserves(prefix: str, marker_topic: str | None) -> Callable[[str], re.Match[str] | None]:
    return re.compile(reserved([marker_topic] if marker_topic else [], prefix)).fullmatch


def _check_names(given: Mapping[str, str], kafka: Mapping[str, str]) -> None:
    known = {name.lower() for name in NAMES}
    for name in given:
        if name not in known:
            hint = did_you_mean(
                name, [*NAMES, "kafka.bootstrap.servers"], f"Known here: {', '.join(NAMES)} and kafka.*."
            )
            raise ConfigError("TL-C01", FORMAT, f'unknown option "{name}"', hint)
    if "" in kafka:
        raise ConfigError(
            "TL-C01", FORMAT, 'unknown option "kafka."', "Name a property of Kafka's client after the dot."
        )


def _guarantee(given: str | None) -> str:
    guarantee = Guarantee.EXACTLY_ONCE.value if given is None else given
    if guarantee not in POLICIES:
        words = "exactly_once (the default), at_least_once (nothing lost) and at_most_once (nothing doubled)"
        raise ConfigError("TL-C40", FORMAT, f'"{given}" is not a guarantee', f"Choose between {words}.")
    return guarantee


def _check_transactional(guarantee: str, given: Mapping[str, str]) -> None:
    """Options about transactions mean nothing without them; ``sinkId`` names the sink in dead letters too."""
    for name in TRANSACTIONAL:
        if guarantee != "exactly_once" and name.lower() in given:
            raise ConfigError(
                "TL-C41",
                FORMAT,
                f'option "{name}" belongs to guarantee exactly_once, this one is {guarantee}',
                "Leave it out, or choose exactly_once.",
            )
    if guarantee == "at_most_once" and "deadlettertopic" in given:
        raise ConfigError(
            "TL-C41",
            FORMAT,
            'option "deadLetterTopic" contradicts guarantee at_most_once, which gives records up',
            "Leave it out, or choose another guarantee.",
        )


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


def _topic(given: str | None) -> str | None:
    if given is not None and not given.strip():
        raise ConfigError(
            "TL-C47", FORMAT, 'option "topic" is empty', "Name a topic, or leave it out and give a column topic."
        )
    return given


#: Kafka's rule for names of topics (org.apache.kafka.common.internals.Topic); 200 leave room for what is added.
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
#: More partitions than a sink can sensibly have; each has a marker and a transactional id.
MOST_PARTITIONS: Final = 1000


def _name(given: Mapping[str, str], name: str) -> str | None:
    value = given.get(name.lower())
    if value is not None and (not _NAME.fullmatch(value) or value in (".", "..")):
        raise ConfigError(
            "TL-C47",
            FORMAT,
            f'option "{name}" is "{value}", which is no name for Kafka',
            "Use 1 to 200 of the characters a-z A-Z 0-9 . _ -",
        )
    return value


def _word(given: Mapping[str, str], name: str, words: tuple[str, ...]) -> str:
    value = given.get(name.lower(), words[0])
    if value not in words:
        raise ConfigError(
            "TL-C47", FORMAT, f'option "{name}" must be {" or ".join(words)}, not "{value}"', "Correct it."
        )
    return value


def _whole(given: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name.lower())
    if value is None:
        return default
    if not value.isdecimal() or not low <= int(value) <= high:
        raise ConfigError(
            "TL-C47",
            FORMAT,
            f'option "{name}" must be a whole number from {low:,} to {high:,}, not "{value}"',
            "Correct it.",
        )
    return int(value)


@overload
def _flag(given: str | None, *, default: bool, name: str = ...) -> bool: ...
@overload
def _flag(given: str | None, *, default: None, name: str = ...) -> bool | None: ...
def _flag(given: str | None, *, default: bool | None, name: str = "includeHeaders") -> bool | None:
    if given is None:
        return default
    if given.lower() not in ("true", "false"):
        raise ConfigError("TL-C47", FORMAT, f'option "{name}" must be true or false, not "{given}"', "Correct it.")
    return given.lower() == "true"


def _seconds(given: str | None, default: float) -> float:
    low, high = _TIMEOUT_RANGE
    try:
        seconds = default if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not low <= seconds <= high:
        raise ConfigError(
            "TL-C47",
            FORMAT,
            f'option "deliveryTimeout" must be {low:g} to {high:g} seconds, not "{given}"',
            "Correct it.",
        )
    return seconds
