"""What can't be is said at once: messages that MQTT can't say, waits that nothing would end, and a lack of room."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towline import Publisher
from towline.delivery.outrows import add_arrival, outgoing_messages, rows_from_messages
from towline.errors import ConfigError, JournalFailed, JournalFull, PublisherError, TowlineError
from towline.mqtt.codec import encode
from towline.mqtt.message import OutboundMessage
from towline.net.client import outbound_message
from towline.publisher.publisher import message_columns
from towline.publisher.receipt import Receipt
from towline.timing import Timestamp

NOWHERE = "mqtt://127.0.0.1:9"
LARGEST = 268_435_455


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(NOWHERE, state_dir=tmp_path / "p")
    yield made
    made.close(0)


def in_child(call: Callable[[], object]) -> int:
    """Call in a forked process; its exit code, -14 when it hangs."""
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        try:
            call()
            os._exit(0)
        except TowlineError as error:
            os._exit(int(error.code[-2:]))
        except BaseException:  # noqa: BLE001 - the test's process is not to go on twice
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- messages --


@pytest.mark.parametrize(
    "message",
    [
        {"topic": "x" * 65536},
        {"topic": "t", "content_type": "a\0"},
        {"topic": "t", "user_properties": [("a", "\ud800")]},
    ],
    ids=["topic", "content_type", "user_properties"],
)
def test_a_message_that_mqtt_cannot_say_is_not_stored(publisher: Publisher, message: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="TL-C51") as told:
        publisher.publish(**message)
    assert len(str(told.value)) < 400
    assert str(told.value).isprintable()
    assert publisher.publish("t", "1").number == 0  # whoever comes next is not in its way


def test_a_message_larger_than_a_packet_is_not_stored(publisher: Publisher) -> None:
    topic, properties = "t", [("a", "b")]
    with pytest.raises(ConfigError, match=r"268,435,\d\d\d bytes, MQTT ends at 268,435,455"):
        publisher.publish(topic, bytes(LARGEST - 400))  # with the marks of receipts, which it may get
    with pytest.raises(ConfigError, match="MQTT ends at"):
        publisher.publish(topic, bytes(LARGEST - 600), user_properties=properties * 1000)
    with pytest.raises(ConfigError, match="MQTT ends at"):
        publisher.publish(topic, bytes(300_000_000))
    assert publisher.flush(0) == 0
    with pytest.raises(ConfigError, match="TL-C51"):
        outbound_message(topic, bytes(300_000_000), 1, retain=False)
    with pytest.raises(ConfigError, match="TL-C51"):
        outbound_message(topic, b"", 1, retain=False, content_type="\0")


texts = st.text(max_size=8) | st.sampled_from(["x" * 65535, "é" * 32767, "\0", "\ud800", "a/b"])
anything = st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=5) | texts
pairs = st.lists(st.tuples(texts, texts) | anything, max_size=3)


@settings(max_examples=2 * settings().max_examples)
@given(
    topic=texts | anything,
    payload=st.binary(max_size=5) | st.binary(max_size=5).map(bytearray) | anything,
    qos=st.integers(0, 2) | anything,
    retain=st.booleans() | anything,
    content_type=texts | anything,
    payload_is_utf8=st.booleans() | anything,
    response_topic=texts | anything,
    correlation_data=st.binary(max_size=5) | anything,
    user_properties=pairs | st.lists(st.lists(texts, min_size=2, max_size=2), max_size=3),
    expiry_s=st.integers(0, 2**32 - 1) | anything,
)
def test_what_is_taken_can_be_sent(**message: Any) -> None:
    """By a client, and by a publisher, which stores it first."""
    contents: list[OutboundMessage | int] = []
    columns: list[dict[str, Any]] = []
    with contextlib.suppress(ConfigError):
        contents.append(outbound_message(**message))
    with contextlib.suppress(ConfigError):
        columns.append(message_columns(**message))
    made = outgoing_messages(add_arrival(rows_from_messages(columns), Timestamp(0)), 0)
    for content in (*contents, *(one.content_or_reason for one in made)):
        assert isinstance(content, OutboundMessage)
        encode(content.to_packet(content.qos and 1, None))


# -- processes and threads --


def test_a_forked_process_is_refused_at_once(publisher: Publisher) -> None:
    receipt = publisher.publish("t", "1")
    calls: list[Callable[[], object]] = [
        lambda: publisher.publish("t", "2"),
        lambda: publisher.publish("t", "2", wait=False),
        publisher.flush,
        publisher.status,
        receipt.at_broker.result,
        lambda: receipt.at_broker.add_done_callback(print),
    ]
    with publisher._condition:
        assert [in_child(call) for call in calls] == [8] * len(calls)
        assert in_child(publisher.close) == 0
        assert in_child(publisher._at_exit) == 0
        assert in_child(lambda: publisher.__exit__(None, None, None)) == 0
        assert in_child(lambda: receipt.on_disk.result() or receipt.number) == 0
    assert publisher.publish("t", "3").number == 1  # the parent's is unharmed


def test_a_publisher_does_not_travel(publisher: Publisher) -> None:
    with pytest.raises(TypeError, match="belongs to the process that created it"):
        pickle.dumps(publisher)


def test_a_disk_that_fails_ends_every_wait(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    first = publisher.publish("t", "1")

    def fail(*_: object, **__: object) -> None:
        raise JournalFailed("TL-J04", "p", "a write failed", "")

    monkeypatch.setattr(publisher._outbox, "append", fail)
    with pytest.raises(JournalFailed):
        publisher.publish("t", "2")
    for wait in (first.at_broker.result, publisher.flush, lambda: publisher.publish("t", "3")):
        with pytest.raises(JournalFailed):
            wait()
    with pytest.raises(ConfigError):
        first.end_to_end.result(10)


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), SystemExit(3), MemoryError()])
def test_a_fault_on_the_mqtt_thread_ends_every_wait(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    receipt = publisher.publish("t", "1")

    def fail(_timeout: float) -> None:
        raise error

    monkeypatch.setattr(publisher._driver, "run_once", fail)
    publisher._driver.wake()
    for wait in (receipt.at_broker.result, publisher.flush, lambda: publisher.publish("t", "3")):
        with pytest.raises(PublisherError, match=f"TL-O09|unexpected {type(error).__name__}"):
            wait()
    assert publisher.close() == 1


def test_nobody_waits_for_a_closed_publisher(tmp_path: Path) -> None:
    publisher = Publisher(NOWHERE, state_dir=tmp_path / "p")
    receipt = publisher.publish("t", "1")
    called = threading.Event()
    receipt.at_broker.add_done_callback(lambda _stage: called.set())
    assert publisher.close(0) == 1
    assert called.is_set()
    with pytest.raises(PublisherError, match="TL-O03"):
        receipt.at_broker.result(10)
    for wait in (publisher.flush, lambda: publisher.publish("t", "2")):
        with pytest.raises(PublisherError, match="TL-O02"):
            wait()
    assert publisher.close() == 0
    assert publisher.status()["accepted"] == 1


def test_a_callback_does_not_wait_for_its_own_thread(publisher: Publisher) -> None:
    told: list[str] = []
    done = threading.Event()

    def call(_stage: object) -> None:
        for wait in (lambda: publisher.publish("t", "2"), publisher.flush, publisher.close):
            try:
                wait()
            except PublisherError as error:
                told.append(error.code)
        publisher.publish("t", "2", wait=False).on_disk.add_done_callback(lambda _stage: done.set())

    publisher._lifecycle.condition.acquire()
    receipt: Receipt = publisher.publish("t", "1", wait=False)
    receipt.on_disk.add_done_callback(call)
    publisher._lifecycle.condition.release()
    assert done.wait(60)
    assert told == ["TL-O10"] * 3


# -- room --


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
