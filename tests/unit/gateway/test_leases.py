from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pyarrow import flight

from tests.unit.gateway.serving import Served, error_of, hold_as, mark, raw, served
from towline.errors import ReaderFenced
from towline.gateway.client import HEARTBEAT_TIMEOUT_S, GatewayClient, Lease
from towline.gateway.service import ConsumerReader, Leases
from towline.processes import ProcessIdentity


def reader(token: str, holder: ProcessIdentity, consumer: str = "default") -> ConsumerReader:
    return ConsumerReader(consumer, token, holder.pid, holder.started, holder.host)


def test_a_second_living_reader_is_refused_with_one_line(
    server: Served, client: GatewayClient, other: subprocess.Popen[bytes]
) -> None:
    hold_as(server, "default", mark(other.pid))
    with pytest.raises(ReaderFenced) as caught:
        client.acquire(Lease("default"))
    line = str(caught.value)
    assert line.startswith(f"plant: the process with pid {other.pid} on {mark().host} reads as consumer")
    assert line.endswith(
        'Give each query an option "consumer" of its own, or write both outputs in one foreachBatch, to Kafka with '
        'the option "batchId"; if that query has ended, stop its process.   [TL-G03]'
    )


def test_a_dead_reader_is_followed_and_its_lease_refused(
    server: Served, client: GatewayClient, other: subprocess.Popen[bytes]
) -> None:
    stale = hold_as(server, "default", mark(other.pid))
    other.kill()
    other.wait()
    client.acquire(Lease("default"))
    fields = {"reader": stale, "journal": server.journal.journal_id, "start": 0, "timeout_s": 0}
    with pytest.raises(flight.FlightServerError) as caught:
        raw(server, "wait", fields)
    assert error_of(caught.value).code == "TL-G07"
    assert isinstance(error_of(caught.value), ReaderFenced)


def test_a_zombie_counts_as_dead(server: Served, client: GatewayClient, other: subprocess.Popen[bytes]) -> None:
    hold_as(server, "default", mark(other.pid))
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    client.acquire(Lease("default"))


def test_patience_waits_for_the_reader_before(
    server: Served, client: GatewayClient, other: subprocess.Popen[bytes]
) -> None:
    hold_as(server, "default", mark(other.pid))
    killer = threading.Timer(0.2, other.kill)
    killer.start()
    assert client.acquire(Lease("default"), wait_s=10)["readers"]["default"]["pid"] == os.getpid()
    killer.join()


def test_a_released_lease_is_free(server: Served, client: GatewayClient, other: subprocess.Popen[bytes]) -> None:
    lease = Lease("default")
    client.acquire(lease)
    client.release(lease)
    hold_as(server, "default", mark(other.pid))


def test_a_stale_release_frees_nothing(server: Served, client: GatewayClient) -> None:
    stale, fresh = Lease("default"), Lease("default")
    client.acquire(stale)
    client.acquire(fresh)
    client.release(stale)
    client.wait(fresh, 0, journal=server.journal.journal_id, timeout_s=0)
    assert set(raw(server, "status")["readers"]) == {"default"}


def test_what_has_ended_is_refused_for_ever(server: Served, client: GatewayClient) -> None:
    """A reader that slept comes back after the one that followed it has ended too; and a call that was late."""
    journal = server.journal.journal_id
    asleep, newer, late = Lease("default"), Lease("default"), Lease("default")
    client.wait(asleep, 0, journal=journal, timeout_s=0)
    client.wait(newer, 0, journal=journal, timeout_s=0)
    client.release(newer)
    client.release(late)
    for lease in (asleep, newer, late):
        with pytest.raises(ReaderFenced, match=r'no longer holds the consumer "default".*TL-G07'):
            client.wait(lease, 0, journal=journal, timeout_s=0)
        with pytest.raises(ReaderFenced, match="TL-G07"):
            client.acquire(lease)
    assert raw(server, "status")["readers"] == {}


def test_a_gateway_that_was_started_again_gives_the_lease_to_the_first_that_asks(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    lease = Lease("default")
    with served(tmp_path / "state") as server, GatewayClient(server.location) as client:
        journal = server.journal.journal_id
        client.wait(lease, 0, journal=journal, timeout_s=0)
    with served(tmp_path / "state") as server, GatewayClient(server.location) as client:
        client.wait(lease, 0, journal=journal, timeout_s=0)
        with pytest.raises(flight.FlightServerError) as caught:
            hold_as(server, "default", mark(other.pid))
        assert error_of(caught.value).code == "TL-G03"
    with served(tmp_path / "state") as server, GatewayClient(server.location) as client:
        hold_as(server, "default", mark(other.pid))
        with pytest.raises(ReaderFenced, match=f"pid {other.pid} .*TL-G03"):
            client.wait(lease, 0, journal=journal, timeout_s=0)


def test_a_lease_pins_what_the_reader_has_not_seen(server: Served, client: GatewayClient) -> None:
    server.add(10)
    lease = Lease("slow")
    status = client.acquire(lease)
    assert (status["consumers"], status["first"], status["end"]) == ({"slow": 0}, 0, 10)
    assert server.journal.consumers["slow"] == 0
    client.wait(lease, 6, journal=server.journal.journal_id, timeout_s=0)
    assert client.acquire(Lease("slow"))["consumers"] == {"slow": 6}


def test_a_reader_elsewhere_that_sends_signs_of_life_is_followed_soon() -> None:
    now = [0.0]
    leases = Leases("plant", lambda: now[0])
    far, next_one = ProcessIdentity(7, 1, "far (network)"), ProcessIdentity(8, 1, "farther (network)")
    leases.acquire(reader("a", far))
    for _ in range(100):
        now[0] += 10
        leases.acquire(reader("a", far))
    now[0] += 30
    with pytest.raises(ReaderFenced, match=r"pid 7 on far \(network\).*TL-G03"):
        leases.acquire(reader("b", next_one))
    now[0] += 1
    leases.acquire(reader("b", next_one))
    with pytest.raises(ReaderFenced, match="TL-G07"):
        leases.acquire(reader("a", far))


#: Reads as "default" until its standard input ends, or says why it may not.
READER = """
import sys
from towline.errors import ReaderFenced
from towline.gateway import client

client.TAKEOVER_S = 0.0
with client.GatewayClient(sys.argv[1]) as here:
    try:
        here.acquire(client.Lease("default"))
    except ReaderFenced as error:
        print(error, flush=True)
    else:
        print("reads", flush=True)
        sys.stdin.read()
"""


def contained(server: Served) -> subprocess.Popen[str]:
    """A reader in a pid namespace of its own, as in a container: its pid is 1, and its host name ours."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    tool = shutil.which("unshare")
    if tool is None or subprocess.run([*unshare, "true"], check=False, capture_output=True, timeout=60).returncode:
        pytest.skip("no unshare (util-linux) here, or no right to make namespaces")
    command = [*unshare, sys.executable, "-c", READER, server.location]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_readers_in_two_containers_of_one_host_name_are_two(server: Served, client: GatewayClient) -> None:
    """The gateway sees neither process: a pid of another namespace is none of its own."""
    now = [0.0]
    server.service._leases._clock = lambda: now[0]
    with contained(server) as first, contained(server) as second:
        assert first.stdout is not None
        assert second.stdout is not None
        try:
            said = {first: first.stdout.readline(), second: second.stdout.readline()}
            assert [line for line in said.values() if line == "reads\n"] == ["reads\n"]
            refused = next(line for line in said.values() if line != "reads\n")
            assert f"the process with pid 1 on {mark().host} (pid namespace " in refused
            assert "[TL-G03]" in refused
            now[0] += HEARTBEAT_TIMEOUT_S
            with pytest.raises(ReaderFenced, match="TL-G03"):
                client.acquire(Lease("default"))
        finally:
            first.kill()
            second.kill()
    now[0] += HEARTBEAT_TIMEOUT_S + 1
    assert client.acquire(Lease("default")), "one that has died is followed as soon as over a network"
