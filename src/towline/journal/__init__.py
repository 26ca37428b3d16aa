"""The journal: rows that were received, durable on disk before they are acknowledged. Independent of MQTT and Spark."""

from __future__ import annotations

from towline.journal.disk import Disk, Limits
from towline.journal.journal import Journal
from towline.journal.outbox import Batch, Flight, Outbox
from towline.journal.segment import largest_frame

__all__ = ["Batch", "Disk", "Flight", "Journal", "Limits", "Outbox", "largest_frame"]
