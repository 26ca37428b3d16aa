"""Routes: which messages a line takes and what Kafka record each becomes. Pure, and the reference for the SQL.

The rules, which `towline.bridge.uplink.sql` compiles for Spark and `Route.record` states in Python:

- The first route whose filter matches takes the message, like the arms of a switch; so a message makes at most one
  record and the account adds up [I11].
- The route's ``where`` decides afterwards: false or null means *filtered*, and no later route is asked.
- A template with a field the message does not have gives null: no key, no topic, a header without value (or none).
- ``fields`` give templates more names, each by Spark SQL over the message and the fields before it; ``reject`` says in
  SQL why a message is refused, null where it is not. Both are Spark's to evaluate; here they are given.
- A topic name that holds captured text must be a legal Kafka name, an allowed one and not reserved, else the message
  goes to the route's fallback topic (design section 10: a device never names a topic outside the allowed list).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from towline.bridge.config.patterns import FIELDS, Pattern, Template, kafka_name_problem, kafka_topic
from towline.kafka.properties import USER_PREFIX, Header, in_bytes, property_headers
from towline.kafka.reserved import INTERNAL, reserved
from towline.mqtt.events import Filter
from towline.mqtt.filters import common, unshared

__all__ = ["HEADERS", "Route", "at_odds", "covers", "first_match", "repeatable", "shadowed", "subscriptions"]

#: Kafka header → what it carries. The first two are always there, the others when the message has them; user properties
#: keep their order and repetition [MQTT-3.3.2-18]. DUP and topic aliases belong to one hop, not to the message.
HEADERS = {
    "mqtt.topic": "topic name, UTF-8",
    "mqtt.qos": "0, 1 or 2",
    "mqtt.retain": '"true", only on a retained message',
    "mqtt.content-type": "content type, UTF-8 [MQTT 5 section 3.3.2.3.9]",
    "mqtt.response-topic": "topic name, UTF-8",
    "mqtt.correlation-data": "the bytes",
    "mqtt.message-expiry": "seconds left on receipt, decimal",
    "mqtt.payload-format": '"1" for UTF-8 text, "0" for bytes, when said',
    "mqtt.subscription-id": "decimal; one header for each",
    "mqtt.received-at": "microseconds since 1970 UTC, decimal; the record's timestamp has the milliseconds",
    "mqtt.user.<key>": "user property, one header for each; traceparent and tracestate have no prefix",
}

#: A subscription that says nothing of its own.
_NO_FILTER = Filter("")


@dataclass(frozen=True, slots=True)
class Route:
    """One arm of a line.

    Attributes:
        pattern: What it takes.
        qos: Highest QoS to subscribe with.
        topic: Kafka topic.
        key: Record key, or None for none.
        headers: Names and templates, in order, after the properties of the message.
        where: Spark SQL over the source's columns, or None.
        allowed_topics: Names and globs a topic with fields is checked against.
        fallback_topic: Where a message goes whose topic is illegal or not allowed; None makes it a dead letter, or
            stops the line where there are none.
        properties: Whether the MQTT properties travel as headers (`HEADERS`).
        key_required: Whether a message that gives no key is a dead letter.
        fields: Names that templates and SQL may use beside those of the message, and the Spark SQL of each, in order;
            it may name the columns of the source and the fields before it.
        reject: Spark SQL that says why a message is refused, null where it is not; what is refused is a dead letter.
        omit_missing: Whether a header whose template gives null is left out, rather than be there without value.
        terms: Further options of the subscription, as `Filter` has them, but for its filter and QoS.
        dedupe: What names a message for ever, as a template or as SQL; None to keep repeats.
        told_by_key: Whether that alone tells a repeat, as its QoS can't: a message without a key is a dead letter.
        repeatable: Whether a message may come twice: that has a key, or at least once is all that is promised.
        dead_letter_topics: Of all lines of the bridge; no message may name one.
    """

    pattern: Pattern
    qos: int
    topic: Template
    key: Template | None = None
    headers: tuple[tuple[str, Template], ...] = ()
    where: str | None = None
    allowed_topics: tuple[str, ...] = ()
    fallback_topic: str | None = None
    properties: bool = True
    key_required: bool = False
    fields: tuple[tuple[str, str], ...] = ()
    reject: str | None = None
    omit_missing: bool = False
    terms: Filter = _NO_FILTER
    dedupe: Template | str | None = None
    told_by_key: bool = False
    repeatable: bool = False
    dead_letter_topics: tuple[str, ...] = ()

    @property
    def said_fields(self) -> tuple[str, ...]:
        """Those of its own fields that its templates name."""
        dedupe = self.dedupe if isinstance(self.dedupe, Template) else None
        templates = [self.topic, self.key, dedupe, *(text for _, text in self.headers)]
        named = {name for template in templates if template is not None for name in template.fields}
        return tuple(name for name, _ in self.fields if name in named)

    @property
    def reserved(self) -> str | None:
        """What a name with fields must not be, as a regular expression; None where it can't become that."""
        head = self.topic.parts[0]
        reach = (INTERNAL, "towline.", *self.dead_letter_topics)
        near = self.topic.fields and any(head.startswith(name) or name.startswith(head) for name in reach)
        return reserved(self.dead_letter_topics) if near else None

    def topic_for(self, values: Mapping[str, str | None]) -> str | None:
        """The Kafka topic of a message, or None where the checks of the module refuse it."""
        return kafka_topic(self.topic, values, self.allowed_topics, self.reserved)

    def may_become(self, name: str) -> bool:
        """Whether a message may name a topic, as far as its beginning tells."""
        taken = self.reserved
        free = taken is None or not re.fullmatch(taken, name)
        return free and kafka_name_problem(name) is None and name.startswith(self.topic.parts[0])

    def record(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """What a matching row becomes, ``where`` and ``reject`` aside; None if it does not match.

        The row has the values of the route's own fields beside the columns of the source. ``topic`` is None where
        neither the template nor a fallback gives one.
        """
        captures = self.pattern.match(row["topic"])
        if captures is None:
            return None
        values = {**_message_fields(row), **captures, **{name: _text(row[name]) for name in self.said_fields}}
        key = self.key.render(values) if self.key else None
        texts = [(name, template.render(values)) for name, template in self.headers]
        own = [(name, in_bytes(text)) for name, text in texts if text is not None or not self.omit_missing]
        return {
            "topic": self.topic_for(values) or self.fallback_topic,
            "key": in_bytes(key),
            "value": row["payload"],
            "headers": [*(_properties(row) if self.properties else ()), *own] or None,
            "timestamp": row["received_at"],
        }


def _text(value: object) -> str | None:
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _message_fields(row: Mapping[str, Any]) -> dict[str, str | None]:
    values = {name: _text(row[column]) for name, column in FIELDS.items()}
    for pair in reversed(row["user_properties"] or []):
        values[USER_PREFIX + pair["key"]] = pair["value"]
    return values


def _properties(row: Mapping[str, Any]) -> list[Header]:
    return property_headers(in_bytes(row["topic"]), row["qos"], _micros(row["received_at"]), row)


def _micros(moment: Any) -> int:
    return int(moment.timestamp()) * 1_000_000 + int(moment.microsecond)


def first_match(routes: Sequence[Route], topic: str) -> int | None:
    """Index of the route that takes a topic, or None."""
    return next((i for i, route in enumerate(routes) if route.pattern.match(topic) is not None), None)


def covers(wide: Pattern, narrow: Pattern) -> bool:
    """Whether every topic that ``narrow`` matches is matched by ``wide`` too."""
    inner = unshared(narrow.filter)
    return common(unshared(wide.filter), inner) == inner


def shadowed(routes: Sequence[Route]) -> list[tuple[int, int]]:
    """Pairs (route, earlier route) where the earlier one takes everything the route could."""
    pairs = []
    for later, route in enumerate(routes):
        above = next((i for i in range(later) if covers(routes[i].pattern, route.pattern)), None)
        if above is not None:
            pairs.append((later, above))
    return pairs


def subscriptions(routes: Sequence[Route]) -> tuple[Filter, ...]:
    """The fewest filters that bring every route its messages.

    A broker may send a message once for each overlapping subscription of a client [MQTT-3.3.4-2], and each copy
    would become a record; so a filter that another covers is left out, and the covering one gets the higher QoS.
    """
    kept: list[tuple[Route, int]] = []
    for route in routes:
        pattern, qos = route.pattern, route.qos
        rivals = [(r, q) for r, q in kept if r.pattern.share == pattern.share]
        if any(covers(r.pattern, pattern) for r, _ in rivals):
            kept = [(r, max(q, qos) if (r, q) in rivals and covers(r.pattern, pattern) else q) for r, q in kept]
            continue
        swallowed = [(r, q) for r, q in rivals if covers(pattern, r.pattern)]
        kept = [entry for entry in kept if entry not in swallowed]
        kept.append((route, max([qos, *(q for _, q in swallowed)])))
    return tuple(replace(route.terms, pattern=route.pattern.filter, qos=qos) for route, qos in kept)


def repeatable(routes: Sequence[Route], filters: Iterable[str]) -> tuple[str, ...]:
    """Filters of which all messages go by routes that bear a repeat."""
    return tuple(one for one in filters if _bear(routes, unshared(one)))


def _bear(routes: Sequence[Route], pattern: str) -> bool:
    taking = [(route, common(unshared(route.pattern.filter), pattern)) for route in routes]
    alone = next((at for at, (_, taken) in enumerate(taking, start=1) if taken == pattern), None)
    return all(route.repeatable for route, taken in taking[:alone] if taken is not None)


def at_odds(routes: Sequence[Route]) -> tuple[int, int] | None:
    """A route, and another whose filter covers its own and is subscribed with other options; None for no such pair."""
    for one, route in enumerate(routes):
        for other, wide in enumerate(routes):
            same_group = one != other and wide.pattern.share == route.pattern.share
            if same_group and covers(wide.pattern, route.pattern) and wide.terms != route.terms:
                return one, other
    return None
