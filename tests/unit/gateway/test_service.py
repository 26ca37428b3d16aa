from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from tests.helpers import commit, wait_until
from tests.unit.gateway.serving import Served, error_of, raw, rows, served
from towline import errors
from towline.errors import GatewayError, GatewayUnreachable, ReaderFenced, TowlineError
from towline.gateway.client import GatewayClient, Lease, ReadableRange
from towline.journal.segment import BATCH_BYTES
from towline.schema import ROW_SCHEMA


def test_a_range_comes_back_as_it_was_appended(server: Served, client: GatewayClient) -> None:
    server.add(25)
    server.add(7)
    got = pa.Table.from_batches(client.read(server.journal.journal_id, 20, 30))
    assert got.equals(pa.Table.from_batches([rows(20, 10)]))
    assert got.schema.equals(ROW_SCHEMA)


def test_reading_twice_gives_the_same_and_consumes_nothing(server: Served, client: GatewayClient) -> None:
    server.add(50)
    journal = server.journal.journal_id
    first, second = (pa.Table.from_batches(client.read(journal, 0, 50)) for _ in range(2))
    assert first.equals(second)
    assert server.journal.first_offset == 0


def test_an_empty_range_has_no_batches(server: Served, client: GatewayClient) -> None:
    server.add(5)
    assert list(client.read(server.journal.journal_id, 5, 5)) == []


def test_a_reader_that_leaves_half_way_harms_nobody(server: Served, client: GatewayClient) -> None:
    for _ in range(30):
        server.add(1000)
    stream = client.read(server.journal.journal_id, 0, 30_000)
    assert next(iter(stream)).num_rows > 0
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    assert sum(batch.num_rows for batch in client.read(server.journal.journal_id, 0, 30_000)) == 30_000


def test_large_rows_come_in_batches_below_the_bound(server: Served, client: GatewayClient) -> None:
    for _ in range(3):
        server.add(5, payload=bytes(5 << 20))
    server.add(1, payload=bytes(BATCH_BYTES + 1))
    server.add(2, payload=b"x")
    batches = list(client.read(server.journal.journal_id, 1, 18))
    assert all(batch.nbytes <= BATCH_BYTES or batch.num_rows == 1 for batch in batches)
    assert [offset for batch in batches for offset in batch.column("offset").to_pylist()] == list(range(1, 18))


@pytest.mark.long
def test_more_than_arrow_can_join_is_served(server: Served, client: GatewayClient) -> None:
    """2.4 GB in 8,000 rows, planned as one batch: the offsets of a binary column end at 2 GiB."""
    for _ in range(1600):
        server.add(5, payload=bytes(300_000))
    at = 0
    for batch in client.read(server.journal.journal_id, 0, 8000):
        assert batch.nbytes <= BATCH_BYTES
        assert batch.column("offset").to_pylist() == list(range(at, at + batch.num_rows))
        at += batch.num_rows
    assert at == 8000


def test_rows_below_the_first_are_named_with_both_ways_out(tmp_path: Path) -> None:
    with served(tmp_path / "state", segment_bytes=64 << 10) as server, GatewayClient(server.location) as client:
        for _ in range(20):
            server.add(500, payload=b"x" * 100)
        server.journal.commit("default", server.journal.end)
        first = server.journal.first_offset
        assert first > 0
        with pytest.raises(GatewayError) as caught:
            list(client.read(server.journal.journal_id, 0, 10))
        assert str(caught.value) == (
            f"plant: offsets 0..9 are no longer in the journal, it begins at {first}. They were committed by every "
            "consumer. Start with a new checkpoint directory to go on from what is there, and set journalRetainBytes "
            "to keep committed rows for a replay.   [TL-G05]"
        )


def test_rows_beyond_the_end_are_refused(server: Served, client: GatewayClient) -> None:
    server.add(5)
    with pytest.raises(GatewayError, match=r"at offset 10, the journal ends at 5: an older copy.*TL-G06"):
        list(client.read(server.journal.journal_id, 0, 10))


def test_another_journal_is_fenced(server: Served, client: GatewayClient) -> None:
    with pytest.raises(
        ReaderFenced, match=f"belongs to journal abc, this gateway has journal {server.journal.journal_id}"
    ):
        list(client.read("abc", 0, 0))


# -- wait ------------------------------------------------------------------------------------------------------------


def test_wait_answers_at_once_when_there_are_rows(server: Served, client: GatewayClient) -> None:
    server.add(10)
    lease = Lease("default")
    window = client.wait(lease, 0, journal=server.journal.journal_id, timeout_s=30)
    journal = server.journal
    assert window == ReadableRange(end=10, journal_end=10, incarnation=journal.incarnation, size=0)


def test_wait_keeps_the_limits(server: Served, client: GatewayClient) -> None:
    for _ in range(100):
        server.add(10)
    lease = Lease("default")
    assert client.wait(lease, 0, journal=server.journal.journal_id, timeout_s=0, max_rows=7).end == 7
    assert 0 < client.wait(lease, 0, journal=server.journal.journal_id, timeout_s=0, max_bytes=10_000).end < 1000
    assert client.wait(lease, 0, journal=server.journal.journal_id, timeout_s=0, max_bytes=1).end >= 1


def test_wait_moves_the_watermark_forward_only_and_tells_each_move(server: Served, client: GatewayClient) -> None:
    server.add(10)
    lease = Lease("default")
    client.acquire(lease)
    server.pump.commits.clear()
    for start in (3, 3, 8, 2):
        assert client.wait(lease, start, journal=server.journal.journal_id, timeout_s=0).end == 10
    assert server.journal.consumers["default"] == 8
    assert server.pump.commits == [3, 8]


def test_wait_ends_with_the_timeout(server: Served, client: GatewayClient) -> None:
    lease = Lease("default")
    assert client.wait(lease, 0, journal=server.journal.journal_id, timeout_s=0.05).end == 0
    assert server.service._long_poll.waiters == 0


def test_new_rows_wake_the_waiting(server: Served, client: GatewayClient) -> None:
    lease = Lease("default")
    windows: list[ReadableRange] = []
    waiter = threading.Thread(
        target=lambda: windows.append(client.wait(lease, 0, journal=server.journal.journal_id, timeout_s=50))
    )
    waiter.start()
    wait_until(lambda: server.service._long_poll.waiters == 1, what="a waiting reader")
    server.add(3)
    waiter.join(60)
    assert [window.end for window in windows] == [3]


def test_close_wakes_the_waiting(tmp_path: Path) -> None:
    server = Served(tmp_path / "state")
    outcome: list[object] = []

    def wait() -> None:
        with GatewayClient(server.location) as client:
            try:
                outcome.append(client.wait(Lease("default"), 0, journal=server.journal.journal_id, timeout_s=50).end)
            except GatewayUnreachable as error:
                outcome.append(error.code)

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: server.service._long_poll.waiters == 1, what="a waiting reader")
    server.close()
    waiter.join(60)
    assert outcome in ([0], ["TL-G01"])


def test_a_waiting_reader_is_dropped_when_its_lease_ends(server: Served, client: GatewayClient) -> None:
    lease = Lease("default")
    caught: list[TowlineError] = []

    def wait() -> None:
        try:
            client.wait(lease, 0, journal=server.journal.journal_id, timeout_s=50)
        except TowlineError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: server.service._long_poll.waiters == 1, what="a waiting reader")
    client.release(lease)
    waiter.join(60)
    assert [error.code for error in caught] == ["TL-G07"]


def test_a_failing_commit_is_told_to_the_process_and_the_reader(
    server: Served, client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(5)
    lease = Lease("default")

    def fail(_consumer: str, _upto: int) -> None:
        raise errors.JournalFailed("TL-J04", "inbox", "a write failed")

    with monkeypatch.context() as patch:
        patch.setattr(server.journal, "commit", fail)
        with pytest.raises(errors.JournalFailed, match="a write failed"):
            client.wait(lease, 5, journal=server.journal.journal_id, timeout_s=0)
    assert [error.code for error in server.failures] == ["TL-J04"]


# -- other actions ---------------------------------------------------------------------------------------------------


def test_status_holds_the_account(server: Served, client: GatewayClient) -> None:
    server.add(10)
    commit(client, "default", 4)
    status = client.status()
    wanted = {"name": "plant", "journal": server.journal.journal_id, "first": 0, "end": 10, "committed": 4}
    assert {key: status[key] for key in wanted} == wanted
    assert status["consumers"] == {"default": 4}
    assert status["connected"] is True
    assert status["bytes_on_disk"] > 0


def test_commit_beyond_the_end_is_refused(server: Served, client: GatewayClient) -> None:
    with pytest.raises(GatewayError, match="TL-G06"):
        commit(client, "default", 1)
    assert dict(server.journal.consumers) == {"default": 0}


def test_the_watermark_that_all_have_come_to_is_told(server: Served, client: GatewayClient) -> None:
    """Acknowledgements may wait for it, and nobody commits any more where no message comes without them."""
    server.add(10)
    commit(client, "slow", 2)
    commit(client, "spark", 10)
    commit(client, "slow", 10)
    assert server.pump.commits == [0, 2, 0, 2, 10]


READER: dict[str, Any] = {"consumer": "x", "lease": "y", "pid": 1, "started": 1, "host": "h"}
WAIT: dict[str, Any] = {"reader": READER, "journal": "j", "start": 0}
FILTERS: dict[str, Any] = {"change": "1", "settings": "x"}
SIGN: dict[str, Any] = {"journal": "j", "valid_s": 1}


@pytest.mark.parametrize(
    ("action", "body", "line"),
    [
        ("dance", {}, 'there is no action "dance"'),
        ("wait", b"\xff\xfe", "the request is not a JSON object"),
        ("wait", b"[1]", "the request is not a JSON object"),
        ("wait", b"[" * 5000, "the request is not a JSON object"),
        ("wait", {}, '"reader" is not accepted: missing'),
        (
            "acquire",
            {"reader": {**READER, "consumer": ""}},
            '"reader.consumer" is not accepted: .* at least 1 character',
        ),
        (
            "acquire",
            {"reader": {**READER, "consumer": "x" * 257}},
            '"reader.consumer" is not accepted: .* at most 256 characters',
        ),
        ("acquire", {"reader": {**READER, "pid": "1"}}, '"reader.pid" is not accepted: .* a valid integer'),
        ("acquire", {"reader": {**READER, "pid": True}}, '"reader.pid" is not accepted: .* a valid integer'),
        ("acquire", {"reader": {**READER, "pid": -1}}, '"reader.pid" is not accepted: .* greater than or equal to 0'),
        (
            "acquire",
            {"reader": {**READER, "newer": 1}},
            '"reader.newer" is not accepted: extra inputs are not permitted',
        ),
        ("acquire", {"reader": READER, "newer": 1}, '"newer" is not accepted: unexpected'),
        ("wait", {**WAIT, "timeout_s": "1"}, '"timeout_s" is not accepted: .* a valid number'),
        ("wait", json.dumps({**WAIT, "timeout_s": float("nan")}).encode(), '"timeout_s" is not accepted: .* finite'),
        ("refused", {"operation": "burn", "offset": 0}, "\"operation\" is not accepted: .* 'page', 'replay' or 'drop'"),
        ("batch_status", {"batch": {"writer": "q/0", "number": -1}}, '"batch.number" is not accepted: .* equal to 0'),
        (
            "batch_status",
            {"batch": {"writer": "", "number": 0}},
            '"batch.writer" is not accepted: .* at least 1 character',
        ),
        ("batch_status", {"batch": {"writer": "q/0", "number": 1, "x": 1}}, '"batch.x" is not accepted: '),
        ("sign_read", {**SIGN, "ranges": []}, '"ranges" is not accepted: .* at least 1 item'),
        ("sign_read", {**SIGN, "ranges": [[0, 1]]}, '"ranges.0.2" is not accepted: .*required'),
        ("sign_read", {**SIGN, "ranges": [[0, "1", ""]]}, '"ranges.0.1" is not accepted: .* a valid integer'),
    ],
)
def test_a_malformed_request_gets_one_line(server: Served, action: str, body: object, line: str) -> None:
    with pytest.raises(flight.FlightServerError) as caught:
        raw(server, action, body)
    error = error_of(caught.value)
    assert (error.code, error.location) == ("TL-G08", "plant")
    assert re.match(line, error.problem)


def test_a_backward_range_is_no_range(server: Served, client: GatewayClient) -> None:
    server.add(5)
    with pytest.raises(GatewayError, match=r"4\.\.2 is not a range"):
        list(client.read(server.journal.journal_id, 4, 2))


def test_what_nobody_foresaw_is_told_with_its_cause_and_the_log(
    server: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> dict[str, object]:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte \x1b[2J\nsecond line")

    monkeypatch.setattr(server.service, "_status", fail)
    log = tmp_path / "gateway-telemetry.log"
    monkeypatch.setattr("towline.gateway.service.stderr_log", lambda: log)
    with pytest.raises(flight.FlightServerError) as caught:
        raw(server, "status")
    line = str(error_of(caught.value))
    assert line.endswith(f"please report it with the traceback in {log}.   [TL-G09]")
    cause = "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte \\x1b[2J"
    assert f"failed in an unexpected way ({cause})" in line
