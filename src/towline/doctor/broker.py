"""Checks of an MQTT broker: session and queue of an offline client, QoS, limits, access rights."""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from towline.bridge.config.model import Downlink, Uplink
from towline.doctor.inputs import (
    CLIENT_KEYS,
    PROBE_PREFIX,
    Inputs,
    LineGateway,
    LineLoad,
    Target,
    queue_text,
    topic_filters,
)
from towline.doctor.mosquitto import MosquittoConf, read_conf
from towline.doctor.table import BROKEN, HOLDS, LIMITED, WARNS, Check, Finding, ProbeSkipped, Verdict, fact
from towline.errors import BrokerError, ConfigError, JournalError, SessionUnknown, TowlineError, Unreachable
from towline.journal.recovery import read_state
from towline.mqtt.events import Filter, PublishAcknowledged
from towline.mqtt.filters import matches, without_share
from towline.mqtt.versions import VERSION_NAMES
from towline.net.client import Client, Message
from towline.net.settings import ClientSettings, ProtocolName
from towline.text import duration_text

if TYPE_CHECKING:
    from mqtt5 import ConnAckPacket

_PROTOCOL_NAMES: Final[Mapping[int, ProtocolName]] = {5: "5", 4: "3.1.1", 3: "3.1"}
#: Probe clients never reconnect: they could displace another client, and the loss is a finding.
_NO_RECONNECT_S: Final = 3600.0
#: Session and message expiry of probes in seconds, in case doctor can't remove them.
_PROBE_EXPIRY_S: Final = 60
#: Seconds for which two clients must coexist: with one session the second displaces the first [MQTT-3.1.4-3].
_COEXISTENCE_S: Final = 1.0
#: Timeouts in seconds: one answer, filling the queue, arrival of a message.
_ANSWER_TIMEOUT_S, _FILL_TIMEOUT_S, _ARRIVAL_TIMEOUT_S = 5.0, 6.0, 5.0
#: Seconds without a message after which the broker's window counts as full.
_SILENCE_S: Final = 0.5
#: Seconds per line and turn while its messages are counted.
_POLL_S: Final = 0.05
#: Receive Maximum of the window probe, and the number of messages published to it.
RECEIVE_MAXIMUM, _WINDOW_MESSAGES = 10, 40
#: Largest Receive Maximum that is sent in CONNECT.
_MAX_WINDOW: Final = 65534
_GRANT_REMEDY: Final = f"Give this user read and write on {PROBE_PREFIX}/#, at least during the probe."


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueProbe:
    """Queue probe of an offline session: Session Present, accepted messages, and the numbers of received ones."""

    session_present: bool
    accepted_count: int
    numbers: Sequence[int]

    @property
    def received_count(self) -> int:
        """Number of received messages, repeats counted once."""
        return len(set(self.numbers))


def probe_topic(filters: set[str], suffix: str) -> str | None:
    """Return a topic with this suffix that no filter matches, or None; with ``$`` in front only if needed."""
    prefixes = (PROBE_PREFIX, f"{PROBE_PREFIX}-{suffix}")
    names = ["/".join([prefix, *[suffix] * depth]) for prefix in prefixes for depth in (1, 0, 2, 3, 4)]
    for topic in (*names, *(f"${name}" for name in names)):
        if not any(matches(pattern, topic) for pattern in filters):
            return topic
    return None


class BrokerProbe(contextlib.ExitStack):
    """Probes of one broker with the product's `Client`; a context manager that removes its sessions.

    A fact is probed when a check needs it. Nothing of a line is changed [I16]: client ids are doctor's own, and the
    probe topic matches no filter of the file or of a session in a journal. Some brokers share one session between all
    clients of a user, whatever their client ids (Mosquitto: ``use_username_as_clientid``): a probe would replace the
    line. So the first connection behaves as the line's reconnect would: it ends no session, keeps its expiry and
    acknowledges nothing. It is closed if the broker has a session for a new client id. Two such clients must stay
    connected at the same time before anything else is probed.
    """

    def __init__(self, target: Target, inputs: Inputs) -> None:
        super().__init__()
        self.callback(self._end_sessions)
        self.target = target
        self.inputs = inputs
        self._suffix = secrets.token_hex(4)
        self._timeout_s = min(inputs.timeout_s, _ANSWER_TIMEOUT_S)
        #: Client ids of doctor's sessions, which are ended at the end.
        self._client_ids: list[str] = []
        #: Client ids whose session may be another client's; not ended until proven otherwise.
        self._unproven_ids: list[str] = []

    def _end_sessions(self) -> None:
        for client_id in self._client_ids:
            with contextlib.suppress(TowlineError):
                self._open_client(client_id).close()

    @property
    def session_lines(self) -> dict[str, LineGateway]:
        """Gateways by line, for lines whose guarantee needs a persistent session."""
        return {name: gateway for name, gateway in self.target.by_line.items() if gateway.needs_session}

    @property
    def uplinks(self) -> dict[str, LineGateway]:
        """Gateways by line, for uplinks among `session_lines`."""
        return {name: gateway for name, gateway in self.session_lines.items() if isinstance(gateway.line, Uplink)}

    @fact
    def conf(self) -> MosquittoConf | None:
        """Parsed ``mosquitto.conf``; None if no file is configured. Raises ConfigError if it can't be read."""
        return None if self.inputs.mosquitto_conf is None else read_conf(self.inputs.mosquitto_conf)

    # -- connections --

    @fact
    def connack(self) -> ConnAckPacket:
        """CONNACK for a client with a session; raises ProbeSkipped if the session is another client's."""
        if (connack := self._first_client.connack) is None:
            raise self._shared_session_error()  # another client has displaced it already
        return connack

    @fact
    def level(self) -> int:
        """MQTT protocol level: 5, 4 (3.1.1) or 3 (3.1); raises as `connack`."""
        return self._first_client.level

    @fact
    def _first_client(self) -> Client:
        return self._harmless_client()

    @fact
    def _tested_publisher(self) -> Client:
        """Publisher that stayed connected beside a second client; raises ProbeSkipped if it can't."""
        first_client, connack = self._first_client, self.connack
        try:
            second = self._harmless_client() if first_client.online else None
        except ProbeSkipped:
            if not connack.session_present and all(gateway.needs_session for gateway in self.target.gateways):
                self._client_ids += self._unproven_ids[-1:]  # created by this probe: no line had one
            raise
        deadline = time.monotonic() + _COEXISTENCE_S
        while second is not None and first_client.online and second.online and time.monotonic() < deadline:
            time.sleep(0.02)
        if second is None or not (first_client.online and second.online):
            raise self._shared_session_error()
        self._client_ids += self._unproven_ids
        first_client.close()
        return second

    @property
    def _publisher(self) -> Client:
        """The tested publisher; replaced by a new client if the broker closed its connection."""
        if not self._tested_publisher.online:
            vars(self)["_tested_publisher"] = self.enter_context(self._open_client(self._new_client_id()))
        return self._tested_publisher

    def _shared_session_error(self) -> ProbeSkipped:
        reason = "the broker disconnects one client when another connects, as with use_username_as_clientid, where all "
        reason += "clients of a user share one session: a probe would displace a line"
        return ProbeSkipped(reason, "Run doctor with a copy of the file that has a user no line uses.")

    @fact
    def probe_topic(self) -> str:
        """Topic that no line receives and on which a test message arrived; raises ProbeSkipped if there is none."""
        self._tested_publisher  # noqa: B018 - must succeed first
        try:
            topic = probe_topic(topic_filters(self.inputs.bridge), self._suffix)
        except (OSError, ValueError, JournalError) as error:  # ValueError: a segment was replaced meanwhile
            reason = f"the subscriptions of a line's session are unknown, and might match the probe: {error}"
            remedy = "Run doctor as the user of the bridge, or fix the file that can't be read."
            raise ProbeSkipped(reason, remedy) from error
        if topic is None:
            reason = "the filters of the file and of the sessions match every topic, so a line would receive the probe"
            raise ProbeSkipped(reason, "Narrow the filters, and start the line once.")
        try:
            with self._open_client(self._new_client_id(), subscribe=topic) as echo:
                self._publish(topic, b"probe")
                message = echo.receive(_ARRIVAL_TIMEOUT_S)
        except BrokerError as error:
            raise ProbeSkipped(f"the broker refuses probes on {topic}: {error.problem}", _GRANT_REMEDY) from error
        if message is None:
            raise ProbeSkipped(f"a message on {topic} was acknowledged and never delivered", _GRANT_REMEDY)
        return topic

    # -- facts --

    @fact
    def measured_loads(self) -> Mapping[str, LineLoad | BrokerError | ConfigError]:
        """Load on each uplink's filters without retained messages, or the error of its subscription.

        For a shared subscription doctor uses a share name of its own.
        """
        self._tested_publisher  # noqa: B018 - must succeed first
        errors: dict[str, LineLoad | BrokerError | ConfigError] = {}
        with contextlib.ExitStack() as stack:
            clients: dict[str, list[Client]] = {}
            for name in (name for name, gateway in self.target.by_line.items() if isinstance(gateway.line, Uplink)):
                gateways = [gateway for gateway in self.target.gateways if gateway.line.name == name]
                try:
                    clients[name] = [stack.enter_context(self._subscribed_client(gateway)) for gateway in gateways]
                except (BrokerError, ConfigError) as error:
                    errors[name] = error
            return errors | self._measure_loads(clients)

    def _subscribed_client(self, gateway: LineGateway) -> Client:
        share, retain_handling = f"$share/{PROBE_PREFIX}-{self._suffix}/", 2 if self.level == 5 else None

        def probe_filter(pattern: str) -> str:
            return (share if pattern.startswith("$share/") else "") + without_share(pattern)

        filters = [
            replace(subscription, pattern=probe_filter(subscription.pattern), retain_handling=retain_handling)
            for subscription in gateway.settings.subscriptions
        ]
        return self._open_client(self._new_client_id(), subscribe=filters)

    def _measure_loads(self, clients_by_line: Mapping[str, Sequence[Client]]) -> dict[str, LineLoad]:
        seconds = self.inputs.measure_seconds
        if self.inputs.rate is not None:
            seconds = min(seconds, _SILENCE_S)
        counts = {name: [0, 0] for name, clients in clients_by_line.items() if clients}
        started_at = time.monotonic()
        while counts and time.monotonic() < started_at + seconds:
            for name, client in [(line, client) for line in counts for client in clients_by_line[line]]:
                for message in _receive_until(client, min(time.monotonic() + _POLL_S, started_at + seconds)):
                    counts[name][0] += not message.retain
                    counts[name][1] += 0 if message.retain else message.size
        elapsed_s, source = time.monotonic() - started_at, f"measured for {seconds:g} s"
        return {name: LineLoad(count / elapsed_s, size / elapsed_s, source) for name, (count, size) in counts.items()}

    @fact
    def queue_probe(self) -> QueueProbe:
        """Messages that the broker queues for an offline session."""
        topic, client_id = self.probe_topic, self._new_client_id()
        self._client_ids.append(client_id)
        with self._open_client(client_id, subscribe=topic, expiry_s=_PROBE_EXPIRY_S):
            pass
        answers = self._publish_numbers(topic, self.inputs.probe_messages)
        accepted_count = sum(answer.exception() is None and answer.result().reason == 0 for answer in answers)
        with self._open_client(client_id, subscribe=topic, expiry_s=_PROBE_EXPIRY_S, window=_MAX_WINDOW) as client:
            assert client.connack is not None
            session_present = client.connack.session_present or client.level == 3
            messages = self._receive_until_marker(client, topic) if session_present else ()
            numbers = [int(message.payload or b"0") for message in messages]
        return QueueProbe(session_present=session_present, accepted_count=accepted_count, numbers=numbers)

    def _receive_until_marker(self, client: Client, topic: str) -> Iterator[Message]:
        """Acknowledge and yield messages until a marker message arrives; it is resent: a full queue may drop it."""
        marker, marker_received = secrets.token_hex(8), False
        deadline = time.monotonic() + _ARRIVAL_TIMEOUT_S
        while time.monotonic() < deadline:
            message = client.receive(0.3)
            if message is None and marker_received:
                return
            if message is None:
                self._publish(topic, marker.encode())
                continue
            message.ack()
            if message.payload == marker.encode():
                marker_received = True
            else:
                deadline = time.monotonic() + _ARRIVAL_TIMEOUT_S
                yield message

    @fact
    def window_counts(self) -> tuple[int, int]:
        """Number of messages received with Receive Maximum `RECEIVE_MAXIMUM`: without and after one acknowledgement."""
        client_id, topic = self._new_client_id(), self.probe_topic
        with self._open_client(client_id, subscribe=topic, window=RECEIVE_MAXIMUM) as client:
            self._publish_numbers(topic, _WINDOW_MESSAGES)
            receive = partial(client.receive, _SILENCE_S)
            first_messages = [*iter(receive, None)]
            if first_messages:
                first_messages[0].ack()
            return len(first_messages), len(first_messages) + len([*iter(receive, None)])

    @fact
    def qos_2(self) -> bool:
        """Whether the broker answers a QoS 2 PUBLISH with PUBREC."""
        return not self._publish(self.probe_topic, b"probe", qos=2).qos_degraded

    # -- helpers --

    def _new_client_id(self) -> str:
        """Return a unique client id within the 23 characters of MQTT 3.1."""
        return f"{PROBE_PREFIX}-{secrets.token_hex(4)}"

    def _publish(self, topic: str, payload: bytes, qos: int = 1) -> PublishAcknowledged:
        """Publish and wait for the broker's answer; raises BrokerError if it refuses or closes the connection."""
        publisher = self._publisher
        result = publisher.publish(topic, payload, qos=qos, expiry_s=_PROBE_EXPIRY_S)
        return self._await_answer(publisher, result).result()

    def _publish_numbers(self, topic: str, count: int) -> list[Future[PublishAcknowledged]]:
        """Publish numbered messages, as many as `_FILL_TIMEOUT_S` permits, and wait for the broker's answers."""
        publisher, deadline = self._publisher, time.monotonic() + _FILL_TIMEOUT_S
        results: list[Future[PublishAcknowledged]] = []
        while len(results) < count and time.monotonic() < deadline:
            results.append(publisher.publish(topic, str(len(results)), timeout_s=self._timeout_s))
        return [self._await_answer(publisher, result) for result in results]

    def _await_answer(self, client: Client, result: Future[PublishAcknowledged]) -> Future[PublishAcknowledged]:
        deadline = time.monotonic() + self._timeout_s
        while not result.done() and client.online and time.monotonic() < deadline:
            time.sleep(0.005)
        if not result.done():
            problem = f"no answer within {self._timeout_s:g} s to a message"
            raise client.last_error or Unreachable("TL-M33", str(self.target.endpoint), problem, "Is the broker busy?")
        return result

    def _harmless_client(self) -> Client:
        """Open a client that changes no session; raises ProbeSkipped if it was given an existing one."""
        if self.conf is not None and self.conf.shares_session:
            raise self._shared_session_error()
        settings = self.target.settings
        users = (settings.username, settings.tls.cert_file, settings.authenticator, settings.websocket_headers_file)
        client_ids = self._unproven_ids if any(users) else self._client_ids  # only a user can select another session
        client_ids.append(client_id := self._new_client_id())
        line_expiries_s = (gateway.settings.session_expiry_s for gateway in self.target.gateways)
        expiry_s = max(_PROBE_EXPIRY_S, *line_expiries_s)
        try:
            return self.enter_context(self._open_client(client_id, expiry_s=expiry_s, window=1, adopt_session=False))
        except SessionUnknown as error:
            raise self._shared_session_error() from error

    def _open_client(
        self,
        client_id: str,
        *,
        subscribe: str | Sequence[Filter] = (),
        expiry_s: int = 0,
        window: int = 1000,
        adopt_session: bool = True,
    ) -> Client:
        """Open a client with the connection settings and credentials of the lines.

        An expiry of 0 ends an existing session. Without `adopt_session` an existing session ends the connection, before
        anything is acknowledged.
        """
        values = {name: getattr(self.target.settings, name) for name in CLIENT_KEYS}
        level = vars(self).get("level", 0)  # level of the first CONNACK
        settings = ClientSettings(
            **values | {"protocol": _PROTOCOL_NAMES.get(level, values["protocol"])},
            session_expiry_s=expiry_s,
            unknown_session="adopt" if adopt_session else "refuse",
            keep_alive_s=30,
            receive_maximum=window,
            connect_timeout_s=self.inputs.timeout_s,
            reconnect_delay_s=_NO_RECONNECT_S,
            reconnect_max_delay_s=_NO_RECONNECT_S,
        )
        return Client(self.target.endpoint, client_id=client_id, subscribe=subscribe, settings=settings)


def _receive_until(client: Client, deadline: float) -> Iterator[Message]:
    """Yield and acknowledge received messages until the deadline."""
    with contextlib.suppress(BrokerError):
        while (remaining_s := deadline - time.monotonic()) > 0 and (message := client.receive(remaining_s)) is not None:
            message.ack()
            yield message


#: Limits shorter than this are near: nobody may notice the outage in time. And a day, in seconds.
_NEAR_LIMIT_S, _DAY_S = 3600.0, 86400
#: Queue limit in bytes that is near if the load is unknown.
_SMALL_QUEUE_BYTES: Final = 64 << 20
#: Small loss of a killed broker: seconds of messages, or a number of messages if the load is unknown.
_SMALL_LOSS_S, _SMALL_LOSS = 60.0, 100
#: Session Expiry Interval of a session without expiry.
_NO_EXPIRY: Final = 0xFFFFFFFF
#: Default limit of a Kafka record in bytes; and the largest typical sensor message.
_KAFKA_RECORD_BYTES, _SENSOR_MESSAGE_BYTES = 1 << 20, 64 << 10
#: Error code of a subscription granted with a lower QoS (`towline.mqtt.handshake`).
_LOWER_QOS_GRANTED: Final = "TL-M11"


def _check_connection(broker: BrokerProbe) -> Iterator[Finding]:
    endpoint = broker.target.endpoint
    try:
        level = broker.level
    except (BrokerError, ConfigError) as error:
        remedy = "Start the broker, or correct brokers." if error.remedy in {"", "Trying again."} else error.remedy
        evidence = f"{error.location}: {error.problem} ({error.code})"
        yield Finding(BROKEN, evidence, "now: nothing is received or sent", remedy)
        return
    username = broker.target.settings.username
    evidence = f"{endpoint} answers{'' if username is None else f' as {username}'}"
    if level == 5:
        yield Finding(HOLDS, evidence)
        return
    limit = "a property, an expiry or a Receive Maximum is needed"
    yield Finding(LIMITED, f"{evidence}, with {VERSION_NAMES[level]}, which has none of them", limit)


def _check_probes(broker: BrokerProbe) -> Iterator[Finding]:
    yield Finding(HOLDS, f"two clients stay connected side by side, and a message on {broker.probe_topic} is delivered")


def _check_session(broker: BrokerProbe) -> Iterator[Finding]:
    if not broker.session_lines:
        return
    probe = broker.queue_probe
    if probe.session_present and (probe.received_count or not probe.accepted_count):
        queued = queue_text(probe.received_count, None)
        yield Finding(HOLDS, f"a probe reconnected: Session Present 1, and {queued} queued")
        return
    evidence = "a probe with a session reconnected: Session Present 0"
    if probe.session_present:
        evidence = f"a probe reconnected: Session Present 1, and none of {probe.accepted_count:,} messages"
    remedy = "Let the broker keep sessions and their queues, or use another broker."
    yield Finding(BROKEN, evidence, "the first broken connection", remedy)


def _check_expiry(broker: BrokerProbe) -> Iterator[Finding]:
    uplinks = broker.uplinks.items()
    return (_expiry_finding(line, gateway.settings.session_expiry_s, broker) for line, gateway in uplinks)


def _expiry_finding(line: str, requested_s: int, broker: BrokerProbe) -> Finding:
    conf, granted_s = broker.conf, broker.connack.session_expiry_interval
    limits: list[tuple[float, str]] = []
    if requested_s < _NO_EXPIRY:
        limits.append((requested_s, f"session_expiry_s of the line is {requested_s:,}"))
    if granted_s is not None and granted_s < requested_s:
        limits.append((granted_s, f"the broker sets Session Expiry Interval {granted_s:,} s"))
    if conf is not None and (seconds := conf.session_expiry_s) is not None:
        limits.append((seconds, f"persistent_client_expiration is {duration_text(seconds)}"))
    if limits:
        seconds, evidence = min(limits)
        remedy = "Raise it to longer than any outage; Mosquitto's default has no limit, session_expiry_s none either."
        limit = f"the intake is down for {duration_text(seconds)}"
        evidence = f"{evidence}: then the session and its queue are deleted"
        return Finding(LIMITED if seconds >= _DAY_S else WARNS, evidence, limit, remedy, line)
    if broker.level < 5 and conf is None:
        remedy = "--mosquitto-conf FILE shows it; at RabbitMQ it is mqtt.subscription_ttl, a day by default."
        evidence = "MQTT 3.x has no session expiry"
        return Finding(LIMITED, evidence, "the broker forgets the session", remedy, line)
    return Finding(HOLDS, "the line asks for a session that never ends, and nothing shortens it", line=line)


def _check_queue(broker: BrokerProbe) -> Iterator[Finding]:
    """TL-D05: longest outage of the intake, by the queue limits in messages and in bytes."""
    load_of = broker.inputs.load_of
    return (_queue_finding(line, broker.queue_probe, broker.conf, load_of((line,))) for line in broker.uplinks)


def _queue_finding(line: str, probe: QueueProbe, conf: MosquittoConf | None, load: LineLoad | None) -> Finding:
    max_queued, probe_limit = _conf_number(conf, "max_queued_messages"), _probed_limit(probe, conf)
    max_messages = min(filter(None, (max_queued, probe_limit)), default=0)
    byte_limits = ((_conf_number(conf, name), name) for name in ("max_queued_bytes", "memory_limit"))
    max_bytes, setting = min((byte_limit for byte_limit in byte_limits if byte_limit[0]), default=(0, ""))
    if max_bytes and not (
        max_messages and (load is None or max_messages / load.messages_s <= max_bytes / load.bytes_s)
    ):
        return _byte_limit_finding(line, max_bytes, setting, load)
    if max_messages:
        facts = [f"max_queued_messages is {max_queued:,}"] if max_queued else []
        if probe_limit:
            facts += [f"of {probe.accepted_count:,} acknowledged probe messages {probe.received_count:,} were queued"]
            facts += ["so the broker does not run with this file"] if probe_limit < max_queued else []
        facts += ["no message arrived during the measurement"] if load is None else []
        drop_end = "newest" if 0 in probe.numbers or not probe.numbers else "oldest"
        sizing_hint = f"{math.ceil(load.messages_s * _DAY_S):,} hold a day" if load else "--rate N shows the time"
        remedy = f"Raise the broker's limit for an offline client (Mosquitto: max_queued_messages 0). {sizing_hint}."
        evidence = f"{', '.join(facts)}; the {drop_end} are dropped silently"
        verdict = LIMITED if load is not None and max_messages / load.messages_s >= _NEAR_LIMIT_S else WARNS
        return Finding(verdict, evidence, queue_text(max_messages, load), remedy, line)
    if conf is not None:
        return Finding(HOLDS, "max_queued_messages is 0, and so are the limits in bytes", line=line)
    remedy = "--mosquitto-conf FILE shows the limit; a larger --probe-messages probes further."
    evidence = f"all {probe.received_count:,} probe messages were queued for an offline session"
    return Finding(LIMITED, evidence, f"at least {queue_text(probe.accepted_count, load)}", remedy, line)


def _probed_limit(probe: QueueProbe, conf: MosquittoConf | None) -> int | None:
    """Return the queue limit found by the probe; None if all messages were queued, or a limit in bytes explains it."""
    if not probe.session_present or not 0 < probe.received_count < probe.accepted_count:
        return None
    byte_limit = _conf_number(conf, "max_queued_bytes")
    return None if 0 < byte_limit < probe.accepted_count * len(str(probe.accepted_count)) else probe.received_count


def _conf_number(conf: MosquittoConf | None, name: str) -> int:
    """Return a setting of the broker, or its default; 0 for no limit or no file."""
    return 0 if conf is None else conf.number(name)


def _byte_limit_finding(line: str, byte_limit: int, setting: str, load: LineLoad | None) -> Finding:
    limit, is_near = f"{byte_limit:,} bytes", byte_limit < _SMALL_QUEUE_BYTES
    if load is not None:
        seconds = byte_limit / load.bytes_s
        limit += f", {duration_text(seconds)} at {load.bytes_s / 1000:,.1f} kB/s"
        is_near = seconds < _NEAR_LIMIT_S
    evidence = f"{setting} is {byte_limit:,}; further messages are dropped silently"
    remedy = f"Raise {setting}, or set it to 0: then memory is the limit."
    return Finding(WARNS if is_near else LIMITED, evidence, limit, remedy, line)


def _check_restart(broker: BrokerProbe) -> Iterator[Finding]:
    """TL-D07: state that the broker persists across a restart or crash."""
    conf, limit = broker.conf, "the broker stops or crashes"
    if not broker.session_lines:
        return
    if conf is None:
        evidence = "whether and how often it saves sessions and queues is not visible to a client"
        remedy = "--mosquitto-conf FILE shows it; Mosquitto saves nothing by default."
        yield Finding(LIMITED, evidence, "the broker stops, unless it saves sessions and queues", remedy)
        return
    directory = conf.text("persistence_location")
    if not conf.flag("persistence"):
        remedy = "Set persistence true, autosave_on_changes true and autosave_interval 1 in mosquitto.conf."
        yield Finding(BROKEN, "persistence is false: every session and queue is in memory only", limit, remedy)
    elif error := conf.persistence_problem():
        evidence = f"persistence is true, and persistence_location {directory} {error}: nothing is saved"
        remedy = "Create the directory, and give it to the broker's user; its log says whether it saves."
        yield Finding(BROKEN, evidence, limit, remedy)
    else:
        verdict, loss = _loss_on_kill(conf, broker.inputs.load_of(broker.uplinks))
        evidence = f"persistence is true, autosave_interval is {conf.number('autosave_interval'):,}"
        evidence += " with autosave_on_changes true" if conf.flag("autosave_on_changes") else ""
        evidence += ": messages since the last save are lost"
        if any(line.exactly_once for line in broker.session_lines.values()):
            evidence += "; so is the phase of QoS 2 messages in flight, which are then lost or duplicated"
        evidence += "" if directory else "; it saves in its working directory, which is unknown here"
        remedy = "" if verdict is LIMITED else "Set autosave_on_changes true and autosave_interval 1. "
        remedy += "Receipts close the remaining gap (docs/publishers.md#receipts)."
        yield Finding(verdict, evidence, f"it is killed or loses power: {loss}", remedy)


def _loss_on_kill(conf: MosquittoConf, load: LineLoad | None) -> tuple[Verdict, str]:
    """Return the verdict on a killed broker, and the messages it loses."""
    interval = conf.number("autosave_interval")
    if not interval:
        return WARNS, "all messages since its start"
    small_loss, loss = _SMALL_LOSS_S, f"{duration_text(interval)} of messages"
    if conf.flag("autosave_on_changes"):
        small_loss, loss = (
            max(_SMALL_LOSS, load.messages_s * _SMALL_LOSS_S if load else 0.0),
            queue_text(interval, load),
        )
    return LIMITED if interval <= small_loss else WARNS, f"up to {loss}"


def _check_qos_2(broker: BrokerProbe) -> Iterator[Finding]:
    """TL-D09: support of QoS 2, and the QoS granted to a line's subscriptions."""
    if any(line.qos == 2 for line in broker.target.gateways):
        if int(broker.connack.max_qos) < 2:
            evidence = f"the broker announces Maximum QoS {int(broker.connack.max_qos)}"
        else:
            evidence = "" if broker.qos_2 else "the broker answers QoS 2 with PUBACK: it treats it as QoS 1"
        remedy = "Use a broker with QoS 2, or guarantee at_least_once; for a downlink with receipts at the consumer."
        if evidence:
            yield Finding(BROKEN, evidence, "the first message", remedy)
        else:
            yield Finding(HOLDS, "a PUBLISH of QoS 2 was answered with PUBREC")
    for line, load in broker.measured_loads.items():
        if isinstance(load, BrokerError) and load.code == _LOWER_QOS_GRANTED:
            yield Finding(BROKEN, load.problem, "now", load.remedy, line, "granted QoS")


def _check_rights(broker: BrokerProbe) -> Iterator[Finding]:
    """TL-D10: read and write access to a line's topics, as far as visible without a message on them."""
    for line, gateway in broker.target.by_line.items():
        access_rule = "an access rule" if broker.conf is None else broker.conf.access_control
        if isinstance(gateway.line, Downlink):
            evidence = "write access is not visible without publishing on the line's topics"
            limit = "a message is refused: it is stored in refused/ and counted"
            finding = (LIMITED, evidence, limit) if access_rule else (HOLDS, "neither plugin nor acl_file is set", "")
            yield Finding(*finding, line=line, promise="right to write")
            continue
        load = broker.measured_loads[line]
        if not isinstance(load, LineLoad):
            if load.code != _LOWER_QOS_GRANTED:
                yield Finding(BROKEN, load.problem, "now", load.remedy or "See the broker's log.", line)
        elif load.messages_s or not access_rule:
            reason = f"messages arrived {load}" if load.messages_s else "neither plugin nor acl_file is set"
            yield Finding(HOLDS, f"every filter is granted, and {reason}", line=line)
        else:
            evidence = (
                f"every filter is granted; a broker may check {access_rule} at each delivery, and drop silently: "
            )
            evidence += f"no message arrived ({load.source})"
            yield Finding(LIMITED, evidence, f"{access_rule} denies what the subscription asks for", line=line)


def _check_window(broker: BrokerProbe) -> Iterator[Finding]:
    """TL-D12: Receive Maximum, the limit of messages in flight; a broker that exceeds it reuses QoS 2 packet ids."""
    if broker.level < 5:
        evidence = "MQTT 3.x has no Receive Maximum"
        if broker.conf is not None:
            evidence += f"; max_inflight_messages is {broker.conf.number('max_inflight_messages'):,}"
        yield Finding(LIMITED, evidence, "a publisher has more in flight than the broker accepts")
        return
    before_ack, after_ack = broker.window_counts
    if before_ack <= RECEIVE_MAXIMUM and after_ack <= RECEIVE_MAXIMUM + 1:
        evidence = f"Receive Maximum {RECEIVE_MAXIMUM}: {before_ack} received, {after_ack} after one acknowledgement"
        yield Finding(HOLDS, f"{evidence}; the broker accepts {broker.connack.receive_max:,} in flight")
        return
    exactly_once = any(line.exactly_once for line in broker.target.gateways)
    evidence = f"the broker breaks Receive Maximum {RECEIVE_MAXIMUM}: {before_ack} received unacknowledged, "
    evidence += f"and {after_ack} after one acknowledgement"
    evidence += "; with QoS 2 it then reuses packet ids, and messages are lost" if exactly_once else ""
    limit = "messages are queued in the session" if exactly_once else "many messages are queued: a restart repeats them"
    yield Finding(BROKEN if exactly_once else WARNS, evidence, limit, "Upgrade it (Mosquitto: 2.0.13 or newer).")


def _check_order(broker: BrokerProbe) -> Iterator[Finding]:
    """TL-D13: order of messages of one publisher on one topic [MQTT-4.6.0-5, -6]."""
    if not broker.session_lines:
        return
    numbers = list(dict.fromkeys(broker.queue_probe.numbers))  # first occurrence only: a repeat may come later
    reordered_count = sum(following < previous for previous, following in itertools.pairwise(numbers))
    if not reordered_count:
        yield Finding(HOLDS, f"{queue_text(len(numbers), None)} queued for an offline session arrived in order")
        return
    evidence = f"of {len(numbers):,} queued messages {reordered_count:,} arrived after a later one"
    limit = "an offline session reconnects"
    yield Finding(WARNS, evidence, limit, "Sort by a field of the payload, or use a broker that preserves order.")


def _check_size(broker: BrokerProbe) -> Iterator[Finding]:
    """TL-D17: largest message, as announced by the broker or set in its file."""
    packet_limit, size_limit = broker.connack.max_packet_size, _conf_number(broker.conf, "message_size_limit")
    downlinks = [gateway.line for gateway in broker.target.gateways if isinstance(gateway.line, Downlink)]
    evidence = "" if packet_limit is None else f"the broker announces Maximum Packet Size {packet_limit:,}"
    if size_limit:
        evidence = f"message_size_limit is {size_limit:,}: larger MQTT 3.x messages are acknowledged and dropped"
        remedy = "Raise message_size_limit at the broker, or set it to 0; only MQTT 5 publishers get an error."
        verdict = WARNS if size_limit < _SENSOR_MESSAGE_BYTES else LIMITED
        yield Finding(verdict, evidence, f"a message of {size_limit:,} bytes", remedy)
    elif packet_limit is not None and packet_limit < _KAFKA_RECORD_BYTES and downlinks:
        line_stops = any(not line.dead_letter_topic for line in downlinks)
        evidence += f", a record of Kafka may have {_KAFKA_RECORD_BYTES:,}; "
        evidence += "the line stops there" if line_stops else "it becomes a dead letter"
        remedy = "Raise max_packet_size at the broker, or give the line a dead_letter_topic."
        limit = f"a record becomes a packet of more than {packet_limit:,} bytes"
        yield Finding(WARNS if line_stops else LIMITED, evidence, limit, remedy)
    elif packet_limit is not None:
        yield Finding(LIMITED, evidence, f"a message of {packet_limit:,} bytes")
    elif broker.conf is None:
        evidence = "the broker announces no limit; an unannounced limit is not visible to a client"
        limit = "message_size_limit is set: larger messages are dropped"
        yield Finding(LIMITED, evidence, limit, "--mosquitto-conf FILE shows it.")
    else:
        yield Finding(HOLDS, "no limit is announced, and none is set")


def _check_first_start(broker: BrokerProbe) -> Iterator[Finding]:
    """TL-D23: no queue before the first start: a broker queues only for a known session."""
    for line, gateway in broker.uplinks.items():
        state = read_state(gateway.settings.inbox_dir)
        if state is None or not state.session.get("established"):
            evidence = f"{broker.target.endpoint} queues nothing for it before: messages published until then are not "
            evidence += "in Kafka, except retained ones"
            remedy = "Start the line before its publishers."
            yield Finding(LIMITED, evidence, "the line has been started once", remedy, line)


CHECKS: Final = (
    Check("TL-D02", "connection", _check_connection),
    Check("TL-D11", "probes", _check_probes),
    Check("TL-D03", "session", _check_session),
    Check("TL-D04", "session expiry", _check_expiry),
    Check("TL-D05", "outage of the intake", _check_queue),
    Check("TL-D07", "restart of the broker", _check_restart),
    Check("TL-D09", "QoS 2", _check_qos_2),
    Check("TL-D10", "right to read", _check_rights),
    Check("TL-D12", "window", _check_window),
    Check("TL-D13", "order", _check_order),
    Check("TL-D17", "size of a message", _check_size),
    Check("TL-D23", "first start", _check_first_start),
)
