"""The place aside: kept once, looked at, and back into the outbox once, whatever ends the process meanwhile."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from tests.helpers import wait_until
from tests.unit.delivery.test_outbound import Line, outbox_rows
from towline.delivery.outbound import OutboxSender
from towline.delivery.refused import RefusedMessages
from towline.errors import JournalFull
from towline.journal import Limits, Outbox
from towline.schema import OUTBOX_SCHEMA
from towline.timing import Timestamp

#: Room for some messages of 50 KB.
_SMALL = Limits(max_bytes=3 << 20, min_free_bytes=0, segment_bytes=64 << 10)


def outbox_at(directory: Path) -> Outbox:
    return Outbox.open(directory / "outbox", schema=OUTBOX_SCHEMA, limits=Limits(min_free_bytes=0))


def rows(*payloads: bytes, topic: str = "d", at: int = 1) -> pa.RecordBatch:
    messages = [{"topic": topic, "payload": payload, "qos": 1} for payload in payloads]
    return outbox_rows(*messages, arrival=Timestamp(at))


def refuse(outbox: Outbox, refused: RefusedMessages, *numbers: int) -> None:
    messages = ((next(iter(outbox.read(n, n + 1))), n, 0x87) for n in numbers)
    for kept in refused.store(messages):
        outbox.mark_done(kept)


def payloads(outbox: Outbox, start: int = 0) -> list[bytes]:
    return [p for batch in outbox.read(start, outbox.end) for p in batch.column("payload").to_pylist()]


def test_kept_shown_replayed(tmp_path: Path) -> None:
    outbox = outbox_at(tmp_path)
    outbox.append_batch(rows(b"0", b"1", b"2", b"3"))
    refused = RefusedMessages(tmp_path / "refused", outbox)
    assert refused.page(0) == {"rows": [], "next": 0, "end": 0}
    refuse(outbox, refused, 1, 3)
    shown = refused.page(0)
    assert [(row["number"], row["words"], row["topic"], row["bytes"]) for row in shown["rows"]] == [
        (1, "not authorized", "d", 1),
        (3, "not authorized", "d", 1),
    ]
    assert refused.replay(shown["end"]) == {"moved": 2, "next": 2, "end": 2}
    assert payloads(outbox, 4) == [b"1", b"3"]
    assert refused.page(0)["rows"] == []
    assert refused.replay(2)["moved"] == 0
    assert outbox.end == 6
    assert outbox.ledger["replayed"] == 2
    refuse(outbox, refused, 4)
    assert refused.drop(3)["moved"] == 1
    assert refused.page(0)["rows"] == []
    assert outbox.end == 6


def test_one_message_with_what_is_no_text_and_too_much(tmp_path: Path) -> None:
    """Neither Arrow nor Spark's cast of bytes to a string validates UTF-8."""
    outbox = outbox_at(tmp_path)
    message = {"topic": "d", "payload": bytes((1 << 20) + 5), "user_properties": [None, {"key": "k", "value": None}]}
    batch = outbox_rows({"topic": "first"}, message, arrival=Timestamp(1))
    index = batch.schema.get_field_index("response_topic")
    invalid = pa.array([None, b"\xff"], pa.binary()).view(pa.string())
    outbox.append_batch(batch.set_column(index, batch.schema.field(index), invalid))
    refused = RefusedMessages(tmp_path / "refused", outbox)
    assert refused.message(0) == {"rows": []}
    refuse(outbox, refused, 0, 1)
    (row,) = refused.message(1)["rows"]
    assert row["bytes"] == (1 << 20) + 5
    assert base64.b64decode(row["payload"]) == bytes(1 << 20)
    assert row["properties"] == [("response_topic", "/w==")]
    (row,) = refused.message(0)["rows"]
    assert (row["topic"], row["payload"], row["properties"]) == ("first", "", [])
    refused.drop(1)
    assert refused.message(0) == refused.message(2) == {"rows": []}


def test_a_replay_that_a_crash_interrupted_enters_once(tmp_path: Path) -> None:
    """The messages are in the outbox, and the mark that they left this place is lost with the crash."""
    outbox = outbox_at(tmp_path)
    outbox.append_batch(rows(*(b"%d" % n for n in range(5))))
    refused = RefusedMessages(tmp_path / "refused", outbox)
    refuse(outbox, refused, 0, 1, 2)
    refused.close()
    shutil.copytree(tmp_path / "refused", tmp_path / "before")
    refused = RefusedMessages(tmp_path / "refused", outbox)
    assert refused.replay(99)["moved"] == 3
    refused.close()
    shutil.rmtree(tmp_path / "refused")
    shutil.copytree(tmp_path / "before", tmp_path / "refused")
    again = RefusedMessages(tmp_path / "refused", outbox)
    refuse(outbox, again, 3)
    assert again.replay(99) == {"moved": 1, "next": 4, "end": 4}
    assert payloads(outbox, 5) == [b"0", b"1", b"2", b"3"]


def test_a_crash_after_keeping_keeps_no_second_one_and_replays_no_second_one(tmp_path: Path) -> None:
    """Kept, and not yet done in the outbox: the message is refused there once more, or the replay comes first."""
    outbox = outbox_at(tmp_path)
    outbox.append_batch(rows(b"0", b"1"))
    row = next(iter(outbox.read(0, 1)))
    refused = RefusedMessages(tmp_path / "refused", outbox)
    assert list(refused.store([(row, 0, 0x87)])) == [[0]]
    refused.close()
    shutil.copytree(tmp_path / "refused", tmp_path / "before")
    again = RefusedMessages(tmp_path / "refused", outbox)
    refuse(outbox, again, 0)
    assert [found["number"] for found in again.page(0)["rows"]] == [0]
    again.close()

    outbox.close()
    shutil.rmtree(tmp_path / "outbox")
    outbox = outbox_at(tmp_path)
    outbox.append_batch(rows(b"0", b"1"))
    first = RefusedMessages(tmp_path / "before", outbox)
    assert first.replay(99)["moved"] == 0
    assert outbox.end == 2
    outbox.close()


def test_messages_of_an_outbox_that_is_gone_are_replayed_into_the_new_one(tmp_path: Path) -> None:
    outbox = outbox_at(tmp_path)
    outbox.append_batch(rows(b"old 0", b"old 1"))
    refused = RefusedMessages(tmp_path / "refused", outbox)
    refuse(outbox, refused, 0, 1)
    refused.close()
    outbox.close()
    shutil.rmtree(tmp_path / "outbox")
    outbox = outbox_at(tmp_path)
    outbox.append_batch(rows(b"new 0", at=2))
    refused = RefusedMessages(tmp_path / "refused", outbox)
    refuse(outbox, refused, 0)
    assert len(refused.page(0)["rows"]) == 3
    assert refused.replay(99)["moved"] == 3
    assert payloads(outbox, 1) == [b"old 0", b"old 1", b"new 0"]


def test_a_full_outbox_stops_a_replay_and_nothing_is_lost(tmp_path: Path) -> None:
    limits = Limits(max_bytes=300_000, min_free_bytes=0, segment_bytes=64 << 10)
    outbox = Outbox.open(tmp_path / "outbox", schema=OUTBOX_SCHEMA, limits=limits)
    outbox.append_batch(rows(bytes(150_000)))
    refused = RefusedMessages(tmp_path / "refused", outbox)
    refuse(outbox, refused, 0)
    outbox.flush()
    outbox.append_batch(rows(bytes(250_000)))
    with pytest.raises(JournalFull):
        refused.replay(99)
    assert outbox.ledger["replayed"] == 0
    assert len(refused.page(0)["rows"]) == 1
    outbox.mark_done([1])
    outbox.flush()
    assert refused.replay(99)["moved"] == 1


def test_without_space_for_refused_messages_everything_waits_and_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("towline.delivery.outbound._FULL_RETRY_S", 0.05)
    outcomes: list[int] = []
    line = Line(tmp_path, 0, on_outcome=lambda number, *_: outcomes.append(number))
    outbox, sender = line.outbox, line.sender
    sender.refused_messages = RefusedMessages(tmp_path / "refused", outbox, _SMALL)
    for _ in range(100):
        outbox.append_batch(rows(bytes(50_000), topic=""))  # MQTT has no way to say it
    outbox.append_batch(rows(b"100"))
    line.connect()
    until(sender, lambda: sender.blocked_reason is not None)
    kept = len(sender.refused_messages.page(0)["rows"])
    account = sender.status()
    assert 0 < kept == account["refused"] == len(outcomes) < 100
    assert account["accepted"] == 101 == account["queued"] + account["refused"] + account["in_flight"]
    assert "don't fit" in account["held_back"]
    assert line.log.codes.count("TL-M49") == 1
    line.sent.clear()
    sender.connection_lost(())
    sender.turn()
    assert line.sent == [], "nothing is sent while there is no room"
    sender.refused_messages.drop(99)
    until(sender, lambda: sender.status()["refused"] == 100)
    assert sender.blocked_reason is None
    assert outcomes == list(range(100))
    sender.close()
    outbox.close()


def until(sender: OutboxSender, condition: Callable[[], bool]) -> None:
    def turned() -> bool:
        sender.turn()
        return condition()

    wait_until(turned, 10)
