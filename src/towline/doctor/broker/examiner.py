"""Examines every broker of a bridge: probes it, reads its configuration, and tells the rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from towline.doctor.broker.access import judge_access, judge_line_access
from towline.doctor.broker.conf import BrokerConf, read_conf
from towline.doctor.broker.facts import BrokerFacts, Elsewhere, Greeting, LineFacts, NoGreeting
from towline.doctor.broker.features import judge_elsewhere, judge_features, judge_line_features
from towline.doctor.broker.keeping import judge_keeping
from towline.doctor.broker.probes import LARGE_BYTES, Bench, greet, own_name
from towline.doctor.broker.targets import LineGateway, Target, targets_of
from towline.doctor.case import Case
from towline.doctor.findings import Finding
from towline.errors import TowlineError
from towline.net.transport import Endpoint

__all__ = ["examine_broker"]

#: Patience with one answer of a broker that has taken us in.
_ANSWER_S: Final = 5.0
#: Bytes around the payload of the large message.
_AROUND: Final = 200


def examine_broker(case: Case) -> Iterator[Finding]:
    """What the brokers keep of what the lines promise.

    Raises:
        ConfigError: ``--mosquitto-conf`` can't be read.
    """
    targets = targets_of(case.bridge)
    facts: dict[Endpoint, BrokerFacts] = {}
    for target in targets:
        file = case.mosquitto_conf
        conf = None if file is None else read_conf(file, target.endpoint.port)
        found = look(target, case)
        facts[target.endpoint] = found
        yield from _judged(target, found, conf, case)
    for target in targets:
        yield from _shared(target, facts, case)


def look(target: Target, case: Case) -> BrokerFacts:
    """Probe one broker."""
    greeting = greet(target, case.patience)
    if isinstance(greeting, NoGreeting):
        return BrokerFacts(greeting=greeting)
    with Bench(target.options(), greeting, min(case.patience, _ANSWER_S)) as bench:
        return _probed(bench, target, BrokerFacts(greeting=greeting), case)


def _probed(bench: Bench, target: Target, facts: BrokerFacts, case: Case) -> BrokerFacts:
    """All probes that concern the lines; what was seen until one fails."""
    greeting = bench.greeting
    kept = [one for one in target.gateways if one.kept]
    try:
        lines = {one.name: (one, bench.line(one, listen=_comes(one, case))) for one in target.gateways}
        facts = replace(
            facts, lines=tuple((name, replace(seen, started=_started(one))) for name, (one, seen) in lines.items())
        )
        facts = replace(facts, own=bench.own_topics())
        if facts.own and facts.own.why:
            return facts
        if kept:
            facts = replace(facts, queue=bench.queue(case.probe_messages))
        if greeting.level == 5:
            facts = replace(facts, window=bench.window())
        if any(one.qos == 2 for one in target.gateways) and int(greeting.connack.max_qos) == 2:
            facts = replace(facts, qos_2=bench.qos_2())
        if any(one.retains for one in target.gateways) and greeting.connack.retain_available:
            facts = replace(facts, retained=bench.retained())
        if kept:
            facts = replace(facts, in_flight=bench.in_flight())
        if (greeting.connack.max_packet_size or 2 * LARGE_BYTES) > LARGE_BYTES + _AROUND:
            facts = replace(facts, large=bench.large())
    except TowlineError as error:
        return replace(facts, stopped=error)
    return facts


def _comes(gateway: LineGateway, case: Case) -> bool:
    """Whether messages may come on a line: some did while its load was measured, or nobody has looked."""
    return case.rate is not None or case.load_of(gateway.name) is not None


def _started(gateway: LineGateway) -> bool | None:
    """Whether a line has run: then its journal is there."""
    if gateway.settings.landing is not None or not gateway.up:
        return None
    try:
        return any(gateway.settings.inbox.iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return None


def _judged(target: Target, facts: BrokerFacts, conf: BrokerConf | None, case: Case) -> Iterator[Finding]:
    yield from judge_access(target, facts)
    yield from judge_keeping(target, facts, conf, case.load_of)
    yield from judge_features(target, facts, conf)
    seen = dict(facts.lines)
    for name, gateway in {one.name: one for one in reversed(target.gateways)}.items():
        if isinstance(facts.greeting, Greeting):
            found = seen.get(name, LineFacts())
            yield from judge_line_access(target, gateway, found, conf)
            yield from judge_line_features(gateway, facts, found, case.load_of(name))


def _shared(target: Target, facts: dict[Endpoint, BrokerFacts], case: Case) -> Iterator[Finding]:
    """Brokers that are said to share sessions are asked whether they do; from the first to each other one."""
    for gateway in {one.name: one for one in target.gateways}.values():
        brokers = gateway.settings.brokers
        if len(brokers) < 2 or not gateway.settings.brokers_share_sessions or brokers[0] != target.endpoint:
            continue
        for other in brokers[1:]:
            here, there = facts[target.endpoint].greeting, facts[other].greeting if other in facts else None
            if isinstance(here, Greeting) and isinstance(there, Greeting):
                yield judge_elsewhere(gateway.name, _asked_elsewhere(target, here, other, there, case))


def _asked_elsewhere(target: Target, here: Greeting, other: Endpoint, there: Greeting, case: Case) -> Elsewhere:
    options = target.options()
    client_id = own_name()
    patience = min(case.patience, _ANSWER_S)
    with Bench(options, here, patience) as first:
        first.make_session(client_id)
        with Bench(replace(options, brokers=(other,)), there, patience) as second:
            present = second.has_session(client_id)
    return Elsewhere(made_at=str(target.endpoint), asked_at=str(other), present=present)
