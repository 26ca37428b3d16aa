"""How a session asks its broker for subscriptions, takes the answers, and comes online with the last of them.

Which filters have to be asked for is the business of `towline.mqtt.subscriptions`. Other filters may be wanted while a
session is online (`Want`): then only the difference is asked for, and no connection is made anew.
"""

from __future__ import annotations

from typing import Final

from mqtt5 import DisconnectPacket, SubAckPacket, UnsubAckPacket

from towline.errors import BrokerError, Refused
from towline.mqtt.events import Action, Filter, Online, Send, Want
from towline.mqtt.machine import Machine, SessionState
from towline.mqtt.reasons import ID_IN_USE
from towline.mqtt.refusals import subscription_refused
from towline.mqtt.rules import unsupported
from towline.mqtt.subscriptions import Request, Subscribe, Unsubscribe

__all__ = ["Subscribing"]

#: Packet ids tried for a SUBSCRIBE: a broker that calls more of them in use says so of any.
_MOST_IDS_IN_USE: Final = 16


class Subscribing(Machine):
    """The part of a `towline.mqtt.session.Session` that subscribes."""

    def _ask_all(self, requests: list[Request], actions: list[Action]) -> None:
        assert self.server is not None
        filters = [f for request in requests if isinstance(request, Subscribe) for f in request.filters]
        refused = unsupported(self.server, filters, self.config.where)
        if refused and self._take_back(refused):
            self._come_online(actions)
            return
        if refused:
            self._send(DisconnectPacket(), actions)
            self._close(refused, actions, fatal=True)
            return
        for request in requests:
            if self.state is not SessionState.OFFLINE:
                self._ask(request, actions)
        self._come_online(actions)

    def _ask(self, request: Request, actions: list[Action]) -> None:
        assert self.server is not None
        packet_id = self.outbound.new_id()
        data, limit = self._encode(request.packet(packet_id)), self.server.max_packet_size
        if limit is None or len(data) <= limit:
            self.outbound.reserved.add(packet_id)
            self._requests[packet_id] = request
            actions.append(Send(data))
            return
        what = f"the broker takes packets of {limit:,} bytes, our subscription has {len(data):,} [MQTT-3.2.2-15]"
        self._close(Refused("TL-M16", self.config.where, what, "Subscribe to fewer filters."), actions, fatal=True)

    def _answered(self, packet_id: int) -> Request | None:
        self.outbound.reserved.discard(packet_id)
        return self._requests.pop(packet_id, None)

    def _on_suback(self, packet: SubAckPacket, _now: float, actions: list[Action]) -> None:
        request = self._answered(packet.packet_id)
        if not isinstance(request, Subscribe) or len(request) != len(packet.reason_codes):
            self._violation("sent a SUBACK that answers no SUBSCRIBE of ours [MQTT-3.9.3-1]", 0x82, actions)
            return
        again: list[Filter] = []
        refused: list[Filter] = []
        for wanted, code in zip(request.filters, packet.reason_codes, strict=True):
            if int(code) == ID_IN_USE and self._ids_in_use < _MOST_IDS_IN_USE:
                again.append(wanted)
            elif error := subscription_refused(wanted, int(code), self.config.where):
                if self._take_back(error):
                    refused.append(wanted)
                    continue
                self._send(DisconnectPacket(), actions)
                self._close(error, actions, fatal=int(code) != ID_IN_USE)
                return
        self.subscriptions.granted(Subscribe(tuple(f for f in request.filters if f not in (*again, *refused))))
        self._remember_subscriptions(actions)
        if again:
            self._ids_in_use += 1
            self._ask(Subscribe(tuple(again)), actions)
        self._come_online(actions)

    def _on_unsuback(self, packet: UnsubAckPacket, _now: float, actions: list[Action]) -> None:
        if packet.packet_id not in self._requests:
            return  # nothing of ours depends on it
        request = self._answered(packet.packet_id)
        coded = self.config.protocol == 5
        if not isinstance(request, Unsubscribe) or (coded and len(request) != len(packet.reason_codes)):
            self._violation("sent an UNSUBACK that answers no UNSUBSCRIBE of ours [MQTT-3.11.3-1]", 0x82, actions)
            return
        self.subscriptions.removed(request, packet.reason_codes)
        self._remember_subscriptions(actions)
        self._come_online(actions)

    def _come_online(self, actions: list[Action]) -> None:
        if self.state is not SessionState.SUBSCRIBING or self._requests:
            return
        self.state, changed = SessionState.ONLINE, self._changing
        self._changing = False
        if not changed:
            actions.append(Online(resumed=self.resumed))
        if self._next_filters is not None:
            self._ask_again(actions)

    def _on_want(self, event: Want, now: float, actions: list[Action]) -> None:
        self._next_filters, self._or_back, self.refusal = event.filters, event.or_back, None
        if self._requests:  # each answer is judged by what was wanted when it was asked for
            return
        if self.state is SessionState.ONLINE:
            self._liveness.heard(now)  # the time for the answer begins here
            self._ask_again(actions)
        else:
            self._take_filters()

    def _ask_again(self, actions: list[Action]) -> None:
        """Ask for the difference, without another connection."""
        before = self.config.filters
        self._take_filters()
        self._back = before if self._or_back else None
        self.state, self._changing = SessionState.SUBSCRIBING, True
        requests = self.subscriptions.ask()
        self._remember_subscriptions(actions)
        self._ask_all(requests, actions)

    def _take_back(self, error: BrokerError) -> bool:
        """Want the filters before this change again, where it may be taken back; whether it may."""
        if self._back is None:
            return False
        if self._next_filters is None:  # else others are wanted anyway
            self._next_filters, self._or_back = self._back, False
        self.refusal = self.refusal or error
        return True
