"""The checks of a broker: what it keeps for a line that is away, and what of MQTT it has and keeps to."""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from towline.bridge.config.model import DownLine, Line
from towline.doctor.case import PROBE, WAY, Case, LineGateway, LineLoad, Target, filters_of, within
from towline.doctor.table import BROKEN, HOLDS, LIMITED, WARNS, Answer, Check, NotAsked, Standing, fact
from towline.errors import BrokerError, ConfigError, JournalError, SessionUnknown, TowlineError, Unreachable
from towline.journal.recovery import session_in
from towline.mosquitto_conf import MosquittoConf, read
from towline.mqtt.events import Filter
from towline.mqtt.filters import matches, unshared
from towline.mqtt.versions import NAMES
from towline.net.client import Client, Message, PublishResult
from towline.net.settings import ClientSettings, ProtocolName
from towline.text import span

if TYPE_CHECKING:
    from mqtt5 import ConnAckPacket

_PROTOCOLS: Final[Mapping[int, ProtocolName]] = {5: "5", 4: "3.1.1", 3: "3.1"}
#: A client that has lost its connection does not come back: it would be in somebody's way, and its loss is a fact.
_NEVER_S: Final = 3600.0
#: Seconds the broker keeps what is to be kept, should nobody come to end it.
_KEPT_S: Final = 60
#: Seconds that two clients are looked at: the second of two with one session throws the first out [MQTT-3.1.4-3].
_BESIDE_S: Final = 1.0
#: Seconds for one answer, for all that is published into the queue, and for a message to come that surely comes.
_ANSWER_S, _FILLING_S, _COMING_S = 5.0, 6.0, 5.0
#: Seconds after which nothing more is taken to come without an acknowledgement.
_SILENCE_S: Final = 0.5
#: Seconds for each line in turn while what comes is counted.
_TURN_S: Final = 0.05
#: Receive Maximum of the probe that holds back its acknowledgements, and how much is published to it.
WINDOW, _TO_WINDOW = 10, 40
#: Receive Maximum that is sent and is as large as can be.
_WIDE: Final = 65534
_GRANT: Final = f"Give this user read and write on {PROBE}/#, if only for the time of the probe."


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptQueue:
    """What a session held that was away: Session Present, messages accepted, and the numbers of those that came."""

    present: bool
    accepted: int
    numbers: Sequence[int]

    @property
    def kept(self) -> int:
        """How many came, each counted once."""
        return len(set(self.numbers))


def probe_topic(filters: set[str], word: str) -> str | None:
    """A topic, with a word of this examination, that no filter takes; with ``$`` only where they take all others."""
    plain = ["/".join([root, *[word] * depth]) for root in (PROBE, f"{PROBE}-{word}") for depth in (1, 0, 2, 3, 4)]
    for topic in (*plain, *(f"${one}" for one in plain)):
        if not any(matches(pattern, topic) for pattern in filters):
            return topic
    return None


class Broker(contextlib.ExitStack):
    """What probes see of one broker, through the product's own `Client`; a context manager that removes what was made.

    Each fact is asked for when a check wants it. Nothing of a line's is touched [I16]: client ids are doctor's own, and
    no filter of the file, nor any that a session of a line is subscribed to by its journal, takes their topics.
    Some brokers give all clients of one user the same session, whatever their client ids (Mosquitto:
    ``use_username_as_clientid``): a probe would be in the line's place. So the first connection is made as the line
    would come back: it ends no session, keeps its expiry, acknowledges nothing, and is over when the broker has a
    session for an id that nobody had before. Two such clients have to live side by side before anything else is asked.
    """

    def __init__(self, target: Target, case: Case) -> None:
        super().__init__()
        self.callback(self._end_sessions)
        self.target = target
        self.case = case
        self._word = secrets.token_hex(4)
        self._patience = min(case.patience, _ANSWER_S)
        #: Client ids whose sessions the broker may have: ended at the end.
        self._sessions: list[str] = []
        #: Those that may be somebody else's sessions: left alone until it is shown that they are not.
        self._unproven: list[str] = []

    def _end_sessions(self) -> None:
        for client_id in self._sessions:
            with contextlib.suppress(TowlineError):
                self._client(client_id).close()

    @property
    def kept(self) -> dict[str, LineGateway]:
        """The lines that promise what only a broker can keep that keeps its session."""
        return {name: one for name, one in self.target.lines.items() if one.kept}

    @property
    def receiving(self) -> dict[str, LineGateway]:
        """Those of them that receive."""
        return {name: one for name, one in self.kept.items() if isinstance(one.line, Line)}

    @fact
    def conf(self) -> MosquittoConf | None:
        """Its ``mosquitto.conf``, where that may be read; raises ConfigError where it can't."""
        return None if self.case.mosquitto_conf is None else read(self.case.mosquitto_conf)

    # -- the way in --

    @fact
    def connack(self) -> ConnAckPacket:
        """What the broker says to a client with a session; raises NotAsked where that is another's."""
        if (found := self._first.connack) is None:
            raise self._shared()  # somebody has thrown it out already
        return found

    @fact
    def level(self) -> int:
        """Version of the protocol: 5, 4 (3.1.1) or 3 (3.1); raises as `connack`."""
        return self._first.level

    @fact
    def _first(self) -> Client:
        return self._proving()

    @fact
    def _pair(self) -> Client:
        """A publisher, once it has lived side by side with another client; raises NotAsked where it can't."""
        first, connack = self._first, self.connack
        try:
            second = self._proving() if first.online else None
        except NotAsked:
            if not connack.session_present and all(one.kept for one in self.target.gateways):
                self._sessions += self._unproven[-1:]  # ours made it: there was none, and a line wants its own
            raise
        until = time.monotonic() + _BESIDE_S
        while second is not None and first.online and second.online and time.monotonic() < until:
            time.sleep(0.02)
        if second is None or not (first.online and second.online):
            raise self._shared()
        self._sessions += self._unproven
        first.close()
        return second

    @property
    def _publisher(self) -> Client:
        """The publisher; another one where the broker has ended its connection."""
        if not self._pair.online:
            vars(self)["_pair"] = self._staying(self._client(self._name()))
        return self._pair

    def _shared(self) -> NotAsked:
        why = "the broker throws one client out when another comes, as with use_username_as_clientid, where all of a "
        why += "user's have one session: a probe would be in the place of a line"
        return NotAsked(why, "Ask with a copy of the file that names a user which no line has.")

    @fact
    def topic(self) -> str:
        """A topic that no line receives, and on which a message has come back; raises NotAsked where there is none."""
        self._pair  # noqa: B018 - asked first
        try:
            topic = probe_topic(filters_of(self.case.bridge), self._word)
        except (OSError, ValueError, JournalError) as error:  # ValueError: a segment that was replaced meanwhile
            why = f"what the session of a line takes is not known, and it might take the probe: {error}"
            raise NotAsked(why, "Ask as the user that runs the bridge, or mend what can't be read.") from error
        if topic is None:
            why = "the filters of the file and of the lines' sessions take every topic, so a line would receive the "
            raise NotAsked(f"{why}probe", "Narrow the filters, and start the line once.")
        try:
            with self._client(self._name(), subscribe=topic) as echo:
                self._published(topic, b"probe")
                came = echo.receive(_COMING_S)
        except BrokerError as error:
            raise NotAsked(f"the broker lets no probe through on {topic}: {error.what}", _GRANT) from error
        if came is None:
            raise NotAsked(f"a message on {topic} was acknowledged and never came", _GRANT)
        return topic

    # -- facts --

    @fact
    def heard(self) -> Mapping[str, LineLoad | BrokerError | ConfigError]:
        """What comes on each uplink's filters, retained messages aside, or why they can't be subscribed.

        A shared subscription is asked for in a group of our own.
        """
        self._pair  # noqa: B018 - asked first
        found: dict[str, LineLoad | BrokerError | ConfigError] = {}
        with contextlib.ExitStack() as stack:
            listening: dict[str, list[Client]] = {}
            for name in (name for name, one in self.target.lines.items() if isinstance(one.line, Line)):
                try:
                    mine = [one for one in self.target.gateways if one.line.name == name]
                    listening[name] = [stack.enter_context(self._listener(one)) for one in mine]
                except (BrokerError, ConfigError) as error:
                    found[name] = error
            return found | self._counted(listening)

    def _listener(self, gateway: LineGateway) -> Client:
        five = self.level == 5
        group = f"$share/{PROBE}-{self._word}/"
        asked = [
            replace(
                one,
                pattern=(group if one.pattern.startswith("$share/") else "") + unshared(one.pattern),
                retain_handling=2 if five else None,
            )
            for one in gateway.settings.subscriptions
        ]
        return self._client(self._name(), subscribe=asked)

    def _counted(self, listening: Mapping[str, Sequence[Client]]) -> dict[str, LineLoad]:
        seconds = self.case.seconds if self.case.rate is None else min(self.case.seconds, _SILENCE_S)
        counts = {name: [0, 0] for name, clients in listening.items() if clients}
        begun = time.monotonic()
        while counts and time.monotonic() < begun + seconds:
            for name, client in [(one, client) for one in counts for client in listening[one]]:
                for message in _come(client, min(time.monotonic() + _TURN_S, begun + seconds)):
                    counts[name][0] += not message.retain
                    counts[name][1] += 0 if message.retain else message.size
        took, how = time.monotonic() - begun, f"measured for {seconds:g} s"
        return {name: LineLoad(number / took, size / took, how) for name, (number, size) in counts.items()}

    @fact
    def queue(self) -> KeptQueue:
        """What is kept for a session that is away, and in which order it comes."""
        topic, client_id = self.topic, self._name()
        self._sessions.append(client_id)
        with self._client(client_id, subscribe=topic, expiry_s=_KEPT_S):
            pass
        until = time.monotonic() + _FILLING_S
        publisher, sent = self._publisher, []
        for number in range(self.case.probe_messages):
            if time.monotonic() > until:
                break
            sent.append(publisher.publish(topic, str(number), timeout_s=self._patience))
        accepted = sum(self._answered(publisher, one).reason == 0 for one in sent)
        with self._client(client_id, subscribe=topic, expiry_s=_KEPT_S, window=_WIDE) as back:
            connack = back.connack
            assert connack is not None
            present = connack.session_present or back.level == 3
            numbers = [int(one.payload or b"0") for one in self._until_marked(back, topic)] if present else []
        return KeptQueue(present=present, accepted=accepted, numbers=numbers)

    def _until_marked(self, client: Client, topic: str) -> Iterator[Message]:
        """Acknowledge what comes until a message comes that was published last; a full queue may drop that."""
        mark, marked = secrets.token_hex(8), False
        until = time.monotonic() + _COMING_S
        while time.monotonic() < until:
            message = client.receive(0.3)
            if message is None and marked:
                return
            if message is None:
                self._published(topic, mark.encode())
                continue
            message.ack()
            if message.payload == mark.encode():
                marked = True
            else:
                until = time.monotonic() + _COMING_S
                yield message

    @fact
    def window(self) -> tuple[int, int]:
        """How many messages came to a client with Receive Maximum `WINDOW` before, and after one acknowledgement."""
        with self._client(self._name(), subscribe=self.topic, window=WINDOW) as client:
            publisher = self._publisher
            for one in [publisher.publish(self.topic, str(number)) for number in range(_TO_WINDOW)]:
                self._answered(publisher, one)
            before = list(_unacknowledged(client))
            if before:
                before[0].ack()
            return len(before), len(before) + len(list(_unacknowledged(client)))

    @fact
    def qos_2(self) -> bool:
        """Whether PUBLISH of QoS 2 is answered with PUBREC."""
        return not self._published(self.topic, b"probe", qos=2).degraded

    # -- steps --

    def _name(self) -> str:
        """A client id that nobody else has; within the 23 characters that MQTT 3.1 takes."""
        return f"{PROBE}-{secrets.token_hex(4)}"

    def _published(self, topic: str, payload: bytes, qos: int = 1) -> PublishResult:
        """Publish, and wait for the broker's answer; raises BrokerError where it refuses, or ends the connection."""
        publisher = self._publisher
        return self._answered(publisher, publisher.publish(topic, payload, qos=qos, expiry_s=_KEPT_S)).wait(0)

    def _answered(self, client: Client, result: PublishResult) -> PublishResult:
        until = time.monotonic() + self._patience
        while not result.done and client.online and time.monotonic() < until:
            time.sleep(0.005)
        if not result.done:
            what = f"no answer within {self._patience:g} s to a message on {result.topic}"
            raise client.last_error or Unreachable("TL-M33", str(self.target.endpoint), what, "Is the broker busy?")
        return result

    def _proving(self) -> Client:
        """A client that harms no session, should it be given one; raises NotAsked where it was."""
        if self.conf is not None and self.conf.one_session(self.target.endpoint.port):
            raise self._shared()
        settings = self.target.settings
        names = (settings.username, settings.tls.cert_file, settings.authenticator, settings.websocket_headers_file)
        mine = not any(names)  # nothing else can name a session
        (self._sessions if mine else self._unproven).append(client_id := self._name())
        expiry_s = max(_KEPT_S, *(one.settings.session_expiry_s for one in self.target.gateways))  # as a line asks for
        try:
            return self._staying(self._client(client_id, expiry_s=expiry_s, window=1, adopt=False))
        except SessionUnknown as error:
            raise self._shared() from error

    def _staying(self, client: Client) -> Client:
        """A client that stays connected until the end."""
        self.callback(client.close, 0)
        return client

    def _client(
        self,
        client_id: str,
        *,
        subscribe: str | Sequence[Filter] = (),
        expiry_s: int = 0,
        window: int = 1000,
        adopt: bool = True,
    ) -> Client:
        """A client that goes where the lines go, with their credentials.

        With an expiry of 0 it ends a session that is there; without `adopt` such a session ends the connection, before
        anything of it is acknowledged.
        """
        way = {name: getattr(self.target.settings, name) for name in WAY}
        level = vars(self).get("level", 0)  # what the broker answered to first
        settings = ClientSettings(
            **way | {"protocol": _PROTOCOLS.get(level, way["protocol"])},
            session_expiry_s=expiry_s,
            unknown_session="adopt" if adopt else "refuse",
            keep_alive_s=30,
            receive_maximum=window,
            connect_timeout_s=self.case.patience,
            reconnect_delay_s=_NEVER_S,
            reconnect_max_delay_s=_NEVER_S,
        )
        return Client(self.target.endpoint, client_id=client_id, subscribe=subscribe, settings=settings)


def _come(client: Client, until: float) -> Iterator[Message]:
    """What comes to a client, acknowledged."""
    with contextlib.suppress(BrokerError):
        while (left := until - time.monotonic()) > 0 and (message := client.receive(left)) is not None:
            message.ack()
            yield message


def _unacknowledged(client: Client) -> Iterator[Message]:
    """What comes without an acknowledgement, until nothing more does."""
    while (message := client.receive(_SILENCE_S)) is not None:
        yield message


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
    return (_expiry_of(line, gateway.settings.session_expiry_s, one) for line, gateway in one.receiving.items())


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
    return (_queue_of(line, one.queue, one.conf, one.case.load_of((line,))) for line in one.receiving)


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
        if isinstance(heard, BrokerError) and heard.code == _GRANTED_LESS:
            yield Answer(BROKEN, heard.what, "now", heard.do, line, "granted QoS")


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
        if not isinstance(heard, LineLoad):
            if heard.code != _GRANTED_LESS:
                yield Answer(BROKEN, heard.what, "now", heard.do or "See the broker's log.", line)
        elif heard.messages_s or not rule:
            came = f"messages came {heard}" if heard.messages_s else "no plugin and no acl_file decides"
            yield Answer(HOLDS, f"every filter is granted, and {came}", line=line)
        else:
            because = f"every filter is granted; a broker may ask {rule} at each delivery, as Mosquitto does, and "
            because += f"tells nobody: no message came ({heard.how})"
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
