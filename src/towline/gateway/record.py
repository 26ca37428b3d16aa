"""The record of the broker's session as a journal holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from towline.mqtt.events import SessionRecord

__all__ = ["recall"]


def recall(stored: Mapping[str, Any]) -> SessionRecord | None:
    """The session record as it was made durable, None on a new journal."""
    if not stored:
        return None
    subscriptions = {str(k): int(v) for k, v in stored["subscriptions"].items()}
    return SessionRecord(str(stored["client_id"]), bool(stored["established"]), subscriptions)
