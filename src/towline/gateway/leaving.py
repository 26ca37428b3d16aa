"""How a gateway leaves its line, and ends the session of a client id at its broker.

A CONNECT with Clean Start discards the session that is there [MQTT-3.1.2-4], and CONNACK says that it is done; with
expiry 0 (MQTT 3.x: CleanSession 1) the one that it makes ends with the connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from towline.delivery.inbound import Uplink
from towline.errors import BrokerError, ConfigError, JournalFull, TowlineError, Unreachable
from towline.gateway.clients import abandoned, end_client, siblings
from towline.gateway.draining import Drain, DrainFacts
from towline.gateway.settings import GatewaySettings
from towline.journal import Journal
from towline.mqtt.events import Filter, Probe, Want
from towline.mqtt.session import Session, SessionState
from towline.net.driver import Hooks, SessionDriver
from towline.net.options import ConnectionOptions

__all__ = ["Departure", "end_session"]

#: Patience in seconds with the goodbye.
_GOODBYE: Final = 2.0
#: And with a broker whose session is to be ended.
_ENDING: Final = 10.0


class Departure:
    """A gateway's way out of its line; it belongs to the pump's thread, but for what `Drain` says.

    Args:
        settings: The gateway's.
        options: Its way to the brokers.
        inbox: Its journal.
        stopping: Whether the gateway is told to stop.
        note: Shows an error.
        wanted: The filters of a gateway that takes part.
        unheard: Whether a reader has yet to write down that the gateway is drained.
        tell: Called when what `Drain.nothing_comes` says has changed.

    Attributes:
        drain: How far the drain is.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        options: ConnectionOptions,
        inbox: Journal,
        stopping: Callable[[], bool],
        note: Callable[[TowlineError], None],
        wanted: Callable[[], tuple[Filter, ...]],
        unheard: Callable[[], bool] = lambda: False,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._unheard = unheard
        self._tell = tell
        self._options = options
        self._wanted = wanted
        self._inbox = inbox
        self._stopping = stopping
        self._note = note
        self._log = structlog.get_logger("towline.gateway").bind(line=settings.name)
        self.drain = Drain(inbox)
        #: A client id whose session is to be ended at the broker, because its owner has given it up; "" for none.
        self._given_up = _given_up(settings, inbox)

    def turn(self, driver: SessionDriver, uplink: Uplink, *, owing: bool) -> bool:
        """Go on as far as it can be now; whether the gateway has left.

        Args:
            driver: Of the gateway's session.
            uplink: Of the gateway.
            owing: A publisher is to get a receipt.
        """
        if self._given_up and driver.online:
            self._end_given_up()
        before = self.drain.nothing_comes
        left = self._drained(driver, uplink, owing=owing)
        if self.drain.nothing_comes is not before:
            self._tell()
        return left

    def _drained(self, driver: SessionDriver, uplink: Uplink, *, owing: bool) -> bool:
        def want(takes_part: bool) -> None:  # noqa: FBT001 - as `Drain.obey` says it
            self._log.info("takes part again" if takes_part else "draining", client_id=self._settings.mqtt_client_id)
            driver.handle(Want(self._wanted() if takes_part else ()))

        try:
            self.drain.obey(want)
        except JournalFull as error:
            self._note(error)
            return False
        if not self.drain.active:
            return False
        facts, now = self._facts(driver, uplink, owing=owing), time.monotonic()
        return self.drain.look(facts, now, lambda: driver.handle(Probe())) and self._left(driver, now)

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
            unheard=self._unheard(),
        )

    def _left(self, driver: SessionDriver, now: float) -> bool:
        """Nothing is left, here or at the broker: end the session; whether that is done."""
        client_id = self._settings.mqtt_client_id
        driver.leave(_GOODBYE)
        try:
            end_session(self._options, client_id, _ENDING, self._stopping)
            self.drain.done()
            end_client(self._settings.state_dir, client_id, "drained")
        except (BrokerError, ConfigError, JournalFull) as error:
            self.drain.put_off(now)
            self._note(error)
            self._log.warning("the session is not ended yet", code=error.code, reason=str(error))
            return False
        except OSError as error:  # the journal has it
            self._log.warning("sessions.json can't be written", reason=str(error))
        self._log.info("drained", client_id=client_id)
        return True

    def _end_given_up(self) -> None:
        """End the session of a client id that was given up, so that it collects nothing more; tried once a start."""
        client_id, self._given_up = self._given_up, ""
        try:
            end_session(self._options, client_id, _ENDING, self._stopping)
            for directory in _directories(self._settings):
                end_client(directory, client_id, "discarded")
        except (BrokerError, ConfigError) as error:
            what = f'the session of client id "{client_id}", which was given up, is not ended: {error}'
            self._log.warning(what, code="TL-G59")
        except OSError as error:
            self._log.warning("sessions.json can't be written", reason=str(error))
        else:
            self._log.info("a session that was given up is ended", client_id=client_id)


def _given_up(settings: GatewaySettings, inbox: Journal) -> str:
    """The client id that its owner has given up, if a session of it may be there and is this line's."""
    client_id, share = settings.abandon_session, settings.share
    others = [share.id_of(name) for name in share.members] if share else []
    if not client_id or client_id in (settings.mqtt_client_id, *others):
        return ""
    known = inbox.session.get("client_id") == client_id or abandoned(settings.state_dir, client_id)
    of_line = share is not None and f"{client_id}-".startswith(f"{share.client_id}-")
    return client_id if known or of_line else ""


def _directories(settings: GatewaySettings) -> tuple[Path, ...]:
    """Where it may be written down that a session of the line is there."""
    own = settings.state_dir
    line = () if settings.share is None else (own.parent.parent,)
    return (own, *siblings(own), *line)


def end_session(
    options: ConnectionOptions, client_id: str, patience_s: float, cancelled: Callable[[], bool] = lambda: False
) -> None:
    """End a session at every broker where one may be.

    Args:
        options: How to get there.
        client_id: Whose session; nobody may be connected with it.
        patience_s: Seconds for each broker.
        cancelled: Whether to give it up.

    Raises:
        BrokerError: It is not known to be ended.
        ConfigError: A broker can't be reached as configured.
    """
    session = replace(
        options.session,
        client_id=client_id,
        filters=(),
        will=None,
        session_expiry_s=0,
        clean_start=True,
        durable=False,
        durable_ids=False,
        exactly_once=False,
    )
    places = [(broker,) for broker in options.brokers] if options.several_sessions else [options.brokers]
    for brokers in places:
        _end(replace(options, session=session, brokers=brokers), patience_s, cancelled)


def _end(options: ConnectionOptions, patience_s: float, cancelled: Callable[[], bool]) -> None:
    def fresh(level: int) -> Session:
        return Session(options.session_at(level))

    deadline = time.monotonic() + patience_s
    driver = SessionDriver(options, Hooks(new_session=fresh, perform=_nothing))
    try:
        while not driver.online:
            if driver.fatal is not None:
                raise driver.fatal
            if cancelled() or time.monotonic() >= deadline:
                what = "the broker did not let the session be ended in time"
                raise driver.error or Unreachable("TL-M03", str(driver.endpoint), what, "Trying again.")
            driver.turn(0.1)
        driver.leave(_GOODBYE)
    finally:
        driver.dispose()


def _nothing(_action: object) -> None:
    """Nothing is received, and nothing is to be remembered."""
