"""What comes in batches of any size is stored in frames of a bounded one, every row once and in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqtt5 import PublishPacket, QoS

from tests.unit.journal.support import Unsynced
from towline.delivery import refused
from towline.delivery.inbound import _split_delivery, to_rows
from towline.delivery.outrows import add_arrival, rows_from_messages
from towline.delivery.refused import RefusedMessages
from towline.errors import JournalError
from towline.gateway import service
from towline.journal import Batch, Limits, Outbox
from towline.mqtt.codec import PublishRun
from towline.mqtt.events import Deliver, Messages
from towline.schema import MESSAGE_SCHEMA, OUTBOX_SCHEMA
from towline.spark import sink
from towline.timing import Timestamp

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZES = st.lists(st.one_of(st.integers(0, 50), st.integers(0, 5000)), min_size=1, max_size=40)
BOUND = 2_000


def messages(sizes: list[int]) -> pa.RecordBatch:
    return rows_from_messages([{"topic": f"t/{n}", "payload": bytes(size), "qos": 1} for n, size in enumerate(sizes)])


def bounded(batches: list[Any]) -> bool:
    return all(batch.num_rows == 1 or batch.nbytes <= BOUND for batch in batches)


def numbers(batches: list[Any]) -> list[int]:
    return [int(topic[2:]) for batch in batches for topic in batch.column("topic").to_pylist()]


@given(SIZES)
def test_frames_of_the_inbox(sizes: list[int]) -> None:
    packets = [PublishPacket(f"t/{n}", bytes(size), qos=QoS(1), packet_id=n + 1) for n, size in enumerate(sizes)]
    whole = Messages([PublishRun.from_packets(packets, b"\x32" * len(packets))])
    rows = to_rows(whole, 7, 0, "g")
    frames = [frame.rows for frame in _split_delivery(rows, Deliver(1, 7, whole, {}, ()), BOUND)]
    assert bounded(frames)
    assert numbers(frames) == list(range(len(sizes)))


def test_a_large_message_that_comes_alone_is_used_where_it_lies() -> None:
    large = PublishPacket("t", bytes(2 << 20), qos=QoS(1), packet_id=1)
    small = PublishPacket("t", b"x", qos=QoS(1), packet_id=2)
    before = pa.total_allocated_bytes()
    alone = to_rows(Messages([PublishRun.from_packets([large], b"\x32")]), 0, 0, "g")
    assert pa.total_allocated_bytes() - before < 1 << 20
    both = to_rows(Messages([PublishRun.from_packets([large, small], b"\x32\x32")]), 0, 0, "g")
    assert both.slice(0, 1).equals(alone)
    alone.validate(full=True)


class Stream:
    """What Flight hands a service: chunks with rows in them."""

    schema = MESSAGE_SCHEMA

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter([SimpleNamespace(data=batch) for batch in self._batches])


@pytest.mark.parametrize("sizes", [[1000, 10, 9000, 0, 0, 1500, 700], []])
def test_rows_of_any_size_enter_the_outbox_in_frames_of_a_bounded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr(service, "max_frame_bytes", lambda _limit: BOUND)
    outbox = Outbox.open(tmp_path, schema=OUTBOX_SCHEMA, limits=Limits(min_free_bytes=0), disk=Unsynced())
    frames: list[pa.RecordBatch] = []

    def stamped(rows: pa.RecordBatch, at: Timestamp) -> pa.RecordBatch:
        frames.append(rows)
        return add_arrival(rows, at)

    monkeypatch.setattr(service, "add_arrival", stamped)
    stored = service.store_batch(outbox, "here", Batch("q/0", 3), Stream([messages(sizes)]), start=0, is_last=True)
    assert (stored.rows, stored.whole) == (len(sizes), True)
    assert bounded(frames)
    assert numbers(frames) == numbers([*outbox.read(0, len(sizes))] if sizes else []) == list(range(len(sizes)))
    outbox.close()


def test_a_chunk_above_the_limit_of_the_outbox_fills_it_and_no_more(tmp_path: Path) -> None:
    limits = Limits(min_free_bytes=0, max_bytes=1 << 20)
    outbox = Outbox.open(tmp_path, schema=OUTBOX_SCHEMA, limits=limits, disk=Unsynced())
    with pytest.raises(JournalError, match="TL-J15"):
        service.store_batch(
            outbox, "here", Batch("q/0", 3, attempt="a"), Stream([messages([100_000] * 40)]), start=0, is_last=True
        )
    assert 5 <= outbox.end <= 10
    outbox.finish_dropped()
    outbox.flush()
    service.store_batch(
        outbox, "here", Batch("q/0", 4), Stream([messages([2_000_000])]), start=0, is_last=True
    )  # nothing waits: it is taken
    outbox.close()


@given(SIZES)
def test_what_a_sink_brings_at_a_time(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "_CHUNK_BYTES", BOUND)
        chunks = list(sink._chunks(iter([messages(sizes), messages(sizes)])))
    assert bounded([rows for rows, _ in chunks])
    assert numbers([rows for rows, _ in chunks]) == [*range(len(sizes))] * 2
    assert [last for _, last in chunks] == [False] * (len(chunks) - 1) + [True]


def test_refused_messages_of_any_size_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused, "_GROUP_BYTES", BOUND)
    sizes = [1000, 10, 9000, 0, 0, 1500, 700]
    rows = add_arrival(messages(sizes), Timestamp(0))
    refused_messages = RefusedMessages(tmp_path / "refused")
    groups = list(refused_messages.store((rows.slice(n, 1), n, 0x87) for n in range(7)))
    assert [number for group in groups for number in group] == list(range(7))
    assert len(groups) > 2
    assert [(row["number"], row["bytes"]) for row in refused_messages.page(0)["rows"]] == list(enumerate(sizes))
    refused_messages.close()
