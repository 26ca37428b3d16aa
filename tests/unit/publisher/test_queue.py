"""The queue before the disk, in one thread: what happens while its first messages are being written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from towline.delivery.outbound import Outcome
from towline.errors import JournalFailed, PublisherError
from towline.journal import Limits
from towline.publisher import Receipt
from towline.publisher.receipt import Lifecycle, PendingMessage


class Disk:
    """An outbox; `steps` are what happens when each of its frames is there and nobody has been told."""

    limits, end = Limits(), 0

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps: Iterator[Callable[[], object]] = iter(steps)
        self.frames: list[int] = []

    def append_batch(self, rows: Any) -> Any:
        self.frames.append(rows.num_rows)
        self.end += rows.num_rows
        end = self.end
        next(self.steps, lambda: None)()
        return SimpleNamespace(end=end)


class Queue:
    def __init__(self, *steps: Callable[[Queue], object]) -> None:
        disk: Any = Disk(*(lambda step=step: step(self) for step in steps))
        self.disk, self.lifecycle = disk, Lifecycle(Path("p"), "mqtt://b", None, disk)
        self.messages: list[PendingMessage] = []

    def put(self, count: int, size: int = 0) -> None:
        for _ in range(count):
            receipt = Receipt("t", self.lifecycle, self.lifecycle.no_receipt_stage)
            self.messages.append(
                PendingMessage({"topic": "t", "payload": bytes(size), "user_properties": None}, receipt)
            )
            self.lifecycle.enqueue(self.messages[-1])

    def run(self) -> list[object]:
        """Store all; the number or the error's code of each message."""
        self.lifecycle.closing = True
        self.lifecycle.run_disk_thread()
        self.lifecycle.closing = False
        stages = [message.receipt.on_disk for message in self.messages]
        return [getattr(stage.exception(1), "code", None) or stage.result(1) for stage in stages]

    def meanwhile(self, count: int) -> None:
        self.lifecycle.closing = False
        self.put(count)
        self.lifecycle.closing = True


def test_numbers_go_to_what_is_written_whoever_is_first_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker may have one of the frame before the disk thread has said so."""
    monkeypatch.setattr("towline.publisher.receipt._MAX_QUEUED_BYTES", 200)

    def delivered(queue: Queue) -> None:
        queue.meanwhile(1)
        queue.lifecycle.record_outcomes([(1, Outcome.DELIVERED, 16)])

    def earlier(queue: Queue) -> None:
        queue.lifecycle.record_outcomes([(0, Outcome.DELIVERED, 0)])
        assert not queue.messages[2].receipt.on_disk.done(), "nobody knows of this one yet"

    queue = Queue(delivered, earlier)
    queue.put(2)
    assert queue.run() == [0, 1, 2]
    assert queue.disk.frames == [2, 1]
    assert [message.receipt.at_broker.done() for message in queue.messages] == [True, True, False]
    assert queue.messages[1].receipt.at_broker.result() == 16
    queue.put(1)
    assert not queue.lifecycle.would_block


def test_what_is_queued_together_is_written_in_frames_of_a_bounded_size() -> None:
    queue = Queue()
    queue.lifecycle._group_bytes = 200
    for count, size in ((5, 0), (1, 500), (1, 0)):
        queue.put(count, size)
    assert queue.run() == list(range(7))
    assert queue.disk.frames == [3, 2, 1, 1]


def test_a_refused_message_fails_at_the_broker_alone() -> None:
    queue = Queue()
    queue.put(2)
    assert queue.run() == [0, 1]
    with queue.lifecycle.completing_stages():
        queue.lifecycle.record_outcomes([(0, Outcome.REFUSED, 0x87)])
    with pytest.raises(PublisherError, match=r"refused message 0\. .*refused/.*\[TL-O04\]"):
        queue.messages[0].receipt.at_broker.result(0)
    assert not queue.messages[1].receipt.at_broker.done()


def test_what_is_being_written_is_not_failed_by_the_other_thread() -> None:
    def ended(queue: Queue) -> None:
        queue.meanwhile(2)
        queue.lifecycle.fail_pending(JournalFailed("TL-J04", "p", "a write failed"), disk=False)

    queue = Queue(ended)
    queue.put(2)
    assert queue.run() == [0, 1, "TL-J04", "TL-J04"]
    with pytest.raises(JournalFailed):
        queue.messages[0].receipt.at_broker.result()


def test_what_is_being_written_is_not_withdrawn() -> None:
    told: list[object] = []

    def wait(queue: Queue) -> None:
        try:
            queue.lifecycle.wait_until_stored(queue.messages[0], time.monotonic() - 1)
        except PublisherError as error:
            told.append(error.code)

    def late(queue: Queue) -> None:
        waiter.append(threading.Thread(target=wait, args=(queue,)))
        waiter[0].start()
        waiter[0].join(0.1)

    waiter = list[threading.Thread]()
    queue = Queue(late)
    queue.put(1)
    assert queue.run() == [0]
    waiter[0].join(10)
    assert told == []
