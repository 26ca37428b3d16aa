"""Draining a gateway: it stops taking, takes in what the broker still holds for it, and leaves when all is committed.

    step         until                                                         after a kill
    LEAVING      UNSUBACK has come for every filter                            it is asked once more, which does no harm
    TAKING       nothing is unacknowledged, and the broker has nothing more:   what was not acknowledged comes again
                 a PINGREQ is answered, and for a moment nothing comes
    COMMITTING   every consumer has committed the end of the journal, and      the same
                 publishers have their receipts
    TELLING      every reader of several gateways that has a lease says that   the same
                 it has written down that this one is drained
    ENDING       a CONNECT with Clean Start is answered: the broker has no     an empty session is made, and ended
                 session any more
    DRAINED      the gateway is told to take part again                        it does not start

Only the beginning and the end are written down (`towline.gateway.membership`): each step between is found again by
looking, and going back to an earlier one loses nothing. The order is what keeps the promise: nothing new may be queued
before what is queued can be taken out [MQTT-3.10.4-2, -3], and a session that is ended takes with it what it holds.
There is no way to hand a message back: what the broker has queued for this client it gives to no other.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from towline.gateway.membership import DRAIN_NOTE, SHARE_NOTE, since_of
from towline.schema import NO_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from towline.journal import Journal

__all__ = ["Drain", "DrainFacts", "DrainStep", "Stillness", "step_of"]

#: Nothing has to come for so many seconds before a session counts as empty: a broker need not answer a PINGREQ after
#: the messages that it has ready.
STILL_S: Final = 1.0
#: The same while a QoS 2 handshake is open: its message is stored, and a broker that was killed may have forgotten it.
OPEN_S: Final = 10.0
#: How often it is looked whether readers that were not heard are still there, in seconds.
LOOK_S: Final = 0.5
#: Pause before another try to end the session, in seconds.
AGAIN_S: Final = 2.0


class DrainStep(StrEnum):
    """Where a drain stands."""

    LEAVING = "unsubscribing"
    TAKING = "taking what the broker holds"
    COMMITTING = "waiting for commits"
    TELLING = "waiting for readers to write down that it leaves"
    ENDING = "ending the session"
    DRAINED = "drained"


#: Nothing is left to be carried on.
_OVER: Final = frozenset({DrainStep.TELLING, DrainStep.ENDING, DrainStep.DRAINED})


@dataclass(frozen=True, slots=True)
class DrainFacts:
    """What a drain looks at.

    Attributes:
        online: The session is online.
        subscribed: A filter is subscribed, or may be.
        open: Messages that are unacknowledged or not on disk.
        handshakes: QoS 2 ids that are not released.
        received: Messages received so far, those that were not stored too.
        connection: Tells one connection from the next.
        probed: Every PINGREQ is answered.
        uncommitted: Rows that a consumer has not committed.
        owing: A publisher is to get a receipt.
        unheard: A reader has yet to write down that the gateway is drained.
    """

    online: bool
    subscribed: bool
    open: int
    handshakes: int
    received: int
    connection: int
    probed: bool
    uncommitted: int
    owing: bool = False
    unheard: bool = False


class Stillness:
    """Whether the broker has nothing more to send: asked by a PINGREQ, and by waiting a moment.

    Args:
        still_s: How long nothing may come, in seconds.
        open_s: How long, while a QoS 2 handshake is open.
    """

    def __init__(self, still_s: float = STILL_S, open_s: float = OPEN_S) -> None:
        self._still_s = still_s
        self._open_s = open_s
        #: Connection, messages received and handshakes open when it was asked; None for not asked.
        self._asked: tuple[int, int, int] | None = None
        self._asked_at = 0.0

    def look(self, facts: DrainFacts, now: float, ask: Callable[[], None]) -> bool:
        """Whether it is still.

        Args:
            facts: As they are.
            now: Seconds on a clock that never goes back.
            ask: Sends a PINGREQ.
        """
        if not facts.online or facts.open:
            self._asked = None
            return False
        here = (facts.connection, facts.received, facts.handshakes)
        if self._asked != here:
            self._asked, self._asked_at = here, now
            ask()
            return False
        return facts.probed and now >= self._still_at(facts.handshakes)

    def _still_at(self, handshakes: int) -> float:
        return self._asked_at + (self._open_s if handshakes else self._still_s)

    def due(self) -> float | None:
        """When to look again by the clock; None for not by the clock."""
        return None if self._asked is None else self._still_at(self._asked[2])


def step_of(facts: DrainFacts, *, still: bool) -> DrainStep:
    """Which step a drain that is not done stands at."""
    if facts.subscribed:
        return DrainStep.LEAVING
    if not still:
        return DrainStep.TAKING
    if facts.uncommitted or facts.owing:
        return DrainStep.COMMITTING
    return DrainStep.TELLING if facts.unheard else DrainStep.ENDING


class Drain:
    """The drain of one gateway; all of it belongs to the pump's thread, but for `ask`, `step` and `since`.

    Args:
        inbox: Its journal.
    """

    def __init__(self, inbox: Journal) -> None:
        self._inbox = inbox
        #: When it began, in seconds since 1970; None while the gateway takes part.
        self.since = since_of(inbox)
        #: None while the gateway takes part.
        self.step: DrainStep | None = DrainStep.LEAVING if self.active else None
        #: Asked for and not yet on disk: True to begin, False to take part again.
        self._orders: deque[bool] = deque()
        self._still = Stillness()
        self._again_at = 0.0

    @property
    def active(self) -> bool:
        """It has begun and is not done."""
        return self.since is not None

    @property
    def nothing_comes(self) -> bool | None:
        """Whether all that it held is committed, and nothing more comes; None while the gateway takes part."""
        step = self.step
        return None if step is None else step in _OVER

    def status(self) -> dict[str, object] | None:
        """What `towline status` shows; None while the gateway takes part."""
        step = self.step
        return None if step is None else {"step": step.value, "since": self.since}

    def ask(self, *, begin: bool) -> None:
        """Begin the drain, or take part again; from any thread."""
        self._orders.append(begin)

    def obey(self, want: Callable[[bool], None]) -> None:
        """Write down what was asked for, and do it.

        Args:
            want: Called with whether the filters are wanted from now on. Who looks on sees the gateway take part when
                the session has heard of it, not before: it is not online then until the broker has answered.

        Raises:
            JournalFull: No room; it is tried again.
        """
        while self._orders:
            begin = self._orders[0]
            if begin is not self.active:
                now = time.time()
                note = {"since": now} if begin else None
                self._inbox.append(NO_ROWS, held={}, released=(), notes={DRAIN_NOTE: note})
                self.since = now if begin else None
                want(not begin)
                self.step = DrainStep.LEAVING if begin else None
            self._orders.popleft()

    def look(self, facts: DrainFacts, now: float, ask: Callable[[], None]) -> bool:
        """Whether the session is to be ended now; arguments as for `Stillness.look`."""
        if not self.active or self.step is DrainStep.DRAINED:
            return False
        still = not facts.subscribed and self._still.look(facts, now, ask)
        self.step = step_of(facts, still=still)
        return self.step is DrainStep.ENDING and now >= self._again_at

    def due(self) -> float | None:
        """When to look again by the clock."""
        if self.step is DrainStep.TAKING:
            return self._still.due()
        if self.step is DrainStep.TELLING:  # a reader that has died says nothing
            return time.monotonic() + LOOK_S
        return self._again_at if self.step is DrainStep.ENDING else None

    def put_off(self, now: float) -> None:
        """The session could not be ended."""
        self._again_at = now + AGAIN_S

    def done(self) -> None:
        """The broker has no session any more: write it down.

        Raises:
            JournalFull: No room; the session is ended once more, then.
        """
        self._inbox.set_session({})
        note = {"since": self.since, "done": time.time()}
        self._inbox.append(NO_ROWS, held={}, released=(), notes={DRAIN_NOTE: note, SHARE_NOTE: None})
        self.step = DrainStep.DRAINED
