"""What comes in batches of any size is stored in frames of a bounded one, every row once and in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.serving import rows
from tests.unit.journal.support import Unsynced
from towline.delivery.outrows import rows_from_messages
from towline.errors import JournalError, TowlineError
from towline.gateway import service
from towline.journal import Batch, Limits, Outbox
from towline.schema import OUTBOX_SCHEMA
from towline.spark import sink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from towline.journal.outbox import BatchStatus

BOUND = 2_000


def messages(sizes: list[int]) -> pa.RecordBatch:
    return rows_from_messages([{"topic": f"t/{n}", "payload": bytes(size), "qos": 1} for n, size in enumerate(sizes)])


def bounded(batches: list[Any]) -> bool:
    return all(batch.num_rows == 1 or batch.nbytes <= BOUND for batch in batches)


def numbers(batches: list[Any]) -> list[int]:
    return [int(topic[2:]) for batch in batches for topic in batch.column("topic").to_pylist()]


def opened(place: Path, max_bytes: int | None = None) -> Outbox:
    limits = Limits(min_free_bytes=0, max_bytes=max_bytes)
    return Outbox.open(place, schema=OUTBOX_SCHEMA, limits=limits, disk=Unsynced())


class Stream:
    """What Flight hands a service: chunks with rows in them."""

    def __init__(self, *batches: pa.RecordBatch) -> None:
        self._batches = batches
        self.schema = (*batches, messages([]))[0].schema

    def __iter__(self) -> Iterator[Any]:
        return iter([SimpleNamespace(data=batch) for batch in self._batches])


def store(outbox: Outbox, *batches: pa.RecordBatch, number: int = 3, attempt: str = "") -> BatchStatus:
    gateway: Any = SimpleNamespace(
        _name="here",
        _require_outbox=lambda: outbox,
        _pump=SimpleNamespace(wake=lambda: None),
        _stored_fields=lambda status: status,
    )
    batch, stream = Batch("q/0", number, attempt=attempt), Stream(*batches)
    stored: BatchStatus = service.GatewayService._store_batch(gateway, batch, 0, is_last=True, reader=stream)
    return stored


def test_a_batch_without_rows_is_stored_too(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        stored = store(outbox, messages([]))
        assert (stored.rows, stored.whole) == (0, True)


@pytest.mark.parametrize(
    ("batches", "code"),
    [([], "TL-G39"), ([messages([1]), messages([2])], "TL-G08"), ([rows(0, 1)], "TL-G21")],
    ids=["none", "two", "other columns"],
)
def test_a_stream_with_anything_but_one_record_batch_enters_nothing(
    tmp_path: Path, batches: list[pa.RecordBatch], code: str
) -> None:
    """gRPC ends the stream of a task that was killed as any other [I10]."""
    with opened(tmp_path) as outbox:
        with pytest.raises(TowlineError, match=code):
            store(outbox, *batches)
        assert outbox.end == 0


def test_a_chunk_above_the_limit_of_the_outbox_fills_it_and_no_more(tmp_path: Path) -> None:
    with opened(tmp_path, 1 << 20) as outbox:
        with pytest.raises(JournalError, match="TL-J15"):
            store(outbox, messages([100_000] * 40), attempt="a")
        assert 5 <= outbox.end <= 10
        outbox.finish_dropped()
        outbox.flush()
        store(outbox, messages([2_000_000]), number=4)  # nothing waits: it is taken


@given(st.lists(st.one_of(st.integers(0, 50), st.integers(0, 5000)), min_size=1, max_size=40))
def test_what_a_sink_brings_at_a_time(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "_CHUNK_BYTES", BOUND)
        chunks = list(sink._chunks(iter([messages(sizes), messages(sizes)])))
    assert bounded([rows for rows, _ in chunks])
    assert numbers([rows for rows, _ in chunks]) == [*range(len(sizes))] * 2
    assert [last for _, last in chunks] == [False] * (len(chunks) - 1) + [True]
