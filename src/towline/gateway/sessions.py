"""The session of a gateway that runs: other filters for it, and its end.

Where other filters are wanted, the broker is asked for the difference only (`towline.mqtt.events.Want`); a filter that
it refuses takes the whole change back. A gateway leaves its line in one pass, ``towline gateway --drain``:

    step         until
    LEAVING      UNSUBACK has come for every filter
    TAKING       nothing is unacknowledged, and nothing has come for a while, over which every PINGREQ is answered
    COMMITTING   every consumer has committed the end of the journal, publishers have their receipts, and the outbox
                 has nothing left to send
    ENDING       a CONNECT with Clean Start is answered: the broker has no session any more

Nothing of it is written down: after a kill the same command takes the same steps, and where the session was ended
already an empty one is made, and ended. Nothing new may be queued before what is queued can be taken out
[MQTT-3.10.4-2, -3], and what a session holds that is ended the broker gives to no other. Nor does MQTT say when a
session is empty, a broker answers a PINGREQ while it has yet to send: only silence tells, and how much of it is enough
is for the user to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final

from towline.errors import ConfigError, Unreachable
from towline.mqtt.events import Event, Filter, Want
from towline.mqtt.session import Session
from towline.net.driver import Hooks, SessionDriver

if TYPE_CHECKING:
    from towline.gateway.settings import GatewaySettings
    from towline.net.settings import BrokerConnection

#: So many PINGREQs are answered over that time.
_PROBES: Final = 4
#: Pause before another try to end the session, in seconds.
_AGAIN_S: Final = 2.0
#: Patience in seconds with a broker whose session is to be ended, at least.
_ENDING_S: Final = 10.0


class ChangeState(StrEnum):
    """How far a change of filters is."""

    #: Not all of it is answered by the broker; also while there is no connection.
    ASKED = "asked"
    #: The session is subscribed to exactly these filters.
    GRANTED = "granted"
    #: The broker does not want one of them, and the filters are those before.
    REFUSED = "refused"


class WantedFilters:
    """The filters that a gateway wants, at first those of its settings; it belongs to the pump's thread."""

    def __init__(self, settings: GatewaySettings, handle: Callable[[Event], None]) -> None:
        self._settings = settings
        #: Gives the session an event.
        self._handle = handle
        #: The change that was asked for last: its name, and its filters.
        self._change = ("", settings.filters)
        #: Those of the next session.
        self._wanted = settings.filters

    def of(self, former: Session | None) -> tuple[Filter, ...]:
        """What a session that follows another is to be subscribed to: what was refused is wanted no more."""
        if former is not None and former.refusal is not None:
            self._wanted = former.config.filters
        return self._wanted

    def ask(self, change: str, filters: Sequence[Filter], session: Session) -> dict[str, str]:
        """Want these filters; with the same name and filters it is asked how far the change is.

        Who asks comes with the same words until it is told, so that a gateway that was killed meanwhile is asked anew.

        Returns:
            ``state``, a `ChangeState`, and ``text``: why the broker refused.
        """
        wanted = self._settings.model_copy(update={"subscriptions": tuple(filters)}).filters
        if (change, wanted) != self._change:
            self._change, self._wanted = (change, wanted), wanted
            self._handle(Want(wanted, or_back=True))
        if not session.subscribed:
            return {"state": ChangeState.ASKED.value, "text": ""}
        if session.config.filters == wanted:
            return {"state": ChangeState.GRANTED.value, "text": ""}
        return {"state": ChangeState.REFUSED.value, "text": str(session.refusal or "a filter was refused")}


class DrainStep(StrEnum):
    """Where a drain stands."""

    LEAVING = "unsubscribing"
    TAKING = "taking what the broker holds"
    COMMITTING = "waiting for commits"
    ENDING = "ending the session"
    DRAINED = "drained"


class Drain:
    """The drain of one gateway: which step it stands at, and when its session counts as empty. Pure: no clock.

    Nothing may come for `idle_s` seconds before it does.
    """

    def __init__(self, idle_s: float) -> None:
        self.step = DrainStep.LEAVING
        #: When to look again by the clock; None where commits and answers of the broker wake.
        self.due: float | None = None
        self._idle_s = idle_s
        #: All that had come when the silence began, None for no silence; when that was; and PINGREQs since then.
        self._here: tuple[int, ...] | None = None
        self._since, self._probes = 0.0, 0
        #: When the end of the session is tried again.
        self._again_at = 0.0

    def look(
        self,
        now: float,
        probe: Callable[[], None],
        came: tuple[int, ...] | None,
        *,
        subscribed: bool,
        probed: bool,
        owing: bool,
    ) -> bool:
        """See how far it is; whether the session is to be ended now.

        Args:
            now: Seconds on a clock that never goes back.
            probe: Sends a PINGREQ.
            came: Changes with all that comes: connection, messages received (those too that were not stored), QoS 2
                ids that are not released. None while it is not online, or a message is unacknowledged or not on disk.
            subscribed: A filter is subscribed, or may be.
            probed: Every PINGREQ is answered.
            owing: A row is to be committed, a publisher is to get a receipt, or a message is to be sent.
        """
        self.due = None
        if subscribed:
            self.step = DrainStep.LEAVING
        elif not self._is_empty(now, probe, came, probed=probed):
            self.step = DrainStep.TAKING
        elif owing:
            self.step = DrainStep.COMMITTING
        else:
            self.step, self.due = DrainStep.ENDING, self._again_at
        return self.step is DrainStep.ENDING and now >= self._again_at

    def _is_empty(self, now: float, probe: Callable[[], None], came: tuple[int, ...] | None, *, probed: bool) -> bool:
        """Whether the broker has no more to send: nothing has come for a while, and the connection is alive."""
        if came is None or came != self._here:
            self._here, self._since, self._probes = came, now, 0
        if came is None:
            return False
        if self._probes < _PROBES and now >= self._since + self._idle_s * self._probes / _PROBES:
            self._probes, probed = self._probes + 1, False
            probe()
        at = self._since + self._idle_s * self._probes / _PROBES
        self.due = at if at > now else None
        return probed and self._probes == _PROBES and now >= at

    def put_off(self, now: float) -> None:
        """The session could not be ended."""
        self._again_at = self.due = now + _AGAIN_S


def drainable(settings: GatewaySettings) -> None:
    """See that a gateway can be drained; raises ConfigError, TL-G57, where it can't."""
    if settings.connection.several_sessions:
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
    session = connection.settings.session(
        client_id, connection.session.where, will=None, session_expiry_s=0, clean_start=True, durable=False
    )
    ending = replace(connection, session=session)
    patience_s = max(_ENDING_S, connection.settings.connect_timeout_s)
    places = [(broker,) for broker in connection.brokers] if connection.several_sessions else [connection.brokers]
    for brokers in places:
        given_up = partial(lambda end: cancelled() or time.monotonic() >= end, time.monotonic() + patience_s)
        hooks = Hooks(  # nothing is received, and nothing is to be remembered
            new_session=lambda level: Session(ending.session_at(level)), perform=lambda _: None, cancelled=given_up
        )
        driver = SessionDriver(replace(ending, brokers=brokers), hooks)
        try:
            while not driver.online:
                if driver.fatal is not None:
                    raise driver.fatal
                if given_up():
                    what = "the broker did not let the session be ended in time"
                    raise driver.error or Unreachable("TL-M03", str(driver.endpoint), what, "Trying again.")
                driver.turn(time.monotonic() + 0.1)
            driver.leave()
        finally:
            driver.dispose()
