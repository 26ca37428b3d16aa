"""The work of a publisher's mqtt thread: delivers the outbox, takes receipts, and says what became of each message."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

from towline.delivery.outbound import Downlink, Outcome
from towline.delivery.receipts.payload import ReceiptPayload
from towline.delivery.record import recall
from towline.errors import JournalFull, Unreachable
from towline.journal import Outbox
from towline.mqtt.events import Action, Deliver, Event, Online, Remember, SessionLost, Settled, Stored
from towline.mqtt.session import Session
from towline.net.driver import Hooks, SessionDriver
from towline.net.options import ConnectionOptions
from towline.publisher.awaited import Awaited, Restored, keep
from towline.publisher.receipt import Lifecycle, Log, Stages, guarded, settling

__all__ = ["OutboxDelivery"]

_NOT_BELIEVED: Final = "a receipt without a code of our key: of a gateway without it, or a forged one"


class OutboxDelivery:
    """Delivers one outbox.

    Args:
        life: Of the publisher.
        outbox: What is to be sent.
        stages: Of the messages that somebody holds.
        awaited: Messages on their way to Kafka; None without receipts.
        options: Of the connection and its session.
        abandoned: Client id whose session is given up; "" for none.
        max_age_s: Older messages are not sent any more; None for no such limit.
        on_outcome: Called with number and outcome of each message; None for nobody.
    """

    def __init__(
        self,
        life: Lifecycle,
        outbox: Outbox,
        stages: Stages,
        awaited: Awaited | None,
        *,
        options: ConnectionOptions,
        abandoned: str,
        max_age_s: float | None,
        on_outcome: Callable[[int, str], None] | None,
    ) -> None:
        self._life = life
        self._outbox = outbox
        self._stages = stages
        self._awaited = awaited
        self._options = options
        self._abandoned = abandoned
        self._on_outcome = on_outcome
        self._log = Log()
        #: outcomes of this turn, reported together
        self._outcomes: list[tuple[int, Outcome, int]] = []
        self._downlink = Downlink(
            outbox,
            handle=self._handle,
            log=self._log,
            refused_dir=life.directory / "refused",
            max_age_s=max_age_s,
            on_outcome=lambda *outcome: self._outcomes.append(outcome),
            on_progress=self._progress,
            mark=awaited.mark if awaited is not None else None,
        )
        hooks = Hooks(new_session=self._new_session, perform=self._perform, ended=self._ended)
        self._driver = SessionDriver(options, hooks)

    # -- from any thread --

    def wake(self) -> None:
        """Let `turn` look around now."""
        self._driver.wake()

    def cancel(self) -> None:
        """Let `turn` return soon, whatever it waits for."""
        self._driver.cancel()

    def status(self) -> dict[str, Any]:
        """The account, and the state of the connection."""
        error, awaited = self._driver.error, self._awaited
        return {
            **self._downlink.status(),
            "receipts": awaited.status(self._outbox.end) if awaited is not None else None,
            "online": self._driver.online,
            "client_id": self._options.session.client_id,
            "broker": str(self._driver.endpoint),
            "last_error": str(error) if error else None,
        }

    # -- the mqtt thread --

    def turn(self) -> None:
        """Do what is due, and wait for more.

        Raises:
            JournalFailed: TL-J04, the outbox is dead [I6].
        """
        driver = self._driver
        try:
            driver.turn(self._downlink.due(), self._awaited.due() if self._awaited is not None else None)
            if self._awaited is not None and (question := self._awaited.turn(time.monotonic())):
                self._downlink.send_again(question, self._awaited.waits)
            self._downlink.turn(unsent=driver.unsent)
        except JournalFull as error:  # what can't be made durable must not be acted on
            what = f"what is sent can't be recorded: {error.what}"
            driver.renew(Unreachable("TL-M13", self._options.session.where, what, error.do))
        if driver.fatal is not None:
            # What is on disk is safe, and another may mend the broker: go on trying, and say so.
            self._log.warning("no connection", code=driver.fatal.code, reason=str(driver.fatal))
            driver.fatal = None

    def end(self) -> None:
        """Say goodbye to the broker and write what memory alone knows; the thread is gone."""
        self._driver.leave()
        try:
            if self._life.dead is None:
                self._downlink.close()
        finally:
            self._driver.dispose()

    def _ended(self) -> bool:
        """The connection is gone; whether the message is known at which the broker ended it."""
        if self._awaited is not None:
            self._awaited.offline()
        return self._downlink.lost(self._driver.session.outbound.withdraw())

    def _handle(self, event: Event) -> None:
        self._driver.handle(event)

    def _new_session(self, level: int) -> Session:
        record = recall(self._outbox.session, str(self._life.directory), self._options.session, self._abandoned)
        if record is not None and self._awaited is not None:  # to get the newest receipt, which the broker retains
            record = replace(record, subscriptions={})
        session = Session(self._options.session_at(level), record)
        self._downlink.attach(session)
        return session

    def _perform(self, action: Action) -> None:
        if isinstance(action, Remember):
            self._outbox.set_session(asdict(action.record) if action.record else {})
        elif isinstance(action, Online):
            self._log.info("online", broker=str(self._driver.endpoint), session="kept" if action.resumed else "new")
            if self._awaited is not None:
                self._awaited.online(time.monotonic())
        elif isinstance(action, Deliver):
            self._take_receipts(action)
        elif isinstance(action, SessionLost):
            self._outbox.count(sessions_lost=1)
            self._log.warning("the broker has lost our session", code="TL-M22", broker=str(self._driver.endpoint))
        else:
            self._downlink.perform(action)

    def _progress(self) -> None:
        """Report all outcomes of a turn at once."""
        outcomes, self._outcomes = self._outcomes, []
        with settling(self._life) as callbacks:
            callbacks.extend(self._stages.done(outcomes))
        for number, outcome, _ in outcomes:
            self._report(number, outcome.value)
        if self._awaited is not None and any(outcome is not Outcome.DELIVERED for _, outcome, _ in outcomes):
            keep(self._outbox, self._awaited, self._downlink.oldest)

    def _report(self, number: int, outcome: str) -> None:
        if self._on_outcome is not None:
            guarded(partial(self._on_outcome, number, outcome))

    # -- receipts --

    def _take_receipts(self, action: Deliver) -> None:
        """That they are acknowledged at once loses nothing, the broker retains the newest."""
        for message in action.messages.packets:
            if self._awaited is None or message.payload is None:
                continue  # a stub is too large for a receipt of ours
            before = self._awaited.not_believed
            receipt = self._awaited.believed(message.payload)
            if receipt is not None:
                self._take(self._awaited, receipt)
            elif not before and self._awaited.not_believed:
                self._log.warning(_NOT_BELIEVED, code="TL-O11")
        self._handle(Settled(action.first + len(action.messages)))
        self._handle(Stored(action.ticket))

    def _take(self, awaited: Awaited, receipt: ReceiptPayload) -> None:
        with settling(self._life) as callbacks:
            before = awaited.settled.watermark
            try:
                lost = awaited.take(receipt, self._outbox.end, time.monotonic())
            except Restored:
                lost = []
                self._log.warning("the outbox is an older copy of itself; messages may be doubled", code="TL-O07")
                awaited.begin_again(receipt.epoch + 1)
                keep(self._outbox, awaited, self._downlink.oldest)
                self._outbox.journal.sync()
            numbers = range(before, awaited.settled.watermark)
            callbacks.extend(self._stages.arrived(numbers))
        if numbers:
            keep(self._outbox, awaited, self._downlink.oldest)
        for number in numbers:
            self._report(number, "arrived")
        if lost:
            self._log.warning("the broker lost messages; sending them again", count=sum(e - s for s, e in lost))
            self._downlink.send_again(lost, awaited.waits)
