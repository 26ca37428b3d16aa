"""Properties of an MQTT message as headers of a Kafka record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from towline.kafka.deadletters import Header

USER_PREFIX: Final = "mqtt.user."
#: Kafka header → what it carries. The first two are always there, the others when the message has them; user properties
#: keep their order and repetition [MQTT-3.3.2-18]. DUP and topic aliases belong to one hop, not to the message.
HEADERS: Final[Mapping[str, str]] = {
    "mqtt.topic": "topic name, UTF-8",
    "mqtt.qos": "0, 1 or 2",
    "mqtt.retain": '"true", only on a retained message',
    "mqtt.content-type": "content type, UTF-8 [MQTT 5 section 3.3.2.3.9]",
    "mqtt.response-topic": "topic name, UTF-8",
    "mqtt.correlation-data": "the bytes",
    "mqtt.message-expiry": "seconds left on receipt, decimal",
    "mqtt.payload-format": '"1" for UTF-8 text, "0" for bytes, if it is set',
    "mqtt.subscription-id": "decimal; one header for each",
    "mqtt.received-at": "microseconds since 1970 UTC, decimal; the record's timestamp has the milliseconds",
    "mqtt.user.<key>": "user property, one header for each; traceparent and tracestate have no prefix",
}
#: User properties whose header has their own name: those of W3C Trace Context (sections 3.2 and 3.3), which the
#: libraries of consumers look for under that name (its drafts for MQTT and for Kafka, OpenTelemetry's propagators).
TRACE_CONTEXT: Final = ("traceparent", "tracestate")


def user_header(key: str) -> str:
    """Return the header name of a user property."""
    return key if key in TRACE_CONTEXT else USER_PREFIX + key


def user_property(header: str) -> str | None:
    """Return the user property of a header name; None for other headers."""
    if header in TRACE_CONTEXT:
        return header
    return header.removeprefix(USER_PREFIX) if header.startswith(USER_PREFIX) else None


def property_headers(topic: bytes | None, qos: int | None, received_us: int, row: Mapping[str, Any]) -> list[Header]:
    """Return the headers of all properties, in the order of `HEADERS`.

    Args:
        topic: The topic name, UTF-8; None where a dead letter has none, as for all that follows.
        qos: 0, 1 or 2.
        received_us: Microseconds since 1970 UTC.
        row: Optional properties, by the columns of `towline.schema.ROW_SCHEMA`.
    """
    headers: list[Header] = [("mqtt.topic", topic), ("mqtt.qos", to_bytes(qos))]
    headers += [("mqtt.retain", b"true")] if row["retain"] else []
    optional = {
        "mqtt.content-type": row["content_type"],
        "mqtt.response-topic": row["response_topic"],
        "mqtt.correlation-data": row["correlation_data"],
        "mqtt.message-expiry": row["message_expiry_seconds"],
        "mqtt.payload-format": None if row["payload_is_utf8"] is None else int(row["payload_is_utf8"]),
    }
    headers += [(name, to_bytes(value)) for name, value in optional.items() if value is not None]
    headers += [("mqtt.subscription-id", to_bytes(number)) for number in row["subscription_ids"] or ()]
    headers.append(("mqtt.received-at", to_bytes(received_us)))
    headers += [(user_header(pair["key"]), to_bytes(pair["value"])) for pair in row["user_properties"] or ()]
    return headers


def to_bytes(value: bytes | str | int | None) -> bytes | None:
    """Encode a value for a record's key or header: text in UTF-8, numbers in digits."""
    return value if value is None or isinstance(value, bytes) else str(value).encode()
