"""Whether the topics are there and take what the lines give them: markers, keys, sizes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from towline.bridge.config.model import Line
from towline.doctor.findings import DoctorQuestion, Finding, Standing
from towline.doctor.kafka.flaws import Flaw, named, rows_of, sized
from towline.doctor.kafka.seen import OK
from towline.doctor.kafka.wanted import TopicRole
from towline.guarantee import policy

if TYPE_CHECKING:
    from towline.doctor.kafka.seen import LookedAt
    from towline.doctor.kafka.wanted import WantedTopic

__all__ = ["RULES"]

#: Default of librdkafka's message.max.bytes.
_CLIENT_MAX: Final = 1_000_000
#: Bytes of a record that are not its payload: topic, headers of `towline.bridge.config.routes`, the batch around it.
_AROUND: Final = 1024
#: Kafka's errors when a creation is refused for want of a right; `towline.doctor.kafka.rights` tells of them.
DENIED: Final = frozenset({"TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"})


def there(look: LookedAt) -> Iterator[Finding]:
    """TL-D26: topics that are missing. What this user may not even see is TL-D39."""
    kafka, missing = look.kafka, []
    made: dict[str, int] = {}
    for one in look.wanted:
        if one.name in kafka.hidden or not one.must or not _absent(look, one):
            continue
        outcome, words = kafka.may_create.get(one.name, (OK, ""))
        if not one.made:
            missing.append((one.name, _missing(look)))
        elif outcome == OK:
            made[one.name] = one.partitions
        elif outcome not in DENIED and outcome != "TOPIC_ALREADY_EXISTS":
            until = "never: the line does not start"
            mend = "Correct [kafka] create_topics, or make it by hand."
            missing.append((one.name, Flaw(Standing.BROKEN, f"Kafka refuses to make it: {words}", until, mend)))
    well = None
    if made:
        well = Flaw(Standing.LIMITED, f"Towline makes {named(made)} at the start", until="")
    elif look.of():
        well = Flaw(Standing.HOLDS, f"{len(look.of())} topics are there")
    yield from rows_of(DoctorQuestion("TL-D26", "topics"), missing, well)


def _absent(look: LookedAt, one: WantedTopic) -> bool:
    seen = look.kafka.topics.get(one.name)
    return seen is None or seen.planned


def _missing(look: LookedAt) -> Flaw:
    fact = "does not exist"
    if "true" in look.kafka.texts("auto.create.topics.enable"):
        partitions, copies = look.kafka.least("num.partitions"), look.kafka.least("default.replication.factor")
        fact += "; auto.create.topics.enable = true: the first program that names it makes it, "
        fact += f"num.partitions = {partitions}, default.replication.factor = {copies}"
    create = f"kafka-topics.sh --bootstrap-server {look.kafka.servers} --create --topic TOPIC"
    mend = f"Set create_topics in [kafka], or: {create}"
    return Flaw(Standing.BROKEN, fact, "never: the line does not start", mend)


def markers(look: LookedAt) -> Iterator[Finding]:
    """TL-D36: the markers, on which it rests that no batch is written twice (docs/exactly-once.md)."""
    found, judged = [], 0
    alter = f"kafka-configs.sh --bootstrap-server {look.kafka.servers} --alter --topic TOPIC --add-config"
    for one in look.wanted:
        seen = look.kafka.topics.get(one.name)
        if one.role is not TopicRole.MARKERS or seen is None or seen.planned:
            continue
        judged += seen.config is not None
        if seen.policy and seen.policy != {"compact"}:
            fact = f"cleanup.policy = {','.join(sorted(seen.policy))}"
            until = "a marker is deleted, after which the line stops (TL-K10)"
            found.append((one.name, Flaw(Standing.BROKEN, fact, until, f"{alter} cleanup.policy=compact")))
        elif seen.partitions < one.partitions:
            fact = f"{seen.partitions} partitions, parallelism = {one.partitions}"
            mend = f"kafka-topics.sh --bootstrap-server {look.kafka.servers} --alter --topic TOPIC"
            mend = f"{mend} --partitions {one.partitions}"
            found.append((one.name, Flaw(Standing.BROKEN, fact, "never: the line does not start (TL-K22)", mend)))
    well = Flaw(Standing.HOLDS, f"cleanup.policy = compact of {judged} marker topics") if judged else None
    yield from rows_of(DoctorQuestion("TL-D36", "markers of batches"), found, well)


def compacted(look: LookedAt) -> Iterator[Finding]:
    """TL-D38: topics that keep the last record of a key, and take none without."""
    found: list[tuple[str, Flaw]] = []
    alter = f"kafka-configs.sh --bootstrap-server {look.kafka.servers} --alter --topic TOPIC"
    delete = f"{alter} --add-config cleanup.policy=delete"
    for one in look.wanted:
        seen = look.kafka.topics.get(one.name)
        if seen is None or "compact" not in seen.policy:
            continue
        fact = f"cleanup.policy = {','.join(sorted(seen.policy))}"
        if one.role is TopicRole.DEAD_LETTERS:
            until = "the first dead letter, at which the line stops (TL-K71)"
            found.append((one.name, Flaw(Standing.BROKEN, fact, until, delete)))
        elif one.role is TopicRole.RECORDS and not one.keyed:
            until = "never: Kafka takes no record without a key there"
            mend = f"Give the route a key, or: {delete}"
            found.append((one.name, Flaw(Standing.BROKEN, f"{fact}, and a route gives no key", until, mend)))
        elif one.role in (TopicRole.RECORDS, TopicRole.SOURCE):
            until = "another record of the same key comes"
            found.append((one.name, Flaw(Standing.LIMITED, fact, until)))
    yield from rows_of(DoctorQuestion("TL-D38", "every record kept"), found)


def sizes(look: LookedAt) -> Iterator[Finding]:
    """TL-D33: the largest message that becomes a record."""
    client = look.bridge.kafka.client()
    text = client.get("message.max.bytes", "")
    of_client = int(text) if text.isdecimal() else _CLIENT_MAX
    for line in look.bridge.uplinks:
        limits = _limits(look, line)
        if not limits:
            continue
        topic, most = min(limits.items(), key=lambda item: item[1])
        names = f"max.message.bytes = {most:,} of {topic}"
        if of_client < most:
            most, names = of_client, f"message.max.bytes = {of_client:,} in [kafka] settings"
        yield _size(line, most - _AROUND, names)


def _limits(look: LookedAt, line: Line) -> Mapping[str, int]:
    """What each topic of a line takes."""
    found = {}
    for one in look.wanted:
        seen = look.kafka.topics.get(one.name)
        if one.line == line.name and one.role is TopicRole.RECORDS and seen is not None:
            most = seen.number("max.message.bytes")
            if most is not None:
                found[one.name] = most
    return found


def _size(line: Line, most: int, names: str) -> Finding:
    packet = line.gateway.max_packet_bytes
    fact = f"{names}; max_packet_bytes = {packet:,} in [mqtt]"
    until = f"a message of more than {sized(most)}"
    mend = ""
    if packet <= most:
        verdict, until = Standing.HOLDS, ""
    elif not policy(line.guarantee).serves_again:
        verdict, until = Standing.LIMITED, f"{until}, which is given up"
    elif line.dead_letter_topic:
        verdict, until = Standing.LIMITED, f"{until}, which becomes a dead letter, in parts"
    else:
        verdict, until = Standing.WARNS, f"{until}: it stops the line until somebody acts"
        mend = (
            "Give the line a dead_letter_topic; or raise max.message.bytes, and message.max.bytes in [kafka] settings."
        )
    return Finding(
        code="TL-D33",
        promise="large messages",
        verdict=verdict,
        because=fact,
        until=until,
        mend=mend,
        line=line.name,
    )


RULES: Final = (there, markers, compacted, sizes)
