"""What a `Publisher` and its `publish` are given, checked and brought into the form of the rooms below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from towline.delivery.receipts.mark import MARK_BYTES
from towline.errors import ConfigError
from towline.mqtt.rules import NO_QOS_2, message_problem
from towline.publisher.errors import wrong

__all__ = ["check_settings", "fields_of"]


def fields_of(
    topic: str,
    payload: bytes | str,
    qos: int,
    *,
    several_sessions: bool = False,
    retain: bool,
    payload_is_utf8: bool | None = None,
    user_properties: Iterable[tuple[str, str]] = (),
    expiry_s: int | None = None,
    content_type: str | None = None,
    response_topic: str | None = None,
    correlation_data: bytes | None = None,
) -> dict[str, Any]:
    """The columns of a message's row.

    Raises:
        ConfigError: TL-C52, MQTT has no way to say it, with the marks of receipts, which it may get in a later life.
    """
    if qos == 2 and several_sessions:
        raise ConfigError("TL-C52", f"message to {str(topic)[:80]!r}", *NO_QOS_2)
    pairs = tuple(user_properties or ())
    said = {"content_type": content_type, "response_topic": response_topic, "correlation_data": correlation_data}
    room = MARK_BYTES
    if problem := message_problem(topic, payload, qos, room, user_properties=pairs, expiry_s=expiry_s, **said):
        what = f"MQTT has no way to say it: {problem}"
        raise ConfigError("TL-C52", f"message to {str(topic)[:80]!r}", what, "Change it.")
    return {
        "topic": topic,
        "payload": payload.encode() if isinstance(payload, str) else bytes(payload),
        "qos": int(qos),
        "retain": bool(retain),
        "payload_is_utf8": None if payload_is_utf8 is None else bool(payload_is_utf8),
        "user_properties": [{"key": key, "value": value} for key, value in pairs] if pairs else None,
        "message_expiry_seconds": expiry_s,
        **said,
    }


#: Settings for which None stands for no limit.
_UNLIMITED: Final = ("max_bytes", "max_age_s")
#: Setting → its type, least and most.
_SETTINGS: Final[Mapping[str, tuple[type, float, float]]] = {
    "min_free_bytes": (int, 0, 1 << 62),
    "max_bytes": (int, 1, 1 << 62),
    "max_age_s": (float, 0, 1e12),
    "receipt_patience_s": (float, 0.001, 1e9),
}


def check_settings(**settings: Any) -> None:
    """Refuse what can't be, before the directory is touched.

    Raises:
        ConfigError: TL-C52.
    """
    for name, value in settings.items():
        kind, low, high = _SETTINGS[name]
        if value is None and name in _UNLIMITED:
            continue
        number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
        if not (number and low <= value <= high):
            raise wrong(f"{name} is {value!r}, and goes from {low:,} to {high:,}")
