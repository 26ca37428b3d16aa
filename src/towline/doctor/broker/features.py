"""Judges what of MQTT a broker has and keeps to: TL-D09, TL-D12 to TL-D19, TL-D22 and TL-D24. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from towline.bridge.config.model import DownLine
from towline.doctor.broker.conf import BrokerConf
from towline.doctor.broker.facts import BrokerFacts, Elsewhere, Greeting, InFlight, KeptWindow, LineAnswers
from towline.doctor.broker.targets import LineGateway, Target
from towline.doctor.broker.versions import faults_of
from towline.doctor.case import LineLoad
from towline.doctor.findings import Finding, Standing
from towline.mqtt.reasons import SUBSCRIBE_ADVICE, reason_words
from towline.mqtt.rules import unsupported
from towline.mqtt.versions import NAMES
from towline.text import counted, printable

__all__ = ["judge_elsewhere", "judge_features", "judge_line_features"]

#: Seconds until a message is on disk and its acknowledgement has left: a slow disk.
_ACK_S: Final = 0.005
#: A window at least as wide is not told.
_WIDE: Final = 100
#: Kafka's largest record by default (message.max.bytes): a packet that a record may become.
_RECORD: Final = 1 << 20
#: In flight at a 3.x publisher by default (paho, and `SessionConfig.window_3`).
_IN_FLIGHT: Final = 20
_NO: Final = 0x80
_MISSING: Final = frozenset({0x9E, 0xA1, 0xA2})
_SHOWN: Final = 80


def judge_features(target: Target, facts: BrokerFacts, conf: BrokerConf | None) -> Iterator[Finding]:
    """Rows about a broker, whatever comes on its lines."""
    greeting = facts.greeting
    if not isinstance(greeting, Greeting):
        return
    if any(one.qos == 2 for one in target.gateways):
        yield _qos_2(target, greeting, facts)
    if facts.window is not None:
        yield _receive_maximum(target, facts.window)
    yield from _version(target, greeting)
    if facts.in_flight is not None:
        yield _three(target, greeting, facts.in_flight)
    yield from _size(target, greeting, facts, conf)
    if any(one.retains for one in target.gateways):
        yield _retained(target, greeting, facts)
    yield from _keep_alive(target, greeting)


def judge_line_features(
    gateway: LineGateway, facts: BrokerFacts, seen: LineAnswers, load: LineLoad | None
) -> Iterator[Finding]:
    """Rows about one line."""
    greeting = facts.greeting
    if not isinstance(greeting, Greeting):
        return
    yield from _missing(gateway, greeting, seen)
    yield from _granted(gateway, seen)
    yield from _window(gateway, facts, greeting, load)
    yield from _publishers(gateway, seen)
    settings = gateway.settings
    if len(settings.brokers) > 1 and not settings.brokers_share_sessions and gateway.kept:
        yield Finding(
            code="TL-D22",
            promise="several brokers",
            verdict=Standing.LIMITED,
            until="the broker in use changes",
            because=f"{len(settings.brokers)} brokers are not said to share sessions: what waits at one that was left "
            "comes when the line is there again",
            mend="brokers_share_sessions = true where they are one cluster.",
            line=gateway.name,
        )


def judge_elsewhere(line: str, found: Elsewhere) -> Finding:
    """The row about brokers that are said to share sessions.

    Args:
        line: Its name.
        found: What was seen.
    """
    if found.present:
        return Finding(
            code="TL-D22",
            promise="several brokers",
            verdict=Standing.HOLDS,
            because=f"a session made at {found.made_at} is there at {found.asked_at}",
            line=line,
        )
    return Finding(
        code="TL-D22",
        promise="several brokers",
        verdict=Standing.BROKEN,
        until="the broker in use changes",
        because=f"brokers_share_sessions is true, and a session made at {found.made_at} is not known at "
        f"{found.asked_at}: its packet ids would name other messages there",
        mend="Name one broker, make them a cluster that shares sessions, or set brokers_share_sessions = false.",
        line=line,
    )


def _qos_2(target: Target, greeting: Greeting, facts: BrokerFacts) -> Finding:
    received = facts.qos_2
    most = int(greeting.connack.max_qos) if greeting.level == 5 else 2
    if most == 2 and received is not False:
        because = "a PUBLISH of QoS 2 was answered with PUBREC" if received else "the broker announces no lower maximum"
        return Finding(code="TL-D09", promise="QoS 2", verdict=Standing.HOLDS, because=because, line=target.lines)
    because = (
        f"the broker announces Maximum QoS {most}" if most < 2 else "it answers QoS 2 with PUBACK: it serves it as 1"
    )
    return Finding(
        code="TL-D09",
        promise="QoS 2",
        verdict=Standing.BROKEN,
        until="the first message",
        because=because,
        mend="Take a broker with QoS 2, or guarantee at_least_once; for a downlink with receipts at the consumer.",
        line=target.lines,
    )


def _granted(gateway: LineGateway, seen: LineAnswers) -> Iterator[Finding]:
    for one in seen.filters:
        if one.code is not None and one.code < min(one.qos, _NO):
            yield Finding(
                code="TL-D09",
                promise="granted QoS",
                verdict=Standing.BROKEN,
                until="now",
                because=f'"{printable(one.pattern, _SHOWN)}" is granted QoS {one.code} instead of {one.qos}',
                mend="Raise the broker's maximum QoS, or choose a weaker guarantee.",
                line=gateway.name,
            )


def _receive_maximum(target: Target, window: KeptWindow) -> Finding:
    if not window.broken:
        because = f"Receive Maximum {window.announced}: {window.before} came, {window.after} after one acknowledgement"
        return Finding(code="TL-D12", promise="window", verdict=Standing.HOLDS, because=because, line=target.lines)
    exactly = any(one.exactly for one in target.gateways)
    twice = "; with QoS 2 it then uses packet ids twice, and messages are lost" if exactly else ""
    return Finding(
        code="TL-D12",
        promise="window",
        verdict=Standing.BROKEN if exactly else Standing.WARNS,
        until="messages wait in the session" if exactly else "many messages wait: a restart repeats them",
        because=f"the broker breaks Receive Maximum {window.announced}: {window.before} came unacknowledged, and "
        f"{window.after} after one acknowledgement{twice}",
        mend="Upgrade it (Mosquitto: 2.0.13 or newer).",
        line=target.lines,
    )


def _version(target: Target, greeting: Greeting) -> Iterator[Finding]:
    if not greeting.software:
        return
    software = printable(greeting.software, _SHOWN)
    filters = [one.pattern for gateway in target.gateways for one in gateway.filters]
    faults = list(faults_of(greeting.software, shared=any(name.startswith("$share/") for name in filters)))
    if not faults:
        because = f"{software}: no fault of this version is known here"
        yield Finding(code="TL-D14", promise="version", verdict=Standing.HOLDS, because=because, line=target.lines)
    for fault in faults:
        yield Finding(
            code="TL-D14",
            promise="version",
            verdict=Standing.WARNS,
            until=fault.until,
            because=f"{software}: {fault.what}",
            mend=f"Upgrade to {fault.mended} or newer.",
            line=target.lines,
        )


def _three(target: Target, greeting: Greeting, flight: InFlight) -> Finding:
    """Ours speaks 3.x on a downlink that is told to; else it is about publishers of others."""
    ours = greeting.level < 5 and any(not one.up for one in target.gateways)
    promise = "publishing with MQTT 3.x" if ours else "publishers of MQTT 3.x"
    if flight.arrived >= flight.sent:
        because = f"{flight.sent} messages that a 3.x publisher had in flight together all arrived"
        return Finding(code="TL-D15", promise=promise, verdict=Standing.HOLDS, because=because, line=target.lines)
    if flight.ended:
        what = f"at {flight.sent} messages in flight together the broker ends the connection"
        until = f"a publisher has up to {flight.sent} messages in flight"
    else:
        until = f"a publisher has more than {flight.arrived} messages in flight"
        what = f"of {flight.sent} messages in flight together, all completed, {flight.arrived} arrived"
    return Finding(
        code="TL-D15",
        promise=promise,
        verdict=Standing.BROKEN if ours else Standing.LIMITED,
        until=until,
        because=f"{what}; MQTT 3.x can't announce a limit",
        mend=f"Set max_inflight_messages to {flight.sent} or more in mosquitto.conf, or as much at the publishers; "
        "MQTT 5 announces it.",
        line=target.lines,
    )


def _size(target: Target, greeting: Greeting, facts: BrokerFacts, conf: BrokerConf | None) -> Iterator[Finding]:
    most = greeting.connack.max_packet_size if greeting.level == 5 else None
    large = facts.large
    if large is not None and large.code < _NO and not large.arrived:
        limit = f"; message_size_limit is {conf.message_size_limit:,}" if conf and conf.message_size_limit else ""
        yield Finding(
            code="TL-D17",
            promise="size of a message",
            verdict=Standing.BROKEN,
            until=f"a message of {large.size:,} bytes, or less",
            because=f"a message of {large.size:,} bytes {_of(large.level)}was acknowledged and dropped{limit}",
            mend="Raise message_size_limit at the broker; only publishers of MQTT 5 are told that they meet it.",
            line=target.lines,
        )
    elif most is not None and most < _RECORD and any(isinstance(one.line, DownLine) for one in target.gateways):
        stops = any(isinstance(one.line, DownLine) and not one.line.dead_letter_topic for one in target.gateways)
        yield Finding(
            code="TL-D17",
            promise="size of a message",
            verdict=Standing.WARNS if stops else Standing.LIMITED,
            until=f"a record becomes a packet of more than {most:,} bytes",
            because=f"the broker announces Maximum Packet Size {most:,}, a record of Kafka may have {_RECORD:,}; "
            f"{'the line stops there' if stops else 'it becomes a dead letter'}",
            mend="Raise max_packet_size at the broker, or give the line a dead_letter_topic.",
            line=target.lines,
        )
    elif most is not None:
        yield _limited_size(target, most, f"the broker announces Maximum Packet Size {most:,}")
    elif conf is not None and conf.message_size_limit:
        because = f"message_size_limit is {conf.message_size_limit:,}: more is acknowledged and dropped"
        yield _limited_size(target, conf.message_size_limit, because)
    elif large is not None and large.code >= _NO:
        yield _limited_size(target, large.size, f"the broker refuses a message of {large.size:,} bytes, and says so")
    elif large is not None:
        because = f"a message of {large.size:,} bytes arrived, and no limit is announced"
        yield Finding(
            code="TL-D17", promise="size of a message", verdict=Standing.HOLDS, because=because, line=target.lines
        )


def _of(level: int) -> str:
    return "" if level == 5 else f"of a publisher of {NAMES[level]} "


def _limited_size(target: Target, most: int, because: str) -> Finding:
    return Finding(
        code="TL-D17",
        promise="size of a message",
        verdict=Standing.LIMITED,
        until=f"a message of {most:,} bytes",
        because=because,
        line=target.lines,
    )


def _retained(target: Target, greeting: Greeting, facts: BrokerFacts) -> Finding:
    there = facts.retained
    announced = greeting.connack.retain_available if greeting.level == 5 else True
    if announced and there is not False:
        because = "a retained message was there for a later subscriber" if there else "the broker has retained messages"
        return Finding(
            code="TL-D18", promise="retained messages", verdict=Standing.HOLDS, because=because, line=target.lines
        )
    because = "it keeps none" if announced else "the broker announces Retain Available 0"
    return Finding(
        code="TL-D18",
        promise="retained messages",
        verdict=Standing.BROKEN,
        until="the first message with retain",
        because=f"{because}, and a downlink publishes retained messages",
        mend="Set retain_available true at the broker, or leave out retain.",
        line=target.lines,
    )


def _keep_alive(target: Target, greeting: Greeting) -> Iterator[Finding]:
    given = greeting.connack.server_keep_alive if greeting.level == 5 else None
    wanted = target.settings.keep_alive_s
    if given is not None and given < wanted:
        yield Finding(
            code="TL-D19",
            promise="keep alive",
            verdict=Standing.LIMITED,
            until=f"the gateway is silent for {1.5 * given:g} s",
            because=f"the broker sets Server Keep Alive {given} s in place of {wanted} s, which the gateway obeys",
            line=target.lines,
        )


def _missing(gateway: LineGateway, greeting: Greeting, seen: LineAnswers) -> Iterator[Finding]:
    lacking = [
        error.what
        for one in gateway.filters
        if greeting.level == 5 and (error := unsupported(greeting.connack, [one], gateway.name)) is not None
    ]
    lacking += [
        f'"{one.pattern}" is refused: {reason_words(one.code)} (0x{one.code:02X})'
        for one in seen.filters
        if one.code in _MISSING and one.code is not None
    ]
    for what in lacking:
        advice = next((SUBSCRIBE_ADVICE[code] for code in _MISSING if reason_words(code)[:6] in what), "")
        yield Finding(
            code="TL-D16",
            promise="subscription",
            verdict=Standing.BROKEN,
            until="now",
            because=printable(what),
            mend=advice or "Change the filter, or the broker.",
            line=gateway.name,
        )


def _window(gateway: LineGateway, facts: BrokerFacts, greeting: Greeting, load: LineLoad | None) -> Iterator[Finding]:
    """How many messages a second a window lets through [docs/sizing.md]."""
    if gateway.up:
        queue = facts.queue
        if queue is None or not queue.window or queue.window >= queue.kept:
            return
        window, whose = queue.window, "the broker sends"
    else:
        window = greeting.connack.receive_max if greeting.level == 5 else _IN_FLIGHT
        whose = "the broker takes"
    most = window / (greeting.round_trip_s + _ACK_S)
    near = gateway.up and load is not None and load.messages_s > most / 2
    if window >= _WIDE and not near:
        return
    known = "" if load is None or not gateway.up else f"; {load.messages_s:,.0f} come"
    yield Finding(
        code="TL-D13",
        promise="throughput",
        verdict=Standing.WARNS if near else Standing.LIMITED,
        until=f"about {most:,.0f} msg/s",
        because=f"{whose} {counted(window)} ahead of their acknowledgement, in {greeting.round_trip_s * 1000:.1f} ms "
        f"of round trip and {_ACK_S * 1000:g} ms of disk{known}",
        mend="Raise the broker's window (Mosquitto: max_inflight_messages; RabbitMQ: mqtt.prefetch).",
        line=gateway.name,
    )


def _publishers(gateway: LineGateway, seen: LineAnswers) -> Iterator[Finding]:
    zero, one, two = seen.levels
    total = zero + one + two
    if not total or not gateway.kept or any(one.promise for one in getattr(gateway.line, "sections", ())):
        return
    if zero:
        yield Finding(
            code="TL-D24",
            promise="publishers",
            verdict=Standing.WARNS,
            until="a publisher, its connection or the broker ends",
            because=f"{zero:,} of {counted(total)} came with QoS 0: a publisher forgets such a message when it has "
            "written it, and may end before it is out",
            mend="Publish with QoS 1 or 2 and wait for the acknowledgement; give a route that means QoS 0 a promise.",
            line=gateway.name,
        )
        return
    lesser = f", {one:,} of them with QoS 1, which a publisher may send twice" if gateway.exactly and one else ""
    yield Finding(
        code="TL-D24",
        promise="publishers",
        verdict=Standing.LIMITED if lesser else Standing.HOLDS,
        until="a publisher sends again what it got no answer for" if lesser else "",
        because=f"{counted(total)} came with QoS 1 or 2{lesser}",
        line=gateway.name,
    )
