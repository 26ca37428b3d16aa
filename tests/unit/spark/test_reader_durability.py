"""What a reader may have cut, and which copies of a journal it recognises."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.helpers import wait_until
from tests.unit.bridge.noted import planned
from tests.unit.gateway.serving import Served, served
from tests.unit.spark.reading import ALL, offset, table
from towline.checkpoint import Checkpoint
from towline.errors import JournalError, ReaderFenced
from towline.spark import reader
from towline.spark.batching import FIRST_BATCH_BYTES, WriteThroughput
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.reader import MqttStreamReader
from towline.spark.sink_note import SinkNote

# -- power loss ------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The checkpoint of `query`."""
    (tmp_path / "ck").mkdir()
    return tmp_path / "ck"


@pytest.fixture
def query(plan: ReadPlan, place: Path) -> Iterator[MqttStreamReader]:
    stream = MqttStreamReader(replace(plan, checkpoint=f"file:{place}"))
    yield stream
    stream.stop()


@pytest.fixture
def done(server: Served, query: MqttStreamReader, place: Path) -> dict[str, Any]:
    """The end of a batch that is in both logs; `latestOffset` has not been called with it yet."""
    server.add(10)
    end = query.latestOffset(query.initialOffset(), ALL)
    planned(place, 0, end)
    return end


def test_a_batch_has_no_more_than_kafka_takes_in_time(server: Served, query: MqttStreamReader, place: Path) -> None:
    """The first of a start has 1 MiB; the next as the sink's note says, and without a note all that waits."""
    limit = ReadMaxRows(200_000)
    server.add(40_000)
    size = server.journal.range_bytes(0, 40_000)
    assert size > 2 << 20
    at = query.latestOffset(query.initialOffset(), limit)
    assert 0.9 < server.journal.range_bytes(0, offset(at)) / FIRST_BATCH_BYTES <= 1.1
    SinkNote(throughput=WriteThroughput(0, FIRST_BATCH_BYTES, 31.0, 15.0)).write(Checkpoint(str(place)))
    after = query.latestOffset(at, limit)
    assert 0.4 < server.journal.range_bytes(offset(at), offset(after)) / FIRST_BATCH_BYTES < 0.6
    query.stop()
    again = query.latestOffset(at, limit)
    assert 0.4 < server.journal.range_bytes(offset(at), offset(again)) / FIRST_BATCH_BYTES < 0.6, (
        "a start goes by the rate before it"
    )
    assert offset(query.latestOffset(at, limit)) == offset(again), "it was planned and not begun"
    assert offset(query.latestOffset(again, limit)) == 40_000, "another sink, which leaves no word"


@pytest.fixture
def synced(server: Served, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Names of files that were synced, with the offset up to which the gateway had removed rows then."""
    seen: dict[str, int] = {}
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        seen[name.split(".")[1] if name.endswith(".towline") else name] = server.journal.consumers["default"]

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def test_the_commit_log_is_durable_before_the_inbox_is_cut(
    server: Served, query: MqttStreamReader, done: dict[str, Any], synced: dict[str, int]
) -> None:
    query.latestOffset(done, ALL)
    assert {name: synced[name] for name in ("0", "commits", "offsets", "ck")} == dict.fromkeys(
        ("0", "commits", "offsets", "ck"), 0
    )
    assert server.journal.consumers["default"] == 10


def test_what_is_served_once_is_remembered_before_it_is_read(
    server: Served, plan: ReadPlan, place: Path, synced: dict[str, int]
) -> None:
    """Forgotten by a power failure it would be planned anew, and what is in Kafka would come twice."""
    stream = MqttStreamReader(replace(plan, checkpoint=str(place), replays_batches=False))
    server.add(10)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    planned(place, 0, end, done=False)
    synced.clear()
    assert len(stream.partitions(start, end)) == 1
    assert {"offsets", "ck"} <= set(synced)
    stream.stop()


def test_a_checkpoint_that_can_not_be_synced_ends_the_query_and_cuts_nothing(
    server: Served, query: MqttStreamReader, done: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        with pytest.raises(JournalError, match=r"Input/output error.*TL-J20"):
            query.latestOffset(done, ALL)
    assert server.journal.consumers["default"] == 0


def test_without_its_checkpoint_the_cut_waits_for_a_sync_of_the_machine(
    server: Served, plan: ReadPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or with another query's."""
    go, asked = threading.Event(), threading.Event()

    def sync() -> None:
        asked.set()
        go.wait(60)

    monkeypatch.setattr(os, "sync", sync)
    monkeypatch.setattr(reader, "_MIN_SYNC_INTERVAL_S", 0.0)
    monkeypatch.setattr(reader, "_MAX_SYNC_SHARE", 1.0)
    stream = MqttStreamReader(replace(plan, checkpoint=str(tmp_path / "other")))
    planned(tmp_path / "other", 0, {})
    server.add(10)
    at = stream.latestOffset(stream.initialOffset(), ALL)
    try:
        stream.latestOffset(at, ALL)
        assert asked.wait(60)
        stream.latestOffset(at, ALL)
        assert server.journal.consumers["default"] == 0
        go.set()
        # the sync that ran may have been asked for the offset before this one
        wait_until(lambda: stream.latestOffset(at, ALL) and server.journal.consumers["default"] == 10)
    finally:
        go.set()
        stream.stop()


# -- restored copies [I14] -------------------------------------------------------------------------------------------


def restored(state: Path, copied_at: int) -> dict[str, Any]:
    """A state directory whose journal was read to row 20, and then replaced by a copy from before; where the query is.

    The copy has gone on in two openings, and is longer than ever.
    """
    with served(state) as server:
        server.add(copied_at)
    shutil.copytree(state / "inbox", state / "older")
    with served(state) as server:
        server.add(20 - copied_at)
        stream = MqttStreamReader(ReadPlan(GatewayAddress(str(state)), "default", poll_ms=50))
        at = stream.latestOffset(stream.initialOffset(), ALL)
        stream.stop()
    shutil.rmtree(state / "inbox")
    (state / "older").rename(state / "inbox")
    for _ in range(2):
        with served(state) as server:
            server.add(15)
    assert offset(at) == 20
    return at


def test_a_copy_that_has_gone_on_is_neither_read_nor_cut(tmp_path: Path) -> None:
    """The same journal, and longer than the checkpoint: only the incarnation tells that its rows are others."""
    at = restored(tmp_path / "state", 19)
    with served(tmp_path / "state") as server:
        stream = MqttStreamReader(ReadPlan(GatewayAddress(str(tmp_path / "state")), "default", poll_ms=50))
        with pytest.raises(
            ReaderFenced, match=r"an older copy that was written to since.*newest state directory.*Or .*TL-G26"
        ):
            stream.latestOffset(at, ALL)
        before = copy.deepcopy(at)
        before["gateways"]["plant"] |= {"offset": 0, "incarnation": ""}
        with pytest.raises(ReaderFenced, match="TL-G26"):
            table(stream, before, at)
        assert server.journal.consumers["default"] == 0
        assert server.journal.first_offset == 0
        stream.stop()
