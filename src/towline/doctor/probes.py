"""What probes see of one broker, through the product's own `Client`; each fact is asked for when a check wants it.

Nothing of a line's is touched [I16]: client ids are doctor's own, and no filter of the file, nor any that a session of
a line is subscribed to by its journal, takes their topics.
Some brokers give all clients of one user the same session, whatever their client ids (Mosquitto:
``use_username_as_clientid``): a probe would be in the line's place. So the first connection is made as the line would
come back: it ends no session, keeps its expiry, acknowledges nothing, and is over when the broker has a session for an
id that nobody had before. Two such clients have to live side by side before anything else is asked.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from towline.bridge.config.model import Line
from towline.doctor.case import PROBE, Case, LineGateway, Target, filters_of
from towline.doctor.table import NotAsked, fact
from towline.errors import BrokerError, ConfigError, JournalError, SessionUnknown, TowlineError, Unreachable
from towline.gateway.sessions import connection_of
from towline.mosquitto_conf import MosquittoConf, read
from towline.mqtt.events import Filter
from towline.mqtt.filters import matches, unshared
from towline.net.client import Client
from towline.net.credentials import read_credentials
from towline.net.messages import Message, PublishResult
from towline.net.settings import ClientSettings, ProtocolName

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
    """What a session held that was away: Session Present, how many messages were accepted, and the numbers that came.

    Messages are numbered from 0, and stand as they came.
    """

    present: bool
    accepted: int
    numbers: Sequence[int]

    @property
    def kept(self) -> int:
        """How many came, each counted once."""
        return len(set(self.numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What came on a line's filters, retained messages aside, in so many seconds; or why it could not be subscribed.

    `size` is bytes of topics, payloads and properties.
    """

    error: BrokerError | ConfigError | None = None
    messages: int = 0
    size: int = 0
    seconds: float = 0.0


def probe_topic(filters: set[str], word: str) -> str | None:
    """A topic, with a word of this examination, that no filter takes; with ``$`` only where they take all others."""
    plain = ["/".join([root, *[word] * depth]) for root in (PROBE, f"{PROBE}-{word}") for depth in (1, 0, 2, 3, 4)]
    for topic in (*plain, *(f"${one}" for one in plain)):
        if not any(matches(pattern, topic) for pattern in filters):
            return topic
    return None


class Broker(contextlib.ExitStack):
    """One broker, as the lines of a target would meet it. A context manager: its end removes what was made."""

    def __init__(self, target: Target, case: Case) -> None:
        super().__init__()
        self.callback(self._end_sessions)
        self.target = target
        #: With the load, once that is known.
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
    def heard(self) -> Mapping[str, Heard]:
        """What each uplink would receive meanwhile; a shared subscription is asked for in a group of our own."""
        self._pair  # noqa: B018 - asked first
        found: dict[str, Heard] = {}
        with contextlib.ExitStack() as stack:
            listening: dict[str, list[Client]] = {}
            for name in (name for name, one in self.target.lines.items() if isinstance(one.line, Line)):
                try:
                    mine = [one for one in self.target.gateways if one.line.name == name]
                    listening[name] = [stack.enter_context(self._listener(one)) for one in mine]
                except (BrokerError, ConfigError) as error:
                    found[name] = Heard(error=error)
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

    def _counted(self, listening: Mapping[str, Sequence[Client]]) -> dict[str, Heard]:
        seconds = self.case.seconds if self.case.rate is None else min(self.case.seconds, _SILENCE_S)
        counts = {name: [0, 0] for name, clients in listening.items() if clients}
        begun = time.monotonic()
        while counts and time.monotonic() < begun + seconds:
            for name, client in [(one, client) for one in counts for client in listening[one]]:
                for message in _come(client, min(time.monotonic() + _TURN_S, begun + seconds)):
                    counts[name][0] += not message.retain
                    counts[name][1] += 0 if message.retain else message.size
        took = time.monotonic() - begun
        return {name: Heard(messages=number, size=size, seconds=took) for name, (number, size) in counts.items()}

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
        given, connection = self.target.settings, connection_of(self.target.settings)
        credentials, headers, _ = read_credentials(connection, lambda: False)
        level = vars(self).get("level", 0)  # what the broker answered to first
        settings = ClientSettings(
            username=given.username,
            **credentials,
            tls=given.tls,
            proxy=given.proxy,
            proxy_password_file=given.proxy_password_file,
            protocol=_PROTOCOLS.get(level, given.protocol),
            session_expiry_s=expiry_s,
            unknown_session="adopt" if adopt else "refuse",
            keep_alive_s=30,
            receive_maximum=window,
            connect_timeout_s=self.case.patience,
            reconnect_delay_s=_NEVER_S,
            reconnect_max_delay_s=_NEVER_S,
            websocket_headers=dict(headers),
            websocket_query_file=given.websocket_query_file,
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
