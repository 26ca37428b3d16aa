"""Bytes ↔ packets ↔ session. Pure: no socket, thread, disk or clock; what drives it is in `towline.net`."""

from __future__ import annotations

from towline.mqtt.codec import Decoder, MalformedPacket, PublishRun
from towline.mqtt.events import Authenticator, Filter, SessionConfig, SessionRecord
from towline.mqtt.session import Session, SessionState

__all__ = [
    "Authenticator",
    "Decoder",
    "Filter",
    "MalformedPacket",
    "PublishRun",
    "Session",
    "SessionConfig",
    "SessionRecord",
    "SessionState",
]
