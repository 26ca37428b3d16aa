"""Headers of an uplink's records in SQL: the properties of a message, and those of a dead letter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from towline.bridge.lines.sql import NO_HEADERS, header, literal
from towline.bridge.uplink.working import NAME, REASON
from towline.kafka.deadletters import PREFIX, Reason
from towline.kafka.properties import TRACE_CONTEXT, USER_PREFIX
from towline.schema import OPTIONAL

if TYPE_CHECKING:
    from towline.bridge.lines.sql import DeadLetterTarget

__all__ = ["dead_letter_headers", "property_headers", "rare_properties"]


def _some(column: str, name: str, value: str | None = None) -> str:
    """A header when the column has a value, else null."""
    return f"CASE WHEN {column} IS NOT NULL THEN {header(literal(name), value or f'CAST({column} AS STRING)')} END"


#: The headers of most messages.
_ALWAYS = [header("'mqtt.topic'", "topic"), header("'mqtt.qos'", "CAST(qos AS STRING)")]
_RECEIVED = header("'mqtt.received-at'", "CAST(unix_micros(received_at) AS STRING)")
#: Whether a message says more than every message does.
_IS_RARE: Final = (
    "coalesce(retain, false) OR content_type IS NOT NULL OR response_topic IS NOT NULL OR correlation_data IS NOT NULL "
    "OR message_expiry_seconds IS NOT NULL OR payload_is_utf8 IS NOT NULL "
    "OR coalesce(size(subscription_ids), 0) > 0 OR coalesce(size(user_properties), 0) > 0"
)


def rare_properties() -> str:
    """What only some messages say, as the struct in `towline.kafka.columns.PROPERTIES`; null for the others."""
    fields = ", ".join(f"{literal(name)}, {name}" for name in ("retain", *OPTIONAL))
    return f"CASE WHEN {_IS_RARE} THEN named_struct({fields}) END"


def property_headers() -> str:
    """All properties as headers, in the order of `towline.bridge.config.routes.HEADERS`, for dead letters.

    Most messages carry none of the optional ones; they take a branch without lambdas, which Spark would interpret.
    """
    return f"CASE WHEN {_IS_RARE} THEN {_all_headers()} ELSE array({', '.join([*_ALWAYS, _RECEIVED])}) END"


def _all_headers() -> str:
    """The same of a message that may have any of them."""
    optional = ", ".join(
        [
            f"CASE WHEN retain THEN {header(literal('mqtt.retain'), literal('true'))} END",
            _some("content_type", "mqtt.content-type"),
            _some("response_topic", "mqtt.response-topic"),
            _some("correlation_data", "mqtt.correlation-data", "correlation_data"),
            _some("message_expiry_seconds", "mqtt.message-expiry"),
            _some("payload_is_utf8", "mqtt.payload-format", "CAST(CAST(payload_is_utf8 AS INT) AS STRING)"),
        ]
    )
    identifiers = f"transform(subscription_ids, i -> {header(literal('mqtt.subscription-id'), 'CAST(i AS STRING)')})"
    own = ", ".join(map(literal, TRACE_CONTEXT))
    name = f"CASE WHEN p.key IN ({own}) THEN p.key ELSE concat({literal(USER_PREFIX)}, p.key) END"
    users = f"transform(user_properties, p -> {header(name, 'p.value')})"
    always = f"array({', '.join(_ALWAYS)})"
    return (
        f"concat({always}, array_compact(array({optional})), coalesce({identifiers}, {NO_HEADERS}), "
        f"array({_RECEIVED}), coalesce({users}, {NO_HEADERS}))"
    )


#: What a person reads in ``towline.dlq.detail``.
_DETAILS = {
    Reason.UNMAPPED: "the SQL of where or reject raised an error on this message",
    Reason.UNROUTED: "no route takes this topic",
    Reason.TOPIC_ABSENT: "the message lacks what the name of the Kafka topic is made of",
    Reason.TOPIC_NOT_ALLOWED: "the name of the Kafka topic is not among allowed_topics",
    Reason.TOPIC_RESERVED: "no message may choose this Kafka topic: markers, dead letters, Kafka's own",
    Reason.TOPIC_ILLEGAL: "Kafka takes no such topic name",
    Reason.KEY_ABSENT: "the message lacks what its key or its dedupe key is made of",
    Reason.PACKET_TOO_LARGE: "larger than max_packet_bytes; headers mqtt.user.towline-* hold its size and digest",
    Reason.TOO_MANY_PROPERTIES: "more than 1,000 properties; the value is the whole MQTT packet",
}


def dead_letter_headers(dead_letters: DeadLetterTarget, refusing: str) -> str:
    """The headers of a dead letter (`towline.kafka.deadletters`): ours, then every property and where it came from.

    All in one lambda: Spark interprets that, so the rare case does not swell the generated code of the usual one.
    """
    details = " ".join(f"WHEN '{reason}' THEN {literal(text)}" for reason, text in _DETAILS.items())
    ours = {
        "reason": REASON,
        "detail": f"CASE {REASON} {details} {refusing}END",
        "topic": NAME,
        "timestamp": "CAST(unix_millis(received_at) AS STRING)",
        "source": literal(dead_letters.source),
    }
    first = ", ".join(
        f"CASE WHEN {value} IS NOT NULL THEN {header(literal(PREFIX + name), value)} END"
        for name, value in ours.items()
    )
    place = ", ".join(
        header(literal(name), f"CAST({column} AS STRING)")
        for name, column in (("mqtt.gateway", "gateway"), ("mqtt.offset", "offset"))
    )
    again = f"CASE WHEN duplicate THEN {header(literal('mqtt.duplicate'), literal('true'))} END"
    original = f"concat({property_headers()}, array_compact(array({place}, {again})))"
    count = header(literal(PREFIX + "headers"), "CAST(size(original) AS STRING)")
    whole = f"concat(array_compact(array({first})), array({count}), original)"
    return f"get(transform(array({original}), original -> {whole}), 0)"
