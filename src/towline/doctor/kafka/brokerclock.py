"""The brokers' clocks, read from the time that a broker writes into a record (LogAppendTime).

Kafka tells its time in no other answer. So a topic of doctor's own is made, one record is written into a partition of
each broker, and the topic is removed: only where this user may make topics.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Producer
from confluent_kafka.cimpl import NewTopic

from towline.doctor.kafka.reading import UNANSWERED, loopback
from towline.doctor.kafka.wanted import PROBE
from towline.errors import TowlineError
from towline.kafka import admin, faults
from towline.kafka.clientconfig import QUIET

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

    from towline.doctor.case import Case

__all__ = ["Skews", "least_apart", "skews"]

#: Brokers that are asked at most.
_MOST: Final = 9
#: Records for each: the first waits for a connection.
_TIMES: Final = 2
_CONFIG: Final = {"message.timestamp.type": "LogAppendTime", "retention.ms": "3600000"}


@dataclass(frozen=True)
class Skews:
    """How far this machine's clock is ahead of the brokers'.

    Attributes:
        by_broker: Seconds, by the broker's id, at least; negative where it is behind.
        why: Why there is none.
        listed: Number of brokers; None where Kafka did not answer.
        local: All of them are on loopback.
        left: The topic of doctor's own that this user could make and not remove, and why; empty for none.
    """

    by_broker: Mapping[int, float] = field(default_factory=dict)
    why: str = ""
    listed: int | None = None
    local: bool = False
    left: str = ""


def skews(case: Case) -> Skews:
    """Compare the clocks; nothing is raised for what Kafka does not allow."""
    client, patience = case.bridge.kafka.client(), case.patience
    try:
        with admin.looking(client) as asked:
            brokers = asked.list_topics(timeout=patience).brokers
            local = all(loopback(f"{one.host}:{one.port}") for one in brokers.values())
            return _measured(case, asked, sorted(brokers)[:_MOST], Skews(listed=len(brokers), local=local))
    except TowlineError as error:
        return Skews(why=f"Kafka did not tell its time: {error.what}")


def _measured(case: Case, asked: AdminClient, brokers: list[int], so_far: Skews) -> Skews:
    topic = f"{PROBE}-{uuid.uuid4().hex[:8]}"
    new = NewTopic(topic, len(brokers), replica_assignment=[[number] for number in brokers], config=_CONFIG)
    try:
        asked.create_topics([new], request_timeout=case.patience)[topic].result(case.patience)
    except UNANSWERED as problem:
        return _without(so_far, f"Kafka's time could not be read: no topic may be made ({faults.reason(problem)})")
    try:
        found = _asked(case, topic, brokers)
    finally:
        left = _removed(asked, topic, case.patience)
    why = "" if found else "Kafka's time could not be read: no broker answered with it"
    return Skews(found, why, so_far.listed, so_far.local, f"{topic} ({left})" if left else "")


def _without(so_far: Skews, why: str) -> Skews:
    return Skews({}, why, so_far.listed, so_far.local)


def _removed(asked: AdminClient, topic: str, seconds: float) -> str:
    """Why the topic could not be removed; empty if it could."""
    try:
        asked.delete_topics([topic], request_timeout=seconds)[topic].result(seconds)
    except UNANSWERED as problem:
        return faults.reason(problem)
    return ""


def _asked(case: Case, topic: str, brokers: list[int]) -> dict[int, float]:
    told: dict[str, Any] = {
        **admin.client_config(case.bridge.kafka.client()),
        "acks": "1",
        "linger.ms": "0",
        "message.timeout.ms": str(int(case.patience * 1000)),
        "error_cb": lambda _error: None,
    }
    for name in ("enable.idempotence", "transaction.timeout.ms", "delivery.timeout.ms", "request.required.acks"):
        told.pop(name, None)
    producer = Producer(told, logger=QUIET)
    found = {}
    for partition, number in enumerate(brokers):
        bounds = [one for _ in range(_TIMES) if (one := _once(case, producer, topic, partition)) is not None]
        if bounds:
            found[number] = least_apart(bounds)
    return found


def _once(case: Case, producer: Any, topic: str, partition: int) -> tuple[float, float] | None:
    """Between which bounds the difference to a broker's clock is; None where it did not answer."""
    stamps: list[float] = []

    def note(error: Any, message: Any) -> None:
        kind, stamp = (None, 0) if error else message.timestamp()
        if kind == TIMESTAMP_LOG_APPEND_TIME:
            stamps.append(stamp / 1000)

    sent = case.now()
    producer.produce(topic, b"", partition=partition, on_delivery=note)
    producer.flush(case.patience)
    answered = case.now()
    return (sent - stamps[0], answered - stamps[0]) if stamps else None


def least_apart(bounds: list[tuple[float, float]]) -> float:
    """The smallest difference of two clocks that agrees with what was seen; 0 where they may be equal.

    A broker wrote its time after a record was sent and before the answer came, so a slow answer proves little, and
    never a difference that there is not.

    Args:
        bounds: Of each attempt, the time of sending and that of the answer, less the broker's time.
    """
    low, high = max(one for one, _ in bounds), min(one for _, one in bounds)
    return low if low > 0 else min(high, 0.0)
