"""Drain of a gateway's MQTT session: ``towline gateway --drain``.

It takes these steps:

    step             until
    UNSUBSCRIBING    UNSUBACK has come for every filter
    RECEIVING        nothing is unacknowledged, nothing has come for the idle time, and a PINGREQ then is answered
    COMMITTING       every consumer has committed the end of the journal, publishers have their receipts, and the
                     outbox is empty
    ENDING_SESSION   a CONNECT with Clean Start is answered: the broker has no session any more

No step is stored: after a kill the same command takes the same steps. If the session was ended already, an empty one is
created and ended. New messages must not be queued before the queued ones are received [MQTT-3.10.4-2, -3], because the
broker discards what an ended session holds. MQTT does not say when a session is empty: a broker answers a PINGREQ while
it has yet to send. So only silence shows it, and the user sets how long (``--idle``).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from towline.errors import ConfigError
from towline.net.client import Client
from towline.net.settings import ClientSettings, ConnectionSettings

if TYPE_CHECKING:
    from towline.gateway.settings import GatewaySettings

#: Shortest idle time after an attempt to end the session, in seconds.
RETRY_IDLE_S: Final = 2.0
#: Longest timeout of the connection that ends a session, in seconds: it delays a stop.
_SESSION_END_TIMEOUT_S: Final = 10.0
#: Settings of a gateway's connection that mean nothing where a session is ended.
_CLIENT_DEFAULTS: Final = frozenset({"will", "receive_maximum"})


class DrainStep(StrEnum):
    """Step of a drain."""

    UNSUBSCRIBING = "unsubscribing"
    RECEIVING = "taking what the broker holds"
    COMMITTING = "waiting for commits"
    ENDING_SESSION = "ending the session"
    DRAINED = "drained"


class Drain:
    """State machine of one gateway's drain, without a clock.

    The session counts as empty when nothing has come for `idle_s` seconds.
    """

    def __init__(self, idle_s: float) -> None:
        self.step = DrainStep.UNSUBSCRIBING
        #: Monotonic time of the next check; None while commits and the broker's answers wake the loop.
        self.next_check_at: float | None = None
        self.idle_s = idle_s
        #: Activity when the idle time began (None: not idle), the time of that, and whether PINGREQ followed.
        self._last_activity: tuple[int, ...] | None = None
        self._idle_since, self._probe_sent = 0.0, False

    def advance(
        self,
        now: float,
        send_probe: Callable[[], None],
        activity: tuple[int, ...] | None,
        *,
        subscribed: bool,
        probes_answered: bool,
        work_pending: bool,
    ) -> bool:
        """Update the step; return True if the session is to be ended now, on no connection.

        If it can't be ended the gateway connects again: that counts as activity, and is followed by another idle time.

        Args:
            now: Seconds on a monotonic clock.
            send_probe: Sends a PINGREQ.
            activity: Changes with whatever comes: connection, messages received (also those not stored), QoS 2 ids that
                are not released. None while offline, or while a message is unacknowledged or not on disk.
            subscribed: A filter is subscribed, or may be.
            probes_answered: Every PINGREQ is answered.
            work_pending: A row is not committed, a receipt is due, or a message is to be sent.
        """
        self.next_check_at = None
        if subscribed:
            self.step = DrainStep.UNSUBSCRIBING
        elif not self._is_session_empty(now, send_probe, activity, probes_answered=probes_answered):
            self.step = DrainStep.RECEIVING
        elif work_pending:
            self.step = DrainStep.COMMITTING
        else:
            self.step = DrainStep.ENDING_SESSION
        return self.step is DrainStep.ENDING_SESSION

    def _is_session_empty(
        self, now: float, send_probe: Callable[[], None], activity: tuple[int, ...] | None, *, probes_answered: bool
    ) -> bool:
        """Return True if the session was idle for `idle_s` seconds and a PINGREQ at the end of that is answered."""
        if activity is None or activity != self._last_activity:
            self._last_activity, self._idle_since, self._probe_sent = activity, now, False
        if activity is None:
            return False
        if now < (idle_end := self._idle_since + self.idle_s):
            self.next_check_at = idle_end
        elif not self._probe_sent:
            self._probe_sent, probes_answered = True, False
            send_probe()
        return self._probe_sent and probes_answered


def check_drainable(settings: GatewaySettings) -> None:
    """Check that a gateway can be drained; raises ConfigError, TL-G57, if it can't."""
    if settings.connection.several_sessions:
        problem = "its brokers may each have a session of its own, and only the one in use would be emptied"
        remedy = "Set brokers_share_sessions where they are one cluster, or drain it at each broker by itself."
        raise ConfigError("TL-G57", settings.name, problem, remedy)


def end_session(settings: GatewaySettings, client_id: str) -> None:
    """End a session at every broker that may have it; one attempt at each.

    A CONNECT with Clean Start discards the present session [MQTT-3.1.2-4], and CONNACK confirms it. With expiry 0 (MQTT
    3.x: CleanSession 1) the new session ends with the connection.

    Args:
        settings: Brokers and settings of the connection.
        client_id: Client id of the session; no client may be connected with it.

    Raises:
        BrokerError: A broker did not confirm the end.
        ConfigError: A broker can't be reached as configured.
    """
    values = {name: getattr(settings, name) for name in ConnectionSettings.model_fields.keys() - _CLIENT_DEFAULTS}
    values["connect_timeout_s"] = min(settings.connect_timeout_s, _SESSION_END_TIMEOUT_S)
    client_settings = ClientSettings(**values, session_expiry_s=0)
    brokers = settings.brokers
    for group in [(broker,) for broker in brokers] if settings.connection.several_sessions else [brokers]:
        Client(group, client_id=client_id, settings=client_settings).close()
