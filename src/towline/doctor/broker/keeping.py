"""Judges what a broker keeps for a gateway that is away, and over its own end: TL-D03 to TL-D08. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from towline.doctor.broker.conf import BrokerConf
from towline.doctor.broker.facts import BrokerFacts, Greeting, KeptQueue
from towline.doctor.broker.targets import LineGateway, Target
from towline.doctor.broker.words import NEAR_S, at_rate, duration, verdict_of, within
from towline.doctor.case import LineLoad
from towline.doctor.findings import Finding, Standing
from towline.text import counted

__all__ = ["PROBE_BYTES", "judge_keeping"]

#: Bytes of a probe's payload, at most.
PROBE_BYTES: Final = 12
#: Session Expiry Interval of a session that never ends.
_NEVER: Final = 0xFFFFFFFF
#: Where it is not known how many bytes a second come, a queue of fewer bytes is small.
_SMALL_QUEUE: Final = 64 << 20
#: What a broker loses when it is killed is small up to so many seconds of messages.
_SHORT_S: Final = 60.0
#: And up to so many messages where it is not known how many come.
_FEW: Final = 100
_CLOSER: Final = "Receipts close what is left (docs/receipts.md)."
_OUTAGE: Final = "outage of the intake"
_DAY_S: Final = 86400

_LoadOf = Callable[[str], LineLoad | None]


def judge_keeping(target: Target, facts: BrokerFacts, conf: BrokerConf | None, load_of: _LoadOf) -> Iterator[Finding]:
    """Rows about session, queue and store, for the lines whose promise needs them.

    Args:
        target: The broker and its lines.
        facts: What was seen of it.
        conf: What it was told; None where that is not known.
        load_of: Load of a line by its name; None where it is not known.
    """
    gateways = [one for one in target.gateways if one.kept]
    if not gateways or not isinstance(facts.greeting, Greeting):
        return
    if facts.queue is not None:
        yield _session(target, facts.queue)
    for one in _of_lines(gateways):
        if one.up:
            yield _expiry(one, facts.greeting, conf)
            yield from _queue(one, facts.queue, conf, load_of(one.name))
            yield from _queue_bytes(one, conf, load_of(one.name))
    yield _restart(target, conf)
    if conf is not None and conf.persistence:
        yield _killed(target, gateways, conf, _sum(gateways, load_of))


def _of_lines(gateways: Sequence[LineGateway]) -> Iterator[LineGateway]:
    """A gateway of each line."""
    yield from {one.name: one for one in reversed(gateways)}.values()


def _session(target: Target, queue: KeptQueue) -> Finding:
    kept = queue.present and (queue.kept or not queue.accepted)
    if kept:
        came = f"a probe left and came back: Session Present 1, and {counted(queue.kept)} that had come meanwhile"
        return Finding(code="TL-D03", promise="session", verdict=Standing.HOLDS, because=came, line=target.lines)
    if queue.present:
        because = f"a probe left and came back: Session Present 1, and none of {counted(queue.accepted)} acknowledged"
    else:
        because = "a probe with a session left and came back: Session Present 0"
    return Finding(
        code="TL-D03",
        promise="session",
        verdict=Standing.BROKEN,
        until="the first broken connection",
        because=because,
        mend="Let the broker keep sessions and their queues, or take another broker.",
        line=target.lines,
    )


def _expiry(gateway: LineGateway, greeting: Greeting, conf: BrokerConf | None) -> Finding:
    wanted = gateway.settings.session_expiry_s
    limits: list[tuple[float, str]] = []
    if wanted < _NEVER:
        limits.append((wanted, f"session_expiry_s of the line is {wanted:,}"))
    if greeting.level == 5 and greeting.expiry_s < min(wanted, greeting.asked_expiry_s):
        limits.append(
            (greeting.expiry_s, f"the broker sets Session Expiry Interval {greeting.expiry_s:,} s in CONNACK")
        )
    if conf is not None and conf.expiration_s is not None:
        limits.append((conf.expiration_s, f"persistent_client_expiration is {duration(conf.expiration_s)}"))
    if not limits and greeting.level < 5 and conf is None:
        return Finding(
            code="TL-D04",
            promise="session expiry",
            verdict=Standing.LIMITED,
            until="the broker forgets the session",
            because="MQTT 3.x asks for no time and is told none",
            mend="--mosquitto-conf FILE tells it; at RabbitMQ it is mqtt.subscription_ttl, a day by default.",
            line=gateway.name,
        )
    if not limits:
        because = "session_expiry_s asks for a session that never ends, and nothing shortens it"
        if greeting.level == 5 and conf is None:
            because = f"the broker accepts a Session Expiry Interval of {duration(greeting.asked_expiry_s)}"
        return Finding(
            code="TL-D04", promise="session expiry", verdict=Standing.HOLDS, because=because, line=gateway.name
        )
    seconds, because = min(limits)
    return Finding(
        code="TL-D04",
        promise="session expiry",
        verdict=verdict_of(seconds, near_s=_DAY_S),
        until=f"the intake is away for {duration(seconds)}",
        because=f"{because}: the session and all that waits in it are gone then",
        mend="Raise it to longer than any outage; Mosquitto's default has no limit, session_expiry_s none either.",
        line=gateway.name,
    )


def _queue(
    gateway: LineGateway, queue: KeptQueue | None, conf: BrokerConf | None, load: LineLoad | None
) -> Iterator[Finding]:
    said = conf.max_queued_messages if conf is not None else 0
    probed = _probed_limit(queue, conf)
    if said or probed is not None:
        yield _queue_ends(gateway, queue, said, probed, load)
    elif conf is not None:
        because = "max_queued_messages is 0: no limit in messages"
        yield Finding(code="TL-D05", promise=_OUTAGE, verdict=Standing.HOLDS, because=because, line=gateway.name)
    elif queue is not None and queue.accepted:
        yield Finding(
            code="TL-D05",
            promise=_OUTAGE,
            verdict=Standing.LIMITED,
            until=f"at least {within(queue.accepted, load)}",
            because=f"all {counted(queue.kept, 'probe message')} were kept for a session that was away",
            mend="--mosquitto-conf FILE tells the limit; --probe-messages looks further.",
            line=gateway.name,
        )


def _probed_limit(queue: KeptQueue | None, conf: BrokerConf | None) -> int | None:
    """How many messages were kept, where it was not all, and no limit in bytes is the reason."""
    if queue is None or not queue.present or queue.kept >= queue.accepted or not queue.kept:
        return None
    limit_bytes = conf.max_queued_bytes if conf is not None else 0
    return None if 0 < limit_bytes < queue.accepted * PROBE_BYTES else queue.kept


def _queue_ends(
    gateway: LineGateway, queue: KeptQueue | None, said: int, probed: int | None, load: LineLoad | None
) -> Finding:
    limit = probed if not said else said if probed is None else min(said, probed)
    assert limit is not None
    dropped = "newest" if queue is None or queue.first else "oldest"
    seen = f"of {queue.accepted:,} acknowledged probe messages {queue.kept:,} were kept" if queue and probed else ""
    facts = [*([f"max_queued_messages is {said:,}"] if said else []), *([seen] if seen else [])]
    if said and probed is not None and probed < said:
        facts.append("so the file is not what the broker runs with")
    if load is None:
        facts.append("no message came while it was measured")
    enough = f" {math.ceil(load.messages_s * _DAY_S):,} hold a day." if load else " --rate N tells the time."
    return Finding(
        code="TL-D05",
        promise=_OUTAGE,
        verdict=verdict_of(None if load is None else limit / load.messages_s),
        until=within(limit, load),
        because=f"{', '.join(facts)}; the {dropped} are dropped, and nobody is told",
        mend=f"Raise the broker's limit for a client that is away (Mosquitto: max_queued_messages 0).{enough}",
        line=gateway.name,
    )


def _queue_bytes(gateway: LineGateway, conf: BrokerConf | None, load: LineLoad | None) -> Iterator[Finding]:
    if conf is None:
        return
    limits = [(size, name) for name in ("max_queued_bytes", "memory_limit") if (size := getattr(conf, name)) > 0]
    if not limits:
        return
    size, name = min(limits)
    seconds = None if load is None else size / load.bytes_s
    known = "" if load is None else f", {duration(size / load.bytes_s)} at {load.bytes_s / 1000:,.1f} kB/s"
    verdict = verdict_of(NEAR_S if load is None and size >= _SMALL_QUEUE else seconds)
    yield Finding(
        code="TL-D06",
        promise="outage, in bytes",
        verdict=verdict,
        until=f"{size:,} bytes{known}",
        because=f"{name} is {size:,}; what comes then is dropped, and nobody is told",
        mend=f"Raise {name}, or set it to 0: then memory is the limit.",
        line=gateway.name,
    )


def _restart(target: Target, conf: BrokerConf | None) -> Finding:
    if conf is None:
        return Finding(
            code="TL-D07",
            promise="restart of the broker",
            verdict=Standing.LIMITED,
            until="the broker ends, unless it saves what it keeps",
            because="whether it saves sessions and queues, and how often, is not seen from outside",
            mend="--mosquitto-conf FILE tells it; Mosquitto saves nothing by default.",
            line=target.lines,
        )
    if conf.persistence:
        because = "persistence is true"
        return Finding(
            code="TL-D07",
            promise="restart of the broker",
            verdict=Standing.HOLDS,
            because=because,
            line=target.lines,
        )
    return Finding(
        code="TL-D07",
        promise="restart of the broker",
        verdict=Standing.BROKEN,
        until="the broker ends, for whatever reason",
        because="persistence is false: every session and queue is in memory only",
        mend="Set persistence true, autosave_on_changes true and autosave_interval 1 in mosquitto.conf.",
        line=target.lines,
    )


def _killed(target: Target, gateways: Sequence[LineGateway], conf: BrokerConf, load: LineLoad | None) -> Finding:
    handshakes = any(one.exactly for one in gateways)
    also = "; so is the phase of QoS 2 messages in flight, which are lost or doubled then" if handshakes else ""
    setting = f"autosave_interval is {conf.autosave_interval:,}"
    if conf.autosave_on_changes:
        setting += " with autosave_on_changes true"
    verdict, until = _loss(conf, load)
    return Finding(
        code="TL-D08",
        promise="broker killed or without power",
        verdict=verdict,
        until=until,
        because=f"{setting}: what came since the last saving is lost{also}",
        mend=_CLOSER
        if verdict is Standing.LIMITED
        else f"Set autosave_on_changes true and autosave_interval 1. {_CLOSER}",
        line=target.lines,
    )


def _loss(conf: BrokerConf, load: LineLoad | None) -> tuple[Standing, str]:
    """How bad it is, and what is lost."""
    if not conf.autosave_interval:
        return Standing.WARNS, "all since the broker was started"
    if conf.autosave_on_changes:
        small = conf.autosave_interval <= (_FEW if load is None else max(_FEW, load.messages_s * _SHORT_S))
        until = f"up to {within(conf.autosave_interval, load)}"
    else:
        small = conf.autosave_interval <= _SHORT_S
        came = "" if load is None else f": {load.messages_s * conf.autosave_interval:,.0f} messages {at_rate(load)}"
        until = f"up to {duration(conf.autosave_interval)} of messages{came}"
    return (Standing.LIMITED if small else Standing.WARNS), until


def _sum(gateways: Sequence[LineGateway], load_of: _LoadOf) -> LineLoad | None:
    loads = [load for one in _of_lines(gateways) if one.up and (load := load_of(one.name)) is not None]
    if not loads:
        return None
    return LineLoad(sum(one.messages_s for one in loads), sum(one.bytes_s for one in loads), loads[0].how)
