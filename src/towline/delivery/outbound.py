"""Outbox sender: sends the rows of an outbox to the broker through a `Session`, and records their outcome.

It belongs to the thread that drives the session. That thread calls `turn` in its loop, `perform` for each action of the
session, `attach_session` for a new session, `connection_lost` when a connection ends. No method uses a socket.

    acknowledged    done in memory at once, on disk with the next flush: a crash in between costs a repeat
    QoS 2           packet id before PUBLISH, phase before PUBREL, both durable [I10]: a crash costs nothing
    QoS 1           packet id written before PUBLISH, not synced: after a crash it is sent again under the same id
    QoS 0           done before it is sent: it may be lost, never doubled
    refused         stored elsewhere with its reason code before it is done; other messages go on, but without free
                    space for it all wait [I7]. A message that makes the broker disconnect is refused too (`Culprits`)
    expired         done and counted, if its PUBLISH was not sent [MQTT-4.3.3-7]
"""

from __future__ import annotations

import contextlib
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

from towline.delivery.outrows import OutgoingMessage, outgoing_messages
from towline.delivery.receipts.mark import Content
from towline.delivery.refused import REPLAYED_COUNTER, RefusedMessages
from towline.errors import BrokerRefused, ConfigError, JournalError, JournalFull, JournalLocked
from towline.journal import InFlight, Outbox
from towline.journal.outbox import PHASE_PUBLISHED, PHASE_QOS1, PHASE_RELEASED
from towline.journal.ranges import Ranges
from towline.mqtt import events
from towline.mqtt.events import Publish
from towline.mqtt.message import OutboundMessage
from towline.mqtt.outbound import CULPRIT_STRIKES, Phase
from towline.mqtt.reasons import NO_SUBSCRIBERS, QOS_NOT_SUPPORTED, QUOTA_EXCEEDED, reason_name
from towline.mqtt.session import Session, SessionState
from towline.timing import Timestamp

#: Most messages in flight; the broker's Receive Maximum is mostly smaller.
_MAX_IN_FLIGHT: Final = 8_000
#: Most bytes in flight; each byte is in memory three times: in the packet, encoded, and unsent.
_MAX_IN_FLIGHT_BYTES: Final = 16 << 20
#: Most messages that wait behind postponed ones, before no new message is sent.
_MAX_WAITING: Final = 10_000
#: Most waiting messages that are sent in one turn.
_MAX_READY: Final = 1000
#: No message is sent while the transport holds this many bytes unsent.
_MAX_UNSENT_BYTES: Final = 1 << 20
#: Done rows reach the disk after this many seconds.
_FLUSH_DELAY_S: Final = 0.2
#: Counter of the ledger: messages that the broker acknowledged without a matching subscription.
UNMATCHED_COUNTER: Final = "unmatched"
#: Seconds between two tries to write to a full disk.
_FULL_RETRY_S: Final = 0.5


#: Placeholder for a message of which only the packet id is needed.
_PLACEHOLDER_MESSAGE: Final = OutboundMessage("-", qos=2)


class Outcome(Enum):
    """Outcome of a message."""

    DELIVERED = "delivered"  # acknowledged by the broker
    EXPIRED = "expired"  # too old to be sent
    REFUSED = "refused"  # rejected by the broker for good: stored with its reason code, other messages go on
    POSTPONED = "put off"  # the broker has no quota now: retried later


class OutboxSender:
    """Sender of one outbox; on a dead outbox every method raises `JournalFailed`.

    Args:
        outbox: The outbox; only the thread of the sender marks its rows as done.
        handle_event: Passes an event to the session.
        log: Takes ``warning(event, **facts)``, as structlog's loggers do.
        refused_dir: Directory of the journal of refused messages.
        max_age_s: Messages older than this many seconds expire; None for no limit.
        on_outcome: Called with number, outcome and reason code of each message, before it is done on disk.
        on_progress: Called when messages were done since the last call.
        mark: Number and content → user properties to add to the message, for an owner that sends messages again.
        exactly_once: A broker that handles QoS 2 as a lower QoS stops all sending (TL-M44).
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        handle_event: Callable[[events.Event], None],
        log: Any,
        refused_dir: Path,
        max_age_s: float | None = None,
        on_outcome: Callable[[int, Outcome, int], None] | None = None,
        on_progress: Callable[[], None] = lambda: None,
        mark: MarkFunction | None = None,
        exactly_once: bool = False,
    ) -> None:
        self._outbox = outbox
        self._exactly_once = exactly_once
        self._handle_event = handle_event
        self._log = log
        self.refused_messages = RefusedMessages(refused_dir, outbox)
        self._max_age_us = None if max_age_s is None else int(max_age_s * 1e6)
        self._on_outcome = on_outcome
        self._on_progress = on_progress
        self._adds_marks = mark is not None
        self._message_queue = MessageQueue(outbox, mark)
        self._dispatcher = Dispatcher(outbox.done_rows, _MAX_IN_FLIGHT, _MAX_IN_FLIGHT_BYTES, _MAX_WAITING)
        self._session: Session | None = None
        #: Number → reason code of refused messages that are not stored yet; they are stored together.
        self._refusals: dict[int, int] = {}
        #: Reason for sending nothing: no space for refused messages, or a broken guarantee. None while sending.
        self.blocked_reason: str | None = None
        #: The broker handles QoS 2 as QoS 1, under exactly once.
        self.guarantee_error: BrokerRefused | None = None
        #: Numbers that an earlier process stored as refused; the outbox learns of them at the start.
        self._recovered_refusals: set[int] = set()
        #: A flush at the start, for rows that a crash left done: nothing else may ever free their space.
        self._flush_at: float | None = time.monotonic()
        self._has_progress = False
        self._retry_at = 0.0
        #: Messages of QoS 0 that are marked as done in memory only, and not sent yet.
        self._unmarked_qos0: list[Publish] = []
        with contextlib.suppress(JournalError):  # raised again when the journal is needed
            for number in self.refused_messages.not_done_numbers():
                self._recovered_refusals.add(number)
                self._finish_message(number, Outcome.REFUSED)

    # -- for the driver --

    def attach_session(self, session: Session) -> None:
        """Start with a new session: restore the packets in flight on disk, and read all other messages again."""
        self._session = session
        session.outbound.culprit_finder.is_droppable = lambda number: number in self._dispatcher.in_flight
        session.outbound.in_order = True
        self._dispatcher.reset(list(self._dispatcher.in_flight))
        in_flight = self._outbox.in_flight
        messages = self._message_queue.read_unfinished(row.row_number for row in in_flight.values())
        for packet_id, row in in_flight.items():
            self._restore(session, packet_id, row, messages.get(row.row_number))
        self._message_queue.rewind()

    def _restore(self, session: Session, packet_id: int, row: InFlight, message: OutgoingMessage | None) -> None:
        number, topic, size, expires_at = row.row_number, "", 0, None
        content_or_reason: OutboundMessage | int = _PLACEHOLDER_MESSAGE
        phase = Phase.RELEASED
        # The first sending of a repeated message may have been enough, and its row be gone. The packet id must be
        # released all the same: the broker may hold the message, and would take the next with that id for a repeat.
        is_finished = self._is_finished(number)
        if is_finished and row.phase == PHASE_QOS1:
            self._outbox.mark_done((), (packet_id,))
            return
        if not is_finished:
            message = message or self._message_queue.read_message(number)
            topic, size, content_or_reason = message.topic, message.size, message.content_or_reason
            phase = Phase.RELEASED if row.phase == PHASE_RELEASED else Phase.PUBLISHED
            expires_at = _expiry_time(message, time.monotonic(), Timestamp.now())
        refusal_reason = content_or_reason if isinstance(content_or_reason, int) else 0
        content = _PLACEHOLDER_MESSAGE if isinstance(content_or_reason, int) else content_or_reason
        session.outbound.restore(packet_id, number, content, phase, expires_at, row.reason)
        self._dispatcher.add_in_flight(number, topic, size)
        if refusal_reason:
            session.outbound.drop_message(number, refusal_reason)

    def _is_finished(self, number: int) -> bool:
        """Return whether a message is never sent again: its row is done, or gone."""
        done = number in self._outbox.done_rows and (not self._adds_marks or number in self._recovered_refusals)
        return done or number < self._outbox.first_offset

    def connection_lost(self, unsent_tokens: Iterable[events.MessageToken]) -> None:
        """Handle the end of the connection; the messages with these tokens were not sent."""
        if self._session is not None:
            culprit = self._session.outbound.culprit_token
            if isinstance(culprit, int):
                facts = {"number": culprit, "times": CULPRIT_STRIKES, "bytes": self._dispatcher.in_flight[culprit][1]}
                self._log.warning("the broker ends the connection at this message", **facts, code="TL-M47")
        self._dispatcher.reset(token for token in unsent_tokens if isinstance(token, int))
        self._message_queue.rewind()

    def perform(self, action: events.Action) -> None:
        """Perform an action of the session.

        Raises:
            JournalFull: TL-J02, the packet's state can't be written: it must not be sent, and the session ends.
        """
        if isinstance(action, events.PublishAcknowledged):
            self._handle_acknowledged(action)
        elif isinstance(action, events.SaveInFlight):
            self._write_in_flight(action)

    def resend(self, ranges: Sequence[tuple[int, int]], needs_resend: Callable[[int], bool]) -> None:
        """Send done messages of these ranges again, before newer ones; replaces the ranges of an earlier call.

        `needs_resend` is called right before a message is sent: its row has to stay while it is in flight.
        """
        self._message_queue.resend(ranges, needs_resend)

    @property
    def oldest_number(self) -> int | None:
        """Smallest number whose row must not be removed; None without one.

        These are rows in flight, also those on disk, postponed rows, and refused rows that are not stored yet. To
        release a packet id of QoS 1, or of a finished message, no row is needed.
        """
        on_disk = (number for number, phase in self._outbox.held_ids.values() if phase != PHASE_QOS1)
        numbers = chain(on_disk, self._refusals, self._dispatcher.numbers())
        return min((number for number in numbers if not self._is_finished(number)), default=None)

    def turn(self, *, unsent: int = 0) -> None:
        """Send messages within the limits, and flush the outbox if it is due."""
        now = time.monotonic()
        self._store_refused(now)
        if self._outbox.finish_dropped():
            self._schedule_flush()
        if self._flush_at is not None and now >= self._flush_at:
            self.flush()
        online = self._session is not None and self._session.state is SessionState.ONLINE
        if online and unsent < _MAX_UNSENT_BYTES and now >= self._retry_at and self.guarantee_error is None:
            self._send(now)
        if self._has_progress:
            self._has_progress = False
            self._on_progress()

    def next_turn_at(self) -> float | None:
        """Return the time of the next `turn`, None for never; new rows and acknowledgements are signalled elsewhere."""
        times = [self._flush_at, self._retry_at if self._refusals else None]
        if self._session is not None and self._session.state is SessionState.ONLINE:
            times.append(self._dispatcher.next_ready_at())
            times.append(self._retry_at if self._retry_at > time.monotonic() else None)
        return min((due for due in times if due is not None), default=None)

    def flush(self) -> None:
        """Write the done rows to disk, without a sync."""
        self._outbox.flush()
        self._flush_at = None

    def close(self) -> None:
        """Write the state that is in memory only; the outbox stays open."""
        self._store_refused(float("inf"))
        self.flush()
        self.refused_messages.close()

    def status(self) -> dict[str, Any]:
        """Return the outbox account: accepted = queued + in_flight + delivered + expired + refused [I11].

        From any thread, so the counts are approximate. Rows of a partial or dropped batch are not accepted.
        """
        ledger, counts = self._outbox.ledger, outbox_counts(self._outbox)
        waiting = counts.pop("waiting")
        in_flight = min(len(self._dispatcher.in_flight), waiting)
        return {
            **counts,
            "queued": waiting - in_flight,
            "in_flight": in_flight,
            "held_back": self.blocked_reason,
            "put_off": self._dispatcher.waiting_count,
            "resent_after_lost_session": ledger.get("resent_after_lost_session", 0),
            "unsure_after_lost_session": ledger.get("unsure_after_lost_session", 0),
            "degraded": ledger.get("degraded", 0),
            UNMATCHED_COUNTER: ledger.get(UNMATCHED_COUNTER, 0),
            "window": self._session.outbound.window if self._session else 0,
            "window_open": self._session.outbound.open_count if self._session else 0,
            "writers": len(self._outbox.last_batches),
            "bytes_on_disk": self._outbox.bytes_on_disk,
        }

    # -- sending --

    def _send(self, now: float) -> None:
        messages: list[Publish] = []
        clock = Timestamp.now()
        ready_numbers = self._dispatcher.ready_numbers(now, _MAX_READY)
        while not self._dispatcher.is_full and (number := next(ready_numbers, None)) is not None:
            self._send_or_finish(self._message_queue.read_message(number), now, clock, messages)
        while self._dispatcher.accepts_new and (message := self._message_queue.next_resend()) is not None:
            if message.number in self._outbox.done_rows and message.number not in self._dispatcher.in_flight:
                self._send_or_finish(message, now, clock, messages)
        while self._dispatcher.accepts_new and (message := self._message_queue.next_message()) is not None:
            if self._dispatcher.may_send(message.number, message.topic):
                self._send_or_finish(message, now, clock, messages)
        if sendable := self._finish_qos0(messages):
            self._handle_event(events.PublishMany(sendable))

    def _send_or_finish(self, message: OutgoingMessage, now: float, clock: Timestamp, messages: list[Publish]) -> None:
        max_age_us = min((us for us in (self._max_age_us, message.expiry_us) if us is not None), default=None)
        if max_age_us is not None and message.arrived_at.age_us(clock) >= max_age_us:
            self._dispatcher.remove_waiting(message.number, message.topic)
            if self._session is not None:
                self._session.outbound.culprit_finder.clear_token(message.number)
            self._finish_message(message.number, Outcome.EXPIRED)
        elif isinstance(message.content_or_reason, int):
            self._dispatcher.remove_waiting(message.number, message.topic)
            self._refusals[message.number] = message.content_or_reason
        else:
            self._dispatcher.add_in_flight(message.number, message.topic, message.size)
            messages.append(Publish(message.number, message.content_or_reason, _expiry_time(message, now, clock)))

    def _finish_qos0(self, messages: list[Publish]) -> list[Publish]:
        """Mark messages of QoS 0 as done, durably: after a crash they must not be sent again; return those to send."""
        earlier_messages, qos0_messages = self._unmarked_qos0, [m for m in messages if not m.message.qos]
        for number in (m.token for m in qos0_messages if isinstance(m.token, int)):
            self._finish_message(number, Outcome.DELIVERED)
        if not (earlier_messages or qos0_messages):
            return messages
        try:
            self._outbox.flush(durable=True)
        except JournalFull as error:
            self._retry_at = time.monotonic() + _FULL_RETRY_S
            self._log.warning("no room, sending pauses", reason=str(error), code=error.code)
            self._unmarked_qos0 = earlier_messages + qos0_messages
            return [m for m in messages if m.message.qos]
        self._unmarked_qos0 = []
        return earlier_messages + messages

    # -- answers --

    def _handle_acknowledged(self, action: events.PublishAcknowledged) -> None:
        number = action.token
        if not isinstance(number, int) or number not in self._dispatcher.in_flight:
            return  # of a previous session
        freed_ids = [action.packet_id] if action.packet_id in self._outbox.held_ids else ()
        if self._exactly_once and (action.qos_degraded or action.reason == QOS_NOT_SUPPORTED):
            self._stop_sending(action)
            if action.reason == QOS_NOT_SUPPORTED:  # it was not sent
                self._dispatcher.reset((number,))
                return
        outcome = self._dispatcher.handle_answer(number, action.reason, time.monotonic() if action.reason else 0.0)
        was_qos0 = not action.packet_id and number in self._outbox.done_rows
        if outcome is Outcome.POSTPONED:
            self._outbox.mark_done((), freed_ids)
        elif outcome is Outcome.REFUSED or (was_qos0 and action.reason):
            self._outbox.mark_done((), freed_ids)
            self._refusals[number] = action.reason
        elif not was_qos0:
            degradations = ["unsure_after_lost_session"] if action.delivery_unknown else []
            degradations += ["degraded"] if action.qos_degraded and not action.delivery_unknown else []
            degradations += [UNMATCHED_COUNTER] if action.reason == NO_SUBSCRIBERS else []
            self._finish_message(number, Outcome.DELIVERED, freed_ids, degradations)

    def _stop_sending(self, action: events.PublishAcknowledged) -> None:
        """Stop sending: this broker would double messages, so exactly once can't hold."""
        if self.guarantee_error is not None:
            return
        problem = "takes QoS 2 as QoS 1 (PUBACK)" if action.qos_degraded else "takes no QoS 2 (Maximum QoS)"
        self.guarantee_error = error = BrokerRefused(
            "TL-M44",
            "the outbox",
            f"the broker {problem}, so exactly once can't hold; sending stops, waiting messages are kept",
            'Use a broker with QoS 2, or guarantee = "at_least_once"; then start the gateway again.',
        )
        self.blocked_reason = str(error)
        self._log.warning("the guarantee can't hold", reason=str(error), number=action.token, code=error.code)

    def _finish_message(
        self, number: int, outcome: Outcome, freed_ids: Any = (), degradations: Sequence[str] = ()
    ) -> None:
        """Mark a message as done with its outcome; `degradations` are counters of a weaker guarantee."""
        was_done, counters = number in self._outbox.done_rows, dict.fromkeys(degradations, 1)
        if outcome is not Outcome.DELIVERED:
            counters |= {outcome.value: 1, ACKNOWLEDGED_COUNTER: -was_done}
        elif not was_done:
            counters[ACKNOWLEDGED_COUNTER] = 1
        self._outbox.mark_done((number,), freed_ids, outcomes=counters)
        self._schedule_flush()
        if self._on_outcome is not None and not (was_done and outcome is Outcome.DELIVERED):
            self._on_outcome(number, outcome, NO_SUBSCRIBERS if UNMATCHED_COUNTER in degradations else 0)

    def _schedule_flush(self) -> None:
        """Schedule a flush of the done rows, and a call of `on_progress`."""
        self._has_progress = True
        if self._flush_at is None:
            self._flush_at = time.monotonic() + _FLUSH_DELAY_S

    def _write_in_flight(self, action: events.SaveInFlight) -> None:
        held_ids = self._outbox.held_ids
        if action.discarded_ids:
            resent_ids = [i for i in action.discarded_ids if i in held_ids and held_ids[i][1] == PHASE_PUBLISHED]
            self._outbox.count(resent_after_lost_session=len(resent_ids))
            self._outbox.mark_done((), action.discarded_ids)
        in_flight = _in_flight_rows(action.qos1_ids, PHASE_QOS1)
        if not (action.qos2_ids or action.pubrec_reasons or action.discarded_ids):
            with contextlib.suppress(JournalFull):  # QoS 1 only: after a crash they are sent as new
                self._outbox.write_in_flight(in_flight, durable=False)
            return
        in_flight |= _in_flight_rows(action.qos2_ids, PHASE_PUBLISHED)
        reasons = action.pubrec_reasons.items()
        in_flight |= {i: InFlight(held_ids[i][0], PHASE_RELEASED, reason) for i, reason in reasons}
        self._outbox.write_in_flight(in_flight)

    def _store_refused(self, now: float) -> None:
        """Store refused messages durably before they are done; without free space all messages wait."""
        if not self._refusals or now < self._retry_at:
            return
        refusals = list(self._refusals.items())
        rows = ((next(iter(self._outbox.read(number, number + 1))), number, reason) for number, reason in refusals)
        try:
            for numbers in self.refused_messages.store(rows):
                for number in numbers:
                    reason = reason_name(self._refusals.pop(number))
                    self._log.warning("the broker refused a message", number=number, reason=reason, code="TL-M40")
                    self._finish_message(number, Outcome.REFUSED)
        except (JournalFull, JournalLocked) as error:
            if self.blocked_reason is None:
                self._log.warning("no room for refused messages", reason=str(error), code="TL-M49")
            self.blocked_reason = str(error)
            self._retry_at = time.monotonic() + _FULL_RETRY_S
        else:
            self.blocked_reason = str(self.guarantee_error) if self.guarantee_error else None


def _expiry_time(message: OutgoingMessage, now: float, clock: Timestamp) -> float | None:
    """Return the expiry time of a message on the clock of `now`."""
    return None if message.expiry_us is None else now + (message.expiry_us - message.arrived_at.age_us(clock)) / 1e6


def _in_flight_rows(tokens: Mapping[int, events.MessageToken], phase: int) -> dict[int, InFlight]:
    """Return the in-flight rows of the outbox's messages; other messages of the session have no row."""
    return {packet_id: InFlight(token, phase) for packet_id, token in tokens.items() if isinstance(token, int)}


#: Counter of the ledger: messages acknowledged, with QoS 0 sent, and not refused afterwards.
ACKNOWLEDGED_COUNTER: Final = "acknowledged"
#: Reads during an update may see one half of it: repeated up to so many times.
_MAX_READS: Final = 5


def outbox_counts(outbox: Outbox) -> dict[str, int]:
    """Return the counts of an outbox's messages from two sources: row numbers (``delivered``) and acknowledgements.

    The outbox marks a message as done by its number; acknowledgements of the broker are a counter of its ledger. Both
    are in the same frames [I11], and neither is derived from the other: a difference is a message that is done but was
    never sent. From any thread.
    """
    for _ in range(_MAX_READS):
        counts = _read_counts(outbox)
        if counts["delivered"] == counts[ACKNOWLEDGED_COUNTER]:
            break
    return counts


def _read_counts(outbox: Outbox) -> dict[str, int]:
    ledger = outbox.ledger
    replayed_count = ledger.get(REPLAYED_COUNTER, 0)  # accepted twice, and no longer refused
    expired_count, refused_count = ledger.get("expired", 0), ledger.get("refused", 0) - replayed_count
    waiting_count, incomplete_count, dropped_count = outbox.waiting_rows, outbox.incomplete_rows, outbox.dropped_rows
    accepted_count = outbox.end - incomplete_count - dropped_count - replayed_count
    return {
        "accepted": accepted_count,
        "waiting": waiting_count,
        "delivered": accepted_count - waiting_count - expired_count - refused_count,
        ACKNOWLEDGED_COUNTER: ledger.get(ACKNOWLEDGED_COUNTER, 0),
        "expired": expired_count,
        "refused": refused_count,
        "replayed": replayed_count,
        "incomplete": incomplete_count,
        "dropped": dropped_count,
    }


#: Number and content of a message → user properties to add.
MarkFunction: TypeAlias = Callable[[int, Content], Sequence[tuple[str, str]]]

#: Most rows and bytes decoded at a time, unless it is one row.
_READ_ROWS: Final = 1000
_READ_BYTES: Final = 8 << 20


class MessageQueue:
    """Queue of an outbox's messages in the order of sending; belongs to the sending thread.

    The cursor advances with each message; `rewind` moves it back to the oldest message that is not done. Done messages
    that are sent again (`resend`) come from a separate sequence.

    Args:
        mark: Returns user properties to add to a message; None for none.
    """

    def __init__(self, outbox: Outbox, mark: MarkFunction | None) -> None:
        self._outbox = outbox
        self._mark = mark
        #: Number of the next row; all below are done, or were taken.
        self._next_number = outbox.done_rows.watermark
        #: Messages from the cursor on.
        self._messages: Iterator[OutgoingMessage] = iter(())
        #: Done messages that are sent again.
        self._resent_messages: Iterator[OutgoingMessage] = iter(())

    def rewind(self) -> None:
        """Restart with the oldest message that is not done, without pending resends."""
        self._next_number = self._outbox.done_rows.watermark
        self._messages = self._resent_messages = iter(())

    def next_message(self) -> OutgoingMessage | None:
        """Take the next message; None if the queue is empty."""
        while True:
            if self._next_number < self._outbox.done_rows.watermark:  # rows from there on may be removed
                self._messages = iter(())
            if (message := next(self._messages, None)) is not None:
                self._next_number = message.number + 1
                return message
            if (row_range := self._outbox.next_rows(self._next_number)) is None:
                return None
            self._next_number = row_range[0]
            self._messages = self._read_messages(*row_range)

    def next_resend(self) -> OutgoingMessage | None:
        """Take the next message to resend; None without one."""
        return next(self._resent_messages, None)

    def resend(self, ranges: Sequence[tuple[int, int]], needs_resend: Callable[[int], bool]) -> None:
        """Resend done messages, as `OutboxSender.resend`."""
        self._resent_messages = (message for message in self._read_resends(ranges) if needs_resend(message.number))

    def _read_resends(self, ranges: Sequence[tuple[int, int]]) -> Iterator[OutgoingMessage]:
        for start_number, end in ranges:
            start = start_number
            while (start := max(start, self._outbox.first_offset)) < end:
                try:
                    for message in self._read_messages(start, end, resent=True):
                        start = message.number + 1
                        yield message
                except JournalError as error:
                    if error.code != "TL-J07" or start >= self._outbox.first_offset:
                        raise  # otherwise these rows were removed between two turns: no receipt is pending for them

    def read_message(self, number: int) -> OutgoingMessage:
        """Read one message."""
        (message,) = self._read_messages(number, number + 1, resent=number in self._outbox.done_rows)
        return message

    def read_unfinished(self, numbers: Iterable[int]) -> dict[int, OutgoingMessage]:
        """Return the messages with these numbers that are not done, by number; reads adjacent ones together."""
        done, first = self._outbox.done_rows, self._outbox.first_offset
        unfinished_ranges = Ranges(0, [(n, n + 1) for n in numbers if n >= first and n not in done])
        messages = chain.from_iterable(self._read_messages(*row_range) for row_range in unfinished_ranges.ranges)
        return {message.number: message for message in messages}

    def _read_messages(self, start: int, end: int, *, resent: bool = False) -> Iterator[OutgoingMessage]:
        for batch in self._outbox.read(start, end, batch_rows=_READ_ROWS, batch_bytes=_READ_BYTES):
            yield from outgoing_messages(batch, start, self._mark, is_resent=resent)
            start += batch.num_rows


#: First retry pause of a postponed message, in seconds; doubles up to the longest.
_FIRST_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 60.0
_FIRST_ERROR_REASON: Final = 0x80


@dataclass(slots=True)
class _TopicQueue:
    """Waiting messages of one topic, in order."""

    numbers: deque[int] = field(default_factory=deque)
    #: retry time of the first message, and the next pause; it was postponed, or is older and came later
    retry_at: float = 0.0
    retry_pause_s: float = _FIRST_RETRY_S
    #: the postponed message is acknowledged: all may be sent
    is_released: bool = False


class Dispatcher:
    """Scheduler of an outbox's messages: pure decisions, without disk, socket or clock.

    Messages are given to the session in the order of the outbox, so that order per topic is kept [MQTT-4.6.0-1, -5].
    Only a message that the broker postpones (0x97, quota exceeded) is sent later. Messages of its topic that were not
    sent wait behind it: those not given to the session yet, or returned by it (`Outbound.in_order`). Those that were
    sent before the broker's answer can overtake it.

    Args:
        done_rows: Rows that need no sending; the owner adds to it.
        max_in_flight: Most messages given to the session and not acknowledged.
        max_bytes: Most bytes of these messages; one message is always allowed.
        max_waiting: Most messages that wait behind a postponed one: beyond it no new message is sent.
    """

    def __init__(self, done_rows: Ranges, max_in_flight: int, max_bytes: int, max_waiting: int) -> None:
        self._done_rows = done_rows
        self._max_in_flight = max_in_flight
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        #: number → topic and bytes of each message in flight; a done one is sent again, or has its packet id released
        self.in_flight: dict[int, tuple[str, int]] = {}
        #: sum of the bytes in `in_flight`
        self.in_flight_bytes = 0
        #: by topic, none of them empty; the first number of a queue being retried is in flight
        self._topic_queues: dict[str, _TopicQueue] = {}
        #: postponed messages and those that wait behind one
        self.waiting_count = 0

    @property
    def is_full(self) -> bool:
        """Whether the limits in flight allow no further message, not even a waiting one."""
        is_full = len(self.in_flight) >= self._max_in_flight or self.in_flight_bytes >= self._max_bytes
        return is_full and bool(self.in_flight)

    @property
    def accepts_new(self) -> bool:
        """Whether a new message may be sent, one that did not wait."""
        return not self.is_full and self.waiting_count < self._max_waiting

    def numbers(self) -> Iterator[int]:
        """Return the numbers that are in flight, and of each topic the first one that waits."""
        return chain(self.in_flight, (queue.numbers[0] for queue in self._topic_queues.values()))

    def may_send(self, number: int, topic: str) -> bool:
        """Return whether a message may be sent now: not if it is done, in flight, or waiting behind its topic."""
        if number in self.in_flight or number in self._done_rows:
            return False
        if topic in self._topic_queues:
            self._add_waiting(number, topic)
        return topic not in self._topic_queues

    def _add_waiting(self, number: int, topic: str) -> None:
        """Add a message to the waiting ones of its topic, once."""
        numbers = self._topic_queues.setdefault(topic, _TopicQueue()).numbers
        if number not in numbers:
            insort(numbers, number)
            self.waiting_count += 1

    def add_in_flight(self, number: int, topic: str, size: int) -> None:
        """Record that a message was given to the session."""
        assert number not in self.in_flight
        self.in_flight[number] = (topic, size)
        self.in_flight_bytes += size

    def handle_answer(self, number: int, reason: int, now: float) -> Outcome:
        """Return the outcome of the broker's answer, at a time of `time.monotonic` [MQTT 5 section 3.4.2.1]."""
        topic, size = self.in_flight.pop(number)
        self.in_flight_bytes -= size
        if reason == QUOTA_EXCEEDED:
            self._postpone(number, topic, now)
            return Outcome.POSTPONED
        self.remove_waiting(number, topic)
        return Outcome.DELIVERED if reason < _FIRST_ERROR_REASON else Outcome.REFUSED

    def _postpone(self, number: int, topic: str, now: float) -> None:
        is_first = topic not in self._topic_queues
        self._add_waiting(number, topic)  # perhaps another one of the topic, sent before the first answer came
        queue = self._topic_queues[topic]
        if is_first or queue.is_released or queue.numbers[0] == number:
            queue.retry_at, queue.is_released = now + queue.retry_pause_s, False
            queue.retry_pause_s = min(2 * queue.retry_pause_s, _MAX_RETRY_S)

    def remove_waiting(self, number: int, topic: str) -> None:
        """Remove an acknowledged or expired message from its topic's queue, so that the next messages may be sent."""
        queue = self._topic_queues.get(topic)
        if queue is None or number not in queue.numbers:
            return
        if queue.numbers[0] == number:  # else an older one was postponed, or came, during its retry
            queue.is_released, queue.retry_pause_s = True, _FIRST_RETRY_S
        queue.numbers.remove(number)
        self.waiting_count -= 1
        if not queue.numbers:
            del self._topic_queues[topic]

    def next_ready_at(self) -> float | None:
        """Return the time of the next ready message: None for never or after an answer, 0 for now."""
        if self.is_full:
            return None
        queues = [q for q in self._topic_queues.values() if q.is_released or q.numbers[0] not in self.in_flight]
        return min((0.0 if queue.is_released else queue.retry_at for queue in queues), default=None)

    def ready_numbers(self, now: float, limit: int) -> Iterator[int]:
        """Yield waiting numbers that may be sent now, in order; the caller must send or remove each."""
        for topic, queue in list(self._topic_queues.items()):
            if limit and not queue.is_released and queue.retry_at <= now and queue.numbers[0] not in self.in_flight:
                limit -= 1
                yield queue.numbers[0]
            while limit and queue.is_released and queue.numbers:
                number = queue.numbers.popleft()
                self.waiting_count -= 1
                if not queue.numbers:
                    del self._topic_queues[topic]
                if number not in self.in_flight:
                    limit -= 1
                    yield number

    def reset(self, unsent_numbers: Iterable[int]) -> None:
        """Reset after the end of the connection: waiting and unsent messages are read from the outbox again."""
        for number in unsent_numbers:
            _, size = self.in_flight.pop(number)
            self.in_flight_bytes -= size
        self._topic_queues.clear()
        self.waiting_count = 0

    def validate(self) -> None:
        """Assert every invariant of the attributes; for tests."""
        assert self.in_flight_bytes == sum(size for _, size in self.in_flight.values())
        assert self.waiting_count == sum(len(queue.numbers) for queue in self._topic_queues.values())
        assert all(queue.numbers for queue in self._topic_queues.values())
        assert all(list(queue.numbers) == sorted(queue.numbers) for queue in self._topic_queues.values())
        assert not any(number in self._done_rows for number in self.in_flight)


def load_session_record(
    session: Mapping[str, Any], location: str, config: events.SessionConfig, abandoned_id: str = ""
) -> events.SessionRecord | None:
    """Return the session record stored in a journal; None in a new journal, and for client id `abandoned_id`.

    Raises:
        ConfigError: TL-M23, the session of another client id holds messages that would never be fetched.
    """
    if not session:
        return None
    subscriptions = {str(k): int(v) for k, v in session["subscriptions"].items()}
    servers = tuple(map(str, session["servers"]))
    record = events.SessionRecord(str(session["client_id"]), bool(session["established"]), subscriptions, servers)
    if record.client_id == config.client_id:
        return record
    # Without an accepted connection, or with a session that ends with it, no broker holds messages.
    if record.established and config.session_expiry_s and record.client_id != abandoned_id:
        raise ConfigError(
            "TL-M23",
            location,
            f'the MQTT session of this directory is that of client id "{record.client_id}", and client_id is '
            f'"{config.client_id}" now: what the broker holds for the first would never be fetched',
            f'Set client_id (option clientId) back to "{record.client_id}"; or give that session up, with what waits '
            f'in it and what is under way with QoS 2: abandon_session (option abandonSession) = "{record.client_id}".',
        )
    return None
