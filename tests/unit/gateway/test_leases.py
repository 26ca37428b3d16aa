from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

import pytest
from pyarrow import flight

from tests.unit.gateway.serving import Served, error_of, mark, open_as, raw
from towline.errors import Fenced
from towline.gateway.client import FOREIGN_LEASE_S, GatewayClient
from towline.gateway.service import Leases
from towline.processes import ProcessMark


def test_a_second_living_reader_is_refused_with_one_line(
    server: Served, client: GatewayClient, other: subprocess.Popen[bytes]
) -> None:
    open_as(server, "default", mark(other.pid))
    with pytest.raises(Fenced) as caught:
        client.open("default")
    line = str(caught.value)
    assert line.startswith(f"plant: the process with pid {other.pid} on {mark().host} reads as consumer")
    assert line.endswith(
        'Give each query an option "consumer" of its own, or write both outputs in one foreachBatch, to Kafka with '
        'the option "batchId"; if that query has ended, stop its process.   [TL-G03]'
    )


def test_another_consumer_is_welcome(server: Served, client: GatewayClient, other: subprocess.Popen[bytes]) -> None:
    open_as(server, "default", mark(other.pid))
    client.open("archive")
    assert set(raw(server, "status")["readers"]) == {"default", "archive"}


def test_a_dead_reader_is_followed_and_its_lease_refused(
    server: Served, client: GatewayClient, other: subprocess.Popen[bytes]
) -> None:
    stale = open_as(server, "default", mark(other.pid))
    other.kill()
    other.wait()
    client.open("default")
    fields = {"consumer": "default", "lease": stale, "journal": server.journal.journal_id, "start": 0, "timeout_s": 0}
    with pytest.raises(flight.FlightServerError) as caught:
        raw(server, "wait", fields)
    assert error_of(caught.value).code == "TL-G07"
    assert isinstance(error_of(caught.value), Fenced)


def test_a_zombie_counts_as_dead(server: Served, client: GatewayClient, other: subprocess.Popen[bytes]) -> None:
    open_as(server, "default", mark(other.pid))
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    client.open("default")


def test_patience_waits_for_the_reader_before(
    server: Served, client: GatewayClient, other: subprocess.Popen[bytes]
) -> None:
    open_as(server, "default", mark(other.pid))
    killer = threading.Timer(0.2, other.kill)
    killer.start()
    assert client.open("default", patience_s=10).token
    killer.join()


def test_a_released_lease_is_free(server: Served, client: GatewayClient, other: subprocess.Popen[bytes]) -> None:
    client.release(client.open("default"))
    assert open_as(server, "default", mark(other.pid))


def test_a_stale_release_frees_nothing(server: Served, client: GatewayClient) -> None:
    stale, fresh = client.open("default"), client.open("default")
    client.release(stale)
    client.wait(fresh, 0, timeout_s=0)


def test_opening_pins_what_the_reader_has_not_seen(server: Served, client: GatewayClient) -> None:
    server.add(10)
    lease = client.open("slow")
    assert (lease.committed, lease.first, lease.tip) == (0, 0, 10)
    assert server.journal.consumers["slow"] == 0
    client.wait(lease, 6, timeout_s=0)
    again = client.open("slow")
    assert again.committed == 6


def test_a_reader_elsewhere_that_sends_signs_of_life_is_followed_soon() -> None:
    now = [0.0]
    leases = Leases("plant", lambda: now[0])
    far, next_one = ProcessMark(7, 1, "far (network)"), ProcessMark(8, 1, "farther (network)")
    token = leases.open("default", far)
    for _ in range(100):
        now[0] += 10
        leases.check("default", token)
    now[0] += 30
    with pytest.raises(Fenced, match=r"pid 7 on far \(network\).*TL-G03"):
        leases.open("default", next_one)
    now[0] += 1
    leases.open("default", next_one)
    with pytest.raises(Fenced, match="TL-G07"):
        leases.check("default", token)


#: Reads as "default" until its standard input ends, or says why it may not.
READER = """
import sys
from towline.errors import Fenced
from towline.gateway import client

client.TAKEOVER_S = 0.0
with client.GatewayClient(sys.argv[1]) as here:
    try:
        here.open("default")
    except Fenced as error:
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
            now[0] += FOREIGN_LEASE_S
            with pytest.raises(Fenced, match="TL-G03"):
                client.open("default")
        finally:
            first.kill()
            second.kill()
    now[0] += FOREIGN_LEASE_S + 1
    assert client.open("default").token, "one that has died is followed as soon as over a network"
