"""Other filters for a gateway that runs: wanted by a call, asked of the broker, granted or taken back.

The connection, its session and what the journal holds stay as they are: the broker is asked for the difference only
(`towline.mqtt.events.Want`). A filter that it refuses takes the whole change back. Whoever asked comes with the same
words again until it is told how that went, so that a gateway that was killed meanwhile is asked anew.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter, ValidationError

from towline.errors import ConfigError
from towline.gateway.request import bad_request
from towline.gateway.sessions import filters_of, inbound_config
from towline.gateway.settings import SubscribedFilter
from towline.mqtt.events import Filter, Want

if TYPE_CHECKING:
    from towline.delivery.inbound import Uplink
    from towline.gateway.settings import GatewaySettings
    from towline.net.driver import SessionDriver

__all__ = ["NEITHER", "ChangeState", "WantedFilters", "check_session"]

#: Why filters with topics in common can't pass into each other.
NEITHER: Final = (
    "while both are subscribed a broker may send a message for each [MQTT-3.3.4-2], while neither is it keeps none, "
    "and guarantee exactly_once allows neither"
)
_FILTERS: Final = TypeAdapter(tuple[SubscribedFilter, ...])


class ChangeState(StrEnum):
    """How far a change of filters is."""

    #: Not all of it is answered by the broker; also while there is no connection.
    ASKED = "asked"
    #: The session is subscribed to exactly these filters.
    GRANTED = "granted"
    #: The broker does not want one of them, and the filters are those before.
    REFUSED = "refused"


def check_session(settings: GatewaySettings, stored: Mapping[str, Any]) -> None:
    """See that a gateway can begin with its filters, where the broker's session has others.

    Args:
        settings: The gateway's.
        stored: The session as its journal has it; empty for none.

    Raises:
        ConfigError: TL-C182, a filter that comes takes topics of one that goes, which the guarantee does not bear.
    """
    ours = bool(stored) and stored["client_id"] == settings.mqtt_client_id
    if ours and (pair := settings.can_not_pass(stored["subscriptions"])):
        what = f'the session at the broker has "{pair[1]}", and "{pair[0]}" takes topics of it: {NEITHER}'
        do = (
            f"Take filters that share no topic; or start once without the former, which costs what comes between; or "
            f"begin another session with another client_id and abandon_session = {json.dumps(stored['client_id'])}."
        )
        raise ConfigError("TL-C182", settings.name, what, do)


class WantedFilters:
    """The filters that a gateway wants; it belongs to the pump's thread, but for `ask`.

    Args:
        settings: The gateway's, with the filters that it begins with.
        wake: Lets the pump look around.

    Attributes:
        wanted: What a session is to be subscribed to.
    """

    def __init__(self, settings: GatewaySettings, wake: Callable[[], None]) -> None:
        self._settings = settings
        self._wake = wake
        self.wanted: tuple[Filter, ...] = filters_of(settings)
        self._lock = threading.Lock()
        #: The change that was asked for last, and its name; not yet taken where `_fresh`.
        self._change, self._next, self._fresh = "", self.wanted, False
        self._state, self._text = ChangeState.GRANTED, ""

    def ask(self, change: str, filters: list[Any]) -> dict[str, str]:
        """Want these filters; from any thread.

        Args:
            change: Names the change: with the same name and filters it is asked how far it is.
            filters: As the gateway's settings have them.

        Returns:
            ``state``, a `ChangeState`, and ``text``: why the broker refused.

        Raises:
            GatewayError: TL-G08, these are no filters.
        """
        try:
            named = filters_of(self._settings.model_copy(update={"subscriptions": _FILTERS.validate_python(filters)}))
        except ValidationError as error:
            raise bad_request(self._settings.name, '"filters" has to be a list of topic filters') from error
        with self._lock:
            if (change, named) != (self._change, self._next):
                self._change, self._next, self._fresh = change, named, True
                self._state, self._text = ChangeState.ASKED, ""
                self._wake()
            return {"state": self._state.value, "text": self._text}

    def turn(self, driver: SessionDriver, uplink: Uplink) -> None:
        """Have the session ask for what was asked for, and see how far it is."""
        with self._lock:
            fresh, self._fresh = self._fresh, False
            if self._state is not ChangeState.ASKED:
                return
            if fresh:
                self.wanted = self._next
        if fresh:
            uplink.expect(self._least_qos())
            driver.handle(Want(self.wanted, or_back=True))
        session = driver.session
        with self._lock:
            if self._fresh:
                return
            if session.refusal is not None and session.subscribed:
                self.wanted = session.config.filters
                self._state, self._text = ChangeState.REFUSED, str(session.refusal)
                uplink.expect(self._least_qos())
            elif session.subscribed and session.config.filters == self.wanted:
                self._state = ChangeState.GRANTED

    def _least_qos(self) -> int:
        return inbound_config(self._settings.model_copy(update={"subscriptions": self.wanted})).least_qos
