"""Probes of a broker: each leaves it as it was, and tells what was seen.

Client ids begin with ``towline-doctor-``, topics with ``towline-doctor/``; both end in a random word, so that two
doctors get along. A session that is to be kept has an expiry of a minute, should nobody come to end it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Self

from mqtt5 import PubAckPacket, PubRecPacket, PubRelPacket

from towline.doctor.broker.facts import (
    FilterAnswer,
    Greeting,
    InFlight,
    KeptQueue,
    KeptWindow,
    LargeMessage,
    LineAnswers,
    NoGreeting,
    OwnTopics,
)
from towline.doctor.broker.targets import LineGateway, Target
from towline.doctor.broker.wire import OtherVersion, Wire, meet
from towline.errors import BrokerError, TowlineError
from towline.mqtt.events import Filter
from towline.mqtt.filters import matches, unshared
from towline.mqtt.reasons import reason_words
from towline.mqtt.rules import unsupported
from towline.net.options import ConnectionOptions
from towline.net.transport import Tls, connect

__all__ = ["IN_FLIGHT", "LARGE_BYTES", "PREFIX", "SAMPLE", "Bench", "greet", "own_name"]

#: Client ids and topics of the doctor begin so.
PREFIX: Final = "towline-doctor"
#: Payload of the large message: more than a broker with a limit for sensor values takes.
LARGE_BYTES: Final = 64 << 10
#: A broker that is asked for a longer session expiry is not asked: should we be killed in that moment, it is over then.
_LONGEST_ASKED: Final = 7 * 86400
#: Seconds the broker keeps what is to be kept, should nobody come to end it.
_KEPT_S: Final = 60
#: Receive Maximum of the probe that holds back its acknowledgements, and how much is published to it.
_WINDOW: Final = 10
_TO_WINDOW: Final = 40
#: QoS 2 messages a 3.x publisher has in flight (`SessionConfig.window_3`).
IN_FLIGHT: Final = 20
#: Patience with a guess of why a broker did not take us in.
_GUESS_S: Final = 2.0
#: Seconds of publishing into the queue, on a line that is slow.
_FILLING: Final = 6.0
#: Seconds for a message to come that surely comes; it is asked for again and again until then.
_COMING: Final = 5.0
#: Seconds until no more is taken to come without an acknowledgement, where messages of QoS 0 wait behind it.
_SETTLED: Final = 1.5
#: Seconds between two of them.
_AGAIN: Final = 0.3
#: Messages, and seconds, of which it is looked with which QoS they come.
SAMPLE: Final = 200
_SAMPLE_S: Final = 1.0
#: Reason codes from here on say no.
_NO: Final = 0x80
#: Receive Maximum that is sent and is as large as can be.
_WIDE: Final = 65534


def own_name() -> str:
    """A client id that nobody else has; within the 23 characters that MQTT 3.1 takes."""
    return f"{PREFIX}-{secrets.token_hex(4)}"


def greet(target: Target, patience_s: float) -> Greeting | NoGreeting:
    """Meet the broker with the protocol of the line, and ask how long it keeps a session."""
    try:
        options = target.options()
    except TowlineError as error:
        return NoGreeting(error=error)
    failure: TowlineError | None = None
    for level in options.levels:
        try:
            return _greeted(options, target, level, patience_s)
        except OtherVersion as error:
            failure = failure or error
        except TowlineError as error:
            return NoGreeting(error=error)
    assert failure is not None
    patience_s = min(patience_s, _GUESS_S)
    older = next((level for level in (4, 3) if _answers(options, level, patience_s)), None)
    tls = older is None and not target.endpoint.tls and _speaks_tls(options, patience_s)
    return NoGreeting(error=failure, speaks=older, tls=tls)


def _greeted(options: ConnectionOptions, target: Target, level: int, patience_s: float) -> Greeting:
    asked = min(_LONGEST_ASKED, *(one.settings.session_expiry_s for one in target.gateways))
    if level < 5:
        asked = 0
    with meet(options, own_name(), level=level, patience_s=patience_s, expiry_s=asked) as wire:
        try:
            software = _software(wire, patience_s)
            return Greeting(
                level=level,
                connack=wire.connack,
                asked_expiry_s=asked,
                round_trip_s=wire.ping(patience_s),
                software=software,
            )
        finally:
            wire.close(expiry_s=0)


def _software(wire: Wire, patience_s: float) -> str:
    """What the broker calls itself; retained, so it comes before the answer to a PINGREQ."""
    if wire.subscribe(Filter("$SYS/broker/version", qos=0), patience_s) >= _NO:
        return ""
    wire.ping(patience_s)
    payload = wire.arrived[0].payload if wire.arrived else None
    wire.arrived.clear()
    return (payload or b"").decode("utf-8", "replace")[:100]


def _answers(options: ConnectionOptions, level: int, patience_s: float) -> bool:
    try:
        with meet(options, own_name(), level=level, patience_s=patience_s):
            return True
    except (TowlineError, ValueError):
        return False


def _speaks_tls(options: ConnectionOptions, patience_s: float) -> bool:
    """Whether a port that ended a connection without TLS is one for TLS."""
    [endpoint] = options.brokers
    if endpoint.scheme not in {"mqtt", "ws"}:
        return False
    secured = replace(endpoint, scheme="mqtts" if endpoint.scheme == "mqtt" else "wss")
    with contextlib.suppress(TowlineError):
        connect(secured, tls=Tls(insecure=True), proxy=options.proxy, timeout_s=patience_s).close()
        return True
    return False


@dataclass
class Bench:
    """Where probes are made: one broker that has taken us in. A context manager: its end removes what is left.

    Attributes:
        options: How to get there.
        greeting: Its first word.
        patience_s: Seconds for each answer.
    """

    options: ConnectionOptions
    greeting: Greeting
    patience_s: float
    _sessions: list[str] = field(default_factory=list)
    _retained: list[str] = field(default_factory=list)
    _word: str = field(default_factory=lambda: secrets.token_hex(4))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(TowlineError):
            for topic in self._retained:
                self._forget(topic)
            for client_id in self._sessions:
                self._meet(client_id).close()

    def topic(self, name: str) -> str:
        """A topic of this bench's own."""
        return f"{PREFIX}/{self._word}/{name}"

    # -- probes --

    def own_topics(self) -> OwnTopics:
        """Whether a message on a topic of ours comes back."""
        topic = self.topic("own")
        with self._meet() as wire:
            try:
                code = wire.subscribe(Filter(topic), self.patience_s)
                if code >= _NO:
                    return OwnTopics(why=f"subscribing to {topic} is refused: {reason_words(code)}")
                wire.publish(topic, b"probe", qos=1, expiry_s=_KEPT_S)
                code = wire.published(self.patience_s)
            except BrokerError as error:
                return OwnTopics(why=f"at a message on {topic} {error.what}")
            if code >= _NO:
                return OwnTopics(why=f"publishing to {topic} is refused: {reason_words(code)}")
            came = wire.wait(lambda: bool(wire.arrived), _COMING)
            return OwnTopics(why="" if came else f"a message on {topic} was acknowledged and never came")

    def queue(self, messages: int) -> KeptQueue:
        """What is kept for a session that is away, and in which window it comes.

        Args:
            messages: Published while it is away.
        """
        topic, client_id = self.topic("queue"), own_name()
        with self._meet(client_id, kept=True) as wire:
            wire.subscribe(Filter(topic), self.patience_s)
        with self._meet() as publisher:
            until = time.monotonic() + _FILLING
            codes = publisher.publish_all(topic, map(_numbered, range(messages)), self.patience_s, until)
            accepted = sum(code < _NO for code in codes)
            with self._meet(client_id, kept=True, window=_WIDE) as wire:
                if not wire.connack.session_present and self.greeting.level > 3:
                    return KeptQueue(present=False, accepted=accepted, kept=0)
                wire.acknowledging = False
                self._settle(wire, publisher, topic)
                window = len(_numbers(wire))
                wire.acknowledging = True
                wire.acknowledge()
                self._last(wire, publisher, topic)
                numbers = _numbers(wire)
        return KeptQueue(
            present=True, accepted=accepted, kept=len(numbers), first=0 in numbers or not numbers, window=window
        )

    def window(self) -> KeptWindow:
        """Whether the broker keeps to Receive Maximum, before and after an acknowledgement."""
        topic = self.topic("window")
        with self._meet(window=_WINDOW) as wire, self._meet() as publisher:
            wire.acknowledging = False
            wire.subscribe(Filter(topic), self.patience_s)
            until = time.monotonic() + _FILLING
            publisher.publish_all(topic, map(_numbered, range(_TO_WINDOW)), self.patience_s, until)
            self._settle(wire, publisher, topic)
            before = len(_numbers(wire))
            wire.acknowledge(1)
            wire.ping(self.patience_s)  # now the broker has read it
            self._settle(wire, publisher, topic)
            return KeptWindow(announced=_WINDOW, before=before, after=len(_numbers(wire)))

    def qos_2(self) -> bool:
        """Whether PUBLISH of QoS 2 is answered with PUBREC."""
        with self._meet() as wire:
            wire.publish(self.topic("qos2"), b"probe", qos=2, expiry_s=_KEPT_S)
            answer = wire.received(self.patience_s)
            if isinstance(answer, PubRecPacket) and int(answer.reason_code) < _NO:
                wire.send(PubRelPacket(answer.packet_id))
                wire.ping(self.patience_s)
                return True
            return False

    def large(self) -> LargeMessage:
        """Whether a large message is passed on; MQTT 3.x has no way to refuse one."""
        topic = self.topic("large")
        with self._meet() as wire, self._older() as publisher:
            wire.subscribe(Filter(topic), self.patience_s)
            code = _NO
            with contextlib.suppress(BrokerError):  # it may end the connection, before its answer or after it
                publisher.publish(topic, bytes(LARGE_BYTES), qos=1, expiry_s=_KEPT_S)
                code = publisher.published(self.patience_s)
                self._last(wire, publisher, topic)
            arrived = any(len(one.payload or b"") == LARGE_BYTES for one in wire.arrived)
            return LargeMessage(size=LARGE_BYTES, code=code, arrived=arrived, level=publisher.level)

    def retained(self) -> bool:
        """Whether a retained message is there for a subscriber that comes later."""
        topic = self.topic("retained")
        self._retained.append(topic)
        with self._meet() as publisher:
            try:
                publisher.publish(topic, b"probe", qos=1, retain=True, expiry_s=_KEPT_S)
                publisher.published(self.patience_s)
            except BrokerError:
                self._retained.remove(topic)
                return False
        with self._meet() as wire:
            wire.subscribe(Filter(topic), self.patience_s)
            there = wire.wait(lambda: bool(wire.arrived), _COMING)
        self._forget(topic)
        self._retained.remove(topic)
        return there

    def in_flight(self) -> InFlight | None:
        """Whether all QoS 2 messages arrive that a 3.x publisher has in flight together; None where none may speak."""
        topic = self.topic("inflight")
        with self._meet() as wire, self._older() as publisher:
            if publisher.level == 5:
                return None
            wire.subscribe(Filter(topic, qos=2), self.patience_s)
            answers: list[PubAckPacket | PubRecPacket] = []
            try:
                for number in range(IN_FLIGHT):
                    publisher.publish(topic, _numbered(number), qos=2)
                answers += (publisher.received(self.patience_s) for _ in range(IN_FLIGHT))
            except BrokerError:
                return InFlight(sent=IN_FLIGHT, arrived=len(answers), ended=True)
            for answer in answers:
                if isinstance(answer, PubRecPacket):
                    publisher.send(PubRelPacket(answer.packet_id))
            publisher.ping(self.patience_s)
            self._last(wire, publisher, topic)
            return InFlight(sent=IN_FLIGHT, arrived=len(_numbers(wire)))

    def line(self, gateway: LineGateway, *, listen: bool = True) -> LineAnswers:
        """How the broker answers to a line's filters, and with which QoS messages come on them.

        A shared subscription is asked for under a group of our own, so that no message is taken away from a member.

        Args:
            gateway: Of the line.
            listen: Wait for messages; not where it is known that none come.
        """
        if not gateway.filters:
            return LineAnswers()
        answers: list[FilterAnswer] = []
        levels = [0, 0, 0]
        with contextlib.ExitStack() as wires:
            wire = wires.enter_context(self._meet(window=SAMPLE))
            for one in self._asked(gateway):
                try:
                    code: int | None = wire.subscribe(self._ours(one), self.patience_s)
                except BrokerError:
                    code = None
                    wire = wires.enter_context(self._meet(window=SAMPLE))
                answers.append(FilterAnswer(pattern=one.pattern, qos=one.qos, code=code))
            wire.acknowledging = False
            with contextlib.suppress(BrokerError):
                wire.wait(lambda: len(wire.arrived) >= SAMPLE, _SAMPLE_S if listen else 0)
            live = [packet for packet in wire.arrived if not packet.retain]
        for packet in live:
            levels[int(packet.qos)] += 1
        seen = [sum(matches(unshared(one.pattern), packet.topic) for packet in live) for one in answers]
        filters = tuple(replace(one, seen=count) for one, count in zip(answers, seen, strict=True))
        return LineAnswers(filters=filters, levels=(levels[0], levels[1], levels[2]))

    def make_session(self, client_id: str) -> None:
        """Leave a session that `has_session` looks for."""
        with self._meet(client_id, kept=True) as wire:
            wire.subscribe(Filter(self.topic("elsewhere")), self.patience_s)

    def has_session(self, client_id: str) -> bool:
        """Whether there is a session of that client id."""
        with self._meet(client_id, kept=True) as wire:
            return wire.connack.session_present

    # -- steps --

    def _asked(self, gateway: LineGateway) -> Iterator[Filter]:
        """The filters that the broker has not said it can't take: it would end the connection."""
        for one in gateway.filters:
            if self.greeting.level < 5 or unsupported(self.greeting.connack, [one], "") is None:
                yield one

    def _ours(self, one: Filter) -> Filter:
        pattern = unshared(one.pattern)
        if pattern != one.pattern:
            pattern = f"$share/{PREFIX}-{self._word}/{pattern}"
        handling = 2 if self.greeting.level == 5 else None
        return replace(one, pattern=pattern, retain_as_published=False, retain_handling=handling)

    def _meet(self, client_id: str = "", *, kept: bool = False, window: int = 1000) -> Wire:
        if kept and client_id not in self._sessions:
            self._sessions.append(client_id)
        return meet(
            self.options,
            client_id or own_name(),
            level=self.greeting.level,
            patience_s=self.patience_s,
            clean=not kept,
            expiry_s=_KEPT_S if kept else 0,
            window=window,
        )

    def _older(self) -> Wire:
        """As a publisher of MQTT 3.1.1, where the broker speaks it and we may: else as the line."""
        if self.greeting.level == 5 and self.options.session.authenticator is None:
            with contextlib.suppress(BrokerError):
                return meet(self.options, own_name(), level=4, patience_s=self.patience_s)
        return self._meet()

    def _forget(self, topic: str) -> None:
        with self._meet() as wire:
            wire.publish(topic, b"", qos=1, retain=True)
            wire.published(self.patience_s)

    def _settle(self, wire: Wire, publisher: Wire, topic: str) -> None:
        """Wait until no more comes without an acknowledgement: messages of QoS 0 are not counted by a window."""
        until = time.monotonic() + _SETTLED
        before = -1
        while time.monotonic() < until and len(_numbers(wire)) > before:
            before = len(_numbers(wire))
            self._await(wire, publisher, topic, qos=0, until=until)

    def _last(self, wire: Wire, publisher: Wire, topic: str) -> None:
        """Wait until a message has come that was published after all others; a full queue may drop it."""
        self._await(wire, publisher, topic, qos=1, until=time.monotonic() + _COMING)

    def _await(self, wire: Wire, publisher: Wire, topic: str, *, qos: int, until: float) -> None:
        mark = secrets.token_hex(8).encode()
        while time.monotonic() < until:
            publisher.publish(topic, mark, qos=qos, expiry_s=_KEPT_S)
            if qos:
                publisher.published(self.patience_s)
            if wire.wait(lambda: any(one.payload == mark for one in reversed(wire.arrived)), _AGAIN):
                return


_MARK: Final = b"probe "


def _numbered(number: int) -> bytes:
    return _MARK + str(number).encode()


def _numbers(wire: Wire) -> set[int]:
    """Numbers of the probe messages that came."""
    return {int(one.payload[len(_MARK) :]) for one in wire.arrived if (one.payload or b"").startswith(_MARK)}  # type: ignore[index]
