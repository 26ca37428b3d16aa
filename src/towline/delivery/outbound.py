"""The downlink: brings the rows of an outbox to the broker through a `Session`, and notes what became of them.

It belongs to the thread that drives the session. That thread calls `turn` in its loop, `perform` for each action of the
session, `attach` for a new session, `lost` when a connection ends; nothing here touches a socket.

    received by the broker   noted in memory at once, on disk with the next flush: a crash between costs a repeat
    QoS 2                    packet id before PUBLISH, phase before PUBREL, both durable [I10]: a crash costs nothing
    QoS 1                    packet id written before PUBLISH, not synced: after a crash it leaves again under the same
    QoS 0                    done before it leaves: it may be lost, never doubled
    refused for good         kept elsewhere with its reason before it is done; the others go on, without room there all
                             wait [I7]. A message at which the broker ends the connection is refused too (`Culprits`)
    expired                  done and counted, where its PUBLISH has not left [MQTT-4.3.3-7]
"""

from __future__ import annotations

import contextlib
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeAlias

from towline.delivery.outrows import Outgoing, outgoing
from towline.delivery.receipts.mark import Content
from towline.delivery.refused import REPLAYED, RefusedMessages
from towline.errors import ConfigError, JournalError, JournalFull, JournalLocked
from towline.errors import Refused as BrokerRefused
from towline.journal import Flight, Outbox
from towline.journal.outbox import PUBLISHED, RELEASED, SENT
from towline.journal.ranges import Ranges
from towline.mqtt.events import (
    Acknowledged,
    Action,
    Event,
    Flying,
    Publish,
    PublishMany,
    SessionConfig,
    SessionRecord,
    Token,
)
from towline.mqtt.message import OutboundMessage
from towline.mqtt.outbound import Outbound, Phase
from towline.mqtt.reasons import NO_SUBSCRIBERS, QOS_NOT_SUPPORTED, QUOTA_EXCEEDED, reason_words
from towline.mqtt.session import Session, SessionState
from towline.mqtt.suspects import STRIKES
from towline.timing import Stamp

#: Messages with the broker at once, at most; its Receive Maximum is mostly the smaller one.
_MOST_OPEN: Final = 8_000
#: The same in bytes; each byte is there three times, in its packet, encoded, and unsent.
_MOST_BYTES: Final = 16 << 20
#: Messages that may wait behind such as were put off, before nothing new is sent.
_MOST_WAITING: Final = 10_000
#: Messages that waited and are taken up in one turn.
_MOST_READY: Final = 1000
#: Nothing is handed over while the transport holds this many bytes the system has not taken.
_MOST_UNSENT: Final = 1 << 20
#: What is done reaches the disk after so many seconds.
_FLUSH_S: Final = 0.2
#: Counter of the ledger: taken by the broker, which has nobody to give them to.
UNMATCHED: Final = "unmatched"
#: Pause before a full disk is asked again, in seconds.
_ROOM_RETRY: Final = 0.5


#: Stands for a message of which only the packet id matters any more.
_UNNAMED: Final = OutboundMessage("-", qos=2)


class Outcome(Enum):
    """What became of a message."""

    DELIVERED = "delivered"  # the broker has it
    EXPIRED = "expired"  # it was too old to be sent
    REFUSED = "refused"  # the broker will not take it: keep it with its reason, go on with the others
    PUT_OFF = "put off"  # the broker can't take it now: try again later


class Downlink:
    """Delivers one outbox; where that is dead (`JournalFailed`), each of these methods raises it.

    Args:
        outbox: What is to be sent; what is done of it is the caller's thread to note.
        log: Takes ``warning(event, **facts)``, as structlog's loggers do.
        max_age_s: Messages that came this many seconds ago are not sent any more; None for no such limit.
        on_outcome: Called with the number of each message that is done, what became of it, and the reason code of the
            broker that took it, before the disk knows.
        on_progress: Called when messages were done since the last time.
        mark: Number and content → user properties to be added to the message, for an owner that sends messages again.
        exactly_once: What is sent with QoS 2 must not be taken as less: then nothing more is sent (TL-M44).
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        handle: Callable[[Event], None],
        log: Any,
        refused_dir: Path,
        max_age_s: float | None = None,
        on_outcome: Callable[[int, Outcome, int], None] | None = None,
        on_progress: Callable[[], None] = lambda: None,
        mark: Marking | None = None,
        exactly_once: bool = False,
    ) -> None:
        self._outbox = outbox
        self._exactly_once = exactly_once
        self._handle = handle
        self._log = log
        self.refused = RefusedMessages(refused_dir, outbox)
        self._max_age_us = None if max_age_s is None else int(max_age_s * 1e6)
        self._on_outcome = on_outcome
        self._on_progress = on_progress
        self._marked = mark is not None
        self._upcoming = Upcoming(outbox, mark)
        self._dispatch = Dispatch(outbox.done, most_open=_MOST_OPEN, most_bytes=_MOST_BYTES, most_waiting=_MOST_WAITING)
        self._session: Session | None = None
        #: Number → reason of messages that were refused and are not kept as such yet: they are kept together.
        self._refusals: dict[int, int] = {}
        #: Why nothing is sent: no room for what was refused, or no promise for what would be. None where it is.
        self.held_back: str | None = None
        #: The broker takes QoS 2 as QoS 1, and exactly once was promised.
        self.broken: BrokerRefused | None = None
        #: Messages go one at a time: the broker ends the connection at one of them.
        self._careful = False
        #: Bytes of the largest message that the broker has taken.
        self._largest = 0
        #: Numbers that a life before this one had kept as refused; the outbox learns of it now.
        self._refused_before: set[int] = set()
        #: At the start for what a crash left done without a word of it: nothing else may ever bring its room back.
        self._flush_at: float | None = time.monotonic()
        self._news = False
        self._room_at = 0.0
        with contextlib.suppress(JournalError):  # raised again where something is to be kept there, or looked at
            for number in self.refused.unfinished():
                self._refused_before.add(number)
                self._done(number, Outcome.REFUSED)

    # -- for the driver --

    def attach(self, session: Session) -> None:
        """Begin with a new session: what the disk knows to be in flight is its business, all else is met again."""
        self._session = session
        session.outbound.suspects.mine = lambda number: number in self._dispatch.open
        session.outbound.in_order = True
        self._dispatch.start_again(list(self._dispatch.open))
        flights = self._outbox.flights
        rows = self._upcoming.unfinished(flight.number for flight in flights.values())
        for packet_id, flight in flights.items():
            self._restore(session, packet_id, flight, rows)
        self._upcoming.rewind()

    def _restore(self, session: Session, packet_id: int, flight: Flight, rows: Mapping[int, Outgoing]) -> None:
        number, topic, size, left = flight.number, "", 0, None
        packet: OutboundMessage | int = _UNNAMED
        phase = Phase.RELEASED
        # Of what was sent a second time the first may have been enough, and the row be gone. The packet id has to be
        # given back all the same: the broker may hold the message, and would take the next with that id for a repeat.
        done = number in self._outbox.done and (not self._marked or number in self._refused_before)
        gone = done or number < self._outbox.first
        if gone and flight.phase == SENT:
            self._outbox.finish((), (packet_id,))
            return
        if not gone:
            message = rows.get(number) or self._upcoming.message(number)
            topic, size, packet = message.topic, message.size, message.content
            phase = Phase.RELEASED if flight.phase == RELEASED else Phase.PUBLISHED
            left = _left(message, time.monotonic(), Stamp.now())
        given_up = packet if isinstance(packet, int) else 0
        content = _UNNAMED if isinstance(packet, int) else packet
        session.outbound.restore(packet_id, number, content, phase, left, flight.reason)
        self._dispatch.hand_over(number, topic, size)
        if given_up:
            session.outbound.give_up(number, given_up)

    def lost(self, withdrawn: Iterable[Token]) -> None:
        """The connection is gone, and these never left."""
        if self._session is not None:
            self._tell_culprit(self._session.outbound)
        self._dispatch.start_again(token for token in withdrawn if isinstance(token, int))
        self._upcoming.rewind()

    def _tell_culprit(self, outbound: Outbound) -> None:
        """Tell which message made the broker end the connection, or that one is looked for."""
        culprit, careful, before = outbound.culprit, outbound.suspects.careful, self._careful
        self._careful = careful
        if isinstance(culprit, int):
            size = self._dispatch.open[culprit][1]
            facts: dict[str, object] = {"number": culprit, "times": STRIKES, "bytes": size}
            if size > self._largest:
                facts["larger_than_any_taken"] = self._largest
            self._log.warning("the broker ends the connection at this message", **facts, code="TL-M47")
        elif careful and not before:
            self._log.warning("sending one message at a time: the broker ends the connection at one", code="TL-M48")

    def perform(self, action: Action) -> None:
        """Carry out what the session asks for.

        Raises:
            JournalFull: TL-J02, what is about to leave can't be made durable: it must not leave, and the session has
                to be renewed.
        """
        if isinstance(action, Acknowledged):
            self._acknowledged(action)
        elif isinstance(action, Flying):
            self._fly(action)

    def send_again(self, ranges: Sequence[tuple[int, int]], wanted: Callable[[int], bool]) -> None:
        """Send messages that are done once more, before newer ones; instead of what was asked for before.

        `wanted` is asked when the turn of each has come: its row has to stay as long as it is on its way.
        """
        self._upcoming.repeat(ranges, wanted)

    @property
    def oldest(self) -> int | None:
        """The smallest number whose row has to stay; None for none.

        Rows on their way, or so as the disk knows it, put off, or refused and not kept yet. An id of QoS 1 needs no row
        to be given back.
        """
        on_disk = (number for number, phase in self._outbox.held.values() if phase != SENT)
        waiting = self._dispatch.oldest
        return min((*on_disk, *self._refusals, *(() if waiting is None else (waiting,))), default=None)

    def turn(self, *, unsent: int = 0) -> None:
        """Hand over what may go, and bring to the disk what is due."""
        now = time.monotonic()
        self._keep_refused(now)
        if self._outbox.settle():
            self._noted()
        if self._flush_at is not None and now >= self._flush_at:
            self.flush()
        online = self._session is not None and self._session.state is SessionState.ONLINE
        if online and unsent < _MOST_UNSENT and now >= self._room_at and self.broken is None:
            self._send(now)
        if self._news:
            self._news = False
            self._on_progress()

    def due(self) -> float | None:
        """When `turn` is due by the clock, None for never; new rows and answers are for others to tell."""
        times = [self._flush_at, self._room_at if self._refusals else None]
        if self._session is not None and self._session.state is SessionState.ONLINE:
            times.append(self._dispatch.due())
            times.append(self._room_at if self._room_at > time.monotonic() else None)
        return min((at for at in times if at is not None), default=None)

    def flush(self) -> None:
        """Bring to the disk what is done, without waiting for it."""
        self._outbox.flush()
        self._flush_at = None

    def close(self) -> None:
        """Write what memory alone knows; the outbox stays open."""
        self._keep_refused(float("inf"))
        self.flush()
        self.refused.close()

    def status(self) -> dict[str, Any]:
        """The account: accepted = queued + in_flight + delivered + expired + refused [I11]; from any thread, about.

        Rows of a batch that is not whole are not accepted yet; those that were brought anew never are.
        """
        ledger, found = self._outbox.ledger, standing(self._outbox)
        waiting = found.pop("waiting")
        in_flight = min(len(self._dispatch.open), waiting)
        return {
            **found,
            "queued": waiting - in_flight,
            "in_flight": in_flight,
            "held_back": self.held_back,
            "put_off": self._dispatch.waiting,
            "resent_after_lost_session": ledger.get("resent_after_lost_session", 0),
            "unsure_after_lost_session": ledger.get("unsure_after_lost_session", 0),
            "degraded": ledger.get("degraded", 0),
            UNMATCHED: ledger.get(UNMATCHED, 0),
            "window": self._session.outbound.window if self._session else 0,
            "window_open": self._session.outbound.open_count if self._session else 0,
            "writers": len(self._outbox.last_batches),
            "bytes_on_disk": self._outbox.bytes_on_disk,
        }

    # -- sending --

    def _send(self, now: float) -> None:
        messages: list[Publish] = []
        clock = Stamp.now()
        ready = self._dispatch.ready(now, _MOST_READY)
        while not self._dispatch.full and (number := next(ready, None)) is not None:
            self._go(self._upcoming.message(number), now, clock, messages)
        while self._dispatch.room and (following := self._upcoming.following_repeat()) is not None:
            if following.number in self._outbox.done and following.number not in self._dispatch.open:
                self._go(following, now, clock, messages)
        while self._dispatch.room and (following := self._upcoming.following()) is not None:
            if following.number in self._refusals:
                continue
            if self._dispatch.admit(following.number, following.topic):
                self._go(following, now, clock, messages)
        if messages:
            self._settle_before(messages)
            self._handle(PublishMany(messages))

    def _go(self, message: Outgoing, now: float, clock: Stamp, messages: list[Publish]) -> None:
        longest = min((us for us in (self._max_age_us, message.expiry_us) if us is not None), default=None)
        if longest is not None and message.arrived.age_us(clock) >= longest:
            self._dispatch.drop(message.number, message.topic)
            if self._session is not None:
                self._session.outbound.suspects.answered(message.number)
            self._done(message.number, Outcome.EXPIRED)
        elif isinstance(message.content, int):
            self._dispatch.drop(message.number, message.topic)
            self._refusals[message.number] = message.content
        else:
            self._dispatch.hand_over(message.number, message.topic, message.size)
            messages.append(Publish(message.number, message.content, _left(message, now, clock)))

    def _settle_before(self, messages: list[Publish]) -> None:
        """Make it durable that messages of QoS 0 are done: after a crash they must not leave a second time."""
        at_most_once = [m.token for m in messages if not m.message.qos and isinstance(m.token, int)]
        if not at_most_once:
            return
        for number in at_most_once:
            self._done(number, Outcome.DELIVERED, answered=False)
        try:
            self._outbox.flush(durable=True)
        except JournalFull as error:
            # Done in memory all the same: lost in a crash, as QoS 0 may be, not doubled.
            self._room_at = time.monotonic() + _ROOM_RETRY
            self._log.warning("no room, holding back", reason=str(error), code=error.code)

    # -- answers --

    def _acknowledged(self, action: Acknowledged) -> None:
        number = action.token
        if not isinstance(number, int) or number not in self._dispatch.open:
            return  # of a session before this one
        freed = [action.packet_id] if action.packet_id in self._outbox.held else ()
        if self._exactly_once and (action.degraded or action.reason == QOS_NOT_SUPPORTED):
            self._break_off(action)
            if action.reason == QOS_NOT_SUPPORTED:  # it has not left
                self._dispatch.start_again((number,))
                return
        size = self._dispatch.open[number][1]
        outcome = self._dispatch.answered(number, action.reason, time.monotonic() if action.reason else 0.0)
        sent_before = not action.packet_id and number in self._outbox.done  # QoS 0
        if outcome is Outcome.PUT_OFF:
            self._outbox.finish((), freed)
        elif outcome is Outcome.REFUSED or (sent_before and action.reason):
            self._outbox.finish((), freed)
            self._refusals[number] = action.reason
        elif not sent_before:
            doubts = {"unsure_after_lost_session": action.unsure, "degraded": action.degraded and not action.unsure}
            doubts[UNMATCHED] = action.reason == NO_SUBSCRIBERS
            self._largest = max(self._largest, size)
            self._done(number, Outcome.DELIVERED, freed, [name for name, holds in doubts.items() if holds])

    def _break_off(self, action: Acknowledged) -> None:
        """Send nothing more: the broker would double what it takes, and has no way to keep what was promised."""
        if self.broken is not None:
            return
        how = "takes QoS 2 as QoS 1 (PUBACK)" if action.degraded else "takes no QoS 2 (Maximum QoS)"
        self.broken = BrokerRefused(
            "TL-M44",
            "the outbox",
            f"the broker {how}, so exactly once can't hold; nothing more is sent, what waits is kept",
            'Use a broker with QoS 2, or guarantee = "at_least_once"; then start the gateway again.',
        )
        self.held_back = str(self.broken)
        self._log.warning("the promise can't hold", reason=self.held_back, number=action.token, code=self.broken.code)

    def _done(
        self, number: int, outcome: Outcome, freed: Any = (), doubts: Sequence[str] = (), *, answered: bool = True
    ) -> None:
        """Note what became of a message; `doubts` count a delivery that is not as good as it was to be.

        `answered`: the broker said so; else it left, with QoS 0.
        """
        before = number in self._outbox.done
        if outcome is not Outcome.DELIVERED:
            counted = [outcome.value, TAKEN_BACK] if before else [outcome.value]
        elif before:
            counted = []
        else:
            counted = [ACKNOWLEDGED if answered else LEFT]
        self._outbox.finish((number,), freed, outcomes=[*counted, *doubts])
        self._noted()
        if self._on_outcome is not None and not (before and outcome is Outcome.DELIVERED):
            self._on_outcome(number, outcome, NO_SUBSCRIBERS if UNMATCHED in doubts else 0)

    def _noted(self) -> None:
        """Something is done: the disk learns of it soon, and whoever waits for it."""
        self._news = True
        if self._flush_at is None:
            self._flush_at = time.monotonic() + _FLUSH_S

    def _fly(self, action: Flying) -> None:
        in_flight = self._outbox.held
        if action.forgotten:
            again = [i for i in action.forgotten if i in in_flight and in_flight[i][1] == PUBLISHED]
            self._outbox.count(resent_after_lost_session=len(again))
            self._outbox.finish((), action.forgotten)
        flights = _flights(action.noted, SENT)
        if not (action.assigned or action.released or action.forgotten):
            with contextlib.suppress(JournalFull):  # of QoS 1 alone: after a crash they leave as new
                self._outbox.fly(flights, durable=False)
            return
        flights |= _flights(action.assigned, PUBLISHED)
        flights |= {i: Flight(in_flight[i][0], RELEASED, reason) for i, reason in action.released.items()}
        self._outbox.fly(flights)

    def _keep_refused(self, now: float) -> None:
        """Keep what the broker refused, durable, before it counts as done; without room it waits, and so do all."""
        if not self._refusals or now < self._room_at:
            return
        waiting = list(self._refusals.items())
        rows = ((next(iter(self._outbox.read(number, number + 1))), number, reason) for number, reason in waiting)
        try:
            for numbers in self.refused.keep(rows):
                for number in numbers:
                    reason = reason_words(self._refusals.pop(number))
                    self._log.warning("refused", number=number, reason=reason, code="TL-M40")
                    self._done(number, Outcome.REFUSED)
        except (JournalFull, JournalLocked) as error:
            if self.held_back is None:
                self._log.warning("no room for refused messages", reason=str(error), code="TL-M49")
            self.held_back = str(error)
            self._room_at = time.monotonic() + _ROOM_RETRY
        else:
            self.held_back = str(self.broken) if self.broken else None


def _left(message: Outgoing, now: float, clock: Stamp) -> float | None:
    """When a message expires, on the clock of `now`."""
    return None if message.expiry_us is None else now + (message.expiry_us - message.arrived.age_us(clock)) / 1e6


def _flights(tokens: Mapping[int, Token], phase: int) -> dict[int, Flight]:
    """What is written of messages of the outbox; what else the session sends has no row to go back to."""
    return {packet_id: Flight(token, phase) for packet_id, token in tokens.items() if isinstance(token, int)}


#: Counters of the ledger: answers of the broker (PUBACK, PUBCOMP), messages of QoS 0 that left, and those of either
#: that were refused all the same.
ACKNOWLEDGED: Final = "acknowledged"
LEFT: Final = "sent"
TAKEN_BACK: Final = "taken_back"
#: One that is asked for while a message is being done may have one half of it: looked at again, so often.
_LOOKS: Final = 5


def standing(outbox: Outbox) -> dict[str, int]:
    """What became of an outbox's messages, told twice: ``delivered`` by numbers, ``acknowledged``, ``sent`` by answers.

    The outbox knows a message as done by its number; answers of the broker are counters of its ledger. Both stand in
    the same frames [I11], and neither is made of the other: their difference is a message that is done and that no
    broker has taken. From any thread.
    """
    for _ in range(_LOOKS):
        seen = _look(outbox)
        if seen["delivered"] == seen["acknowledged"] + seen["sent"] - seen["taken_back"]:
            break
    return seen


def _look(outbox: Outbox) -> dict[str, int]:
    ledger = outbox.ledger
    replayed = ledger.get(REPLAYED, 0)  # accepted a second time, and refused no more
    expired, refused = ledger.get("expired", 0), ledger.get("refused", 0) - replayed
    waiting, incomplete, dropped = outbox.waiting, outbox.incomplete, outbox.dropped
    accepted = outbox.end - incomplete - dropped - replayed
    return {
        "accepted": accepted,
        "waiting": waiting,
        "delivered": accepted - waiting - expired - refused,
        **{name: ledger.get(name, 0) for name in (ACKNOWLEDGED, LEFT, TAKEN_BACK)},
        "expired": expired,
        "refused": refused,
        "replayed": replayed,
        "incomplete": incomplete,
        "dropped": dropped,
    }


#: Number and content of a message → user properties to be added to it.
Marking: TypeAlias = Callable[[int, Content], Sequence[tuple[str, str]]]

#: Rows decoded at a time, and their bytes, unless it is one row.
_CHUNK: Final = 1000
_CHUNK_BYTES: Final = 8 << 20


class Upcoming:
    """The messages of one outbox in the order in which they may leave; belongs to the thread that sends.

    The cursor goes on with each message that is taken; `rewind` sets it back to the oldest that is not done. What is
    done and goes once more (`repeat`) comes from a sequence of its own.

    Args:
        mark: Adds to each message; None for nothing.
    """

    def __init__(self, outbox: Outbox, mark: Marking | None) -> None:
        self._outbox = outbox
        self._mark = mark
        #: Next row to be taken; everything below is done, or was taken.
        self._cursor = outbox.done.watermark
        #: Reads on from the cursor.
        self._messages: Iterator[Outgoing] = iter(())
        #: Messages that were done and go once more.
        self._repeats: Iterator[Outgoing] = iter(())

    def rewind(self) -> None:
        """Begin anew with the oldest that is not done; no repeat is left."""
        self._cursor = self._outbox.done.watermark
        self._messages = self._repeats = iter(())

    def following(self) -> Outgoing | None:
        """Take the next message; None when there is none."""
        while True:
            if self._cursor < self._outbox.done.watermark:  # rows from there on may be gone
                self._messages = iter(())
            if (message := next(self._messages, None)) is not None:
                self._cursor = message.number + 1
                return message
            if (rows := self._outbox.following(self._cursor)) is None:
                return None
            self._cursor = rows[0]
            self._messages = self._read(*rows)

    def following_repeat(self) -> Outgoing | None:
        """Take the next message that goes once more; None when there is none."""
        return next(self._repeats, None)

    def repeat(self, ranges: Sequence[tuple[int, int]], wanted: Callable[[int], bool]) -> None:
        """As `Downlink.send_again`."""
        self._repeats = (message for message in self._read_again(ranges) if wanted(message.number))

    def _read_again(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Outgoing]:
        for first, end in ranges:
            start = first
            while (start := max(start, self._outbox.first)) < end:
                try:
                    for message in self._read(start, end, again=True):
                        start = message.number + 1
                        yield message
                except JournalError as error:
                    if error.code != "TL-J07" or start >= self._outbox.first:
                        raise  # otherwise they were let go between two turns: nobody waits for them any more

    def message(self, number: int) -> Outgoing:
        """Read one message."""
        (message,) = self._read(number, number + 1, again=number in self._outbox.done)
        return message

    def unfinished(self, numbers: Iterable[int]) -> dict[int, Outgoing]:
        """Those among these that are not done, by number, read in as few pieces as there are."""
        done, first = self._outbox.done, self._outbox.first
        wanted = Ranges(0, [(n, n + 1) for n in numbers if n >= first and n not in done])
        return {message.number: message for piece in wanted.ranges for message in self._read(*piece)}

    def _read(self, start: int, end: int, *, again: bool = False) -> Iterator[Outgoing]:
        for batch in self._outbox.read(start, end, batch_rows=_CHUNK, batch_bytes=_CHUNK_BYTES):
            yield from outgoing(batch, start, self._mark, again=again)
            start += batch.num_rows


#: First pause before a message that was put off is tried again, in seconds; doubles up to the longest.
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
_REFUSAL: Final = 0x80


@dataclass(slots=True)
class _Waiting:
    """The messages of a topic that wait, in order."""

    numbers: deque[int] = field(default_factory=deque)
    #: when the first is tried again, and the pause after that; it was put off, unless older ones came later, of a batch
    #: that became whole
    at: float = 0.0
    pause: float = _FIRST_PAUSE
    #: the one that was put off is answered: all may go
    free: bool = False


class Dispatch:
    """Which message of the outbox goes next: decisions only, no disk, no socket, no clock.

    Messages are handed to the session in the order in which they came, so that order per topic is kept [MQTT-4.6.0-1,
    -5]. Only a message that the broker puts off (0x97, quota exceeded) leaves the row: it is tried again later, and
    those of its topic that have not left wait behind it: not handed over yet, or given back by the session
    (`Outbound.in_order`). Those that had left before the answer came can overtake it.

    Args:
        done: What needs no sending; its owner adds to it.
        most_open: Messages handed over and not answered, at most.
        most_bytes: The same in bytes; one message is always allowed.
        most_waiting: Messages that wait behind one that was put off: beyond it nothing new is handed over.
    """

    def __init__(self, done: Ranges, *, most_open: int, most_bytes: int, most_waiting: int) -> None:
        self._done = done
        self._most_open = most_open
        self._most_bytes = most_bytes
        self._most_waiting = most_waiting
        #: number → topic and bytes of each message handed over and not answered; done are only those that go once more,
        #: or whose packet id is given back
        self.open: dict[int, tuple[str, int]] = {}
        #: sum of the bytes in `open`
        self.open_bytes = 0
        #: by topic, none of them empty; of those being tried again the first is open
        self._topics: dict[str, _Waiting] = {}
        #: Messages that wait behind one that was put off, that one included.
        self.waiting = 0

    @property
    def full(self) -> bool:
        """So much is with the broker that nothing more may be handed over, not even what waited."""
        return bool(self.open) and (len(self.open) >= self._most_open or self.open_bytes >= self._most_bytes)

    @property
    def room(self) -> bool:
        """A message that did not wait may be handed over."""
        return not self.full and self.waiting < self._most_waiting

    @property
    def oldest(self) -> int | None:
        """The smallest number that was handed over or waits; None when there is none."""
        return min((*self.open, *(topic.numbers[0] for topic in self._topics.values())), default=None)

    def admit(self, number: int, topic: str) -> bool:
        """Whether the next message of the outbox may go now; else it is done, on its way, or waits behind its topic."""
        if number in self.open or number in self._done:
            return False
        if topic in self._topics:
            self._wait(number, topic)
        return topic not in self._topics

    def _wait(self, number: int, topic: str) -> None:
        """Put a message in the row of its topic, once."""
        numbers = self._topics.setdefault(topic, _Waiting()).numbers
        if number not in numbers:
            insort(numbers, number)
            self.waiting += 1

    def hand_over(self, number: int, topic: str, size: int) -> None:
        """A message was given to the session."""
        assert number not in self.open
        self.open[number] = (topic, size)
        self.open_bytes += size

    def answered(self, number: int, reason: int, now: float) -> Outcome:
        """Take the broker's answer at a time of `time.monotonic` [MQTT 5 section 3.4.2.1]."""
        topic, size = self.open.pop(number)
        self.open_bytes -= size
        if reason == QUOTA_EXCEEDED:
            self._put_off(number, topic, now)
            return Outcome.PUT_OFF
        self.drop(number, topic)
        return Outcome.DELIVERED if reason < _REFUSAL else Outcome.REFUSED

    def _put_off(self, number: int, topic: str, now: float) -> None:
        first = topic not in self._topics
        self._wait(number, topic)  # it may be a second one of the topic, that had left before the first answer came
        row = self._topics[topic]
        if first or row.free or row.numbers[0] == number:
            row.at, row.pause, row.free = now + row.pause, min(2 * row.pause, _LONGEST_PAUSE), False

    def drop(self, number: int, topic: str) -> None:
        """A message is answered, or not sent at all because it expired: those behind it need not wait for it."""
        row = self._topics.get(topic)
        if row is None or number not in row.numbers:
            return
        if row.numbers[0] == number:  # else an older one was put off, or came, while it was tried again
            row.free, row.pause = True, _FIRST_PAUSE
        row.numbers.remove(number)
        self.waiting -= 1
        if not row.numbers:
            del self._topics[topic]

    def due(self) -> float | None:
        """When `ready` has something by the clock, None for never or after an answer; what is ready counts as 0."""
        if self.full:
            return None
        rows = (row for row in self._topics.values() if row.free or row.numbers[0] not in self.open)
        return min((0.0 if row.free else row.at for row in rows), default=None)

    def ready(self, now: float, most: int) -> Iterator[int]:
        """Numbers that waited and may be handed over now, in order; what is taken has to be handed over, or dropped."""
        for topic, row in list(self._topics.items()):
            if most and not row.free and row.at <= now and row.numbers[0] not in self.open:
                most -= 1
                yield row.numbers[0]
            while most and row.free and row.numbers:
                number = row.numbers.popleft()
                self.waiting -= 1
                if not row.numbers:
                    del self._topics[topic]
                if number not in self.open:
                    most -= 1
                    yield number

    def start_again(self, never_left: Iterable[int]) -> None:
        """The connection is gone: what waited, and was handed over and never sent, is met again in the outbox."""
        for number in never_left:
            _, size = self.open.pop(number)
            self.open_bytes -= size
        self._topics.clear()
        self.waiting = 0

    def validate(self) -> None:
        """Assert every invariant named above; for tests."""
        assert self.open_bytes == sum(size for _, size in self.open.values())
        assert self.waiting == sum(len(row.numbers) for row in self._topics.values())
        assert all(row.numbers for row in self._topics.values())
        assert all(list(row.numbers) == sorted(row.numbers) for row in self._topics.values())
        assert not any(number in self._done for number in self.open)


def recall(stored: Mapping[str, Any], where: str, config: SessionConfig, abandoned: str = "") -> SessionRecord | None:
    """The session record as a journal has it; None on a new one, and for the session of `abandoned`, which is given up.

    Raises:
        ConfigError: TL-M23, the session is another client id's: nobody would fetch what the broker holds for it.
    """
    if not stored:
        return None
    subscriptions = {str(k): int(v) for k, v in stored["subscriptions"].items()}
    servers = tuple(map(str, stored["servers"]))
    record = SessionRecord(str(stored["client_id"]), bool(stored["established"]), subscriptions, servers)
    if record.client_id == config.client_id:
        return record
    # What no broker has accepted holds nothing, and a session that ends with its connection keeps nothing.
    if record.established and config.session_expiry_s and record.client_id != abandoned:
        raise ConfigError(
            "TL-M23",
            where,
            f'the MQTT session of this directory is that of client id "{record.client_id}", and client_id is '
            f'"{config.client_id}" now: what the broker holds for the first would never be fetched',
            f'Set client_id (option clientId) back to "{record.client_id}"; or give that session up, with what waits '
            f'in it and what is under way with QoS 2: abandon_session (option abandonSession) = "{record.client_id}".',
        )
    return None
