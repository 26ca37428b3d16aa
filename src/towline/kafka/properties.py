"""The properties of an MQTT message as headers of a Kafka record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

__all__ = ["USER_PREFIX", "Header", "in_bytes", "property_headers"]

Header: TypeAlias = tuple[str, bytes | None]

USER_PREFIX: Final = "mqtt.user."


def property_headers(topic: bytes | None, qos: int | None, received_us: int, more: Mapping[str, Any]) -> list[Header]:
    """All properties, in the order of `towline.bridge.config.routes.HEADERS`.

    Args:
        topic: The topic name, UTF-8; None where a dead letter does not say it, as all that follows.
        qos: 0, 1 or 2.
        received_us: Microseconds since 1970 UTC.
        more: What only some messages have, by the columns of `towline.schema.ROW_SCHEMA`.
    """
    headers: list[Header] = [("mqtt.topic", topic), ("mqtt.qos", in_bytes(qos))]
    headers += [("mqtt.retain", b"true")] if more["retain"] else []
    optional = {
        "mqtt.content-type": more["content_type"],
        "mqtt.response-topic": more["response_topic"],
        "mqtt.correlation-data": more["correlation_data"],
        "mqtt.message-expiry": more["message_expiry_seconds"],
        "mqtt.payload-format": None if more["payload_is_utf8"] is None else int(more["payload_is_utf8"]),
    }
    headers += [(name, in_bytes(value)) for name, value in optional.items() if value is not None]
    headers += [("mqtt.subscription-id", in_bytes(number)) for number in more["subscription_ids"] or ()]
    headers.append(("mqtt.received-at", in_bytes(received_us)))
    headers += [(USER_PREFIX + pair["key"], in_bytes(pair["value"])) for pair in more["user_properties"] or ()]
    return headers


def in_bytes(value: bytes | str | int | None) -> bytes | None:
    """As a record's key or header: texts in UTF-8, numbers in digits."""
    return value if value is None or isinstance(value, bytes) else str(value).encode()
