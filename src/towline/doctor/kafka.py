"""The checks of Kafka: copies, in-sync replicas, transactions, sizes, retention, compaction, rights. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from towline.bridge.config.model import Line
from towline.doctor.cluster import TRANSACTIONS, Cluster, TopicRole, TopicSeen, TopicUse
from towline.doctor.table import BROKEN, HOLDS, LIMITED, UNKNOWN, WARNS, Answer, Check, named, sized
from towline.errors import ConfigError, KafkaError
from towline.guarantee import policy
from towline.kafka.clientconfig import largest_message
from towline.kafka.faults import Meaning, means
from towline.text import span

#: librdkafka's name of a broker that it was told of, which has the broker's number; a bootstrap server has none.
_TOLD: Final = re.compile(r"(?P<address>\S+:\d+)/(?P<id>\d+): (?P<why>.+)")
#: Copies with which one broker may be lost while another one is away.
_ENOUGH: Final = 3
#: Bytes of a record that are not its payload.
_AROUND = 1024
#: A day, and more than anybody asks for: Kafka's "no limit" is 292 million years.
_DAY_MS, _FOR_EVER_MS = 86_400_000, 3650 * 86_400_000
#: Least times to keep a record: a consumer may be away over a lunch; who looks at dead letters, or mends a line that
#: stands, comes the next morning. And who it is for.
_KEPT: Final = {
    TopicRole.RECORDS: (3_600_000, "a consumer is away for {}"),
    TopicRole.NOTICES: (3_600_000, "a consumer is away for {}"),
    TopicRole.DEAD_LETTERS: (_DAY_MS, "nobody replays a dead letter for {}"),
    TopicRole.SOURCE: (_DAY_MS, "the line stands for {}: what Kafka deleted meanwhile is never sent"),
}
_ALTER: Final = "kafka-configs.sh --bootstrap-server SERVERS --alter --topic TOPIC --add-config"
_ACL: Final = "kafka-acls.sh --bootstrap-server SERVERS --add --allow-principal User:THIS"


def _grouped(
    kafka: Cluster, found: Iterable[tuple[str, Answer | None]], well: Answer | None = None
) -> Iterator[Answer]:
    """What is said of several topics in the same words is one row; ``TOPIC`` in it is the first of them.

    Where nothing is said of any, `well` is.
    """
    topics: dict[Answer, list[str]] = {}
    for name, answer in found:
        if answer is not None:
            topics.setdefault(answer, []).append(name)
    if not topics and well is not None:
        yield well
    for answer, names in topics.items():
        mend = answer.mend.replace("TOPIC", names[0]).replace("SERVERS", kafka.servers)
        yield replace(answer, because=f"{named(names)}: {answer.because}", mend=mend)


def _of(kafka: Cluster, *roles: TopicRole) -> list[TopicSeen]:
    """The topics with one of these roles, each once; all that a line's records rest on where none is named."""
    names = dict.fromkeys(one.name for one in kafka.wanted if not roles or one.role in roles)
    if not roles and kafka.writers:
        names[TRANSACTIONS] = None
    return [kafka.topics[name] for name in names if name in kafka.topics]


def _answers(kafka: Cluster) -> Iterator[Answer]:
    try:
        listed = kafka.listed
    except (KafkaError, ConfigError) as error:
        if told := _TOLD.search(error.what):
            yield _unreached(int(told["id"]), told["address"], told["why"])
        else:
            do = error.do or f"Is {kafka.servers} right, and up?"
            yield Answer(BROKEN, error.what, "now: nothing reaches Kafka", do)
        return
    yield from (_unreached(number, listed.brokers[number], why) for number, why in sorted(kafka.unreached.items()))
    if not kafka.unreached:
        number = len(listed.brokers)
        yield Answer(HOLDS, f"{number} broker{'' if number == 1 else 's'} of cluster {listed.cluster_id}")


def _unreached(number: int, address: str, why: str) -> Answer:
    because = f"broker {number} tells its clients to come to {address}, which can't be reached: {why}"
    until = "now: the partitions that it leads can't be written or read from here"
    return Answer(BROKEN, because, until, "Correct its advertised.listeners, or the network between.")


def _there(kafka: Cluster) -> Iterator[Answer]:
    """TL-D26: topics that are missing. What this user may not even see is TL-D39."""
    made, missing = [], []
    for one in kafka.wanted:
        if not one.must or one.name in kafka.described:
            continue
        name, words = kafka.may_create.get(one.name, ("", ""))
        if not one.made:
            mend = "Set create_topics in [kafka], or: kafka-topics.sh --bootstrap-server SERVERS --create --topic TOPIC"
            missing.append((one.name, Answer(BROKEN, "does not exist", "never: the line does not start", mend)))
        elif not name:
            made.append(one.name)
        elif not means(name, Meaning.DENIED) and name != "TOPIC_ALREADY_EXISTS":
            mend = "Correct [kafka] create_topics, or make it by hand."
            until = "never: the line does not start"
            missing.append((one.name, Answer(BROKEN, f"Kafka refuses to make it: {words}", until, mend)))
    yield from _grouped(kafka, missing)
    if made:
        yield Answer(LIMITED, f"Towline makes {named(made)} at the start")
    elif not missing:
        yield Answer(HOLDS, f"{len(kafka.described)} topics are there")


def _copies(kafka: Cluster) -> Iterator[Answer]:
    """TL-D27: how many brokers may be lost for good; what the transactions rest on is a topic as any other."""
    brokers, log = kafka.listed.brokers, kafka.topics.get(TRANSACTIONS)
    if kafka.writers and log is not None and log.planned and log.replicas > len(brokers):
        because = f"{TRANSACTIONS}: Kafka can't make {log.replicas} copies on {len(brokers)} brokers"
        mend = "Start as many brokers, or set transaction.state.log.replication.factor and "
        mend += f"transaction.state.log.min.isr to what {len(brokers)} can hold."
        yield Answer(BROKEN, because, "never: no transaction begins", mend)
    if len(brokers) == 1:
        because = f"Kafka is one broker ({next(iter(brokers.values()))}): every topic has one copy"
        until = "its disk is lost, and with it what Kafka acknowledged; while it is away nothing reaches Kafka"
        mend = "For trying out that is all right. Else: three brokers, replication factor 3, min.insync.replicas 2."
        yield Answer(WARNS, because, until, mend)
        return
    topics = _of(kafka)
    because = f"{len(topics)} topics have {_ENOUGH} copies or more, on {len(brokers)} brokers"
    well = Answer(HOLDS, because, "several brokers lose their disks at once") if topics else None
    yield from _grouped(kafka, ((one.name, _few(one, len(brokers))) for one in topics), well)


def _few(one: TopicSeen, brokers: int) -> Answer | None:
    if one.replicas >= _ENOUGH:
        return None
    because = f"replication factor {one.replicas}{' when it is made' if one.planned else ''}"
    mend = "Move it to three brokers: kafka-reassign-partitions.sh."
    if one.planned and one.name == TRANSACTIONS:
        mend = "Set transaction.state.log.replication.factor to 3."
    elif one.planned:
        mend = "Set replication_factor = 3 in create_topics, or the cluster's default.replication.factor."
    mend = f"A third broker, then: {mend}" if brokers < _ENOUGH else mend
    if one.replicas < 2:
        return Answer(WARNS, because, "the disk of one broker is lost", mend)
    return Answer(WARNS, because, "one broker is away: writing then stops, or rests on one copy", mend)


def _in_sync(kafka: Cluster) -> Iterator[Answer]:
    """TL-D28: min.insync.replicas against the copies, and the replicas that are in sync now."""
    topics = _of(kafka)
    least = " or ".join(map(str, sorted({one.number("min.insync.replicas") or 0 for one in topics})))
    until = "" if len(kafka.listed.brokers) == 1 else "two brokers of a topic are away: writing waits for one of them"
    well = Answer(HOLDS, f"every replica is in sync, min.insync.replicas {least}", until) if topics else None
    yield from _grouped(kafka, ((one.name, answer) for one in topics for answer in (_bound(one), _behind(one))), well)


def _bound(one: TopicSeen) -> Answer | None:
    """What is wrong with a topic's min.insync.replicas; of two copies and fewer TL-D27 tells already.

    Kafka takes one that is above the copies for as many as these (`Partition.effectiveMinIsr`; seen on 4.3).
    """
    least = one.number("min.insync.replicas")
    if least is None or one.replicas < _ENOUGH or 1 < least < one.replicas:
        return None
    because = f"min.insync.replicas = {least} of {one.replicas} copies"
    mend = f"{_ALTER} min.insync.replicas=2"
    if one.planned:
        setting = "transaction.state.log.min.isr" if one.name == TRANSACTIONS else "min.insync.replicas"
        mend = f"Set the cluster's {setting} to 2."
    until = "one broker is away: nothing can be written then"
    if least == 1:
        until = "the one broker that has an acknowledged record loses its disk"
    return Answer(WARNS, because, until, mend)


def _behind(one: TopicSeen) -> Answer | None:
    mend = "Is a broker down, or slow? kafka-topics.sh --describe --under-replicated-partitions names it."
    if one.leaderless:
        because = f"{one.leaderless} of {one.partitions} partitions have no leader"
        return Answer(BROKEN, because, "now: nothing of them can be written or read", mend)
    if one.in_sync >= one.replicas:
        return None
    least = min(one.number("min.insync.replicas") or 1, one.replicas)
    because = f"{one.in_sync} of {one.replicas} replicas are in sync"
    if one.in_sync < least:
        return Answer(BROKEN, f"{because}, min.insync.replicas is {least}", "now: Kafka takes no record", mend)
    return Answer(WARNS, because, f"{one.in_sync - least + 1} more brokers are away", mend)


def _unclean(kafka: Cluster) -> Iterator[Answer]:
    """TL-D30: whether a replica that is behind may lead. With one copy there is none."""
    name = "unclean.leader.election.enable"
    several = [one for one in _of(kafka) if one.replicas > 1 and name in (one.config or {})]
    until = "all replicas in sync are away: one that is behind may lead then, and what it lacks is gone"
    bad = Answer(WARNS, f"{name} = true", until, f"{_ALTER} {name}=false")
    found = ((one.name, bad) for one in several if (one.config or {})[name] == "true")
    yield from _grouped(kafka, found, Answer(HOLDS, f"{name} = false") if several else None)


def _transactions(kafka: Cluster) -> Iterator[Answer]:
    """TL-D31: whether a transaction can begin, tried with the time-out of each writer; and whether one stays open."""
    for name, hidden in kafka.hidden.items():
        because = (
            f"{name}: {hidden:,} offsets are behind a transaction that stays open, of a transactional id not known"
        )
        mend = f"Name its writer: kafka-transactions.sh --bootstrap-server {kafka.servers} find-hanging, or list."
        yield Answer(WARNS, because, "now: nobody reads them before it ends, by its time-out at the latest", mend)
    if not kafka.writers:
        return
    longest, most = "transaction.max.timeout.ms", kafka.least("transaction.max.timeout.ms")
    asked = max(one.timeout_ms for one in kafka.writers)
    tried = [(one, kafka.begun[one.probe_id]) for one in kafka.writers if one.probe_id in kafka.begun]
    failed = [(one, outcome) for one, outcome in tried if outcome[0] not in {"", _ID_DENIED}]
    fact = f"transaction.timeout.ms = {asked:,}{'' if most is None else f', {longest} = {most:,} of the brokers'}"
    if (most is not None and most < asked) or any(name == "INVALID_TRANSACTION_TIMEOUT" for _, (name, _) in failed):
        mend = f"Raise {longest} of the brokers, or lower transaction.timeout.ms in [kafka] settings."
        yield Answer(BROKEN, fact, "never: Kafka refuses to begin a transaction", mend)
        return
    for writer, (_, words) in failed:
        because = f"a transaction of {writer.probe_id} could not begin: {words}"
        mend = "Is a broker down, or Kafka busy? Mend that, and ask again."
        yield Answer(BROKEN, because, "never: the line writes nothing", mend, writer.line)
    if tried and not failed and any(not name for _, (name, _) in tried):
        yield Answer(HOLDS, f"{named(one.line for one, _ in tried)} began a transaction; {fact}")


def _sizes(kafka: Cluster) -> Iterator[Answer]:
    """TL-D33: the largest message that becomes a record."""
    of_client = largest_message(kafka.case.bridge.kafka.client())
    for line in kafka.case.bridge.uplinks:
        mine = {one.name for one in kafka.wanted if one.line == line.name and one.role is TopicRole.RECORDS}
        sizes = [(one.number("max.message.bytes"), name) for name, one in kafka.topics.items() if name in mine]
        known = [(size, f"max.message.bytes = {size:,} of {name}") for size, name in sizes if size is not None]
        if known:
            yield _size(line, *min([*known, (of_client, f"message.max.bytes = {of_client:,} in [kafka] settings")]))


def _size(line: Line, most: int, name: str) -> Answer:
    packet = line.gateway.max_packet_bytes
    because, until = (
        f"{name}; max_packet_bytes = {packet:,} in [mqtt]",
        f"a message of more than {sized(most - _AROUND)}",
    )
    if packet <= most - _AROUND:
        return Answer(HOLDS, because, line=line.name)
    if not policy(line.guarantee).serves_again:
        return Answer(LIMITED, because, f"{until}, which is given up", line=line.name)
    if line.dead_letter_topic:
        return Answer(LIMITED, because, f"{until}, which becomes a dead letter, in parts", line=line.name)
    mend = "Give the line a dead_letter_topic; or raise max.message.bytes, and message.max.bytes in [kafka] settings."
    return Answer(WARNS, because, f"{until}: it stops the line until somebody acts", mend, line.name)


def _retention(kafka: Cluster) -> Iterator[Answer]:
    """TL-D34: how long records stay, against how long somebody may be away."""
    yield from _grouped(kafka, ((one.name, _kept(kafka, one)) for one in kafka.wanted))


def _kept(kafka: Cluster, use: TopicUse) -> Answer | None:
    one = kafka.topics.get(use.name)
    if one is None or not one.policy or use.role not in _KEPT:
        return None
    least, who = _KEPT[use.role]
    limits = {name: one.number(name) for name in ("retention.ms", "retention.bytes")}
    shown = ", ".join(f"{name} = {value:,}" for name, value in limits.items() if value is not None and value >= 0)
    spans = [limits["retention.ms"]]
    load = kafka.case.load_of(kafka.case.loads) if use.role is TopicRole.RECORDS else None
    if load is not None and (by_size := limits["retention.bytes"]) is not None and by_size >= 0:
        spans.append(int(by_size * one.partitions / load.bytes_s * 1000))
    kept = min((value for value in spans if value is not None and value >= 0), default=_FOR_EVER_MS)
    if "delete" not in one.policy or kept >= _FOR_EVER_MS:
        return Answer(HOLDS, "Kafka deletes nothing by itself", line=use.line)
    mend = f"Keep records for {span(least / 1000)} at least: {_ALTER} retention.ms=604800000" if kept < least else ""
    return Answer(WARNS if kept < least else LIMITED, shown, who.format(span(kept / 1000)), mend, use.line)


def _compaction(kafka: Cluster) -> Iterator[Answer]:
    """TL-D38: topics that keep the last record of a key, and take none without; the markers have to be such a one."""
    judged = [(one, kafka.topics[one.name]) for one in kafka.wanted if one.name in kafka.topics]
    told = judged and all(seen.policy for _, seen in judged)
    well = Answer(HOLDS, "markers are compacted, and nothing else is") if told else None
    yield from _grouped(kafka, ((one.name, _compacted(one, seen)) for one, seen in judged), well)


def _compacted(use: TopicUse, seen: TopicSeen) -> Answer | None:
    because, delete = f"cleanup.policy = {','.join(sorted(seen.policy))}", f"{_ALTER} cleanup.policy=delete"
    if use.role is TopicRole.MARKERS:
        return _markers(use, seen, because)
    if "compact" not in seen.policy:
        return None
    if use.role is TopicRole.DEAD_LETTERS:
        return Answer(BROKEN, because, "the first dead letter, at which the line stops (TL-K71)", delete)
    if use.role is TopicRole.RECORDS and not use.keyed:
        because, mend = f"{because}, and a route gives no key", f"Give the route a key, or: {delete}"
        return Answer(BROKEN, because, "never: Kafka takes no record without a key there", mend)
    return Answer(LIMITED, because, "another record of the same key comes")


def _markers(use: TopicUse, seen: TopicSeen, because: str) -> Answer | None:
    if not seen.planned:
        if seen.policy and seen.policy != {"compact"}:
            until = "a marker is deleted, after which the line stops (TL-K10)"
            return Answer(BROKEN, because, until, f"{_ALTER} cleanup.policy=compact")
        if seen.partitions < use.partitions:
            because = f"{seen.partitions} partitions, parallelism = {use.partitions}"
            mend = f"kafka-topics.sh --bootstrap-server SERVERS --alter --topic TOPIC --partitions {use.partitions}"
            return Answer(BROKEN, because, "never: the line does not start (TL-K22)", mend)
    return None


_ID_DENIED: Final = "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"


def _rights(kafka: Cluster) -> Iterator[Answer]:
    """TL-D39: what this user may do, as Kafka itself says (KIP-430), or as it answered when it was tried."""
    found = [*_grouped(kafka, _topic_rights(kafka))]
    for one in kafka.writers:
        if kafka.begun.get(one.probe_id, ("", ""))[0] == _ID_DENIED:
            because = (
                f"transactional id {one.probe_id} is refused, which a right for the prefix {one.prefix} would cover"
            )
            mend = f"{_ACL} --operation Write --operation Describe --resource-pattern-type prefixed "
            mend = f"{mend.replace('SERVERS', kafka.servers)}--transactional-id {one.prefix}"
            found.append(Answer(WARNS, because, "never, unless each id is granted by its full name", mend, one.line))
    if not kafka.settings:
        because = "DescribeConfigs on the cluster is not granted: transaction.max.timeout.ms and others can't be read"
        mend = f"{_ACL} --operation DescribeConfigs --cluster, for the user that runs doctor."
        found.append(Answer(UNKNOWN, because, mend=mend.replace("SERVERS", kafka.servers)))
    yield from found or [Answer(HOLDS, "this user may do all that the lines need with their topics")]


def _topic_rights(kafka: Cluster) -> Iterator[tuple[str, Answer]]:
    for name in dict.fromkeys(one.name for one in kafka.wanted):
        uses = [one for one in kafka.wanted if one.name == name]
        needed = sorted({right for one in uses for right in one.rights})
        operations = " ".join(f"--operation {right.title()}" for right in needed)
        seen = kafka.topics.get(name)
        if name in kafka.described and seen is None:
            if any(one.must for one in uses):
                mend = f"{_ACL} {operations} --operation DescribeConfigs --topic TOPIC"
                yield name, Answer(BROKEN, "this user may not even see it (Describe)", "never", mend)
        elif seen is None or seen.planned:
            if means(kafka.may_create.get(name, ("", ""))[0], Meaning.DENIED):
                mend = f"{_ACL} --operation Create --topic TOPIC; or make it by hand."
                yield name, Answer(BROKEN, "Create is not granted, and it is missing", "never", mend)
        elif lacking := [right for right in needed if seen.allowed is not None and right not in seen.allowed]:
            words = " and ".join(right.title() for right in lacking)
            until = "never: the line stops at its first batch"
            yield name, Answer(BROKEN, f"{words} not granted", until, f"{_ACL} {operations} --topic TOPIC")
        elif seen.config is None:
            because = "DescribeConfigs not granted: its limits can't be read, by doctor and by the line"
            yield name, Answer(UNKNOWN, because, mend=f"{_ACL} --operation DescribeConfigs --topic TOPIC")


CHECKS: Final = (
    Check("TL-D25", "Kafka answers", _answers),
    Check("TL-D26", "topics", _there),
    Check("TL-D27", "loss of a broker", _copies),
    Check("TL-D28", "in-sync replicas", _in_sync),
    Check("TL-D30", "who may lead", _unclean),
    Check("TL-D31", "transactions", _transactions),
    Check("TL-D33", "large messages", _sizes),
    Check("TL-D34", "time to read", _retention),
    Check("TL-D38", "compaction", _compaction),
    Check("TL-D39", "rights", _rights),
)
