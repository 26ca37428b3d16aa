"""The options of ``format("kafka_transactional")``: Spark's Kafka sink's own, and the guarantee."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from towline.errors import ConfigError
from towline.kafka.clientconfig import check_client, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FORMAT", "SinkSettings", "promise"]

#: Name of the format, and the place an error about its options names.
FORMAT: Final = "kafka_transactional"

#: Spellings for people; Spark hands options over in lower case.
NAMES: Final = ("topic", "includeHeaders", "guarantee", "sinkId", "deliveryTimeout")
#: Spark's own, which every sink is given.
SPARKS: Final = frozenset({"checkpointlocation", "queryname"})
_TIMEOUT_RANGE: Final = (1.0, 900.0)


class Promise(NamedTuple):
    """What a guarantee decides about the producer (design section 4).

    Attributes:
        client: librdkafka's settings that make the promise.
        accepts: What a user may write for them without contradicting it.
        timeout_s: Default of ``deliveryTimeout`` in seconds.
    """

    client: Mapping[str, str]
    accepts: Mapping[str, frozenset[str]]
    timeout_s: float


#: At least once: idempotent, acknowledged by all in-sync replicas, sent again until the delivery timeout.
#: max.in.flight at most 5 is what idempotence allows (KIP-98, librdkafka).
_AT_LEAST_ONCE: Final = Promise(
    client=MappingProxyType({"acks": "all", "enable.idempotence": "true"}),
    accepts=MappingProxyType(
        {
            "acks": frozenset({"all", "-1"}),
            "enable.idempotence": frozenset({"true"}),
            "max.in.flight": frozenset("12345"),
        }
    ),
    timeout_s=60.0,
)
#: At most once: nobody answers and nothing is sent twice, so nothing can double.
_AT_MOST_ONCE: Final = Promise(
    client=MappingProxyType({"acks": "0", "enable.idempotence": "false", "retries": "0"}),
    accepts=MappingProxyType(
        {"acks": frozenset({"0"}), "enable.idempotence": frozenset({"false"}), "retries": frozenset({"0"})}
    ),
    timeout_s=5.0,
)
PROMISES: Final = MappingProxyType({"at_least_once": _AT_LEAST_ONCE, "at_most_once": _AT_MOST_ONCE})

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


def promise(guarantee: str) -> Promise:
    """What ``guarantee`` decides; one of `PROMISES`."""
    return PROMISES[guarantee]


@dataclass(frozen=True)
class SinkSettings:
    """The validated options of one sink; picklable, and free of secrets [I12].

    Attributes:
        guarantee: ``at_least_once`` or ``at_most_once``.
        servers: ``bootstrap.servers`` as written, for messages.
        topic: Topic of every record; None when the column ``topic`` names it.
        include_headers: Whether the column ``headers`` is written, if there is one.
        timeout_s: Seconds within which Kafka must have confirmed a record.
        client: Unresolved librdkafka configuration, complete but for callbacks.
        sink_id: Reserved: names the sink in transactional ids.
    """

    guarantee: str
    servers: str
    topic: str | None
    include_headers: bool
    timeout_s: float
    client: Mapping[str, str] = field(hash=False)
    sink_id: str | None = None

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
        timeout_s = _seconds(given.get("deliverytimeout"), promise(guarantee).timeout_s)
        _check_promise(guarantee, kafka)
        client = {**TUNING, **promise(guarantee).client, **kafka, "message.timeout.ms": str(int(timeout_s * 1000))}
        check_client(client, FORMAT)
        return cls(
            guarantee=guarantee,
            servers=client["bootstrap.servers"],
            topic=_topic(given.get("topic")),
            include_headers=_flag(given.get("includeheaders"), default=True),
            timeout_s=timeout_s,
            client=client,
            sink_id=given.get("sinkid"),
        )


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
    words = "at_least_once (nothing lost) and at_most_once (nothing doubled)"
    if given is None or given == "exactly_once":
        which = "guarantee exactly_once" if given else "guarantee exactly_once, which is meant when none is given,"
        raise ConfigError(
            "TL-C40",
            FORMAT,
            f"{which} is not available yet; the two that work are {words}",
            'Say option("guarantee", ...).',
        )
    if given not in PROMISES:
        raise ConfigError("TL-C40", FORMAT, f'"{given}" is not a guarantee', f"Choose between {words}.")
    return given


def _check_promise(guarantee: str, kafka: Mapping[str, str]) -> None:
    accepts = promise(guarantee).accepts
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
        if setting == "retries" and guarantee == "at_least_once" and value.strip() == "0":
            raise ConfigError(
                "TL-C41", FORMAT, f'option "kafka.{name}" = 0 contradicts guarantee {guarantee}', "Leave it out."
            )


def _topic(given: str | None) -> str | None:
    if given is not None and not given.strip():
        raise ConfigError(
            "TL-C47", FORMAT, 'option "topic" is empty', "Name a topic, or leave it out and give a column topic."
        )
    return given


def _flag(given: str | None, *, default: bool) -> bool:
    if given is None:
        return default
    if given.lower() not in ("true", "false"):
        raise ConfigError(
            "TL-C47", FORMAT, f'option "includeHeaders" must be true or false, not "{given}"', "Correct it."
        )
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
