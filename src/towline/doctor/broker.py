"""The checks of a broker: what it keeps for a line that is away, and what of MQTT it has and keeps to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

from towline.bridge.config.model import DownLine
from towline.doctor.case import LineLoad, within
from towline.doctor.probes import WINDOW, Broker, KeptQueue
from towline.doctor.table import Answer, Check, Standing, span
from towline.errors import BrokerError, ConfigError
from towline.journal.recovery import session_in
from towline.mosquitto_conf import MosquittoConf
from towline.mqtt.versions import NAMES

BROKEN, HOLDS, LIMITED, WARNS = Standing.BROKEN, Standing.HOLDS, Standing.LIMITED, Standing.WARNS
#: Outages that are shorter may well be over before anybody has looked: a limit below is near.
_NEAR_S, _DAY_S = 3600.0, 86400
#: Where it is not known how many bytes a second come, a queue of fewer bytes is small.
_SMALL_QUEUE: Final = 64 << 20
#: What a broker loses when it is killed is small up to so many seconds of messages, or so many where none are counted.
_SHORT_S, _FEW = 60.0, 100
#: Session Expiry Interval of a session that never ends.
_NEVER: Final = 0xFFFFFFFF
#: Kafka's largest record by default, which a packet may have to carry; a limit for messages of sensors.
_RECORD, _SENSOR = 1 << 20, 64 << 10
#: A refusal for less than the QoS that was asked for (`towline.mqtt.handshake`).
_GRANTED_LESS: Final = "TL-M11"


def _connection(one: Broker) -> Iterator[Answer]:
    endpoint = one.target.endpoint
    try:
        level = one.level
    except (BrokerError, ConfigError) as error:
        do = "Start the broker, or correct brokers." if error.do in {"", "Trying again."} else error.do
        yield Answer(BROKEN, f"{error.where}: {error.what} ({error.code})", "now: nothing is received or sent", do)
        return
    name = one.target.settings.username
    told = f"{endpoint} answers{'' if name is None else f' as {name}'}"
    if level == 5:
        yield Answer(HOLDS, told)
        return
    until = "a property, an expiry or a Receive Maximum is needed"
    yield Answer(LIMITED, f"{told}, with {NAMES[level]}, which has none of them", until)


def _probes(one: Broker) -> Iterator[Answer]:
    yield Answer(HOLDS, f"two clients live side by side, and a message on {one.topic} comes back")


def _session(one: Broker) -> Iterator[Answer]:
    if not one.kept:
        return
    queue = one.queue
    if queue.present and (queue.kept or not queue.accepted):
        yield Answer(HOLDS, f"a probe left and came back: Session Present 1, and {within(queue.kept, None)} waited")
        return
    because = "a probe with a session left and came back: Session Present 0"
    if queue.present:
        because = f"a probe left and came back: Session Present 1, and none of {queue.accepted:,} messages"
    mend = "Let the broker keep sessions and their queues, or take another broker."
    yield Answer(BROKEN, because, "the first broken connection", mend)


def _expiry(one: Broker) -> Iterator[Answer]:
    for line, gateway in one.receiving.items():
        yield _expiry_of(line, gateway.settings.session_expiry_s, one)


def _expiry_of(line: str, wanted: int, one: Broker) -> Answer:
    conf, given = one.conf, one.connack.session_expiry_interval
    limits: list[tuple[float, str]] = []
    if wanted < _NEVER:
        limits.append((wanted, f"session_expiry_s of the line is {wanted:,}"))
    if given is not None and given < wanted:
        limits.append((given, f"the broker sets Session Expiry Interval {given:,} s"))
    if conf is not None and (seconds := conf.session_expiry_s) is not None:
        limits.append((seconds, f"persistent_client_expiration is {span(seconds)}"))
    if limits:
        seconds, because = min(limits)
        mend = "Raise it to longer than any outage; Mosquitto's default has no limit, session_expiry_s none either."
        until = f"the intake is away for {span(seconds)}"
        because = f"{because}: the session and all that waits in it are gone then"
        return Answer(LIMITED if seconds >= _DAY_S else WARNS, because, until, mend, line)
    if one.level < 5 and conf is None:
        mend = "--mosquitto-conf FILE tells it; at RabbitMQ it is mqtt.subscription_ttl, a day by default."
        because = "MQTT 3.x asks for no time and is told none"
        return Answer(LIMITED, because, "the broker forgets the session", mend, line)
    return Answer(HOLDS, "the line asks for a session that never ends, and nothing shortens it", line=line)


def _queue(one: Broker) -> Iterator[Answer]:
    """TL-D05: how long the intake may be away, by the limits in messages and in bytes."""
    for line in one.receiving:
        yield _queue_of(line, one.queue, one.conf, one.case.load_of((line,)))


def _queue_of(line: str, queue: KeptQueue, conf: MosquittoConf | None, load: LineLoad | None) -> Answer:
    said = _number(conf, "max_queued_messages")
    probed = _probed_limit(queue, conf)
    limit = min(filter(None, (said, probed)), default=0)
    size, name = _bytes_limit(conf)
    if size and not (limit and (load is None or limit / load.messages_s <= size / load.bytes_s)):
        return _ends_by_bytes(line, size, name, load)
    if limit:
        facts = [f"max_queued_messages is {said:,}"] if said else []
        facts += [f"of {queue.accepted:,} acknowledged probe messages {queue.kept:,} were kept"] if probed else []
        facts += ["so the file is not what the broker runs with"] if said and probed and probed < said else []
        facts += ["no message came while it was measured"] if load is None else []
        dropped = "newest" if 0 in queue.numbers or not queue.numbers else "oldest"
        enough = f"{math.ceil(load.messages_s * _DAY_S):,} hold a day" if load else "--rate N tells the time"
        mend = f"Raise the broker's limit for a client that is away (Mosquitto: max_queued_messages 0). {enough}."
        because = f"{', '.join(facts)}; the {dropped} are dropped, and nobody is told"
        verdict = LIMITED if load is not None and limit / load.messages_s >= _NEAR_S else WARNS
        return Answer(verdict, because, within(limit, load), mend, line)
    if conf is not None:
        return Answer(HOLDS, "max_queued_messages is 0, and so are the limits in bytes", line=line)
    mend = "--mosquitto-conf FILE tells the limit; --probe-messages looks further."
    because = f"all {queue.kept:,} probe messages were kept for a session that was away"
    return Answer(LIMITED, because, f"at least {within(queue.accepted, load)}", mend, line)


def _probed_limit(queue: KeptQueue, conf: MosquittoConf | None) -> int | None:
    """How many messages were kept, where it was not all, and no limit in bytes is the reason."""
    if not queue.present or not 0 < queue.kept < queue.accepted:
        return None
    limit_bytes = _number(conf, "max_queued_bytes")
    return None if 0 < limit_bytes < queue.accepted * len(str(queue.accepted)) else queue.kept


def _bytes_limit(conf: MosquittoConf | None) -> tuple[int, str]:
    """The least limit in bytes, and its name; 0 for none."""
    limits = ((_number(conf, name), name) for name in ("max_queued_bytes", "memory_limit"))
    return min((one for one in limits if one[0]), default=(0, ""))


def _number(conf: MosquittoConf | None, name: str) -> int:
    """A setting of the broker, as set or by default; 0 where there is no limit, or no file."""
    return 0 if conf is None else conf.number(name)


def _ends_by_bytes(line: str, size: int, name: str, load: LineLoad | None) -> Answer:
    seconds = None if load is None else size / load.bytes_s
    known = "" if load is None or seconds is None else f", {span(seconds)} at {load.bytes_s / 1000:,.1f} kB/s"
    near = size < _SMALL_QUEUE if seconds is None else seconds < _NEAR_S
    because = f"{name} is {size:,}; what comes then is dropped, and nobody is told"
    mend = f"Raise {name}, or set it to 0: then memory is the limit."
    return Answer(WARNS if near else LIMITED, because, f"{size:,} bytes{known}", mend, line)


def _restart(one: Broker) -> Iterator[Answer]:
    """TL-D07: what the broker has saved when it is started again, after whatever end."""
    conf, ends = one.conf, "the broker ends, for whatever reason"
    if not one.kept:
        return
    if conf is None:
        because = "whether it saves sessions and queues, and how often, is not seen from outside"
        mend = "--mosquitto-conf FILE tells it; Mosquitto saves nothing by default."
        yield Answer(LIMITED, because, "the broker ends, unless it saves what it keeps", mend)
        return
    location = conf.text("persistence_location")
    if not conf.flag("persistence"):
        mend = "Set persistence true, autosave_on_changes true and autosave_interval 1 in mosquitto.conf."
        yield Answer(BROKEN, "persistence is false: every session and queue is in memory only", ends, mend)
    elif why := conf.unwritable():
        because = f"persistence is true, and persistence_location {location} {why}: nothing is saved"
        mend = "Make the directory, and give it to the broker's user; its log says whether it saves."
        yield Answer(BROKEN, because, ends, mend)
    else:
        verdict, until = _loss(conf, one.case.load_of(one.receiving))
        because = f"persistence is true, autosave_interval is {conf.number('autosave_interval'):,}"
        because += " with autosave_on_changes true" if conf.flag("autosave_on_changes") else ""
        because += ": what came since the last saving is lost"
        if any(line.exactly for line in one.kept.values()):
            because += "; so is the phase of QoS 2 messages in flight, which are lost or doubled then"
        because += "" if location else "; it saves in its working directory, which is not seen from here"
        closer = "Receipts close what is left (docs/receipts.md)."
        mend = closer if verdict is LIMITED else f"Set autosave_on_changes true and autosave_interval 1. {closer}"
        yield Answer(verdict, because, f"it is killed or loses power: {until}", mend)


def _loss(conf: MosquittoConf, load: LineLoad | None) -> tuple[Standing, str]:
    """How bad it is when the broker is killed, and what is lost."""
    interval = conf.number("autosave_interval")
    if not interval:
        return WARNS, "all since it was started"
    if conf.flag("autosave_on_changes"):
        small = interval <= (_FEW if load is None else max(_FEW, load.messages_s * _SHORT_S))
        return (LIMITED if small else WARNS), f"up to {within(interval, load)}"
    came = "" if load is None else f": {load.messages_s * interval:,.0f} messages {load}"
    return (LIMITED if interval <= _SHORT_S else WARNS), f"up to {span(interval)} of messages{came}"


def _qos_2(one: Broker) -> Iterator[Answer]:
    """TL-D09: QoS 2 as such, and the QoS that a line's subscriptions are granted."""
    if any(line.qos == 2 for line in one.target.gateways):
        if int(one.connack.max_qos) < 2:
            because = f"the broker announces Maximum QoS {int(one.connack.max_qos)}"
        else:
            because = "" if one.qos_2 else "the broker answers QoS 2 with PUBACK: it serves it as 1"
        mend = "Take a broker with QoS 2, or guarantee at_least_once; for a downlink with receipts at the consumer."
        if because:
            yield Answer(BROKEN, because, "the first message", mend)
        else:
            yield Answer(HOLDS, "a PUBLISH of QoS 2 was answered with PUBREC")
    for line, heard in one.heard.items():
        if heard.error is not None and heard.error.code == _GRANTED_LESS:
            yield Answer(BROKEN, heard.error.what, "now", heard.error.do, line, "granted QoS")


def _rights(one: Broker) -> Iterator[Answer]:
    """TL-D10: who may read and write the topics of a line, as far as it is seen without a message on them."""
    for line, gateway in one.target.lines.items():
        rule = "an access rule" if one.conf is None else one.conf.access(one.target.endpoint.port)
        if isinstance(gateway.line, DownLine):
            because = "without publishing on the line's own topics it is not seen who may"
            until = "a message is refused; it is set aside then, and counted"
            told = (LIMITED, because, until) if rule else (HOLDS, "no plugin and no acl_file decides", "")
            yield Answer(*told, line=line, promise="right to write")
            continue
        heard = one.heard[line]
        if heard.error is not None:
            if heard.error.code != _GRANTED_LESS:
                yield Answer(BROKEN, heard.error.what, "now", heard.error.do or "See the broker's log.", line)
        elif heard.messages or not rule:
            came = f"{heard.messages:,} messages came" if heard.messages else "no plugin and no acl_file decides"
            yield Answer(HOLDS, f"every filter is granted, and {came}", line=line)
        else:
            because = (
                f"every filter is granted; a broker may ask {rule} at each delivery, as Mosquitto does, and tells "
            )
            because += f"nobody: no message came in {heard.seconds:.1f} s"
            yield Answer(LIMITED, because, f"{rule} denies what the subscription asks for", line=line)


def _window(one: Broker) -> Iterator[Answer]:
    """TL-D12: Receive Maximum, which bounds what is in flight; with QoS 2 packet ids are used twice beyond it."""
    if one.level < 5:
        most = "" if one.conf is None else f"; max_inflight_messages is {one.conf.number('max_inflight_messages'):,}"
        yield Answer(LIMITED, f"MQTT 3.x announces none{most}", "a publisher has more in flight than the broker takes")
        return
    before, after = one.window
    if before <= WINDOW and after <= WINDOW + 1:
        because = f"Receive Maximum {WINDOW}: {before} came, {after} after one acknowledgement"
        yield Answer(HOLDS, f"{because}; the broker takes {one.connack.receive_max:,} of ours")
        return
    exactly = any(line.exactly for line in one.target.gateways)
    because = f"the broker breaks Receive Maximum {WINDOW}: {before} came unacknowledged, and {after} after one "
    because += "acknowledgement"
    because += "; with QoS 2 it then uses packet ids twice, and messages are lost" if exactly else ""
    until = "messages wait in the session" if exactly else "many messages wait: a restart repeats them"
    yield Answer(BROKEN if exactly else WARNS, because, until, "Upgrade it (Mosquitto: 2.0.13 or newer).")


def _order(one: Broker) -> Iterator[Answer]:
    """TL-D13: messages of one publisher on one topic come in the order of their publishing [MQTT-4.6.0-5, -6]."""
    if not one.kept:
        return
    numbers = list(dict.fromkeys(one.queue.numbers))  # the first of each: a repeat may come later
    late = sum(later < before for before, later in itertools.pairwise(numbers))
    if not late:
        yield Answer(HOLDS, f"{within(len(numbers), None)} of a session that was away came as they were published")
        return
    because = f"of {len(numbers):,} messages that waited {late:,} came after one that was published later"
    until = "a session that was away comes back"
    yield Answer(WARNS, because, until, "Sort by what the payload says, or take a broker that keeps order.")


def _size(one: Broker) -> Iterator[Answer]:
    """TL-D17: how large a message may be, as the broker announces it, or as its file says."""
    most, said = one.connack.max_packet_size, _number(one.conf, "message_size_limit")
    down = [gateway.line for gateway in one.target.gateways if isinstance(gateway.line, DownLine)]
    if said:
        because = f"message_size_limit is {said:,}: of a publisher of MQTT 3.x more is acknowledged and dropped"
        mend = "Raise message_size_limit at the broker, or set it to 0; only publishers of MQTT 5 are told."
        yield Answer(WARNS if said < _SENSOR else LIMITED, because, f"a message of {said:,} bytes", mend)
    elif most is not None and most < _RECORD and down:
        stops = any(not line.dead_letter_topic for line in down)
        because = f"the broker announces Maximum Packet Size {most:,}, a record of Kafka may have {_RECORD:,}; "
        because += "the line stops there" if stops else "it becomes a dead letter"
        mend = "Raise max_packet_size at the broker, or give the line a dead_letter_topic."
        until = f"a record becomes a packet of more than {most:,} bytes"
        yield Answer(WARNS if stops else LIMITED, because, until, mend)
    elif most is not None:
        yield Answer(LIMITED, f"the broker announces Maximum Packet Size {most:,}", f"a message of {most:,} bytes")
    elif one.conf is None:
        because = "the broker announces no limit; one that it does not announce is not seen from outside"
        yield Answer(LIMITED, because, "message_size_limit is set: more is dropped", "--mosquitto-conf FILE tells it.")
    else:
        yield Answer(HOLDS, "no limit is announced, and none is set")


def _first_start(one: Broker) -> Iterator[Answer]:
    """TL-D23: the broker queues for a client that it knows, so the subscriber has to have been there first."""
    for line, gateway in one.receiving.items():
        if not session_in(gateway.settings.inbox).get("established"):
            because = f"{one.target.endpoint} keeps nothing for it before: what is published until then is not in "
            because += "Kafka, but for retained messages"
            mend = "Start the line before its publishers."
            yield Answer(LIMITED, because, "the line has been started once", mend, line)


CHECKS: Final = (
    Check("TL-D02", "connection", _connection),
    Check("TL-D11", "probes", _probes),
    Check("TL-D03", "session", _session),
    Check("TL-D04", "session expiry", _expiry),
    Check("TL-D05", "outage of the intake", _queue),
    Check("TL-D07", "restart of the broker", _restart),
    Check("TL-D09", "QoS 2", _qos_2),
    Check("TL-D10", "right to read", _rights),
    Check("TL-D12", "window", _window),
    Check("TL-D13", "order", _order),
    Check("TL-D17", "size of a message", _size),
    Check("TL-D23", "first start", _first_start),
)
