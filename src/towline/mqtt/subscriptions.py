"""Known and requested subscriptions of the session at the broker.

A filter wrongly taken for subscribed means silence for ever. A filter wrongly taken for unsubscribed means unwanted
messages. So the durable record never claims more than we know: a filter that a packet may change is unsure before the
packet is sent, and only the answer makes it sure again. An unsure filter is requested again with the next connection,
which does no harm [MQTT-3.8.4-3], [MQTT-3.10.4-5] except for retained messages: with Retain Handling 0 they would all
come a second time. So a filter that we have requested before has Retain Handling 1, "only for a new subscription":
after the loss of a session they still come. MQTT 3.x has no Retain Handling.

This module sends and stores nothing and assigns no packet ids: `towline.mqtt.session` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from towline.mqtt.events import Filter

#: In place of `Filter.encoded_options`: the broker may have the filter or not, with any options.
UNSURE: Final = -1


class Subscriptions:
    """Topic filters of one session at the broker, across connections.

    Args:
        filters: Requested filters.
        known_options: Topic filter → options, as in the durable record.
    """

    def __init__(self, filters: Iterable[Filter], known_options: Mapping[str, int]) -> None:
        self._filters = {f.pattern: f for f in filters}
        #: Topic filter → `Filter.encoded_options` or `UNSURE`. Durable before any packet that depends on it is sent;
        #: replaced with each step and never changed, so that a record can hold it.
        self.known_options = dict(known_options)
        self._options_before_connect = self.known_options

    def set_filters(self, filters: Iterable[Filter]) -> None:
        """Replace the requested filters; only while no SUBSCRIBE or UNSUBSCRIBE is unanswered."""
        self._filters = {f.pattern: f for f in filters}

    def expect_connack(self) -> None:
        """Mark all subscriptions unsure before CONNECT: the broker may have lost the session and create an empty one.

        After a crash before CONNACK, the next CONNACK would say Session Present of the empty session.
        """
        self._options_before_connect = self.known_options
        self.mark_unsure()

    def mark_unsure(self) -> None:
        """Mark all subscriptions unsure: another client had the session, or the server may be another one."""
        self.known_options = dict.fromkeys(self.known_options, UNSURE)

    def restore_options(self) -> None:
        """Restore the options from before CONNECT: CONNACK confirmed the session, or refused the connection."""
        self.known_options = self._options_before_connect

    def clear_options(self) -> None:
        """Clear all subscriptions: CONNACK reported no session."""
        self.known_options = {}

    def pending_changes(self) -> tuple[list[Filter], list[str]]:
        """Return the filters to subscribe to and the topic filters to unsubscribe from, and mark them unsure.

        They stay unsure even if the packet can't be sent: the broker may apply it though its answer never comes.
        """
        known = self.known_options
        changed = [f for f in self._filters.values() if known.get(f.pattern) != f.encoded_options]
        surplus = [pattern for pattern in known if pattern not in self._filters]
        filters = list(map(self._with_retain_handling, changed))
        self.known_options = known | dict.fromkeys([*(f.pattern for f in changed), *surplus], UNSURE)
        return filters, surplus

    def _with_retain_handling(self, topic_filter: Filter) -> Filter:
        if topic_filter.retain_handling is not None:
            return topic_filter
        return replace(topic_filter, retain_handling=int(topic_filter.pattern in self.known_options))

    def confirm_granted(self, patterns: Iterable[str]) -> None:
        """Record the filters that SUBACK granted, with the requested options."""
        self.known_options = self.known_options | {p: self._filters[p].encoded_options for p in patterns}

    def confirm_removed(self, patterns: Collection[str]) -> None:
        """Remove the filters that UNSUBACK confirmed; a refused one stays unsure."""
        self.known_options = {p: options for p, options in self.known_options.items() if p not in patterns}
