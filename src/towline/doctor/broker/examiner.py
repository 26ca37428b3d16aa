"""Examines every broker of a bridge: probes it, reads its configuration, and tells the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from towline.doctor.broker.access import judge_access, judge_line_access
from towline.doctor.broker.conf import BrokerConf, read_conf
from towline.doctor.broker.facts import BrokerFacts, Elsewhere, Greeting, LineAnswers, NoGreeting
from towline.doctor.broker.features import judge_elsewhere, judge_features, judge_line_features
from towline.doctor.broker.keeping import judge_keeping
from towline.doctor.broker.probes import LARGE_BYTES, Bench, greet, own_name
from towline.doctor.broker.targets import LineGateway, Target, targets_of
from towline.doctor.case import Case
from towline.doctor.findings import Finding
from towline.errors import TowlineError, Unreachable
from towline.net.transport import Endpoint

__all__ = ["examine_broker"]

#: Seconds for the connection, and for CONNACK.
_CONNACK_S: Final = 8.0
#: No further probe is begun after so many seconds.
_ALL_S: Final = 12.0
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
    greeting = greet(target, min(case.patience, _CONNACK_S))
    if isinstance(greeting, NoGreeting):
        return BrokerFacts(greeting=greeting)
    with Bench(target.options(), greeting, min(case.patience, _ANSWER_S)) as bench:
        return _probed(bench, target, BrokerFacts(greeting=greeting), case)


def _probed(bench: Bench, target: Target, facts: BrokerFacts, case: Case) -> BrokerFacts:
    """All probes that concern the lines; what was seen until one fails, or until it has taken too long."""
    until = case.monotonic() + _ALL_S
    try:
        for probe in _probes(bench, target, case):
            facts = replace(facts, **probe())
            if facts.own is not None and facts.own.why:
                return facts
            if case.monotonic() > until:
                what = f"the broker is slow: after {_ALL_S:g} s some probes were left out"
                return replace(facts, stopped=Unreachable("TL-M03", str(target.endpoint), what, "Ask again."))
    except TowlineError as error:
        return replace(facts, stopped=error)
    return facts


def _probes(bench: Bench, target: Target, case: Case) -> Iterator[Callable[[], dict[str, Any]]]:
    """Each gives fields of `BrokerFacts`."""
    greeting = bench.greeting
    kept = any(one.kept for one in target.gateways)
    yield lambda: {"lines": tuple((one.name, _line(bench, one, target, case)) for one in _each_line(target))}
    yield lambda: {"own": bench.own_topics()}
    if kept:
        yield lambda: {"queue": bench.queue(case.probe_messages)}
    if greeting.level == 5:
        yield lambda: {"window": bench.window()}
    if any(one.qos == 2 for one in target.gateways) and int(greeting.connack.max_qos) == 2:
        yield lambda: {"qos_2": bench.qos_2()}
    if any(one.retains for one in target.gateways) and greeting.connack.retain_available:
        yield lambda: {"retained": bench.retained()}
    if kept:
        yield lambda: {"in_flight": bench.in_flight()}
    if (greeting.connack.max_packet_size or 2 * LARGE_BYTES) > LARGE_BYTES + _AROUND:
        yield lambda: {"large": bench.large()}


def _each_line(target: Target) -> list[LineGateway]:
    """The first gateway of each line."""
    return list({one.name: one for one in reversed(target.gateways)}.values())


def _line(bench: Bench, gateway: LineGateway, target: Target, case: Case) -> LineAnswers:
    """What is seen of a line; where members share it, each filter of each of them is asked for."""
    mine = [one for one in target.gateways if one.name == gateway.name]
    each = [bench.line(one, listen=_comes(one, case)) for one in mine]
    filters = {one.pattern: one for seen in each for one in seen.filters}
    zero, one, two = (sum(seen.levels[level] for seen in each) for level in range(3))
    return LineAnswers(filters=tuple(filters.values()), levels=(zero, one, two), started=_started(gateway))


def _comes(gateway: LineGateway, case: Case) -> bool:
    """Whether messages may come on a line: some did while its load was measured, or nobody has looked."""
    return case.rate is not None or case.load_of(gateway.name) is not None


def _started(gateway: LineGateway) -> bool | None:
    """Whether a line has run: then its journal is there."""
    if not gateway.up:
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
    if isinstance(facts.greeting, Greeting):
        for gateway in _each_line(target):
            found = seen.get(gateway.name, LineAnswers())
            yield from judge_line_access(target, gateway, found, conf)
            yield from judge_line_features(gateway, facts, found, case.load_of(gateway.name))


def _shared(target: Target, facts: dict[Endpoint, BrokerFacts], case: Case) -> Iterator[Finding]:
    """Brokers that are said to share sessions are asked whether they do; from the first to each other one."""
    for gateway in _each_line(target):
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
