"""A publisher that has no room says so, and waits no longer than it is told."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from towline import Publisher
from towline.errors import JournalFull, PublisherError

NOWHERE = "mqtt://127.0.0.1:9"


def test_no_room_is_told_once_and_a_message_that_waited_too_long_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "towline.publisher")
    with Publisher(NOWHERE, state_dir=tmp_path / "p") as publisher:
        full = threading.Event()
        full.set()
        append = publisher._outbox.append

        def limited(rows):  # type: ignore[no-untyped-def]
            if full.is_set():
                raise JournalFull("TL-J05", str(tmp_path), "the disk is full", "Make room.")
            return append(rows)

        monkeypatch.setattr(publisher._outbox, "append", limited)
        for _ in range(2):
            with pytest.raises(PublisherError, match="was not taken.*TL-O30"):
                publisher.publish("t", "lost", timeout=0.5)
        kept = publisher.publish("t", "kept", wait=False)
        full.clear()
        assert kept.on_disk.result(20) == 0  # nothing of the others was stored
        publisher.publish("t", "next", timeout=20)
        told = [r.levelname for r in caplog.records if "room" in r.getMessage()]
        assert told == ["WARNING", "INFO"]
        publisher.close(0)
