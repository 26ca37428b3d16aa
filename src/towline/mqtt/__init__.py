"""Bytes ↔ packets ↔ session, and a small blocking client.

All up to the session is pure: no sockets, threads, disk or clock. `transport`, `connection` and what sits on them are
the edges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from towline.mqtt.codec import Decoder, MalformedPacket, PublishRun
from towline.mqtt.events import Authenticator, Filter, SessionConfig, SessionRecord
from towline.mqtt.session import Session, State

if TYPE_CHECKING:
    from mqtt5 import QoS

    from towline.mqtt.client import Client
    from towline.mqtt.messages import Memory, Message, Receipt, Store, Will
    from towline.mqtt.transport import Proxy, Tls

__all__ = [
    "Authenticator",
    "Client",
    "Decoder",
    "Filter",
    "MalformedPacket",
    "Memory",
    "Message",
    "Proxy",
    "PublishRun",
    "QoS",
    "Receipt",
    "Session",
    "SessionConfig",
    "SessionRecord",
    "State",
    "Store",
    "Tls",
    "Will",
]

_HOMES = {
    "Client": "towline.mqtt.client",
    **dict.fromkeys(("Memory", "Message", "Receipt", "Store", "Will"), "towline.mqtt.messages"),
    **dict.fromkeys(("Proxy", "Tls"), "towline.mqtt.transport"),
    "QoS": "mqtt5",
}


def __getattr__(name: str) -> Any:
    """Load the client and its transport when they are asked for: the gateway's Spark side needs neither."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  # keeps the package light

    return getattr(import_module(_HOMES[name]), name)
