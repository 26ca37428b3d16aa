"""A publisher that has no room says so, and waits no longer than it is told."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from towline import Publisher
from towline.errors import ConfigError, JournalFull, PublisherError

NOWHERE = "mqtt://127.0.0.1:9"


def test_no_room_is_told_once_and_a_message_that_waited_too_long_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "towline.publisher")
    with Publisher(NOWHERE, state_dir=tmp_path / "p") as publisher:
        full = threading.Event()
        full.set()
        append = publisher._outbox.append

        def limited(rows: Any) -> Any:
            if full.is_set():
                raise JournalFull("TL-J05", str(tmp_path), "the disk is full", "Make room.")
            return append(rows)

        monkeypatch.setattr(publisher._outbox, "append", limited)
        with pytest.raises(PublisherError, match=r"was not accepted.*TL-O30"):
            publisher.publish("t", "lost", timeout=0.3)
        kept = publisher.publish("t", "kept", wait=False)
        with pytest.raises(PublisherError, match=r"was not accepted.*TL-O30"):
            publisher.publish("t", "lost behind it", timeout=0.3)
        full.clear()
        assert kept.on_disk.result(20) == 0  # nothing of the others was stored
        assert publisher.publish("t", "next", timeout=20).number == 1
        levels = [r.levelname for r in caplog.records if "room" in r.getMessage()]
        assert levels == ["WARNING", "INFO"]
        publisher.close(0)


def test_only_so_many_messages_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("towline.publisher.receipt._MAX_QUEUED", 10)
    with Publisher(NOWHERE, state_dir=tmp_path / "p") as publisher:
        with publisher._lifecycle.condition:  # the disk thread stands still
            for number in range(10):
                assert not publisher.would_block
                last = publisher.publish("t", str(number), wait=False)
            assert publisher.would_block
        assert last.number == 9
        publisher.close(0)


def test_a_message_without_room_until_the_end_is_called_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`AsyncPublisher` waits by a callback: without it, it would wait for ever."""
    called_back = threading.Event()

    def full(_rows: Any) -> Any:
        raise JournalFull("TL-J05", str(tmp_path), "the disk is full", "Make room.")

    with Publisher(NOWHERE, state_dir=tmp_path / "p") as publisher:
        monkeypatch.setattr(publisher._outbox, "append", full)
        stage = publisher.publish("t", "1", wait=False).on_disk
        stage.add_done_callback(lambda _stage: called_back.set())
        publisher.close(0)
        assert called_back.wait(20)
        assert isinstance(error := stage.exception(), PublisherError)
        assert error.code == "TL-O01"


@pytest.mark.parametrize(
    "setting",
    [
        {"min_free_bytes": -1},
        {"max_bytes": 0},
        {"max_age_s": -1},
        {"state_dir": "s3://bucket/outbox"},
        {"receipt_patience_s": 0},
        {"receipt_patience_s": float("nan")},
        {"client_id": "a\0b"},
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_leaves_the_directory_alone(tmp_path: Path, setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(setting))}.*TL-C51"):
        Publisher(NOWHERE, **{"state_dir": tmp_path / "p", **setting})  # type: ignore[arg-type]
    assert not (tmp_path / "p").exists()
