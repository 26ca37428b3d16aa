"""What the broker's session is subscribed to, as far as we know, and what to ask for until it is what is wanted.

A filter taken for subscribed that is not means silence for ever; one taken for gone that is not means messages nobody
wants. So the durable record is never surer than we are: a filter that a packet may change is unsure before the packet
leaves, and only the answer makes it sure again. What is unsure is asked for anew with the next connection, which does
no harm where it was done already [MQTT-3.8.4-3], [MQTT-3.10.4-5], but for the retained messages: with Retain Handling 0
they would all come a second time. So a filter that we have asked for before says 1, "only for a new subscription": a
session that the broker has lost still gets them. MQTT 3.x can't say that.

`_AFTER` is the table of it. Nothing here sends, stores or counts packet ids: that is `towline.mqtt.session`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, TypeAlias

from mqtt5 import SubscribePacket, TopicFilter, UnsubAckReasonCode, UnsubscribePacket

from towline.mqtt.events import Filter

#: In place of `Filter.terms`: the filter may be there or not, with whatever terms. Equal to those of no filter.
UNSURE: Final = -1


class SubscriptionStep(Enum):
    """What happens to subscriptions: the first six to all that are known, the others to those of one packet."""

    CONNECT = "CONNECT is about to leave"
    REFUSED = "CONNACK says no"
    RESUMED = "CONNACK says Session Present"
    PERHAPS_RESUMED = "CONNACK of MQTT 3.1, which can't say"
    ELSEWHERE = "CONNACK of what may be another server says Session Present; or another client had our session"
    NEW = "CONNACK says that there was no session"
    SUBSCRIBE = "SUBSCRIBE is about to leave"
    GRANTED = "SUBACK grants it"
    UNSUBSCRIBE = "UNSUBSCRIBE is about to leave"
    REMOVED = "UNSUBACK says that it is gone"


class _Known(Enum):
    UNSURE = "unsure"
    AS_BEFORE = "as it was before this CONNECT"
    AS_WANTED = "there, with the terms wanted"
    GONE = "not there"


_AFTER: Final[dict[SubscriptionStep, _Known]] = {
    # It may find our session lost and make an empty one. Unless we live to see its CONNACK, the next one says Session
    # Present of that.
    SubscriptionStep.CONNECT: _Known.UNSURE,
    SubscriptionStep.REFUSED: _Known.AS_BEFORE,  # no session was touched
    SubscriptionStep.RESUMED: _Known.AS_BEFORE,
    SubscriptionStep.PERHAPS_RESUMED: _Known.UNSURE,
    SubscriptionStep.ELSEWHERE: _Known.UNSURE,  # it has a session of ours, with what we wanted when we were there last
    SubscriptionStep.NEW: _Known.GONE,
    # Either may have been carried out though its answer never comes.
    SubscriptionStep.SUBSCRIBE: _Known.UNSURE,
    SubscriptionStep.UNSUBSCRIBE: _Known.UNSURE,
    SubscriptionStep.GRANTED: _Known.AS_WANTED,
    SubscriptionStep.REMOVED: _Known.GONE,
}


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Filters for one SUBSCRIBE: all with the same identifier, of which it has one [MQTT 5 section 3.8.2.1.2]."""

    filters: tuple[Filter, ...]

    def __len__(self) -> int:
        return len(self.filters)

    def packet(self, packet_id: int) -> SubscribePacket:
        """The request as the codec takes it."""
        asked: list[TopicFilter] = [f.packet() for f in self.filters]
        return SubscribePacket(packet_id, asked, subscription_id=self.filters[0].identifier)


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Topic filters for one UNSUBSCRIBE."""

    patterns: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.patterns)

    def packet(self, packet_id: int) -> UnsubscribePacket:
        """The request as the codec takes it."""
        return UnsubscribePacket(packet_id, list(self.patterns))


Request: TypeAlias = Subscribe | Unsubscribe


class Subscriptions:
    """The filters of one session of the broker, across connections.

    Args:
        wanted: What it is to be subscribed to.
        known: What the durable record says of it.
    """

    def __init__(self, wanted: Iterable[Filter], known: Mapping[str, int]) -> None:
        self._wanted = {f.pattern: f for f in wanted}
        #: Topic filter → `Filter.terms` or `UNSURE`. To be durable before anything leaves that is decided after it;
        #: replaced with each step and never changed, so that a record can hold it.
        self.known = dict(known)
        self._before = self.known

    def want(self, wanted: Iterable[Filter]) -> None:
        """Let these be the filters wanted; not while an answer is missing, which is judged by what was wanted."""
        self._wanted = {f.pattern: f for f in wanted}

    def step(self, step: SubscriptionStep, patterns: Iterable[str] | None = None) -> None:
        """Take what happened to these filters; None for all that are known."""
        if step is SubscriptionStep.CONNECT:
            self._before = self.known
        about = self.known if patterns is None else patterns
        said = {pattern: self._said(_AFTER[step], pattern) for pattern in about}
        self.known = {p: terms for p, terms in {**self.known, **said}.items() if terms is not None}

    def _said(self, known: _Known, pattern: str) -> int | None:
        if known is _Known.AS_BEFORE:
            return self._before[pattern]
        if known is _Known.AS_WANTED:
            return self._wanted[pattern].terms
        return UNSURE if known is _Known.UNSURE else None

    def ask(self) -> list[Request]:
        """What has to be asked for by what is known; unsure from here on, even if it can't be sent."""
        changed = [self._asked(f) for f in self._wanted.values() if self.known.get(f.pattern) != f.terms]
        surplus = tuple(pattern for pattern in self.known if pattern not in self._wanted)
        self.step(SubscriptionStep.SUBSCRIBE, [f.pattern for f in changed])
        self.step(SubscriptionStep.UNSUBSCRIBE, surplus)
        identifiers = dict.fromkeys(f.identifier for f in changed)
        requests: list[Request] = [Subscribe(tuple(f for f in changed if f.identifier == i)) for i in identifiers]
        return [*requests, Unsubscribe(surplus)] if surplus else requests

    def _asked(self, wanted: Filter) -> Filter:
        handling = int(wanted.pattern in self.known) if wanted.retain_handling is None else wanted.retain_handling
        return replace(wanted, retain_handling=handling)

    def granted(self, request: Subscribe) -> None:
        """Take a SUBACK that grants all that was asked for."""
        self.step(SubscriptionStep.GRANTED, [f.pattern for f in request.filters])

    def removed(self, request: Unsubscribe, codes: Sequence[UnsubAckReasonCode]) -> None:
        """Take an UNSUBACK.

        Args:
            request: What it answers.
            codes: One a filter, or none at all: MQTT 3.x has none, and no way to refuse. A filter with a code from
                0x80 stays unsure [MQTT 5 section 3.11.3].
        """
        refused = {pattern for pattern, code in zip(request.patterns, codes, strict=False) if int(code) >= 0x80}
        self.step(SubscriptionStep.REMOVED, [pattern for pattern in request.patterns if pattern not in refused])
