"""What survives the loss of a broker: copies of the topics, of transactions, and who may lead. Pure.

The rules are Kafka's: a record with ``acks=all`` is acknowledged when all replicas in sync have it, and no fewer than
``min.insync.replicas`` (KIP-98 writes with nothing less).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from towline.doctor.findings import DoctorQuestion, Finding, Standing
from towline.doctor.kafka.flaws import Flaw, rows_of
from towline.doctor.kafka.seen import TRANSACTIONS, KafkaSeen, TopicSeen

if TYPE_CHECKING:
    from towline.doctor.kafka.seen import LookedAt

__all__ = ["RULES", "can_begin"]

#: Copies with which one broker may be lost while another one is away.
_ENOUGH: Final = 3
_LOST: Final = DoctorQuestion("TL-D27", "loss of a broker")
_LOG: Final = DoctorQuestion("TL-D32", "transactions without a broker")
_ALTER: Final = "kafka-configs.sh --bootstrap-server SERVERS --alter --topic TOPIC --add-config"


def _mend(look: LookedAt, text: str) -> str:
    return text.replace("SERVERS", look.kafka.servers)


def copies(look: LookedAt) -> Iterator[Finding]:
    """TL-D27: how many brokers may be lost for good."""
    kafka = look.kafka
    if kafka.alone:
        place = f"{next(iter(kafka.brokers.values()))}{', on this machine' if kafka.local else ''}"
        yield _LOST.answer(
            Standing.WARNS,
            f"Kafka is one broker ({place}): every topic has one copy",
            "its disk is lost, and with it what Kafka acknowledged; while it is away nothing reaches Kafka",
            "For trying out that is all right. Else: three brokers, replication factor 3, min.insync.replicas 2.",
        )
        return
    topics = look.of()
    most = min(_ENOUGH, len(kafka.brokers))
    least = min((one.replicas for one in topics), default=most)
    well = Flaw(
        Standing.HOLDS,
        f"{len(topics)} topics have {least} copies or more, on {len(kafka.brokers)} brokers",
        until="several brokers lose their disks at once",
    )
    few = ((one.name, _few(one, most)) for one in topics if one.replicas < _ENOUGH)
    yield from rows_of(_LOST, few, well)


def _few(one: TopicSeen, most: int) -> Flaw:
    made = " when Towline makes it (the cluster's default.replication.factor, or create_topics)" if one.planned else ""
    mend = (
        "Set replication_factor = 3 in create_topics, or the cluster's default.replication.factor."
        if one.planned
        else "Move it to three brokers: kafka-reassign-partitions.sh."
    )
    if one.replicas < 2:
        return Flaw(Standing.WARNS, f"replication factor 1{made}", "the disk of one broker is lost", mend)
    if most < _ENOUGH:
        mend = f"A third broker, then: {mend}"
    until = "one broker is away: writing then stops, or rests on one copy"
    return Flaw(Standing.WARNS, f"replication factor {one.replicas}{made}", until, mend)


def in_sync(look: LookedAt) -> Iterator[Finding]:
    """TL-D28: min.insync.replicas against the copies."""
    found = [(one.name, flaw) for one in look.of() if (flaw := _bound(one)) is not None]
    judged = [one for one in look.of() if one.min_in_sync is not None and one.replicas >= _ENOUGH]
    well = None
    if judged:
        fact = f"min.insync.replicas {_range(one.min_in_sync or 0 for one in judged)} of "
        fact += f"{_range(one.replicas for one in judged)} copies"
        well = Flaw(Standing.HOLDS, fact, until="two brokers of a topic are away: writing waits for one of them")
    mended = ((name, Flaw(one.verdict, one.fact, one.until, _mend(look, one.mend))) for name, one in found)
    yield from rows_of(DoctorQuestion("TL-D28", "acknowledged by several"), mended, well)


def _range(values: Iterable[int]) -> str:
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _bound(one: TopicSeen) -> Flaw | None:
    """What is wrong with a topic's min.insync.replicas; of two copies and fewer TL-D27 tells already.

    Kafka takes one that is above the copies for as many as these (`Partition.effectiveMinIsr`; seen on 4.3).
    """
    least, copies_ = one.min_in_sync, one.replicas
    if least is None or copies_ < _ENOUGH:
        return None
    fact = f"min.insync.replicas = {least} of {copies_} copies"
    mend = f"{_ALTER} min.insync.replicas={max(1, min(2, copies_ - 1))}"
    if one.planned:
        mend = "Set the cluster's min.insync.replicas to 2."
    if least == 1:
        until = "the one broker that has an acknowledged record loses its disk"
        return Flaw(Standing.WARNS, fact, until, mend)
    if least >= copies_:
        return Flaw(Standing.WARNS, fact, "one broker is away: nothing can be written then", mend)
    return None


def now(look: LookedAt) -> Iterator[Finding]:
    """TL-D29: replicas that are behind at this moment."""
    topics = [*look.of(), *filter(None, [look.kafka.topics.get(TRANSACTIONS)])]
    there = [one for one in topics if not one.planned]
    found = [(one.name, flaw) for one in there if (flaw := _behind(one)) is not None]
    well = Flaw(Standing.HOLDS, "every replica is in sync, every partition has a leader") if there else None
    yield from rows_of(DoctorQuestion("TL-D29", "replicas in sync"), found, well)


def _behind(one: TopicSeen) -> Flaw | None:
    mend = "Is a broker down, or slow? kafka-topics.sh --describe --under-replicated-partitions names it."
    if one.leaderless:
        fact = f"{one.leaderless} of {one.partitions} partitions have no leader"
        return Flaw(Standing.BROKEN, fact, "now: nothing of them can be written or read", mend)
    if one.in_sync >= one.replicas:
        return None
    least = one.min_in_sync
    fact = f"{one.in_sync} of {one.replicas} replicas are in sync"
    if least is not None and one.in_sync < min(least, one.replicas):
        return Flaw(Standing.BROKEN, f"{fact}, min.insync.replicas is {least}", "now: Kafka takes no record", mend)
    return Flaw(Standing.WARNS, fact, f"{one.in_sync - (least or 1) + 1} more brokers are away", mend)


def unclean(look: LookedAt) -> Iterator[Finding]:
    """TL-D30: whether a replica that is behind may lead. With one copy there is none."""
    name = "unclean.leader.election.enable"
    several = [one for one in look.of() if one.replicas > 1 and one.config is not None and name in one.config]
    if not several:
        return
    until = "all replicas in sync are away: one that is behind may lead then, and what it lacks is gone"
    bad = Flaw(Standing.WARNS, f"{name} = true", until, _mend(look, f"{_ALTER} {name}=false"))
    found = ((one.name, bad) for one in several if (one.config or {})[name] == "true")
    yield from rows_of(DoctorQuestion("TL-D30", "who may lead"), found, Flaw(Standing.HOLDS, f"{name} = false"))


def can_begin(kafka: KafkaSeen) -> bool:
    """Whether Kafka's topic of transactions is there or can be made."""
    if TRANSACTIONS in kafka.topics or TRANSACTIONS in kafka.listed:
        return True
    wanted = kafka.least("transaction.state.log.replication.factor")
    return wanted is None or wanted <= len(kafka.brokers)


def transaction_log(look: LookedAt) -> Iterator[Finding]:
    """TL-D32: the same for Kafka's own topic of transactions, of which an exactly-once line is made."""
    kafka = look.kafka
    if not look.writers:
        return
    log = kafka.topics.get(TRANSACTIONS)
    copies_ = kafka.least("transaction.state.log.replication.factor") if log is None else log.replicas
    least = log.min_in_sync if log is not None else None
    if least is None:
        least = kafka.least("transaction.state.log.min.isr")
    if copies_ is None:
        return
    fact = f"{TRANSACTIONS}: {copies_} copies, {'unknown' if least is None else least} must be in sync"
    judged = _log_flaw(copies_, least, kafka, there=log is not None)
    flaw = judged or (None if kafka.alone else Flaw(Standing.HOLDS, ""))
    if flaw is not None:
        yield _LOG.answer(flaw.verdict, fact, flaw.until, flaw.mend)


def _log_flaw(copies_: int, least: int | None, kafka: KafkaSeen, *, there: bool) -> Flaw | None:
    lines = "transaction.state.log.replication.factor and transaction.state.log.min.isr"
    if not there and copies_ > len(kafka.brokers):
        mend = f"Start as many brokers, or set {lines} to what {len(kafka.brokers)} can hold."
        until = f"never: Kafka can't make it on {len(kafka.brokers)} brokers, and no transaction begins"
        return Flaw(Standing.BROKEN, "", until, mend)
    mend = f"Three copies, two in sync: {lines} for a topic that is made, kafka-configs.sh for one that is there."
    weak = (
        (copies_ < _ENOUGH, "one broker is away: transactions stop, or rest on one copy"),
        (least == 1, "one broker's disk is lost: a commit may be forgotten"),
        (least is not None and least >= copies_, "one broker is away: no transaction goes on"),
    )
    until = "" if kafka.alone else next((text for is_so, text in weak if is_so), "")  # TL-D27 tells of one broker
    return Flaw(Standing.WARNS, "", until, mend) if until else None


RULES: Final = (copies, in_sync, now, unclean, transaction_log)
