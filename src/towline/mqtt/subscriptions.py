"""What the broker's session is subscribed to, as far as we know, and what to ask for until it is what is wanted.

A filter taken for subscribed that is not means silence for ever; one taken for gone that is not means messages nobody
wants. So the durable record is never surer than we are: a filter that a packet may change is unsure before the packet
leaves, and only the answer makes it sure again. What is unsure is asked for anew with the next connection, which does
no harm where it was done already [MQTT-3.8.4-3], [MQTT-3.10.4-5], but for the retained messages: with Retain Handling 0
they would all come a second time. So a filter that we have asked for before says 1, "only for a new subscription": a
session that the broker has lost still gets them. MQTT 3.x can't say that.

Nothing here sends, stores or counts packet ids: that is `towline.mqtt.session`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from towline.mqtt.events import Filter

#: In place of `Filter.terms`: the filter may be there or not, with whatever terms. Equal to those of no filter.
UNSURE: Final = -1


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

    def connect(self) -> None:
        """CONNECT is about to leave: it may find our session lost, and make an empty one.

        Unless we live to see its CONNACK, the next one says Session Present of that.
        """
        self._before = self.known
        self.doubt()

    def doubt(self) -> None:
        """Another client had our session, or the server may be another one."""
        self.known = dict.fromkeys(self.known, UNSURE)

    def kept(self) -> None:
        """CONNACK says that the session is as it was before CONNECT, or that none was touched."""
        self.known = self._before

    def lost(self) -> None:
        """CONNACK says that there was no session."""
        self.known = {}

    def ask(self) -> tuple[list[Filter], list[str]]:
        """What to subscribe to and what to unsubscribe from, by what is known.

        Unsure from here on, even if it can't be sent: it may be carried out though its answer never comes.
        """
        changed = [self._asked(f) for f in self._wanted.values() if self.known.get(f.pattern) != f.terms]
        surplus = [pattern for pattern in self.known if pattern not in self._wanted]
        self.known = self.known | dict.fromkeys([*(f.pattern for f in changed), *surplus], UNSURE)
        return changed, surplus

    def _asked(self, wanted: Filter) -> Filter:
        handling = int(wanted.pattern in self.known) if wanted.retain_handling is None else wanted.retain_handling
        return replace(wanted, retain_handling=handling)

    def granted(self, patterns: Iterable[str]) -> None:
        """SUBACK grants these, with the terms wanted."""
        self.known = self.known | {pattern: self._wanted[pattern].terms for pattern in patterns}

    def removed(self, patterns: Collection[str]) -> None:
        """UNSUBACK says that these are gone; one that it refuses stays unsure."""
        self.known = {pattern: terms for pattern, terms in self.known.items() if pattern not in patterns}
