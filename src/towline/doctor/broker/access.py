"""Judges how a broker lets us in, and to which topics: TL-D02, TL-D10, TL-D11, TL-D20, TL-D21, TL-D23. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Final

from towline.bridge.config.model import DownLine
from towline.doctor.broker.acl import Right, right
from towline.doctor.broker.conf import BrokerConf
from towline.doctor.broker.facts import BrokerFacts, FilterAnswer, Greeting, LineAnswers, NoGreeting
from towline.doctor.broker.targets import LineGateway, Target
from towline.doctor.findings import Finding, Standing
from towline.mqtt.filters import unshared
from towline.mqtt.reasons import SUBSCRIBE_ADVICE, reason_words
from towline.mqtt.versions import NAMES
from towline.text import counted, printable

__all__ = ["judge_access", "judge_line_access"]

#: SUBACK reasons that are not about rights (`towline.doctor.broker.features` tells those).
_FEATURES: Final = frozenset({0x9E, 0xA1, 0xA2})
_NO: Final = 0x80
#: Characters of a filter that are shown.
_SHOWN: Final = 80


def judge_access(target: Target, facts: BrokerFacts) -> Iterator[Finding]:
    """Rows about the way in."""
    yield from _in_clear(target)
    greeting = facts.greeting
    if isinstance(greeting, NoGreeting):
        yield _refused(target, greeting)
        return
    yield Finding(
        code="TL-D02",
        promise="connection",
        verdict=Standing.HOLDS,
        because=f"{target.endpoint} answers{_as(target)} in {greeting.round_trip_s * 1000:.1f} ms",
        line=target.lines,
    )
    if greeting.level < 5:
        yield _older(target, greeting)
    if facts.own is not None and facts.own.why:
        yield Finding(
            code="TL-D11",
            promise="probes",
            verdict=Standing.UNKNOWN,
            because=f"{printable(facts.own.why)}; so session, queue and window could not be looked at",
            mend="Give this user read and write on towline-doctor/#, if only for the time of the probe.",
            line=target.lines,
        )
    elif facts.stopped is not None:
        yield Finding(
            code="TL-D11",
            promise="probes",
            verdict=Standing.UNKNOWN,
            because=f"probing ended early: {printable(facts.stopped.what)}",
            mend="Ask again; the broker's log may tell why.",
            line=target.lines,
        )


def judge_line_access(
    target: Target, gateway: LineGateway, facts: LineAnswers, conf: BrokerConf | None
) -> Iterator[Finding]:
    """Rows about the topics of a line, and about its first start."""
    if isinstance(gateway.line, DownLine):
        yield _publishing(gateway, gateway.line, conf)
        return
    refused = [one for one in facts.filters if (one.code is None or one.code >= _NO) and one.code not in _FEATURES]
    for one in refused:
        yield _subscription_refused(gateway, one)
    granted = [one for one in facts.filters if one.code is not None and one.code < _NO]
    if granted:
        yield _subscribed(gateway, granted, conf)
    if facts.started is False and gateway.kept:
        yield Finding(
            code="TL-D23",
            promise="first start",
            verdict=Standing.LIMITED,
            until="the line has been started once",
            because=f"{target.endpoint} keeps nothing for it before: what is published until then is not in Kafka, "
            "but for retained messages",
            mend="Start the line before its publishers.",
            line=gateway.name,
        )


def _as(target: Target) -> str:
    name = target.settings.username
    return "" if name is None else f" as {printable(name)}"


def _refused(target: Target, greeting: NoGreeting) -> Finding:
    error = greeting.error
    if greeting.speaks is not None:
        return Finding(
            code="TL-D20",
            promise="protocol",
            verdict=Standing.BROKEN,
            until="now",
            because=f"{target.endpoint} does not speak MQTT 5 ({printable(error.what)}), it speaks "
            f"{NAMES[greeting.speaks]}",
            mend='Set protocol = "auto" in [mqtt], or take a listener that speaks MQTT 5.',
            line=target.lines,
        )
    if greeting.tls:
        secured = str(target.endpoint).replace("mqtt:", "mqtts:").replace("ws:", "wss:")
        return Finding(
            code="TL-D02",
            promise="connection",
            verdict=Standing.BROKEN,
            until="now",
            because=f"{target.endpoint}: {printable(error.what)}; the port speaks TLS",
            mend=f"Write {secured}.",
            line=target.lines,
        )
    return Finding(
        code="TL-D02",
        promise="connection",
        verdict=Standing.BROKEN,
        until="now",
        because=f"{printable(error.where)}: {printable(error.what)} ({error.code})",
        mend=printable(error.do)
        if error.do and error.do != "Trying again."
        else "Start the broker, or correct brokers.",
        line=target.lines,
    )


def _older(target: Target, greeting: Greeting) -> Finding:
    return Finding(
        code="TL-D20",
        promise="protocol",
        verdict=Standing.LIMITED,
        until="a property, an expiry or a Receive Maximum is needed",
        because=f"the session speaks {NAMES[greeting.level]}, which has none of them, and no reason for a refusal",
        mend='protocol = "5", where the broker speaks it.',
        line=target.lines,
    )


def _in_clear(target: Target) -> Iterator[Finding]:
    endpoint = target.endpoint
    if _stays_here(endpoint.scheme, endpoint.host):
        return
    if endpoint.tls and not target.settings.tls.insecure:
        because = f"{endpoint} is reached over TLS, and its certificate is verified"
        yield Finding(code="TL-D21", promise="privacy", verdict=Standing.HOLDS, because=because, line=target.lines)
        return
    what = "its certificate is not verified (tls.insecure)" if endpoint.tls else "without TLS"
    secret = ", and the password with it" if target.settings.password_file else ""
    yield Finding(
        code="TL-D21",
        promise="privacy",
        verdict=Standing.WARNS,
        until="somebody listens or answers on the way",
        because=f"{endpoint} is on another machine and reached {what}: messages can be read and changed{secret}",
        mend="Write mqtts:// and give the broker a certificate.",
        line=target.lines,
    )


def _stays_here(scheme: str, host: str) -> bool:
    if scheme == "unix" or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _subscription_refused(gateway: LineGateway, one: FilterAnswer) -> Finding:
    code = one.code
    if code is None:
        why, advice = "the broker ended the connection", "Give this user the right to read it; see the broker's log."
    else:
        why = f"{reason_words(code)} (0x{code:02X})"
        advice = SUBSCRIBE_ADVICE.get(code, "Change the filter, or the broker.")
    return Finding(
        code="TL-D10",
        promise="right to read",
        verdict=Standing.BROKEN,
        until="now",
        because=f'"{printable(one.pattern, _SHOWN)}" is refused: {why}',
        mend=advice,
        line=gateway.name,
    )


def _subscribed(gateway: LineGateway, granted: list[FilterAnswer], conf: BrokerConf | None) -> Finding:
    silent = [one for one in granted if not one.seen]
    rights = {one.pattern: _right_to(gateway, "read", unshared(one.pattern), conf) for one in silent}
    denied = [pattern for pattern, found in rights.items() if found in {Right.NONE, Right.PART}]
    if denied:
        none = all(rights[pattern] is Right.NONE for pattern in denied)
        shown = ", ".join(f'"{printable(pattern, _SHOWN)}"' for pattern in denied[:3])
        return Finding(
            code="TL-D10",
            promise="right to read",
            verdict=Standing.BROKEN if none else Standing.WARNS,
            until="now" if none else "a topic that this user may not read",
            because=f"{shown}: the broker grants the subscription, and acl_file lets "
            f"{'nothing' if none else 'only a part'} of it through; nobody is told",
            mend=f'Add "topic read FILTER" under "user {printable(gateway.settings.username or "NAME")}" in acl_file.',
            line=gateway.name,
        )
    seen = sum(one.seen for one in granted)
    known = all(found is Right.ALL for found in rights.values())
    told = f"{counted(len(granted), 'filter')} granted"
    if not silent or known:
        because = (
            f"{told}, {counted(seen)} came" if not silent else f"{told}, and nothing in the broker's file denies it"
        )
        return Finding(
            code="TL-D10", promise="right to read", verdict=Standing.HOLDS, because=because, line=gateway.name
        )
    return Finding(
        code="TL-D10",
        promise="right to read",
        verdict=Standing.LIMITED,
        until="an access rule denies what the subscription asks for",
        because=f"{told}; a broker may ask its rules at each delivery, as Mosquitto does, and on "
        f"{counted(len(silent), 'filter')} no message came meanwhile{_unknown(conf)}",
        line=gateway.name,
    )


def _publishing(gateway: LineGateway, line: DownLine, conf: BrokerConf | None) -> Finding:
    said = line.section.topic
    topic = said if isinstance(said, str) and "{" not in said else None
    found = None if topic is None else _right_to(gateway, "write", topic, conf)
    if topic is not None and found in {Right.NONE, Right.PART}:
        return Finding(
            code="TL-D10",
            promise="right to write",
            verdict=Standing.BROKEN,
            until="now",
            because=f'acl_file gives no right to write "{printable(topic, _SHOWN)}"',
            mend=f'Add "topic write {printable(topic, _SHOWN)}" under '
            f'"user {printable(gateway.settings.username or "NAME")}" in acl_file.',
            line=gateway.name,
        )
    if found is Right.ALL:
        because = "nothing in the broker's file denies its topic"
        return Finding(
            code="TL-D10", promise="right to write", verdict=Standing.HOLDS, because=because, line=gateway.name
        )
    return Finding(
        code="TL-D10",
        promise="right to write",
        verdict=Standing.LIMITED,
        until="a message is refused; it is set aside then, and counted",
        because="without publishing on the line's own topics it is not seen who may",
        line=gateway.name,
    )


def _right_to(gateway: LineGateway, access: str, pattern: str, conf: BrokerConf | None) -> Right | None:
    """What the broker's file says; None where that is not known."""
    if conf is None or conf.acl_unknown:
        return None
    if conf.acl is None:
        return Right.ALL
    settings = gateway.settings
    return right(conf.acl, access, pattern, user=settings.username, client_id=settings.mqtt_client_id)


def _unknown(conf: BrokerConf | None) -> str:
    if conf is None or not conf.acl_unknown:
        return ""
    return f" ({printable(conf.acl_unknown)})"
