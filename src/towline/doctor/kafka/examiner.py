"""The examiner of Kafka: asks once, and lets every rule judge what was seen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from towline.doctor.findings import DoctorQuestion, Finding, Standing
from towline.doctor.kafka import copies, retention, rights, topics, transactions
from towline.doctor.kafka.planned import planned
from towline.doctor.kafka.reading import read
from towline.doctor.kafka.seen import LookedAt
from towline.doctor.kafka.wanted import wanted, writers
from towline.errors import ConfigError, KafkaError
from towline.text import counted

if TYPE_CHECKING:
    from towline.doctor.case import Case
    from towline.doctor.kafka.seen import KafkaSeen

__all__ = ["RULES", "answers", "examine", "judge"]

_ANSWERS: Final = DoctorQuestion("TL-D25", "Kafka answers")
#: librdkafka's name of a broker that it was told of, which has the broker's number; a bootstrap server has none.
_TOLD: Final = re.compile(r"(?P<address>\S+:\d+)/(?P<id>\d+): (?P<why>.+)")
#: All questions about Kafka that an answering cluster is asked.
RULES: Final[tuple[Callable[[LookedAt], Iterator[Finding]], ...]] = (
    *topics.RULES,
    *copies.RULES,
    *transactions.RULES,
    *retention.RULES,
    *rights.RULES,
)


def examine(case: Case) -> Iterator[Finding]:
    """Look at the bridge's Kafka (`towline.doctor.case.Examiner`)."""
    bridge = case.bridge
    begun = writers(bridge)
    try:
        kafka, needed = read(case, partial(wanted, bridge), begun)
    except (KafkaError, ConfigError) as error:
        if elsewhere := _TOLD.search(error.what):
            yield _unreached(int(elsewhere["id"]), elsewhere["address"], elsewhere["why"])
            return
        yield _ANSWERS.answer(
            Standing.BROKEN,
            f"{error.what}",
            until="now: nothing reaches Kafka",
            mend=error.do or f"Is {bridge.kafka.bootstrap_servers} right, and up?",
        )
        return
    yield from answers(kafka)
    if len(kafka.unreached) == len(kafka.brokers):
        return
    kafka = replace(kafka, topics={**planned(kafka, needed), **kafka.topics})
    yield from judge(LookedAt(bridge=bridge, kafka=kafka, wanted=needed, writers=begun, total=case.total))


def judge(look: LookedAt) -> Iterator[Finding]:
    """What every rule says."""
    for rule in RULES:
        yield from rule(look)


def answers(kafka: KafkaSeen) -> Iterator[Finding]:
    """TL-D25: whether it answers, and whether each broker is where it tells its clients that it is."""
    for number, why in sorted(kafka.unreached.items()):
        yield _unreached(number, kafka.brokers[number], why)
    if not kafka.unreached:
        count = len(kafka.brokers)
        yield _ANSWERS.answer(
            Standing.HOLDS,
            f"{counted(count, 'broker')} of cluster {kafka.cluster_id}, in {kafka.answer_s * 1000:,.0f} ms",
        )


def _unreached(number: int, address: str, why: str) -> Finding:
    return _ANSWERS.answer(
        Standing.BROKEN,
        f"broker {number} tells its clients to come to {address}, which can't be reached: {why}",
        until="now: the partitions that it leads can't be written or read from here",
        mend="Correct its advertised.listeners, or the network between.",
    )
