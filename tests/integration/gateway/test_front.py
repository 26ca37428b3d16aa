"""The process that faces the network: it hands on what is let in, may end at any time, and is started again."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyarrow import flight
from structlog.testing import capture_logs

from tests.helpers import gateway_settings, wait_until
from tests.unit.gateway.remote import Pki
from tests.unit.gateway.serving import Served, rows, served
from towline.delivery.outrows import rows_from_messages
from towline.errors import ConfigError, GatewayError, GatewayUnreachable, ReaderFenced
from towline.gateway.access import ClientAccess
from towline.gateway.client import GatewayClient, Lease
from towline.gateway.process import NetworkFront
from towline.gateway.settings import GatewaySettings
from towline.journal import Limits, Outbox
from towline.schema import NO_MESSAGES, OUTBOX_SCHEMA
from towline.spark.link import GatewayAddress
from towline_prove.devstack.process import free_port


class Fronted:
    """A served journal with an outbox, and the process in front of it."""

    def __init__(self, server: Served, pki: Pki, **more: Any) -> None:
        self.server, self.pki = server, pki
        self.front = NetworkFront(settings(pki, server.state_dir), server.location, **more)

    @property
    def location(self) -> str:
        return str(self.front.status()["location"])

    @property
    def pid(self) -> int:
        return self.front._process.pid

    def driver(self) -> GatewayClient:
        return GatewayClient(self.location, self.pki.access())

    def shown(self) -> str:
        """The certificate that it shows; "" while nobody listens, for the milliseconds of a change."""
        host, _, port = self.location.removeprefix("grpc+tls://").rpartition(":")
        try:
            return ssl.get_server_certificate((host, int(port)))
        except OSError:  # refused, reset, or cut off in the handshake
            return ""


def settings(pki: Pki, state_dir: Path, **listen: Any) -> GatewaySettings:
    given = {**pki.settings().model_dump(), "address": f"127.0.0.1:{free_port()}", **listen}
    return gateway_settings(name="plant", state_dir=state_dir, listen=given)


def answers(driver: GatewayClient) -> bool:
    try:
        driver.status()
    except GatewayUnreachable:
        return False
    return True


@pytest.fixture(scope="module")
def fronted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    directory = tmp_path_factory.mktemp("front")
    with served(directory / "state") as server:
        kept = Outbox.open(directory / "state" / "outbox", schema=OUTBOX_SCHEMA, limits=Limits(min_free_bytes=0))
        server.service._outbox = kept
        fronted = Fronted(server, Pki.made(directory / "pki"))
        yield fronted
        fronted.front.close()
        kept.close()


def test_everything_passes_as_it_is(fronted: Fronted) -> None:
    """The gateway's errors too, and rows above gRPC's usual limit of 4 MB."""
    end = fronted.server.add(5, payload=bytes(5 << 20))
    journal = fronted.server.journal.journal_id
    with fronted.driver() as driver:
        lease = Lease("default")
        window = driver.wait(lease, 0, journal=journal, timeout_s=0)
        assert window.end == end
        (ticket,) = driver.request_read_tickets(journal, [(end - 5, end, window.incarnation)])
        writing = driver.request_write_ticket("query")
        driver.release(lease)
        with pytest.raises(ReaderFenced, match="TL-G04"):
            list(driver.read("another", 0, 1))
        with pytest.raises(GatewayError, match="TL-G21"):
            driver.send("query/1", 0, rows(0, 1))
    authority = fronted.pki.authority_text
    with GatewayClient(fronted.location, ClientAccess(), ticket=ticket, ca_pem=authority) as worker:
        got = pa.Table.from_batches(worker.read(journal, end - 5, end, incarnation=window.incarnation))
        assert got.equals(pa.Table.from_batches([rows(end - 5, 5, payload=bytes(5 << 20))]))
    with GatewayClient(fronted.location, ClientAccess(), ticket=writing, ca_pem=authority) as worker:
        batch = rows_from_messages([{"topic": "t", "payload": bytes(5 << 20)} for _ in range(2)])
        assert not worker.send("query/0", 0, batch, is_last=False).whole
        stored = worker.send("query/0", 0, batch, start=2)
        assert (stored.rows, stored.whole) == (4, True)
        assert worker.stored_batch("query/0", 0).rows == 4
        assert worker.wait_delivered(0, timeout_s=0)


def test_it_is_started_again_on_the_same_port_and_a_stream_goes_on(fronted: Fronted, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("another-token-of-some-length")
    stranger = GatewayClient(fronted.location, fronted.pki.access(token_file=str(tmp_path / "wrong")))
    with stranger, pytest.raises(GatewayError, match="TL-G40"):
        stranger.status()
    wait_until(lambda: fronted.front.status()["refused"], what="the refused call")
    for _ in range(20):
        fronted.server.add(10_000, payload=bytes(200))
    location, before = fronted.location, fronted.pid
    journal, end = fronted.server.journal.journal_id, fronted.server.journal.end
    with fronted.driver() as driver:
        (ticket,) = driver.request_read_tickets(journal, [(end - 200_000, end, "")])
    offsets: list[int] = []
    for batch in GatewayAddress(location, ticket=ticket, ca_pem=fronted.pki.authority_text).rows(
        journal, end - 200_000, end
    ):
        if not offsets:
            os.kill(before, signal.SIGKILL)
        offsets += batch.column("offset").to_pylist()
    assert offsets == list(range(end - 200_000, end))
    assert fronted.pid != before
    assert (fronted.location, fronted.front.status()["running"]) == (location, True)
    assert int(fronted.front.status()["refused"]) >= 1


def test_a_certificate_is_renewed_while_it_runs_if_it_can_be_used(
    fronted: Fronted, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Calls that run go on; the token, the port, the process and the connection of others stay as they are."""
    one = Fronted(fronted.server, Pki.made(tmp_path / "pki"))
    process, location, before = one.pid, one.location, one.shown()
    key = one.pki.directory / "server.key"
    whole, heard = key.read_text(), list[str]()
    key.write_text("half a k")

    def told() -> bool:
        heard.append(capfd.readouterr().err)
        return "TL-C97" in "".join(heard)

    wait_until(told, 30)
    assert one.shown() == before
    key.write_text(whole)
    end = one.server.journal.end
    with one.driver() as client, one.driver() as waiting, ThreadPoolExecutor(1) as pool:
        lease, journal = Lease("renewing"), one.server.journal.journal_id
        window = pool.submit(waiting.wait, lease, end, journal=journal, timeout_s=50)
        wait_until(lambda: one.server.service._long_poll.waiters)
        one.pki.issue("server", "127.0.0.1")
        wait_until(lambda: one.shown() not in ("", before), 30)
        wait_until(lambda: answers(client))
        one.server.add(1)
        assert window.result(30).end == end + 1
        waiting.release(lease)
    assert (one.location, one.pid) == (location, process)
    one.front.close()


def test_a_message_without_end_of_a_stranger_ends_only_what_is_in_front(fronted: Fronted) -> None:
    """gRPC takes it in whole before it asks who sends it."""
    small = Fronted(fronted.server, fronted.pki, max_bytes=300 << 20)
    before = small.pid
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    authority = fronted.pki.authority_text.encode()
    stranger = flight.connect(small.location, tls_root_certs=authority, generic_options=options)
    with capture_logs() as said, stranger:
        with pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
            list(stranger.do_action(flight.Action("status", bytes(256 << 20))))
        wait_until(lambda: small.pid != before, what="another process")
    assert [(line["code"], line["reason"]) for line in said] == [
        ("TL-G49", "the network's calls took more than 300 MB")
    ]
    with small.driver() as driver:
        wait_until(lambda: answers(driver))
    small.front.close()


def test_a_machine_that_says_nothing_is_given_up(fronted: Fronted, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose power is off: its connections stay."""
    monkeypatch.setattr("towline.gateway.client.READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr("towline.gateway.client.WRITE_TIMEOUT_S", 0.5)
    end = fronted.server.add(1)
    with fronted.driver() as driver:
        driver.status()
        os.kill(fronted.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: psutil.Process(fronted.pid).status() == psutil.STATUS_STOPPED)
            with pytest.raises(GatewayUnreachable, match="TL-G01"):
                list(driver.read(fronted.server.journal.journal_id, end - 1, end))
            with pytest.raises(GatewayUnreachable, match="TL-G01"):
                driver.send("silent/0", 0, NO_MESSAGES)
        finally:
            os.kill(fronted.pid, signal.SIGCONT)
        assert sum(batch.num_rows for batch in driver.read(fronted.server.journal.journal_id, end - 1, end)) == 1


def test_its_failure_is_told_and_it_ends_with_the_gateway(tmp_path: Path, fronted: Fronted) -> None:
    taken = {"address": fronted.location.removeprefix("grpc+tls://")}
    with pytest.raises(GatewayError, match=r"can't listen on this address.*the port free\?.*TL-G45"):
        NetworkFront(settings(fronted.pki, tmp_path, **taken), fronted.server.location)
    with pytest.raises(ConfigError, match="TL-C98"):
        NetworkFront(settings(fronted.pki, tmp_path, token_file=tmp_path / "none"), fronted.server.location)
    another = Fronted(fronted.server, fronted.pki)
    process = psutil.Process(another.pid)
    assert another.front._process.stdin is not None
    another.front._closing.set()
    another.front._process.stdin.close()  # as the kernel does when the gateway is killed
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 10)
    another.front.close()
