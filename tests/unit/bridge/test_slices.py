"""Slices of a batch on their way through Spark to the task that writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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


def test_a_slice_is_read_by_the_task_that_writes_where_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ticket lets it in to a gateway on a network; one without rows is nothing to read."""
    asked: list[Any] = []
    monkeypatch.setattr(GatewayAddress, "rows", lambda *place: asked.append(place))
    (batch,) = LineReader(ReadPlan(LOCAL), {"writers": "3"}).read(WriterPartition(SLICES, 2, 3))
    slices = [open_slice(text) for text in batch.column(SLICE_COLUMN).to_pylist()]
    assert [of for _, *of in slices] == [[2, 3]] * 2
    assert asked == [(LOCAL, "j1", 3, 9, "inc"), (ADMITTED, "j2", 0, 4, "")]
    assert not list(LineReader(ReadPlan(LOCAL), {"writers": "3"}).read(WriterPartition([], 0, 3)))


def test_each_writer_has_all_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a batch without rows: each writer leaves its marker."""
    for slices in (SLICES, ()):
        monkeypatch.setattr(reader.MqttStreamReader, "partitions", lambda *_: slices)  # noqa: B023 - asked at once
        parts: Any = LineReader(ReadPlan(LOCAL), {"writers": "2"}).partitions({}, {})
        assert [(part.slices, part.writer, part.writers) for part in parts] == [(slices, 0, 2), (slices, 1, 2)]


def test_what_is_handed_out_once_is_not_written_by_a_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_task_attempt", lambda: 1)
    partition, options = WriterPartition(SLICES, 0, 1), {"writers": "1"}
    with pytest.raises(GatewayError, match="TL-G62"):
        list(LineReader(ReadPlan(LOCAL, replays_batches=False), options).read(partition))
    assert len(list(LineReader(ReadPlan(LOCAL), options).read(partition))) == 1
