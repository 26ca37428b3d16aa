"""Slices of a batch on their way through Spark to the task that writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from towline.bridge.uplink.sink import SLICE_COLUMN, LineReader, WriterPartition, open_slice
from towline.errors import GatewayError
from towline.gateway.access import ClientAccess
from towline.processes import ProcessIdentity
from towline.spark import reader
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.reader import Slice

LOCAL = GatewayAddress("/state/é", settings='{"name": "g"}', owner=ProcessIdentity(7, 8, "host"))
REMOTE = GatewayAddress("grpc+tls://h:1", access=ClientAccess("/token", "/ca", "name"), ticket_s=5)
ADMITTED = replace(REMOTE, ticket="ticket", ca_pem="PEM")
SLICES = (
    Slice(LOCAL, "j1", 3, 9, "inc"),
    Slice(ADMITTED, "j2", 0, 4),
    Slice(LOCAL, "j3", 5, 5),
)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Which rows of which gateway are read; no gateway is there."""
    calls: list[tuple[Any, ...]] = []

    def rows(place: GatewayAddress, *range_: Any) -> Iterator[pa.RecordBatch]:
        calls.append((place, *range_))
        return iter(())

    monkeypatch.setattr(GatewayAddress, "rows", rows)
    return calls


def test_a_slice_is_read_by_the_task_that_writes_where_the_plan_says(asked: list[tuple[Any, ...]]) -> None:
    """Its ticket lets it in to a gateway on a network; one without rows is nothing to read."""
    (batch,) = LineReader(ReadPlan(LOCAL), 3, None, {}).read(WriterPartition(SLICES, 2, 3))
    slices = [open_slice(text) for text in batch.column(SLICE_COLUMN).to_pylist()]
    assert [of for _, *of in slices] == [[2, 3]] * 2
    assert asked == [(LOCAL, "j1", 3, 9, "inc"), (ADMITTED, "j2", 0, 4, "")]
    assert not list(LineReader(ReadPlan(LOCAL), 3, None, {}).read(WriterPartition([], 0, 3)))


def test_what_is_handed_out_once_is_not_written_by_a_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_task_attempt", lambda: 1)
    partition = WriterPartition(SLICES, 0, 1)
    with pytest.raises(GatewayError, match="TL-G62"):
        list(LineReader(ReadPlan(LOCAL, replays_batches=False), 1, None, {}).read(partition))
    assert len(list(LineReader(ReadPlan(LOCAL), 1, None, {}).read(partition))) == 1
