"""At most one reader moves a consumer's watermark [I8]."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.gateway.serving import Served, hold_as, mark, raw, served
from towline.errors import ReaderFenced
from towline.gateway.client import HEARTBEAT_TIMEOUT_S, GatewayClient, Lease
from towline.gateway.service import ConsumerReader, Leases

HERE = mark()
#: Another living process of this machine, one that has ended, and two that the gateway can't see.
LIVING, ENDED = mark(os.getppid()), replace(HERE, started=HERE.started + 1)
FAR, FARTHER = (replace(HERE, pid=1, host=f"{HERE.host} (pid namespace {n})") for n in (7, 8))
HOLDERS = [HERE, LIVING, ENDED, FAR, FARTHER]


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
    hold_as(server, "default", LIVING)
    with pytest.raises(ReaderFenced) as caught:
        client.acquire(Lease("default"), wait_s=0.2)
    line = str(caught.value)
    assert line.startswith(f"plant: the process with pid {LIVING.pid} on {LIVING.host} reads as consumer")
    assert line.endswith(
        'Give each query an option "consumer" of its own, or write both outputs in one foreachBatch, to Kafka with '
        'the option "batchId"; if that query has ended, stop its process.   [TL-G03]'
    )
    raw(server, "release", {"consumer": "default", "lease": f"of {LIVING.pid}"})
    assert client.acquire(Lease("default"))["readers"]["default"]["pid"] == HERE.pid


def test_a_gateway_that_was_started_again_gives_the_lease_to_the_first_that_asks(tmp_path: Path) -> None:
    lease = Lease("default")
    with served(tmp_path / "state") as server, GatewayClient(server.location) as client:
        journal = server.journal.journal_id
        client.wait(lease, 0, journal=journal, timeout_s=0)
    with served(tmp_path / "state") as server, GatewayClient(server.location) as client:
        client.wait(lease, 0, journal=journal, timeout_s=0)
    with served(tmp_path / "state") as server, GatewayClient(server.location) as client:
        hold_as(server, "default", LIVING)
        with pytest.raises(ReaderFenced, match=f"pid {LIVING.pid} .*TL-G03"):
            client.wait(lease, 0, journal=journal, timeout_s=0)


def test_a_lease_pins_what_the_reader_has_not_seen(server: Served, client: GatewayClient) -> None:
    server.add(10)
    lease = Lease("slow")
    status = client.acquire(lease)
    assert (status["consumers"], status["first"], status["end"]) == ({"slow": 0}, 0, 10)
    assert server.journal.consumers["slow"] == 0
    client.wait(lease, 6, journal=server.journal.journal_id, timeout_s=0)
    assert client.acquire(Lease("slow"))["consumers"] == {"slow": 6}
