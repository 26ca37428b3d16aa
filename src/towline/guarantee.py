"""Delivery guarantees in one table: the settings that each guarantee requires and refuses (design section 4).

The source, the sinks, the bridge, ``towline check`` and the page docs/guarantees.md all read it from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Guarantee(StrEnum):
    """Delivery guarantee of a line, with the meaning of Kafka's delivery semantics (design section 4)."""

    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"
    EXACTLY_ONCE = "exactly_once"


class AckAfter(StrEnum):
    """Watermark that a message must have passed before PUBACK or PUBREC is sent [I1]."""

    RECEIVED = "received"
    JOURNAL = "journal"
    KAFKA = "kafka"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of one guarantee.

    Attributes:
        qos: Default QoS of subscriptions; a lower one is refused.
        min_qos_with_dedupe: Lowest QoS accepted on a line with a dedupe key.
        persistent_session: The broker must keep the session [MQTT-3.1.2-4, -5].
        ack_choices: Accepted values of ``ack_after``; the first is the default.
        replays_batches: The source serves a batch that a crash interrupted again. If False, it serves the batch empty
            and counts its rows as dropped.
        transactions: Records and marker are one Kafka transaction [I9].
        publish_qos_choices: Accepted QoS of messages that a downlink publishes; the first is the default.
        spark_settings: Spark settings with their required values.
        kafka_settings: librdkafka settings that make the guarantee.
        kafka_timeout_s: Default delivery timeout of a record, in seconds.
        loss_text: Possible loss in words; "no" if none.
        duplicates_text: Possible duplicates in words; "no" if none.
    """

    qos: int
    min_qos_with_dedupe: int
    persistent_session: bool
    ack_choices: tuple[AckAfter, ...]
    replays_batches: bool
    transactions: bool = False
    publish_qos_choices: tuple[int, ...]
    spark_settings: Mapping[str, str]
    kafka_settings: Mapping[str, str]
    kafka_timeout_s: float = 60.0
    loss_text: str
    duplicates_text: str


#: A second attempt of a task would fence the first; another number of partitions on a replay would be another batch.
_REPEATABLE_TASKS: Final = MappingProxyType(
    {"spark.speculation": "false", "spark.sql.adaptive.streaming.stateless.enabled": "false"}
)

#: A stage that is run again would hand over rows a second time without saying so: its tasks count their attempts anew.
#: Where an executor was decommissioned Spark would not even count that attempt.
_SINGLE_STAGE_ATTEMPT: Final = MappingProxyType(
    {"spark.stage.maxConsecutiveAttempts": "1", "spark.stage.ignoreDecommissionFetchFailure": "false"}
)

#: Idempotent, acknowledged by all in-sync replicas, sent again until the delivery timeout.
_ACKS_ALL: Final = MappingProxyType({"acks": "all", "enable.idempotence": "true"})
#: Nobody answers and nothing is sent twice, so nothing can double.
_ACKS_NONE: Final = MappingProxyType({"acks": "0", "enable.idempotence": "false", "retries": "0"})

POLICIES: Final[Mapping[Guarantee, Policy]] = MappingProxyType(
    {
        Guarantee.AT_MOST_ONCE: Policy(
            qos=0,
            min_qos_with_dedupe=0,
            persistent_session=False,
            ack_choices=(AckAfter.RECEIVED,),
            replays_batches=False,
            publish_qos_choices=(0,),
            spark_settings=_SINGLE_STAGE_ATTEMPT,
            kafka_settings=_ACKS_NONE,
            kafka_timeout_s=5.0,
            loss_text="yes: what is on the way when a process or a broker fails",
            duplicates_text="no",
        ),
        Guarantee.AT_LEAST_ONCE: Policy(
            qos=1,
            min_qos_with_dedupe=1,
            persistent_session=True,
            ack_choices=(AckAfter.JOURNAL, AckAfter.KAFKA),
            replays_batches=True,
            publish_qos_choices=(1, 2),
            spark_settings=MappingProxyType({}),
            kafka_settings=_ACKS_ALL,
            loss_text="no, from the broker's hand-over on, as long as the state directory is kept",
            duplicates_text="yes: after a crash or a retry, and what a publisher sends again",
        ),
        Guarantee.EXACTLY_ONCE: Policy(
            qos=2,
            min_qos_with_dedupe=1,
            persistent_session=True,
            ack_choices=(AckAfter.JOURNAL,),
            replays_batches=True,
            transactions=True,
            publish_qos_choices=(2,),
            spark_settings=_REPEATABLE_TASKS,
            # ``reconnect.backoff.ms`` and `list_topics` first save 500 ms when the transaction's coordinator is looked
            # up (measured, librdkafka 2.16).
            kafka_settings=MappingProxyType({**_ACKS_ALL, "reconnect.backoff.ms": "0"}),
            loss_text="no, from the broker's hand-over on, as long as the state directory is kept",
            duplicates_text="no, for a consumer with isolation.level=read_committed",
        ),
    }
)


def policy(guarantee: Guarantee | str) -> Policy:
    """Return the policy of a guarantee."""
    return POLICIES[Guarantee(guarantee)]


def qos_problem(guarantee: Guarantee, qos: int, *, dedupe: bool = False) -> tuple[str, str] | None:
    """Return problem and remedy if a subscription's QoS is too low for the guarantee; else None.

    A line with a dedupe key may subscribe with a lower QoS (`dedupe`).
    """
    policy_ = POLICIES[guarantee]
    min_qos = policy_.min_qos_with_dedupe if dedupe else policy_.qos
    if qos >= min_qos:
        return None
    remedy = 'Raise it. With exactly_once a dedupe key or promise = "at_least_once" allows QoS 1, "at_most_once" QoS 0.'
    return f"guarantee {guarantee} needs QoS {' or '.join(map(str, range(min_qos, 3)))}", remedy


def promise_problem(guarantee: Guarantee, promise: Guarantee, qos: int | None = None) -> tuple[str, str] | None:
    """Return problem and remedy if a route can't have this ``promise`` of its own; else None.

    The line's sink writes all its routes in one transaction, so a route can be weaker only in its subscription.
    """
    setting = f'promise = "{promise}"'
    if guarantee is not Guarantee.EXACTLY_ONCE:
        return f"{setting} is for a route of a line with exactly_once, not {guarantee}", "Change one of the two."
    if promise is guarantee:
        return f"{setting} is what the line promises", "Remove it, or write at_least_once or at_most_once."
    if qos not in (None, promise_qos := POLICIES[promise].qos):
        return f"{setting} subscribes with QoS {promise_qos}, not {qos}", "Remove qos, or promise."
    return None


def sharing_problem(brokers: int) -> tuple[str, str]:
    """Return problem and remedy of QoS 2 with brokers that share no sessions; a single one may redirect to others.

    Exactly once needs two sides that both remember the packet id [MQTT-4.3.3]. A broker that takes over without the
    sessions knows no packet id, so a message in flight is received, or published, a second time.
    """
    brokers_text = f"{brokers} brokers" if brokers > 1 else "follow_redirects"
    problem = f"QoS 2 with {brokers_text} needs them to share sessions: a takeover would double messages in flight"
    remedy = "Set brokers_share_sessions = true if they do, give one address, or take at_least_once and QoS 1."
    return problem, remedy


def spark_conflict(guarantee: Guarantee, conf: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the first Spark setting that contradicts the guarantee, with its required value; None if there is none."""
    for name, value in POLICIES[guarantee].spark_settings.items():
        if name in conf and str(conf[name]).strip().lower() != value:
            return name, value
    return None
