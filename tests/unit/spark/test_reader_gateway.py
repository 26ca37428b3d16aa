"""Readers of a gateway that goes and comes, and the processes they live in."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.helpers import wait_until
from tests.unit.gateway.serving import Served, served
from tests.unit.spark.reading import ALL, offset, table
from tests.unit.spark.several import until
from towline.errors import GatewayUnreachable, ReaderFenced
from towline.gateway.client import GatewayClient, Lease
from towline.spark import link
from towline.spark.link import GatewayAddress, ReadPlan, retry_while_unreachable
from towline.spark.options import driver_pid
from towline.spark.reader import MqttStreamReader, Slice

# -- the gateway goes and comes --------------------------------------------------------------------------------------


def test_the_one_gateway_of_a_source_is_away_as_one_of_several_is(
    tmp_path: Path, lonely: MqttStreamReader, caplog: pytest.LogCaptureFixture
) -> None:
    stream = lonely
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
    assert [text.endswith("; its messages wait there   [TL-G54]") for text in told] == [True, False]
    assert "is available again" in told[1]


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[MqttStreamReader]:
    stream = MqttStreamReader(ReadPlan(GatewayAddress(str(tmp_path)), "default", poll_s=0.05))
    yield stream
    stream.stop()


def test_a_restarted_gateway_on_the_same_socket_knows_the_reader_again(tmp_path: Path) -> None:
    """The channel connects again by itself: only the epoch tells a restart from a takeover."""
    stream = MqttStreamReader(ReadPlan(GatewayAddress(str(tmp_path)), "default", poll_s=0.05))
    with served(tmp_path):
        at = stream.latestOffset(stream.initialOffset(), ALL)
    with served(tmp_path) as second:
        assert stream._planner is not None
        client = stream._planner.gateways[0]._client
        assert client is not None

        def connected() -> bool:
            try:
                return bool(client.status())
            except GatewayUnreachable:
                return False

        wait_until(connected)
        second.add(1)
        assert offset(until(stream, at, lambda place: offset(place) == 1)) == 1
        stream.stop()


def test_a_reader_that_was_taken_over_stops(server: Served, stream: MqttStreamReader) -> None:
    at = stream.initialOffset()
    with GatewayClient(server.location) as newer:
        newer.acquire(Lease("default"))
        with pytest.raises(ReaderFenced, match="TL-G07"):
            stream.latestOffset(at, ALL)


def test_rows_go_on_where_a_dying_gateway_left_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = GatewayAddress(str(tmp_path))
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
        GatewayAddress(str(tmp_path)).connect()
    assert str(caught.value) == (
        f"{tmp_path}: no gateway runs in this state directory. Start it, or give the options broker, subscribe and "
        "stateDir instead of gateway.   [TL-G01]"
    )


def test_only_an_unreachable_gateway_is_called_again_and_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_RETRY_PAUSE_S", 0.001)
    gone, fenced = GatewayUnreachable("TL-G01", "x", "gone"), ReaderFenced("TL-G04", "x", "other")
    errors = [gone, gone, fenced]

    def fail() -> None:
        raise errors.pop(0)

    with pytest.raises(ReaderFenced):
        retry_while_unreachable(fail, timeout_s=60)
    errors.append(gone)
    with pytest.raises(GatewayUnreachable):
        retry_while_unreachable(fail, timeout_s=0)


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
    program = "from towline.spark.options import driver_pid; print(driver_pid())"
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
from towline.spark.link import GatewayAddress

reader._SOURCE_RUNNER = "runner"
address = GatewayAddress({state_dir!r})
made = reader.MqttStreamReader(reader.ReadPlan(address, "default", poll_s=30, gateways={gateways!r}))
at = made.initialOffset()
try:
    try:
        {work}
    finally:
        made.stop()
except BaseException:
    raise BrokenPipeError  # Spark's runner reports to the JVM, which has closed the socket
"""


def runner(server: Served, place: Path, work: str, gateways: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """The module of the runner is imitated by name."""
    place.mkdir()
    (place / "runner.py").write_text(RUNNER.format(state_dir=str(server.state_dir), work=work, gateways=gateways))
    return subprocess.Popen([sys.executable, "-m", "runner"], cwd=place, stderr=subprocess.PIPE)


@pytest.mark.parametrize("several", [False, True])
def test_sigterm_ends_the_runner_through_stop(server: Served, tmp_path: Path, several: bool) -> None:
    """Two signals come, as from Spark; the lease is given back once and nothing is printed.

    Of several gateways one is away, and is asked on a thread of its own.
    """
    gateways = (str(server.state_dir), str(tmp_path / "away")) if several else ()
    work = "while True: at = made.latestOffset(at, reader.ReadMaxRows(9))"
    child = runner(server, tmp_path / "fake", work, gateways)
    try:
        wait_until(lambda: server.service._long_poll.waiters == 1, what="a waiting reader")
        child.terminate()
        child.terminate()
        _, err = child.communicate(timeout=60)
        assert child.returncode == 0
        assert (b"TL-G54" in err) if several else err == b""
        assert b"Traceback" not in err
        assert server.service._leases._leases == {}
    finally:
        child.kill()


def test_a_runner_whose_jvm_is_gone_ends_without_a_word(server: Served, tmp_path: Path) -> None:
    child = runner(server, tmp_path / "fake", "raise EOFError  # the runner reads the next call")
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")
    assert server.service._leases._leases == {}


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
        part = Slice(plan.address, server.journal.journal_id, 0, 10_000)
        counts.append(sum(batch.num_rows for batch in MqttStreamReader(plan).read(part)))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [10_000] * 4
