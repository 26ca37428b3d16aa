"""Durable MQTT publisher: `publish` returns when the message is on disk; delivery survives restarts."""

from __future__ import annotations

from towline.publisher.publisher import AsyncPublisher, Publisher
from towline.publisher.receipt import Completion, Receipt

__all__ = ["AsyncPublisher", "Completion", "Publisher", "Receipt"]
