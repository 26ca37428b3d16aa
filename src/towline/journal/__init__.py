"""Append-only journal of rows, durable on disk before a message is acknowledged. Independent of MQTT and Spark."""

from __future__ import annotations

from towline.journal.disk import Disk, Limits
from towline.journal.journal import Journal
from towline.journal.outbox import Batch, InFlight, Outbox
from towline.journal.segment import max_frame_bytes

__all__ = ["Batch", "Disk", "InFlight", "Journal", "Limits", "Outbox", "max_frame_bytes"]
