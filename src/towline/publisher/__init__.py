"""A durable outbox for applications: `publish` returns when the message is on disk, delivery goes on for ever after."""

from __future__ import annotations

from towline.publisher.publisher import AsyncPublisher, Publisher
from towline.publisher.receipt import Completion, Receipt

__all__ = ["AsyncPublisher", "Completion", "Publisher", "Receipt"]
