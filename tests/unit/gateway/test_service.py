"""Reading, waiting and committing over a gateway's Flight service, and what it makes of requests and errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import flight

from tests.helpers import commit, wait_until
from tests.unit.gateway.serving import Served, error_of, mark, raw, served
from towline import errors
from towline.errors import GatewayError, GatewayUnreachable, ReaderFenced, TowlineError
from towline.gateway.client import HEARTBEAT_TIMEOUT_S, GatewayClient, Lease
from towline.gateway.service import ConsumerReader, Leases
from towline.journal.segment import BATCH_BYTES
from towline.threads import call_in_thread


def test_large_rows_come_in_batches_below_the_bound(server: Served, client: GatewayClient) -> None:
    for _ in range(3):
        server.add(5, payload=bytes(5 << 20))
    server.add(1, payload=bytes(BATCH_BYTES + 1))
    server.add(2, payload=b"x")
    batches = list(client.read(server.journal.journal_id, 1, 18))
    assert all(batch.nbytes <= BATCH_BYTES or batch.num_rows == 1 for batch in batches)
    assert [offset for batch in batches for offset in batch.column("offset").to_pylist()] == list(range(1, 18))


CLOSE_DURING_CALLS = """
import sys, threading, time
from pathlib import Path
from tests.unit.gateway.serving import served
from towline.gateway.client import GatewayClient

with served(Path(sys.argv[1])) as server:
    for attempt in range(300):
        client, ended = GatewayClient(server.location), threading.Event()
        def call():
            while not ended.is_set():
                assert client.status()["end"] == 0
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(attempt % 10 * 0.0005)
        client.close()
        ended.set()
        for thread in threads:
            thread.join()
print("done")
"""


def test_a_client_is_closed_while_other_threads_call(tmp_path: Path) -> None:
    """As when a query stops during a slow poll: closing a FlightClient in use ends the process with SIGSEGV."""
    command = [sys.executable, "-c", CLOSE_DURING_CALLS, str(tmp_path / "state")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_a_range_that_is_not_there_is_named_with_the_ways_out(tmp_path: Path) -> None:
    with served(tmp_path / "state", segment_bytes=64 << 10) as server, GatewayClient(server.location) as client:
        for _ in range(20):
            server.add(500, payload=b"x" * 100)
        commit(client, "default", 10_000)
        journal, first = server.journal.journal_id, server.journal.first_offset
        assert first > 0
        for start, end, other, code, line in (
            (
                0,
                10,
                "",
                "TL-G05",
                f"offsets 0..9 are no longer in the journal, it begins at {first}. They were",
            ),
            (first, 10_001, "", "TL-G06", "at offset 10,001, the journal ends at 10,000: an older copy"),
            (first, first, "abc", "TL-G04", f"belongs to journal abc, this gateway has journal {journal}"),
            (first + 1, first, "", "TL-G08", f"{first + 1}..{first} is not a range"),
        ):
            with pytest.raises(GatewayError) as caught:
                list(client.read(other or journal, start, end))
            assert line in str(caught.value)
            assert caught.value.code == code
        with pytest.raises(GatewayError, match=r"only receives, it has no outbox.*TL-G20"):
            client.stored_batch("q/0", 0)


def test_wait_keeps_the_limits(server: Served, client: GatewayClient) -> None:
    for _ in range(100):
        server.add(10)

    def window(**limits: Any) -> tuple[int, int]:
        found = client.wait(Lease("default"), 0, journal=server.journal.journal_id, timeout_s=0, **limits)
        assert (found.journal_end, found.incarnation) == (1000, server.journal.incarnation)
        return found.end, found.size

    assert window() == (1000, 0)
    assert window(max_rows=7) == (7, 0)
    end, size = window(max_bytes=10_000)
    assert 0 < end < 1000
    assert 0 < size <= 10_000
    assert window(max_bytes=1)[0] >= 1
    found = client.wait(Lease("default"), 0, journal=server.journal.journal_id, timeout_s=60, max_rows=0)
    assert (found.end, found.journal_end) == (0, 1000), "no rows were asked for, so nothing is waited for"


def test_wait_moves_the_watermark_forward_only_and_tells_what_all_have_come_to(
    server: Served, client: GatewayClient
) -> None:
    """Acknowledgements may wait for it, and nobody commits any more where no message comes without them."""
    server.add(10)
    lease = Lease("default")
    client.acquire(lease)
    server.commits.clear()
    for start in (3, 3, 8, 2):
        assert client.wait(lease, start, journal=server.journal.journal_id, timeout_s=0).end == 10
    with pytest.raises(GatewayError, match="TL-G06"):
        commit(client, "default", 11)
    assert server.journal.consumers["default"] == 8
    assert server.commits == [3, 8]
    commit(client, "slow", 2)
    commit(client, "default", 9)
    assert server.commits == [3, 8, 0, 2, 2]
    status = client.status()
    assert (status["committed"], status["consumers"]) == (2, {"default": 9, "slow": 2})


@pytest.mark.parametrize(
    ("happens", "outcomes"),
    [
        (lambda server, _client, _lease: server.add(3), [3]),
        (lambda _server, client, lease: client.release(lease), ["TL-G07"]),
        (lambda server, _client, _lease: server.service.close(), [0, "TL-G01"]),
    ],
    ids=["rows", "release", "close"],
)
def test_what_wakes_a_waiting_reader(
    server: Served,
    client: GatewayClient,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[..., object],
    outcomes: list[object],
) -> None:
    """At once, and not when its call looks for its caller the next time."""
    monkeypatch.setattr("towline.gateway.service._POLL_S", 60.0)
    lease = Lease("default")

    def wait() -> object:
        with GatewayClient(server.location) as waiting:
            try:
                return waiting.wait(lease, 0, journal=server.journal.journal_id, timeout_s=50).end
            except TowlineError as error:
                return error.code

    waiter = call_in_thread(wait, "reader")
    wait_until(lambda: server.service._long_poll.waiters == 1, what="a waiting reader")
    happens(server, client, lease)
    assert waiter.result(20) in outcomes
    assert server.service._long_poll.waiters == 0


def test_a_failing_commit_is_told_to_the_process_and_the_reader(
    server: Served, client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(5)

    def fail(_consumer: str, _upto: int) -> None:
        raise errors.JournalFailed("TL-J04", "inbox", "a write failed")

    with monkeypatch.context() as patch:
        patch.setattr(server.journal, "commit", fail)
        with pytest.raises(errors.JournalFailed, match="a write failed"):
            client.wait(Lease("default"), 5, journal=server.journal.journal_id, timeout_s=0)
    assert [error.code for error in server.failures] == ["TL-J04"]


READER: dict[str, Any] = {"consumer": "x", "lease": "y", "pid": 1, "started": 1, "host": "h"}
WAIT: dict[str, Any] = {"reader": READER, "journal": "j", "start": 0}
FILTERS: dict[str, Any] = {"change": "1", "settings": "x"}
SIGN: dict[str, Any] = {"journal": "j", "valid_s": 1}


@pytest.mark.parametrize(
    ("action", "body", "line"),
    [
        ("dance", {}, 'there is no action "dance"'),
        *(("wait", body, "the request is not a JSON object") for body in (b"\xff\xfe", b"[1]", b"[" * 5000)),
        ("wait", {}, '"reader" is not accepted: missing'),
        ("acquire", {"reader": {**READER, "consumer": ""}}, '"reader.consumer" .* at least 1 character'),
        ("acquire", {"reader": {**READER, "consumer": "x" * 257}}, '"reader.consumer" .* at most 256 characters'),
        *(("acquire", {"reader": {**READER, "pid": pid}}, '"reader.pid" .* a valid integer') for pid in ("1", True)),
        ("acquire", {"reader": {**READER, "newer": 1}}, '"reader.newer" is not accepted: extra inputs'),
        ("wait", json.dumps({**WAIT, "timeout_s": float("nan")}).encode(), '"timeout_s" is not accepted: .* finite'),
        (
            "refused",
            {"operation": "burn", "offset": 0},
            "\"operation\" is not accepted: .* 'page', 'message', 'replay' or 'drop'",
        ),
        ("batch_status", {"batch": {"writer": "q/0", "number": -1}}, '"batch.number" is not accepted: .* equal to 0'),
        ("sign_read", {**SIGN, "ranges": [[0, "1", ""]]}, '"ranges.0.1" is not accepted: .* a valid integer'),
    ],
)
def test_a_malformed_request_gets_one_line(server: Served, action: str, body: object, line: str) -> None:
    with pytest.raises(flight.FlightServerError) as caught:
        raw(server, action, body)
    error = error_of(caught.value)
    assert (error.code, error.location) == ("TL-G08", "plant")
    assert re.match(line, error.problem)


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


def test_no_gateway_is_one_clear_line_and_the_client_comes_back_with_it(tmp_path: Path) -> None:
    with served(tmp_path / "state") as server, GatewayClient(server.location) as client:
        assert client.status()["epoch"] == 1
        server.close()
        with pytest.raises(GatewayUnreachable) as caught:
            client.status()
        assert str(caught.value) == (
            f"{server.location}: no gateway answers (Unavailable). Is it running? `towline status` shows it; with the "
            "option stateDir a source starts one itself.   [TL-G01]"
        )
        with served(tmp_path / "state"):

            def epoch() -> int:
                try:
                    return int(client.status()["epoch"])
                except GatewayUnreachable:
                    return 0

            assert wait_until(epoch) == 2


# -- leases: at most one reader moves a consumer's watermark [I8] --

HERE = mark()
#: Another living process of this machine, one that has ended, and two that the gateway can't see.
LIVING, ENDED = mark(os.getppid()), replace(HERE, started=HERE.started + 1)
FAR, FARTHER = (replace(HERE, pid=1, host=f"{HERE.host} (pid namespace {n})") for n in (7, 8))
HOLDERS = [HERE, LIVING, ENDED, FAR, FARTHER]
THEIRS = ConsumerReader("default", "theirs", LIVING.pid, LIVING.started, LIVING.host)


#: A reader far away sends a sign of life, and is followed after the whole time, not before.
FOLLOWED = [("acquire", 6), ("wait", 3), ("acquire", 6), ("wait", 6), ("acquire", 8), ("wait", 1), ("acquire", 8)]


@example(FOLLOWED)
@given(st.lists(st.tuples(st.sampled_from(["acquire", "release", "wait"]), st.integers(0, 9)), max_size=60))
def test_a_reader_holds_its_consumer_until_it_ends_and_never_again(steps: Iterable[tuple[str, int]]) -> None:
    """Two readers each of five processes; a model of one consumer."""
    now = 0.0
    leases = Leases("plant", lambda: now)
    holder: int | None = None
    called_at, ended = 0.0, set[int]()
    for step, reader in steps:
        process = HOLDERS[reader // 2]
        if step == "wait":
            now += reader * HEARTBEAT_TIMEOUT_S / 6
        elif step == "release":
            leases.release("default", str(reader))
            ended.add(reader)
            holder = None if holder == reader else holder
        else:
            before = None if holder is None else HOLDERS[holder // 2]
            gone = before == ENDED or (before in (FAR, FARTHER) and now - called_at > HEARTBEAT_TIMEOUT_S)
            asked = ConsumerReader("default", str(reader), process.pid, process.started, process.host)
            if reader in ended or not (holder in (None, reader) or gone or before == process):
                with pytest.raises(ReaderFenced) as refused:
                    leases.acquire(asked)
                assert refused.value.code == ("TL-G07" if reader in ended else "TL-G03")
            else:
                assert leases.acquire(asked) is (holder != reader)
                if holder not in (None, reader):
                    ended.add(holder)
                holder, called_at = reader, now


def test_a_second_living_reader_is_refused_with_one_line(server: Served, client: GatewayClient) -> None:
    raw(server, "acquire", {"reader": THEIRS._asdict()})
    with pytest.raises(ReaderFenced) as caught:
        client.acquire(Lease("default"), wait_s=0.2)
    line = str(caught.value)
    assert line.startswith(f"plant: the process with pid {LIVING.pid} on {LIVING.host} reads as consumer")
    assert line.endswith(
        'Give each query an option "consumer" of its own, or write both outputs in one foreachBatch, to Kafka with '
        'the option "batchId"; if that query has ended, stop its process.   [TL-G03]'
    )
    raw(server, "release", {"consumer": "default", "lease": THEIRS.lease})
    assert client.acquire(Lease("default"))["readers"]["default"]["pid"] == HERE.pid


def test_a_reader_that_another_one_keeps_out_moves_nothing(server: Served, client: GatewayClient) -> None:
    server.add(5)
    raw(server, "acquire", {"reader": THEIRS._asdict()})
    with pytest.raises(ReaderFenced, match=f"pid {LIVING.pid} .*TL-G03"):
        client.wait(Lease("default"), 5, journal=server.journal.journal_id, timeout_s=0)
    assert server.journal.consumers == {"default": 0}


def test_a_lease_pins_what_the_reader_has_not_seen(server: Served, client: GatewayClient) -> None:
    server.add(10)
    lease = Lease("slow")
    status = client.acquire(lease)
    assert (status["consumers"], status["first"], status["end"]) == ({"slow": 0}, 0, 10)
    assert server.journal.consumers["slow"] == 0
    client.wait(lease, 6, journal=server.journal.journal_id, timeout_s=0)
    assert client.acquire(Lease("slow"))["consumers"] == {"slow": 6}
