"""The readers as Spark calls them, without Spark, against a real gateway service."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from tests.helpers import wait_until
from tests.unit.gateway.serving import Served, mark, rows, served
from towline.errors import ConfigError, Fenced, GatewayError, GatewayUnreachable, JournalError
from towline.gateway.client import GatewayClient
from towline.spark import link, reader
from towline.spark.link import GatewayPlace, driver_pid, patiently
from towline.spark.offsets import Position
from towline.spark.reader import MqttBatchReader, MqttStreamReader, ReadPlan, Slice

ALL = ReadAllAvailable()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "state") as running:
        yield running


@pytest.fixture
def plan(server: Served) -> ReadPlan:
    return ReadPlan(GatewayPlace(str(server.state_dir), ""), "default", poll_s=0.05)


@pytest.fixture
def stream(plan: ReadPlan) -> Iterator[MqttStreamReader]:
    made = MqttStreamReader(plan)
    yield made
    made.stop()


def offset(place: dict[str, Any]) -> int:
    return int(place["gateways"]["plant"]["offset"])


def table(made: MqttStreamReader, start: dict[str, Any], end: dict[str, Any]) -> pa.Table:
    batches = [batch for part in made.partitions(start, end) for batch in made.read(part)]
    return pa.Table.from_batches(batches, schema=rows(0, 0).schema)


# -- offsets ---------------------------------------------------------------------------------------------------------


def test_a_query_goes_batch_by_batch(server: Served, stream: MqttStreamReader) -> None:
    server.add(25)
    at = stream.initialOffset()
    assert offset(at) == 0
    seen = []
    for _ in range(3):
        end = stream.latestOffset(at, ReadMaxRows(10))
        seen.append(table(stream, at, end))
        at = end
    assert [batch.num_rows for batch in seen] == [10, 10, 5]
    assert pa.concat_tables(seen).equals(pa.Table.from_batches([rows(0, 25)]))


def test_nothing_new_returns_the_start_itself(server: Served, stream: MqttStreamReader) -> None:
    server.add(5)
    at = stream.latestOffset(stream.initialOffset(), ALL)
    assert stream.latestOffset(at, ALL) is at
    assert stream.partitions(at, at) == []


def test_limits_are_kept(server: Served, stream: MqttStreamReader) -> None:
    for _ in range(50):
        server.add(20)
    at = stream.initialOffset()
    assert offset(stream.latestOffset(at, ReadMaxRows(30))) == 30
    assert 0 < offset(stream.latestOffset(at, ReadMaxBytes(20_000))) < 1000
    assert offset(stream.latestOffset(at, ALL)) == 1000


def test_the_limit_in_bytes_holds_beside_the_one_in_rows(server: Served, plan: ReadPlan) -> None:
    for _ in range(50):
        server.add(20)
    made = MqttStreamReader(replace(plan, max_rows=30, max_bytes=20_000))
    at, ends = made.initialOffset(), [0]
    while ends[-1] < 1000:
        at = made.latestOffset(at, made.getDefaultReadLimit())
        ends.append(offset(at))
    assert max(after - before for before, after in pairwise(ends)) <= 30
    bytes_only = MqttStreamReader(replace(plan, max_bytes=20_000))
    window = bytes_only._hold
    made.stop()
    assert 0 < window.wait(Position.parse(bytes_only.initialOffset()), 0, 0, ReadMaxRows(900), None).end < 900
    assert offset(bytes_only.latestOffset(bytes_only.initialOffset(), ALL)) == 1000
    bytes_only.stop()


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({"max_rows": 7, "max_bytes": 9}, ReadMaxRows(7)),
        ({"max_rows": 7}, ReadMaxRows(7)),
        ({"max_bytes": 9}, ReadMaxBytes(9)),
        ({}, ReadAllAvailable()),
    ],
)
def test_the_default_limit_is_the_option(plan: ReadPlan, limits: dict[str, int], wanted: object) -> None:
    made = MqttStreamReader(replace(plan, **limits))  # type: ignore[arg-type]
    assert made.getDefaultReadLimit() == wanted
    made.stop()


def test_only_the_start_of_latest_offset_commits(server: Served, stream: MqttStreamReader) -> None:
    server.add(10)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    table(stream, start, end)
    stream.commit(end)
    assert server.journal.consumers["default"] == 0
    wait_until(lambda: stream.latestOffset(end, ALL) and server.journal.consumers["default"] == 10)


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
    server.add(100)
    server.journal.commit("default", 40)
    made = MqttStreamReader(replace(plan, starting=starting))
    assert offset(made.initialOffset()) == wanted
    made.stop()


def test_an_idle_query_ticks(server: Served, stream: MqttStreamReader, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add(3)
    at = stream.latestOffset(stream.initialOffset(), ALL)
    monkeypatch.setattr(reader, "TICK_S", 0.02)
    ticked = wait_until(lambda: (found := stream.latestOffset(at, ALL)) is not at and found, what="a tick")
    assert ticked == {**at, "tick": 1}
    (part,) = stream.partitions(at, ticked)
    assert list(stream.read(part)) == []


def test_a_query_that_starts_idle_warms_its_workers_at_once(server: Served, stream: MqttStreamReader) -> None:
    at = stream.initialOffset()
    began = time.monotonic()
    first = stream.latestOffset(at, ALL)
    assert time.monotonic() - began < 2
    assert first == {**at, "tick": 1}
    (part,) = stream.partitions(at, first)
    assert list(stream.read(part)) == []


def test_ticks_come_before_workers_die() -> None:
    assert reader.TICK_S + 5 < 60


def test_a_busy_query_does_not_tick(server: Served, stream: MqttStreamReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TICK_S", 0.0)
    server.add(1)
    assert stream.latestOffset(stream.initialOffset(), ALL)["tick"] == 0


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
        at, start = made.latestOffset(at, ALL), at
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


def test_available_now_ends_where_it_began(server: Served, stream: MqttStreamReader) -> None:
    server.add(20)
    stream.prepareForTriggerAvailableNow()
    server.add(20)
    at = stream.initialOffset()
    middle = stream.latestOffset(at, ReadMaxRows(15))
    end = stream.latestOffset(middle, ReadMaxRows(15))
    assert (offset(middle), offset(end)) == (15, 20)
    assert stream.latestOffset(end, ReadMaxRows(15)) is end
    assert server.journal.consumers["default"] == 20


def test_available_now_neither_waits_nor_ticks(server: Served, plan: ReadPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TICK_S", 0.0)
    made = MqttStreamReader(replace(plan, poll_s=30))
    made.prepareForTriggerAvailableNow()
    at = made.initialOffset()
    assert made.latestOffset(at, ALL) is at
    made.stop()


# -- restart ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_batch_is_served_again(server: Served, plan: ReadPlan, stream: MqttStreamReader) -> None:
    server.add(30)
    start = stream.latestOffset(stream.initialOffset(), ReadMaxRows(10))
    end = stream.latestOffset(start, ReadMaxRows(10))
    before = table(stream, start, end)
    stream.stop()
    server.add(5)
    again = MqttStreamReader(plan)
    again.getDefaultReadLimit()
    assert table(again, start, end).equals(before)
    again.stop()


def test_at_most_once_serves_the_interrupted_batch_empty(
    server: Served, plan: ReadPlan, stream: MqttStreamReader
) -> None:
    server.add(30)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadMaxRows(10))
    stream.stop()
    again = MqttStreamReader(replace(plan, at_most_once=True))
    assert again.partitions(start, end) == []
    later = again.latestOffset(end, ReadMaxRows(10))
    assert table(again, end, later).column("offset").to_pylist() == list(range(10, 20))
    again.stop()


def test_at_most_once_serves_a_repeated_task_nothing(
    server: Served, plan: ReadPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(5)
    once = MqttStreamReader(replace(plan, at_most_once=True))
    part = Slice(server.journal.journal_id, 0, 5)
    assert sum(batch.num_rows for batch in once.read(part)) == 5
    monkeypatch.setattr(reader, "_attempt", lambda: 1)
    assert list(once.read(part)) == []
    assert sum(batch.num_rows for batch in MqttStreamReader(plan).read(part)) == 5


def test_a_foreign_journal_names_both_ways_out(server: Served, stream: MqttStreamReader) -> None:
    at = stream.initialOffset()
    foreign = copy.deepcopy(at)
    foreign["gateways"]["plant"]["journal"] = "abc"
    for call in (lambda: stream.latestOffset(foreign, ALL), lambda: stream.partitions(foreign, {**foreign, "tick": 1})):
        with pytest.raises(Fenced) as caught:
            call()
        assert str(caught.value) == (
            "plant: the checkpoint belongs to journal abc (offset 0), this gateway serves journal "
            f"{server.journal.journal_id}. Bring back the state directory of that journal, or start the query with a "
            "new checkpoint directory and get what waits here; rows that only the other journal held stay there.   "
            "[TL-G04]"
        )


def test_a_checkpoint_ahead_of_the_journal_is_refused(server: Served, stream: MqttStreamReader) -> None:
    at = stream.initialOffset()
    at["gateways"]["plant"]["offset"] = 99
    with pytest.raises(GatewayError, match="TL-G06"):
        stream.latestOffset(at, ALL)


# -- the gateway goes and comes --------------------------------------------------------------------------------------


def test_a_stream_survives_a_restart_of_its_gateway(tmp_path: Path) -> None:
    plan = ReadPlan(GatewayPlace(str(tmp_path), ""), "default", poll_s=0.05)
    stream = MqttStreamReader(plan)
    with served(tmp_path) as first:
        first.add(10)
        at = stream.latestOffset(stream.initialOffset(), ALL)
    with served(tmp_path) as second:
        second.add(5)
        end = stream.latestOffset(at, ALL)
        assert offset(end) == 15
        assert table(stream, at, end).num_rows == 5
        wait_until(lambda: stream.latestOffset(at, ALL) and second.journal.consumers["default"] == 10)
        stream.stop()


def test_a_restarted_gateway_on_the_same_socket_knows_the_reader_again(tmp_path: Path) -> None:
    """The channel connects again by itself: only the epoch tells a restart from a takeover."""
    stream = MqttStreamReader(ReadPlan(GatewayPlace(str(tmp_path), ""), "default", poll_s=0.05))
    with served(tmp_path):
        at = stream.latestOffset(stream.initialOffset(), ALL)
    with served(tmp_path) as second:
        client = stream._hold._client
        assert client is not None

        def connected() -> bool:
            try:
                return bool(client.status())
            except GatewayUnreachable:
                return False

        wait_until(connected)
        second.add(1)
        assert offset(stream.latestOffset(at, ALL)) == 1
        stream.stop()


def test_a_reader_that_was_taken_over_stops(server: Served, stream: MqttStreamReader) -> None:
    at = stream.initialOffset()
    with GatewayClient(server.location) as newer:
        newer.open("default")
        with pytest.raises(Fenced, match="TL-G07"):
            stream.latestOffset(at, ALL)


def test_a_second_query_is_refused(server: Served, stream: MqttStreamReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TAKEOVER_S", 0.1)
    with subprocess.Popen(["sleep", "60"]) as other:
        server.service._leases.open("default", mark(other.pid))
        with pytest.raises(Fenced, match=f"pid {other.pid} .* TL-G03|TL-G03"):
            stream.getDefaultReadLimit()
        other.kill()


def test_rows_go_on_where_a_dying_gateway_left_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = GatewayPlace(str(tmp_path), "")
    with served(tmp_path) as server:
        for _ in range(5):
            server.add(10)
        whole = GatewayClient.read
        calls = []

        def broken(client: GatewayClient, journal: str, start: int, end: int, **more: str) -> Iterator[pa.RecordBatch]:
            calls.append(start)
            for batch in whole(client, journal, start, end, **more):
                yield batch.slice(0, 7)
                if len(calls) < 3:
                    raise GatewayUnreachable("TL-G01", "plant", "gone")
                yield batch.slice(7)

        monkeypatch.setattr(GatewayClient, "read", broken)
        got = pa.Table.from_batches(place.rows(server.journal.journal_id, 0, 50))
    assert calls == [0, 7, 14]
    assert got.column("offset").to_pylist() == list(range(50))


def test_no_gateway_in_a_directory_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(GatewayUnreachable) as caught:
        GatewayPlace(str(tmp_path), "").connect()
    assert str(caught.value) == (
        f"{tmp_path}: no gateway runs in this state directory. Start it, or give the options broker, subscribe and "
        "stateDir instead of gateway.   [TL-G01]"
    )


def test_patience_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_PAUSE_S", 0.001)
    tries = []

    def call() -> None:
        tries.append(1)
        raise GatewayUnreachable("TL-G01", "x", "gone")

    with pytest.raises(GatewayUnreachable):
        patiently(call, patience_s=0.02)
    assert len(tries) > 1


def test_other_errors_need_no_patience() -> None:
    def call() -> None:
        raise Fenced("TL-G04", "x", "other")

    with pytest.raises(Fenced):
        patiently(call, patience_s=60)


# -- report, batch, checks -------------------------------------------------------------------------------------------


def test_the_report_is_json_with_the_queue(server: Served, stream: MqttStreamReader) -> None:
    assert stream.reportLatestOffset() is None
    server.add(10)
    stream.latestOffset(stream.initialOffset(), ReadMaxRows(4))
    report = stream.reportLatestOffset()
    assert report is not None
    assert (report["tip"], report["queued"], report["connected"]) == (10, 6, True)
    assert json.loads(json.dumps(report)) == report


def test_a_broker_that_is_down_is_in_the_report_and_told_once(
    server: Served, stream: MqttStreamReader, caplog: pytest.LogCaptureFixture
) -> None:
    here = stream.initialOffset()

    def report() -> dict[str, Any]:
        stream.latestOffset(here, ReadAllAvailable())
        made = stream.reportLatestOffset()
        assert made is not None
        return made

    assert "last_error" not in report()
    for text in ("no connection to a:1883   [TL-M01]", "no connection to b:1883   [TL-M01]"):
        server.reported = {"state": "offline", "last_error": {"code": "TL-M01", "text": text, "at": 1.5}}
        for _ in range(2):
            assert report()["last_error"] == text
    server.reported = {"state": "online", "last_error": None}
    assert "last_error" not in report()
    server.reported = {"state": "offline", "last_error": {"code": "TL-M05", "text": "cut off   [TL-M05]", "at": 2.5}}
    report()
    told = [record.getMessage() for record in caplog.records if record.name == "towline.spark"]
    assert told == ["no connection to a:1883   [TL-M01]", "cut off   [TL-M05]"]


def test_the_report_never_fails(tmp_path: Path) -> None:
    stream = MqttStreamReader(ReadPlan(GatewayPlace(str(tmp_path), ""), "default"))
    with served(tmp_path):
        stream.initialOffset()
    assert stream.reportLatestOffset() is None


def test_a_stream_with_an_end_is_refused(plan: ReadPlan) -> None:
    with pytest.raises(ConfigError, match=r"a stream has no end.*TL-C24"):
        MqttStreamReader(replace(plan, ending=5)).getDefaultReadLimit()


def test_another_schema_is_refused(plan: ReadPlan) -> None:
    for made in (
        MqttStreamReader(replace(plan, own_schema=False)).getDefaultReadLimit,
        MqttBatchReader(replace(plan, own_schema=False)).partitions,
    ):
        with pytest.raises(ConfigError, match=r"the schema of this source is fixed.*TL-C24"):
            made()


@pytest.mark.parametrize(
    ("starting", "ending", "wanted"),
    [(None, None, (0, 50)), (10, 20, (10, 20)), ("committed", None, (30, 50)), ("latest", None, (50, 50))],
)
def test_a_batch_read_is_a_range(
    server: Served, plan: ReadPlan, starting: str | int | None, ending: int | None, wanted: tuple[int, int]
) -> None:
    server.add(50)
    server.journal.commit("default", 30)
    made = MqttBatchReader(replace(plan, starting=starting, ending=ending))
    (part,) = made.partitions()
    assert isinstance(part, Slice)
    assert (part.start, part.end) == wanted
    assert sum(batch.num_rows for batch in made.read(part)) == wanted[1] - wanted[0]
    assert server.journal.consumers == {"default": 30}


def test_a_backward_range_is_one_line(server: Served, plan: ReadPlan) -> None:
    server.add(50)
    with pytest.raises(ConfigError, match=r"it is 5, before the start at 9\. The journal holds the offsets 0 to 49"):
        MqttBatchReader(replace(plan, starting=9, ending=5)).partitions()


# -- processes -------------------------------------------------------------------------------------------------------


def test_an_unconnected_reader_travels_and_is_small(plan: ReadPlan) -> None:
    text = pickle.dumps(MqttStreamReader(plan))
    assert len(text) < 1000
    assert isinstance(pickle.loads(text), MqttStreamReader)  # noqa: S301 - our own bytes


def test_unpickling_a_reader_loads_no_pydantic(plan: ReadPlan, tmp_path: Path) -> None:
    (tmp_path / "reader").write_bytes(pickle.dumps(MqttStreamReader(plan)))
    program = (
        f"import pickle, sys; pickle.load(open({str(tmp_path / 'reader')!r}, 'rb'))\n"
        "print([m for m in ('pyarrow._flight', 'pydantic') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


def test_the_driver_is_the_nearest_java(tmp_path: Path) -> None:
    """A process named java starts a daemon that starts us: the first is the one whose end ends the gateway."""
    java = tmp_path / "java"
    java.symlink_to("/bin/sh")
    program = "from towline.spark.link import driver_pid; print(driver_pid())"
    script = f'echo $$; sh -c \'"{sys.executable}" -c "{program}"; :\'; :'
    out = subprocess.run([str(java), "-c", script], capture_output=True, text=True, check=True, timeout=60)
    shell, found = out.stdout.split()
    assert found == shell


def test_without_a_jvm_the_driver_is_the_parent() -> None:
    assert driver_pid() == os.getppid()


def test_sigterm_is_ours_only_in_sparks_runner(stream: MqttStreamReader) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stream.initialOffset()
    assert signal.getsignal(signal.SIGTERM) is before


RUNNER = """
import sys
from towline.spark import reader
from towline.spark.link import GatewayPlace

reader._RUNNER = "runner"
made = reader.MqttStreamReader(reader.ReadPlan(GatewayPlace({state_dir!r}, ""), "default", poll_s=30))
at = made.initialOffset()
try:
    try:
        {work}
    finally:
        made.stop()
except BaseException:
    raise BrokenPipeError  # Spark's runner reports to the JVM, which has closed the socket
"""


def runner(server: Served, place: Path, work: str) -> subprocess.Popen[bytes]:
    """The module of the runner is imitated by name."""
    place.mkdir()
    (place / "runner.py").write_text(RUNNER.format(state_dir=str(server.state_dir), work=work))
    return subprocess.Popen([sys.executable, "-m", "runner"], cwd=place, stderr=subprocess.PIPE)


def test_sigterm_ends_the_runner_through_stop(server: Served, tmp_path: Path) -> None:
    """Two signals come, as from Spark; the lease is given back once and nothing is printed."""
    child = runner(server, tmp_path / "fake", "while True: at = made.latestOffset(at, reader.ReadAllAvailable())")
    try:
        wait_until(lambda: server.service._polls.waiting == 1, what="a waiting reader")
        child.terminate()
        child.terminate()
        _, err = child.communicate(timeout=60)
        assert (child.returncode, err) == (0, b"")
        assert server.service._leases._held == {}
    finally:
        child.kill()


def test_a_runner_whose_jvm_is_gone_ends_without_a_word(server: Served, tmp_path: Path) -> None:
    child = runner(server, tmp_path / "fake", "raise EOFError  # the runner reads the next call")
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")
    assert server.service._leases._held == {}


def test_an_error_of_the_reader_goes_to_spark(server: Served, tmp_path: Path) -> None:
    child = runner(server, tmp_path / "fake", "made.partitions({}, {})")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert b"BrokenPipeError" in err


def test_readers_of_many_threads_get_along(server: Served, plan: ReadPlan) -> None:
    for _ in range(10):
        server.add(1000)
    counts: list[int] = []

    def count() -> None:
        part = Slice(server.journal.journal_id, 0, 10_000)
        counts.append(sum(batch.num_rows for batch in MqttStreamReader(plan).read(part)))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [10_000] * 4


# -- power loss ------------------------------------------------------------------------------------------------------


class Query:
    """What Spark does around a reader: a batch's entries in the checkpoint."""

    def __init__(self, stream: MqttStreamReader, path: Path) -> None:
        self.stream = stream
        self.path = path
        self.at = stream.initialOffset()
        self._batch = 0
        (path / "offsets").mkdir(parents=True)
        (path / "commits").mkdir()

    def batch(self) -> None:
        """Plan and finish the next batch; `latestOffset` has not been called with its end yet."""
        self.at = self.stream.latestOffset(self.at, ALL)
        self.write("offsets", f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(self.at)}')
        self.write("commits", 'v1\n{"nextBatchWatermarkMs":0}')
        self._batch += 1

    def write(self, log: str, text: str) -> None:
        (self.path / log / str(self._batch)).write_text(text)


@pytest.fixture
def query(plan: ReadPlan, tmp_path: Path) -> Iterator[Query]:
    stream = MqttStreamReader(replace(plan, checkpoint=f"file:{tmp_path / 'ck'}"))
    yield Query(stream, tmp_path / "ck")
    stream.stop()


def test_with_its_checkpoint_known_the_inbox_is_cut_at_once(server: Served, query: Query) -> None:
    for end in (10, 20):
        server.add(10)
        query.batch()
        query.stream.latestOffset(query.at, ALL)
        assert server.journal.consumers["default"] == end


def test_the_commit_log_is_durable_before_the_inbox_is_cut(
    server: Served, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(10)
    query.batch()
    seen: dict[str, int] = {}
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        seen[name.split(".")[1] if name.endswith(".towline") else name] = server.journal.consumers["default"]

    monkeypatch.setattr(os, "fsync", fsync)
    query.stream.latestOffset(query.at, ALL)
    assert {name: seen[name] for name in ("0", "commits", "offsets", "ck")} == dict.fromkeys(
        ("0", "commits", "offsets", "ck"), 0
    )
    assert server.journal.consumers["default"] == 10


def test_at_most_once_a_batch_is_remembered_before_it_is_read(
    server: Served, plan: ReadPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgotten by a power failure it would be planned anew, and what is in Kafka would come twice."""
    stream = MqttStreamReader(replace(plan, checkpoint=str(tmp_path / "ck"), at_most_once=True))
    query = Query(stream, tmp_path / "ck")
    server.add(10)
    start, end = query.at, stream.latestOffset(query.at, ALL)
    query.write("offsets", f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(end)}')
    seen: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        seen.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", fsync)
    assert len(stream.partitions(start, end)) == 1
    assert {"offsets", "ck"} <= set(seen)
    stream.stop()


def test_a_checkpoint_that_can_not_be_synced_ends_the_query_and_cuts_nothing(
    server: Served, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(10)
    query.batch()

    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        with pytest.raises(JournalError, match=r"Input/output error.*TL-J20"):
            query.stream.latestOffset(query.at, ALL)
    assert server.journal.consumers["default"] == 0


@pytest.mark.parametrize("why", ["unknown", "of another query", "not there"])
def test_without_its_checkpoint_the_cut_waits_for_a_sync_of_the_machine(
    server: Served, plan: ReadPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    location = {"unknown": "", "of another query": str(tmp_path / "other"), "not there": "file:/not/there"}[why]
    go, asked = threading.Event(), threading.Event()

    def sync() -> None:
        asked.set()
        go.wait(60)

    monkeypatch.setattr(os, "sync", sync)
    stream = MqttStreamReader(replace(plan, checkpoint=location))
    Query(stream, tmp_path / "other").batch()
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


def test_nothing_waits_for_ever_on_an_idle_line(server: Served, plan: ReadPlan) -> None:
    """No checkpoint known, a long poll: the cut comes with one of the next calls, and they come soon."""
    stream = MqttStreamReader(replace(plan, poll_s=30.0))
    server.add(10)
    at = stream.latestOffset(stream.initialOffset(), ALL)
    assert stream.latestOffset(at, ALL) is at

    def idle() -> None:
        while offset(stream.latestOffset(at, ALL)) == 10:
            pass

    spark = threading.Thread(target=idle)
    spark.start()
    wait_until(lambda: server.journal.consumers["default"] == 10)
    server.add(1)
    spark.join(60)
    assert not spark.is_alive()
    stream.stop()


def test_the_last_call_of_available_now_cuts(server: Served, stream: MqttStreamReader) -> None:
    server.add(10)
    stream.prepareForTriggerAvailableNow()
    at = stream.latestOffset(stream.initialOffset(), ALL)
    stream.latestOffset(at, ALL)
    assert server.journal.consumers["default"] == 10


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
        stream = MqttStreamReader(ReadPlan(GatewayPlace(str(state), ""), "default", poll_s=0.05))
        at = stream.latestOffset(stream.initialOffset(), ALL)
        wait_until(lambda: stream.latestOffset(at, ALL) and server.journal.consumers["default"] == 20)
        stream.stop()
    shutil.rmtree(state / "inbox")
    (state / "older").rename(state / "inbox")
    for _ in range(2):
        with served(state) as server:
            server.add(15)
    assert offset(at) == 20
    return at


@pytest.mark.parametrize("copied_at", [0, 5, 19])
def test_a_copy_that_has_gone_on_is_neither_read_nor_cut(tmp_path: Path, copied_at: int) -> None:
    """The same journal, and longer than the checkpoint: only the incarnation tells that its rows are others."""
    at = restored(tmp_path / "state", copied_at)
    with served(tmp_path / "state") as server:
        stream = MqttStreamReader(ReadPlan(GatewayPlace(str(tmp_path / "state"), ""), "default", poll_s=0.05))
        with pytest.raises(Fenced, match=r"an older copy that has gone on.*newest state directory, or .*TL-G26"):
            stream.latestOffset(at, ALL)
        before = copy.deepcopy(at)
        before["gateways"]["plant"] |= {"offset": 0, "incarnation": ""}
        with pytest.raises(Fenced, match="TL-G26"):
            table(stream, before, at)
        here = at["gateways"]["plant"]
        with GatewayClient(server.location) as client, pytest.raises(Fenced, match="TL-G26"):
            client.commit("default", 20, journal=here["journal"], incarnation=here["incarnation"])
        assert server.journal.consumers["default"] == 0
        assert server.journal.first == 0
        stream.stop()


def test_a_copy_that_has_all_the_query_read_goes_on(tmp_path: Path) -> None:
    at = restored(tmp_path / "state", 20)
    with served(tmp_path / "state") as server:
        stream = MqttStreamReader(ReadPlan(GatewayPlace(str(tmp_path / "state"), ""), "default", poll_s=0.05))
        assert table(stream, at, stream.latestOffset(at, ALL)).num_rows == 30
        stream.stop()
        assert server.journal.end == 50


def test_an_offset_from_before_incarnations_is_upgraded_by_the_next(server: Served, stream: MqttStreamReader) -> None:
    server.add(10)
    at = stream.latestOffset(stream.initialOffset(), ALL)
    del at["gateways"]["plant"]["incarnation"]
    assert stream.latestOffset(at, ALL) is at
    server.add(1)
    assert stream.latestOffset(at, ALL)["gateways"]["plant"] == {
        "journal": server.journal.journal_id,
        "offset": 11,
        "incarnation": server.journal.incarnation,
    }


def test_a_query_that_begins_names_the_opening_it_begins_at(server: Served, plan: ReadPlan) -> None:
    server.add(10)
    for starting, incarnation in ((0, None), (5, server.journal.incarnation), ("latest", server.journal.incarnation)):
        made = MqttStreamReader(replace(plan, starting=starting))
        assert made.initialOffset()["gateways"]["plant"].get("incarnation") == incarnation
        made.stop()


def test_a_query_that_ends_at_what_is_there_names_what_it_came_to(server: Served, stream: MqttStreamReader) -> None:
    server.add(10)
    stream.prepareForTriggerAvailableNow()
    at = stream.initialOffset()
    server.add(10)
    end = stream.latestOffset(at, ALL)
    assert (offset(end), end["gateways"]["plant"]["incarnation"]) == (10, server.journal.incarnation)
    assert stream.latestOffset(end, ALL) is end
