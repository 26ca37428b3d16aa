"""What a gateway's settings say to its MQTT session, and other filters for one that runs.

Where other filters are wanted, the connection, its session and what the journal holds stay as they are: the broker is
asked for the difference only (`towline.mqtt.events.Want`). A filter that it refuses takes the whole change back.
Whoever asked comes with the same words again until it is told how that went, so that a gateway that was killed
meanwhile is asked anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from towline.errors import ConfigError
from towline.gateway.settings import GatewaySettings
from towline.guarantee import AckAfter, Guarantee, policy
from towline.mqtt.events import Event, Filter, Want
from towline.mqtt.filters import overlapping
from towline.net.settings import BrokerConnection

if TYPE_CHECKING:
    from towline.mqtt.session import Session


def connection_of(settings: GatewaySettings) -> BrokerConnection:
    """The gateway's connection and its session; secrets are read at each connection."""
    delivers = settings.outbox is not None
    session = settings.session(
        settings.mqtt_client_id,
        settings.name,
        settings.filters,
        session_expiry_s=settings.session_expiry_s,
        receive_maximum=settings.window,
        unknown_session=settings.unknown_session or ("adopt" if settings.acks is AckAfter.KAFKA else "refuse"),
        durable=policy(settings.guarantee).persistent,
        durable_ids=delivers,
        exactly_once=delivers and settings.guarantee is Guarantee.EXACTLY_ONCE,
    )
    return BrokerConnection(
        settings=settings,
        session=session,
        brokers=settings.brokers,
        linger_s=settings.linger_ms / 1000,
        linger_after_silence_s=settings.linger_after_silence_ms / 1000 if settings.linger_ms else 0.0,
    )


class ChangeState(StrEnum):
    """How far a change of filters is."""

    #: Not all of it is answered by the broker; also while there is no connection.
    ASKED = "asked"
    #: The session is subscribed to exactly these filters.
    GRANTED = "granted"
    #: The broker does not want one of them, and the filters are those before.
    REFUSED = "refused"


def passing_problem(settings: GatewaySettings, former: Iterable[str], where: str) -> ConfigError | None:
    """Why a session can't pass from its filters to those of the settings: TL-C170; None where it can.

    What may be neither lost nor doubled can't pass from a filter that goes to one that takes the same topics.

    Args:
        settings: The gateway's.
        former: Filters that the session has.
        where: Begins the error.
    """
    if settings.guarantee is not Guarantee.EXACTLY_ONCE:
        return None
    former, wanted = list(former), {one.pattern for one in settings.subscriptions}
    pairs = ((one, gone) for one in settings.single if one not in former for gone in former if gone not in wanted)
    comes, goes = next((pair for pair in pairs if any(overlapping(pair))), ("", ""))
    what = (
        f'"{comes}" takes topics of "{goes}", which the session has and which goes: while both are subscribed a broker '
        "may send a message for each [MQTT-3.3.4-2], while neither is it keeps none, and exactly_once allows neither"
    )
    do = "Take filters that share no topic; or pass in two steps, first without the former: what comes between is lost."
    return ConfigError("TL-C170", where, what, do) if goes else None


def check_session(settings: GatewaySettings, stored: Mapping[str, Any]) -> None:
    """See that the broker's session, as a journal has it, can pass into these filters; raises ConfigError TL-C170."""
    ours = stored.get("client_id") == settings.mqtt_client_id
    if ours and (problem := passing_problem(settings, stored["subscriptions"], settings.name)):
        raise problem


class WantedFilters:
    """The filters that a gateway wants; it belongs to the pump's thread.

    Args:
        settings: The gateway's, with the filters that it begins with.
        handle: Gives the session an event.
        expect: Counts messages with less than this QoS from now on.
    """

    def __init__(
        self, settings: GatewaySettings, handle: Callable[[Event], None], expect: Callable[[int], None]
    ) -> None:
        self._settings = settings
        self._handle = handle
        self._expect = expect
        #: The change that was asked for last: its name, and its filters.
        self._change = ("", settings.filters)
        self._state, self._text = ChangeState.GRANTED, ""

    @property
    def wanted(self) -> tuple[Filter, ...]:
        """What a session is to be subscribed to."""
        return self._settings.filters

    def ask(self, change: str, filters: Sequence[Filter]) -> dict[str, str]:
        """Want these filters; with the same name and filters it is asked how far the change is.

        Returns:
            ``state``, a `ChangeState`, and ``text``: why the broker refused.
        """
        wanted = self._with(filters)
        if (change, wanted.filters) != self._change:
            self._change, self._state, self._text = (change, wanted.filters), ChangeState.ASKED, ""
            self._want(wanted)
            self._handle(Want(wanted.filters, or_back=True))
        return {"state": self._state.value, "text": self._text}

    def answered(self, session: Session) -> None:
        """A session is online, or has all answers to a change: see what became of it."""
        if not session.subscribed:
            return
        if session.refusal is not None:
            self._state, self._text = ChangeState.REFUSED, str(session.refusal)
            self._want(self._with(session.config.filters))
        elif session.config.filters == self.wanted:
            self._state = ChangeState.GRANTED

    def _with(self, filters: Sequence[Filter]) -> GatewaySettings:
        return self._settings.model_copy(update={"subscriptions": tuple(filters)})

    def _want(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._expect(settings.least_qos)
