"""A gateway leaves its line in one pass, ``towline gateway --drain``: takes in what its session holds, and ends that.

    step         until
    LEAVING      UNSUBACK has come for every filter
    TAKING       nothing is unacknowledged, and nothing has come for a while, over which every PINGREQ is answered
    COMMITTING   every consumer has committed the end of the journal, publishers have their receipts, and the outbox
                 has nothing left to send
    ENDING       a CONNECT with Clean Start is answered: the broker has no session any more

Nothing of it is written down. After a kill the same command takes the same steps, and loses nothing: what was not
acknowledged comes again, and where the session was ended already an empty one is made, and ended. The order is what
keeps the promise: nothing new may be queued before what is queued can be taken out [MQTT-3.10.4-2, -3], and a session
that is ended takes with it what it holds. There is no way to hand a message back: what the broker has queued for this
client it gives to no other. Nor does MQTT say when a session is empty: a broker answers a PINGREQ while it has yet to
send. So only silence tells, and how much of it is enough is for the user to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import structlog

from towline.errors import ConfigError, Unreachable
from towline.mqtt.events import Probe
from towline.mqtt.session import Session, SessionState
from towline.net.driver import Hooks, SessionDriver

if TYPE_CHECKING:
    from towline.delivery.inbound import Uplink
    from towline.gateway.settings import GatewaySettings
    from towline.journal import Journal
    from towline.net.settings import BrokerConnection

__all__ = ["Drain", "DrainFacts", "DrainStep", "Stillness", "drainable", "end_session", "step_of"]

#: So many PINGREQs are answered over that time.
_PROBES: Final = 4
#: Pause before another try to end the session, in seconds.
_AGAIN_S: Final = 2.0
#: Patience in seconds with a broker whose session is to be ended.
_ENDING_S: Final = 10.0


class DrainStep(StrEnum):
    """Where a drain stands."""

    LEAVING = "unsubscribing"
    TAKING = "taking what the broker holds"
    COMMITTING = "waiting for commits"
    ENDING = "ending the session"
    DRAINED = "drained"


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
        owing: A publisher is to get a receipt, or a message is to be sent.
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


class Stillness:
    """Whether the broker has nothing more to send: nothing has come for a while, and the connection is alive.

    Args:
        idle_s: How long nothing may come, in seconds.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        #: BrokerConnection, messages received and handshakes open when the silence began; None for no silence.
        self._here: tuple[int, int, int] | None = None
        self._since = self._looked = 0.0
        #: PINGREQs since then.
        self._probes = 0

    def look(self, facts: DrainFacts, now: float, probe: Callable[[], None]) -> bool:
        """Whether it is still.

        Args:
            facts: As they are.
            now: Seconds on a clock that never goes back.
            probe: Sends a PINGREQ.
        """
        self._looked = now
        if not facts.online or facts.open:
            self._here = None
            return False
        here = (facts.connection, facts.received, facts.handshakes)
        if self._here != here:
            self._here, self._since, self._probes = here, now, 0
        if self._probes < _PROBES:
            if now >= self._next_probe():
                self._probes += 1
                probe()
            return False
        return facts.probed and now >= self._since + self._idle_s

    def _next_probe(self) -> float:
        return self._since + self._idle_s * self._probes / _PROBES

    def due(self) -> float | None:
        """When to look again by the clock; None for not by the clock, as where the last PINGREQ is not answered."""
        at = self._next_probe()  # behind the last: the end of the silence
        return at if self._here is not None and at > self._looked else None


def step_of(facts: DrainFacts, *, still: bool) -> DrainStep:
    """Which step a drain that is not done stands at."""
    if facts.subscribed:
        return DrainStep.LEAVING
    if not still:
        return DrainStep.TAKING
    return DrainStep.COMMITTING if facts.uncommitted or facts.owing else DrainStep.ENDING


class Drain:
    """The drain of one gateway; it belongs to the pump's thread, but for `step`.

    Args:
        where: The gateway.
        inbox: Its journal.
        idle_s: How long nothing may come before its session counts as empty, in seconds.

    Attributes:
        step: How far it is.
    """

    def __init__(self, where: str, inbox: Journal, idle_s: float) -> None:
        self._inbox = inbox
        self._log = structlog.get_logger("towline.gateway").bind(line=where)
        self.step = DrainStep.LEAVING
        self._still = Stillness(idle_s)
        self._again_at = 0.0

    def ready(self, driver: SessionDriver, uplink: Uplink, *, owing: bool) -> bool:
        """Whether the session is to be ended now.

        Args:
            driver: Of the gateway's session.
            uplink: Of the gateway.
            owing: A publisher is to get a receipt, or a message is to be sent.
        """
        facts, now = self._facts(driver, uplink, owing=owing), time.monotonic()
        still = not facts.subscribed and self._still.look(facts, now, lambda: driver.handle(Probe()))
        step = step_of(facts, still=still)
        if step is not self.step:
            self.step = step
            self._log.info("drain", step=step.value, waiting=facts.uncommitted, consumers=[*self._inbox.consumers])
        return step is DrainStep.ENDING and now >= self._again_at

    def _facts(self, driver: SessionDriver, uplink: Uplink, *, owing: bool) -> DrainFacts:
        session, inbox = driver.session, self._inbox
        return DrainFacts(
            online=driver.online and session.state is SessionState.ONLINE,
            subscribed=bool(session.subscriptions.known),
            open=session.inbound.unacknowledged + uplink.full,
            handshakes=len(session.inbound.held),
            received=uplink.received,
            connection=driver.count,
            probed=session.probed,
            uncommitted=inbox.end - inbox.committed,
            owing=owing,
        )

    def due(self) -> float | None:
        """When to look again by the clock; commits and answers of the broker wake by themselves."""
        times = {DrainStep.TAKING: self._still.due(), DrainStep.ENDING: self._again_at}
        return times.get(self.step)

    def put_off(self) -> None:
        """The session could not be ended."""
        self._again_at = time.monotonic() + _AGAIN_S

    def done(self) -> None:
        """The broker has no session any more."""
        self.step = DrainStep.DRAINED
        self._log.info("drained")


def drainable(settings: GatewaySettings) -> None:
    """See that a gateway can be drained.

    Raises:
        ConfigError: TL-G57, it can't.
    """
    if settings.several_sessions:
        what = "its brokers may each have a session of its own, and only the one in use would be emptied"
        do = "Set brokers_share_sessions where they are one cluster, or drain it at each broker by itself."
        raise ConfigError("TL-G57", settings.name, what, do)


def end_session(connection: BrokerConnection, client_id: str, cancelled: Callable[[], bool]) -> None:
    """End a session at every broker where one may be.

    A CONNECT with Clean Start discards the session that is there [MQTT-3.1.2-4], and CONNACK says that it is done; with
    expiry 0 (MQTT 3.x: CleanSession 1) the one that it makes ends with the connection.

    Args:
        connection: How to get there.
        client_id: Whose session; nobody may be connected with it.
        cancelled: Whether to give it up.

    Raises:
        BrokerError: It is not known to be ended.
        ConfigError: A broker can't be reached as configured.
    """
    session = replace(
        connection.session,
        client_id=client_id,
        filters=(),
        will=None,
        session_expiry_s=0,
        clean_start=True,
        durable=False,
        durable_ids=False,
        exactly_once=False,
    )
    places = [(broker,) for broker in connection.brokers] if connection.several_sessions else [connection.brokers]
    for brokers in places:
        _end(replace(connection, session=session, brokers=brokers), cancelled)


def _end(connection: BrokerConnection, cancelled: Callable[[], bool]) -> None:
    def fresh(level: int) -> Session:
        return Session(connection.session_at(level))

    deadline = time.monotonic() + _ENDING_S
    driver = SessionDriver(connection, Hooks(new_session=fresh, perform=_nothing))
    try:
        while not driver.online:
            if driver.fatal is not None:
                raise driver.fatal
            if cancelled() or time.monotonic() >= deadline:
                what = "the broker did not let the session be ended in time"
                raise driver.error or Unreachable("TL-M03", str(driver.endpoint), what, "Trying again.")
            driver.turn(time.monotonic() + 0.1)
        driver.leave()
    finally:
        driver.dispose()


def _nothing(_action: object) -> None:
    """Nothing is received, and nothing is to be remembered."""
