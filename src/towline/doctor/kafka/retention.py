"""For how long: what Kafka keeps, and which times of records it takes. Pure.

A record of an uplink has the time at which its message was received (``received_at``), also when it waited for hours
until Kafka was back. A topic of CreateTime judges and deletes by that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from towline.doctor.findings import DoctorQuestion, Standing
from towline.doctor.kafka.flaws import Flaw, days, rows_of
from towline.doctor.kafka.wanted import TopicRole

if TYPE_CHECKING:
    from towline.doctor.findings import Finding
    from towline.doctor.kafka.seen import LookedAt, TopicSeen

__all__ = ["RULES", "kept_ms"]

_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
#: Longer than this nobody asks: Kafka's "no limit" is 292 million years.
_FOR_EVER_MS: Final = 3650 * _DAY_MS
#: Least times to keep something, below which a row warns: a consumer may be away over a lunch; who looks at dead
#: letters, or mends a line that stands, comes the next morning.
_LEAST_MS: Final = {
    TopicRole.RECORDS: _HOUR_MS,
    TopicRole.NOTICES: _HOUR_MS,
    TopicRole.DEAD_LETTERS: _DAY_MS,
    TopicRole.SOURCE: _DAY_MS,
}
_WHO: Final = {
    TopicRole.RECORDS: "a consumer is away for {}",
    TopicRole.NOTICES: "a consumer is away for {}",
    TopicRole.DEAD_LETTERS: "nobody replays a dead letter for {}",
    TopicRole.SOURCE: "the line stands for {}: what Kafka deleted meanwhile is never sent",
}
#: What is a clock that is a little wrong, and no more.
_LEAST_AHEAD_MS: Final = 60_000


def kept_ms(one: TopicSeen, bytes_s: float | None = None) -> int | None:
    """How long a topic keeps a record; -1 for ever, None where it can't be read.

    Args:
        one: The topic.
        bytes_s: What comes into it, where that is known: then its retention.bytes count too.
    """
    if not one.policy:
        return None
    if "delete" not in one.policy:
        return -1
    by_time = one.number("retention.ms")
    by_size = one.number("retention.bytes")
    found = [by_time] if by_time is not None and by_time >= 0 else []
    if by_size is not None and by_size >= 0 and bytes_s:
        found.append(int(by_size * one.partitions / bytes_s * 1000))
    return min(found, default=-1)


def kept(look: LookedAt) -> Iterator[Finding]:
    """TL-D34: how long records stay, against how long somebody may be away."""
    for line in look.bridge.lines:
        found = [*_kept(look, line.name)]
        bad = [(name, flaw) for name, flaw in found if flaw.verdict is Standing.WARNS]
        yield from rows_of(DoctorQuestion("TL-D34", "time to read"), bad or found, line=line.name)


def _kept(look: LookedAt, line: str) -> Iterator[tuple[str, Flaw]]:
    load = look.total
    for one in look.wanted:
        seen = look.kafka.topics.get(one.name)
        if one.line != line or seen is None or one.role not in _LEAST_MS:
            continue
        by_rate = load.bytes_s if load is not None and one.role is TopicRole.RECORDS else None
        span = kept_ms(seen, by_rate)
        if span is None:
            continue
        if span < 0 or span > _FOR_EVER_MS:
            yield one.name, Flaw(Standing.HOLDS, "Kafka deletes nothing by itself")
            continue
        short = span < _LEAST_MS[one.role]
        limits = [
            f"{name} = {seen.number(name):,}" for name in ("retention.ms", "retention.bytes") if _limits(seen, name)
        ]
        least = days(_LEAST_MS[one.role])
        alter = f"kafka-configs.sh --bootstrap-server {look.kafka.servers} --alter --topic TOPIC --add-config"
        yield (
            one.name,
            Flaw(
                Standing.WARNS if short else Standing.LIMITED,
                ", ".join(limits) + (f", {seen.partitions} partitions" if len(limits) > 1 else ""),
                _WHO[one.role].format(days(span)),
                f"Keep records for {least} at least: {alter} retention.ms=604800000" if short else "",
            ),
        )


def _limits(seen: TopicSeen, name: str) -> bool:
    value = seen.number(name)
    return value is not None and value >= 0


def times(look: LookedAt) -> Iterator[Finding]:
    """TL-D35: which times of records Kafka takes, against how long a message may wait for it."""
    judged = ((seen.name, _times(seen, look.kafka.servers)) for seen in look.of(TopicRole.RECORDS))
    found = [(name, flaw) for name, flaw in judged if flaw is not None]
    bad = [(name, flaw) for name, flaw in found if flaw.verdict is Standing.WARNS]
    yield from rows_of(DoctorQuestion("TL-D35", "outage of Kafka"), bad or found)


def _times(seen: TopicSeen, servers: str) -> Flaw | None:
    config = seen.config
    if config is None:
        return None
    if config.get("message.timestamp.type") == "LogAppendTime":
        fact = "message.timestamp.type = LogAppendTime: a record has Kafka's time; that of receipt is in its headers"
        return Flaw(Standing.LIMITED, fact)
    alter = f"kafka-configs.sh --bootstrap-server {servers} --alter --topic TOPIC --add-config"
    before, after = seen.number("message.timestamp.before.max.ms"), seen.number("message.timestamp.after.max.ms")
    if before is not None and before < _DAY_MS:
        until = f"Kafka is away for {days(before)}: what waited longer becomes dead letters, or stops the line"
        mend = f"{alter} message.timestamp.before.max.ms=9223372036854775807"
        return Flaw(Standing.WARNS, f"message.timestamp.before.max.ms = {before:,}", until, mend)
    if after is not None and after < _LEAST_AHEAD_MS:
        until = f"this machine's clock is {days(after)} ahead of Kafka's"
        return Flaw(
            Standing.WARNS,
            f"message.timestamp.after.max.ms = {after:,}",
            until,
            f"{alter} message.timestamp.after.max.ms=3600000",
        )
    span = _outage_ms(seen, before)
    if span is None:
        return Flaw(Standing.HOLDS, "records keep the time of receipt; Kafka takes any, and deletes none by its age")
    name, value = span
    until = f"Kafka is away for {days(value)}: it takes what waited longer, and deletes it at once"
    if name != "retention.ms":
        until = f"Kafka is away for {days(value)}: what waited longer becomes dead letters, or stops the line"
    return Flaw(Standing.LIMITED, f"{name} = {value:,}, and records keep the time of receipt", until)


def _outage_ms(seen: TopicSeen, before: int | None) -> tuple[str, int] | None:
    limits = {"message.timestamp.before.max.ms": before if before is not None else -1}
    if "delete" in seen.policy:
        by_time = seen.number("retention.ms")
        limits["retention.ms"] = by_time if by_time is not None else -1
    bounded = [(value, name) for name, value in limits.items() if 0 <= value < _FOR_EVER_MS]
    if not bounded:
        return None
    value, name = min(bounded)
    return name, value


RULES: Final = (kept, times)
