"""The readers as Spark calls them, without Spark, against a real gateway service: rows, cuts, restored copies."""

from __future__ import annotations

import copy
import json
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StringType, StructField, StructType

from tests.helpers import wait_until
from tests.unit.bridge import noted
from tests.unit.gateway.serving import Served, served
from tests.unit.spark.reading import ALL, NewReader, offset, table, until
from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, GatewayError, ReaderFenced
from towline.gateway.client import GatewayClient, Lease
from towline.gateway.identity import JournalPosition
from towline.spark import batching, reader
from towline.spark.batching import FIRST_BATCH_BYTES, TriggerTiming, WriteThroughput
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.options import parse_options
from towline.spark.reader import MqttBatchReader, MqttStreamReader, Slice
from towline.spark.sink_note import SinkNote
from towline.spark.source import MqttDataSource

# -- offsets ---------------------------------------------------------------------------------------------------------


def test_nothing_new_returns_the_start_itself_and_a_tick_now_and_then(
    server: Served, stream: MqttStreamReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(3)
    at = stream.latestOffset(stream.initialOffset(), ALL)
    assert stream.latestOffset(at, ALL) is at
    assert stream.partitions(at, at) == []
    monkeypatch.setattr(batching, "IDLE_BATCH_S", 0.02)
    ticked = wait_until(lambda: (found := stream.latestOffset(at, ALL)) is not at and found, what="a tick")
    assert ticked == {**at, "tick": 1}
    (part,) = stream.partitions(at, ticked)
    assert list(stream.read(part)) == []


def test_stop_commits_nothing_and_frees_the_consumer(server: Served, stream: MqttStreamReader) -> None:
    server.add(10)
    stream.latestOffset(stream.initialOffset(), ALL)
    stream.stop()
    assert server.journal.consumers["default"] == 0
    assert server.service._leases.readers() == {}
    stream.stop()


@pytest.mark.parametrize(
    ("starting", "wanted"), [(None, 40), ("committed", 40), ("earliest", 0), ("latest", 100), (77, 77)]
)
def test_where_a_new_checkpoint_begins(server: Served, plan: ReadPlan, starting: str | int | None, wanted: int) -> None:
    """Behind a row it names the opening of the journal that wrote it [I14]."""
    server.add(100)
    server.journal.commit("default", 40)
    made = MqttStreamReader(replace(plan, start_offset=starting))
    here = JournalPosition("plant", server.journal.journal_id, wanted, server.journal.incarnation_of(wanted))
    assert made.initialOffset()["gateways"] == {"plant": here.to_json()}
    made.stop()


def planned(checkpoint: Path, batch: int, end: dict[str, Any], watermark_ms: int) -> None:
    (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
    facts = json.dumps({"batchWatermarkMs": watermark_ms, "batchTimestampMs": 0})
    (checkpoint / "offsets" / str(batch)).write_text(f"v1\n{facts}\n{json.dumps(end)}")


def test_no_row_is_late_and_a_replay_has_the_same_times(server: Served, plan: ReadPlan, tmp_path: Path) -> None:
    made = MqttStreamReader(replace(plan, checkpoint=str(tmp_path / "ck"), event_time=True))
    at = made.initialOffset()
    early, right = 1_700_000_000_000, 1_800_000_000_000  # ms, around the rows' 2026-01-01
    for batch, watermark_ms in enumerate((0, early, right)):
        server.add(3)
        start, at = at, until(made, at, lambda place, batch=batch: offset(place) == 3 * (batch + 1))  # type: ignore[misc]
        with pytest.raises(ConfigError, match=r"watermark of this batch can't be read.*TL-C24"):
            made.partitions(start, at)
        planned(tmp_path / "ck", batch, at, watermark_ms)
        for part in (*made.partitions(start, at), *made.partitions(start, at)):
            (got,) = made.read(part)
            received = got.column("received_at").cast(pa.int64()).to_pylist()
            assert got.column("event_time").cast(pa.int64()).to_pylist() == [
                max(one, watermark_ms * 1000 + 1000) for one in received
            ]
    made.stop()


# -- AvailableNow ----------------------------------------------------------------------------------------------------


def test_available_now_ends_at_what_is_there_and_neither_waits_nor_ticks(
    server: Served, plan: ReadPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "IDLE_BATCH_S", 0.0)
    made = MqttStreamReader(replace(plan, poll_ms=30000))
    server.add(10)
    made.prepareForTriggerAvailableNow()
    at = made.initialOffset()
    server.add(10)
    end = made.latestOffset(at, ALL)
    assert (offset(end), end["gateways"]["plant"]["incarnation"]) == (10, server.journal.incarnation)
    assert made.latestOffset(end, ALL) is end
    made.stop()


# -- rests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "available_now", "rows", "looks"),
    [
        ({}, False, 4_004, [4, 2_004, 4_004]),
        ({"max_rows": 3}, False, 3, []),
        ({"max_bytes": 100}, False, 1, []),
        ({}, True, 4, []),
    ],
)
def test_few_rows_wait_for_more_unless_a_batch_is_full_or_the_query_has_an_end(
    server: Served,
    plan: ReadPlan,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, Any],
    available_now: bool,
    rows: int,
    looks: list[int],
) -> None:
    seen: list[int] = []

    def delay_s(_timing: TriggerTiming, waiting: int, _now: float) -> float:
        if waiting not in seen:  # else the reader has not heard yet of the last rows
            seen.append(waiting)
            server.add(2_000 if waiting < 4_000 else 0)
        return 0.001 if waiting < 4_000 else 0.0

    monkeypatch.setattr(TriggerTiming, "delay_s", delay_s)
    made = MqttStreamReader(replace(plan, **limits))
    for _ in range(4):
        server.add(1)
    if available_now:
        made.prepareForTriggerAvailableNow()
    start = made.initialOffset()
    assert offset(made.latestOffset(start, made.getDefaultReadLimit())) == rows
    assert seen == looks
    if limits:
        assert offset(made.latestOffset(start, ALL)) == 4_004, "Trigger.Once has no limits"
    made.stop()


# -- restart ---------------------------------------------------------------------------------------------------------


def test_rows_that_are_handed_out_once_are_refused_to_a_repeated_task(
    server: Served, plan: ReadPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer without them would stand for the first attempt's behind a shuffle, and nobody count it [I11]."""
    server.add(5)
    once = MqttStreamReader(replace(plan, replays_batches=False))
    part = Slice(plan.address, server.journal.journal_id, 0, 5)
    assert sum(batch.num_rows for batch in once.read(part)) == 5
    monkeypatch.setattr(reader, "_task_attempt", lambda: 1)
    with pytest.raises(
        GatewayError, match=r"attempt 2 of a task asks for rows that at_most_once reads only once.*TL-G62"
    ):
        once.read(part)
    assert list(once.read(Slice(part.address, part.journal, 5, 5))) == []
    assert sum(batch.num_rows for batch in MqttStreamReader(plan).read(part)) == 5


def test_a_foreign_journal_names_both_ways_out(server: Served, stream: MqttStreamReader) -> None:
    at = stream.initialOffset()
    foreign, end = copy.deepcopy(at), copy.deepcopy(at)
    foreign["gateways"]["plant"]["journal"] = end["gateways"]["plant"]["journal"] = "abc"
    end["gateways"]["plant"]["offset"] = 5
    for call in (lambda: stream.latestOffset(foreign, ALL), lambda: stream.partitions(foreign, end)):
        with pytest.raises(ReaderFenced) as caught:
            call()
        assert str(caught.value) == (
            "plant: the query's checkpoint belongs to journal abc, this gateway has journal "
            f"{server.journal.journal_id}. Bring back the newest state directory of that query. Or start the query "
            "with a new checkpoint directory and get what waits here: rows that only the other one held stay there, "
            "and what both hold may come twice.   [TL-G04]"
        )


# -- the gateway goes and comes --------------------------------------------------------------------------------------


def test_the_one_gateway_of_a_source_is_away_as_one_of_several_is(
    tmp_path: Path, new_reader: NewReader, caplog: pytest.LogCaptureFixture
) -> None:
    stream = new_reader(address=GatewayAddress(str(tmp_path)), gateways=())
    with served(tmp_path) as first:
        first.add(10)
        at = stream.latestOffset(stream.initialOffset(), ALL)

    def report() -> dict[str, Any]:
        stream.latestOffset(at, ALL)
        return stream.reportLatestOffset() or {}

    away = wait_until(lambda: (found := report()).get("away_since") and found)
    assert (away["queued"], "no gateway" in away["last_error"]) == (0, True)
    with served(tmp_path) as second:
        second.add(5)
        end = until(stream, at, lambda place: offset(place) == 15)
        assert table(stream, at, end).num_rows == 5
        assert "away_since" not in report()
    told = [one.getMessage() for one in caplog.records if one.name == "towline.spark"]
    assert ["; its messages wait there. Is it running?" in text and text.endswith("[TL-G54]") for text in told] == [
        True,
        False,
    ]
    assert "is available again" in told[1]


def test_a_reader_that_was_taken_over_stops(server: Served, stream: MqttStreamReader) -> None:
    at = stream.initialOffset()
    with GatewayClient(server.location) as newer:
        newer.acquire(Lease("default"))
        with pytest.raises(ReaderFenced, match="TL-G07"):
            stream.latestOffset(at, ALL)


# -- report, batch, checks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("absent_s", "arrived", "told"),
    [(41.0, 2186, True), (41.0, 999, False), (0.4, 2186, False)],
)
def test_a_broker_whose_queue_may_have_been_too_short_is_told_once(
    server: Served, caplog: pytest.LogCaptureFixture, absent_s: float, arrived: int, told: bool
) -> None:
    """As of a Mosquitto as installed, which drops without a word; of another broker it is not known."""
    place = parse_options({"broker": "mqtt://h", "subscribe": "t", "stateDir": str(server.state_dir)}).address
    stream = MqttStreamReader(ReadPlan(place, "default", poll_ms=50))
    server.reported = {"absent_s": absent_s, "arrived": arrived, "up_s": 2.0}
    here = stream.initialOffset()
    for _ in range(2):
        stream.latestOffset(here, ALL)
        assert stream.reportLatestOffset() is not None
    stream.stop()
    lines = [record.getMessage() for record in caplog.records if record.name == "towline.spark"]
    assert len(lines) == told
    for line in lines:
        assert line.startswith(
            "no gateway ran for 41 s, and 1,093 messages come each second: a Mosquitto with default "
        )
        assert "The limit of this broker is not known here." in line
        assert line.endswith("[TL-G64]")


@pytest.mark.parametrize(
    ("given", "said"), [(True, "the schema of this source is fixed.*TL-C24"), (False, '"stateDir" is missing.*TL-C20')]
)
def test_what_spark_would_mask_the_reader_tells(plan: ReadPlan, given: bool, said: str) -> None:
    """Another schema, and a table that is read without its options."""
    source = MqttDataSource({"gateway": plan.address.location} if given else {})
    schema = StructType([StructField("a", StringType())])
    for made in (source.streamReader(schema).getDefaultReadLimit, source.reader(schema).partitions):
        with pytest.raises(ConfigError, match=said):
            made()


def test_a_backward_range_is_one_line(server: Served, plan: ReadPlan) -> None:
    server.add(50)
    with pytest.raises(ConfigError, match=r"it is 5, before the start at 9\. The journal holds the offsets 0 to 49"):
        MqttBatchReader(replace(plan, start_offset=9, end_offset=5)).partitions()


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
    server: Served, query: MqttStreamReader, place: Path, synced: dict[str, int]
) -> None:
    server.add(10)
    end = query.latestOffset(query.initialOffset(), ALL)
    noted.planned(place, 0, end)
    query.latestOffset(end, ALL)
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
    noted.planned(place, 0, end, done=False)
    synced.clear()
    assert len(stream.partitions(start, end)) == 1
    assert {"offsets", "ck"} <= set(synced)
    stream.stop()


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
    noted.planned(tmp_path / "other", 0, {})
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
