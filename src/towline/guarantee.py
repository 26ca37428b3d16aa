"""The switch ``guarantee``: what each word sets and what it refuses, in one table (design section 4).

The source, the sinks, the bridge, ``towline check`` and the page docs/guarantees.md all read it from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Guarantee(StrEnum):
    """The promise of a line, as Kafka's delivery semantics use the words (design section 4)."""

    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"
    EXACTLY_ONCE = "exactly_once"


class AckAfter(StrEnum):
    """Which watermark drives PUBACK and PUBREC [I1]."""

    RECEIVED = "received"
    JOURNAL = "journal"
    KAFKA = "kafka"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What one promise sets.

    Attributes:
        qos: QoS to subscribe with where none is written; a subscription with less is refused.
        least_qos_keyed: With less it is refused on a line that drops repeats by a key.
        persistent: Whether the broker must keep the session [MQTT-3.1.2-4, -5].
        acks: When the broker may be answered; the first is taken where none is written, others are refused.
        serves_again: Whether the source serves the batch that a crash interrupted again; else it serves it empty, and
            its rows are counted as given up.
        transactions: Whether records and marker are one transaction [I9].
        isolations: What ``isolation.level`` of the way back may be; the first is taken where none is written: what is
            aborted was never said, whatever may be lost.
        publish_levels: QoS that may be published with on the way back; the first is taken where none is written.
        spark: Spark settings that must have this value.
        kafka: librdkafka's settings that make the promise.
        kafka_accepts: What a user may write for them without contradicting it.
        kafka_timeout_s: Seconds within which Kafka must have confirmed a record, where none are written.
        lost: What can be lost, in words; "no" if nothing.
        doubled: What can be doubled, in words; "no" if nothing.
    """

    qos: int
    least_qos_keyed: int
    persistent: bool
    acks: tuple[AckAfter, ...]
    serves_again: bool
    replay: str
    transactions: bool = False
    isolations: tuple[str, ...] = ("read_committed", "read_uncommitted")
    publish_levels: tuple[int, ...]
    spark: Mapping[str, str]
    kafka: Mapping[str, str]
    kafka_accepts: Mapping[str, frozenset[str]]
    kafka_timeout_s: float = 60.0
    lost: str
    doubled: str

    @property
    def publish_qos(self) -> int:
        """QoS of what is published on the way back where none is written."""
        return self.publish_levels[0]


#: Of MQTT: QoS is 0, 1 or 2 [MQTT 5 section 4.3].
HIGHEST_QOS: Final = 2
#: A second attempt of a task would fence the first; another number of partitions on a replay would be another batch.
_REPEATABLE: Final = MappingProxyType(
    {"spark.speculation": "false", "spark.sql.adaptive.streaming.stateless.enabled": "false"}
)

#: A stage that is run again would hand over rows a second time without saying so: its tasks count their attempts anew.
#: Where an executor was decommissioned Spark would not even count that attempt.
_STAGED_ONCE: Final = MappingProxyType(
    {"spark.stage.maxConsecutiveAttempts": "1", "spark.stage.ignoreDecommissionFetchFailure": "false"}
)

#: Idempotent, acknowledged by all in-sync replicas, sent again until the delivery timeout.
_ACKNOWLEDGED: Final = MappingProxyType({"acks": "all", "enable.idempotence": "true"})
#: max.in.flight at most 5 is what idempotence allows (KIP-98, librdkafka).
_IDEMPOTENT: Final = MappingProxyType(
    {
        "acks": frozenset({"all", "-1"}),
        "enable.idempotence": frozenset({"true"}),
        "max.in.flight": frozenset("12345"),
    }
)
#: Nobody answers and nothing is sent twice, so nothing can double.
_UNANSWERED: Final = MappingProxyType({"acks": "0", "enable.idempotence": "false", "retries": "0"})

POLICIES: Final[Mapping[Guarantee, Policy]] = MappingProxyType(
    {
        Guarantee.AT_MOST_ONCE: Policy(
            qos=0,
            least_qos_keyed=0,
            persistent=False,
            acks=(AckAfter.RECEIVED,),
            serves_again=False,
            replay="served empty",
            publish_levels=(0,),
            spark=_STAGED_ONCE,
            kafka=_UNANSWERED,
            kafka_accepts=MappingProxyType({name: frozenset({value}) for name, value in _UNANSWERED.items()}),
            kafka_timeout_s=5.0,
            lost="yes: what is on the way when a process or a broker fails",
            doubled="no",
        ),
        Guarantee.AT_LEAST_ONCE: Policy(
            qos=1,
            least_qos_keyed=1,
            persistent=True,
            acks=(AckAfter.JOURNAL, AckAfter.KAFKA),
            serves_again=True,
            replay="served again, the same rows in the same order",
            publish_levels=(1, 2),
            spark=MappingProxyType({}),
            kafka=_ACKNOWLEDGED,
            kafka_accepts=_IDEMPOTENT,
            lost="no, from the broker's hand-over on, as long as the state directory is kept",
            doubled="yes: after a crash or a retry, and what a publisher sends again",
        ),
        Guarantee.EXACTLY_ONCE: Policy(
            qos=2,
            least_qos_keyed=1,
            persistent=True,
            acks=(AckAfter.JOURNAL,),
            serves_again=True,
            replay="served again, and skipped if the marker says that Kafka has it",
            transactions=True,
            isolations=("read_committed",),
            publish_levels=(2,),
            spark=_REPEATABLE,
            # ``reconnect.backoff.ms`` and `list_topics` first save 500 ms when the transaction's coordinator is looked
            # up (measured, librdkafka 2.16).
            kafka=MappingProxyType({**_ACKNOWLEDGED, "reconnect.backoff.ms": "0"}),
            kafka_accepts=_IDEMPOTENT,
            lost="no, from the broker's hand-over on, as long as the state directory is kept",
            doubled="no, for a consumer with isolation.level=read_committed",
        ),
    }
)


def policy(guarantee: Guarantee | str) -> Policy:
    """What a guarantee sets."""
    return POLICIES[Guarantee(guarantee)]


def qos_problem(guarantee: Guarantee, qos: int, *, keyed: bool = False) -> tuple[str, str] | None:
    """Why a subscription with this QoS does not fit the promise, and what to do; None where it does.

    It may be weaker where the line drops repeats by a key (`keyed`).
    """
    table = POLICIES[guarantee]
    least = table.least_qos_keyed if keyed else table.qos
    if qos >= least:
        return None
    what = f"guarantee {guarantee} needs QoS {' or '.join(map(str, range(least, HIGHEST_QOS + 1)))}"
    if table.least_qos_keyed <= qos:
        return what, f'Raise it, or give a dedupe key or promise = "at_least_once", which allow QoS {qos}.'
    line = "" if guarantee is Guarantee.EXACTLY_ONCE else "take guarantee exactly_once and "
    return what, f'Raise it, or {line}give the route promise = "at_most_once", which takes QoS 0.'


def promise_problem(guarantee: Guarantee, promise: Guarantee, qos: int | None = None) -> tuple[str, str] | None:
    """Why a route of a line can't promise this by itself, and what to do; None where it can.

    Its sink writes transactions as those of the whole line, so a route can be weaker only in how it is subscribed.
    """
    said = f'promise = "{promise}"'
    if guarantee is not Guarantee.EXACTLY_ONCE:
        return f"{said} is for a route of a line with guarantee exactly_once, not {guarantee}", "Change one of the two."
    if promise is guarantee:
        return f"{said} is what the line promises", "Remove it, or write at_least_once or at_most_once."
    if qos not in (None, takes := POLICIES[promise].qos):
        return f"{said} subscribes with QoS {takes}, not {qos}", "Remove qos, or promise."
    return None


def sharing_problem(guarantee: Guarantee, brokers: int, publish_qos: int | None = None) -> tuple[str, str]:
    """Why QoS 2 can't keep its promise with brokers that share no sessions, and what to do.

    Exactly once is a matter between two sides that both remember the packet id [MQTT-4.3.3]: a broker that takes over
    from another without its sessions knows of none, so what was under way comes, or goes, a second time.

    Args:
        guarantee: Of a line that promises exactly once, or publishes with QoS 2.
        brokers: How many are named; one may name others (`follow_redirects`).
        publish_qos: What it publishes with; None for a line that receives.
    """
    promise, weaker = f"guarantee {guarantee}", "take guarantee at_least_once"
    if publish_qos == 2 and guarantee is not Guarantee.EXACTLY_ONCE:
        promise, weaker = "QoS 2", "publish with QoS 1"
    several = f"{brokers} brokers" if brokers > 1 else "follow_redirects"
    what = f"{promise} with {several} needs them to share sessions: one that takes over would double what is under way"
    do = f"Set brokers_share_sessions = true if they are one cluster that does, or give one address; or {weaker}."
    return what, do


def conf_problem(guarantee: Guarantee, conf: Mapping[str, object]) -> tuple[str, str] | None:
    """The first Spark setting that contradicts the promise, and the value it must have."""
    for name, value in POLICIES[guarantee].spark.items():
        if name in conf and str(conf[name]).strip().lower() != value:
            return name, value
    return None
