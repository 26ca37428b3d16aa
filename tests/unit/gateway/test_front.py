"""The process that faces the network: it hands on what is let in, may end at any time, and is started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyarrow import flight

from tests.helpers import wait_until
from tests.unit.gateway.remote import Pki
from tests.unit.gateway.serving import Served, rows, served
from towline.delivery.outrows import rows_of
from towline.errors import ConfigError, Fenced, GatewayError, GatewayUnreachable
from towline.gateway.access import Access
from towline.gateway.client import GatewayClient
from towline.gateway.network import NetworkFront
from towline.gateway.outbox_handler import OutboxHandler
from towline.gateway.settings import GatewaySettings
from towline.journal import Limits, Outbox
from towline.schema import MESSAGE_SCHEMA, OUTBOX_SCHEMA
from towline_prove.devstack.ports import free_port


class Fronted:
    """A served journal with an outbox, and the process in front of it."""

    def __init__(self, server: Served, pki: Pki, front: NetworkFront) -> None:
        self.server = server
        self.pki = pki
        self.front = front

    @property
    def pid(self) -> int:
        return self.front._process.pid

    def driver(self) -> GatewayClient:
        return GatewayClient(self.front.location, self.pki.access())


def settings(pki: Pki, state_dir: Path, **listen: Any) -> GatewaySettings:
    given = {"name": "plant", "state_dir": state_dir, "brokers": "mqtt://h", "subscriptions": [{"filter": "t"}]}
    return GatewaySettings.model_validate(
        {**given, "listen": {**pki.settings().model_dump(), "address": f"127.0.0.1:{free_port()}", **listen}}
    )


def answers(driver: GatewayClient) -> bool:
    try:
        driver.status()
    except GatewayUnreachable:
        return False
    return True


@pytest.fixture(scope="module")
def fronted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    directory = tmp_path_factory.mktemp("front")
    pki = Pki.made(directory / "pki")
    with served(directory / "state") as server:
        kept = Outbox.open(directory / "state" / "outbox", schema=OUTBOX_SCHEMA, limits=Limits(min_free_bytes=0))
        server.service._outbox = OutboxHandler(
            kept, "plant", wake=lambda: None, on_failure=server.failures.append, ask=lambda _: Future()
        )
        front = NetworkFront(settings(pki, directory / "state"), server.location)
        yield Fronted(server, pki, front)
        front.close()
        kept.close()


def test_everything_passes_as_it_is(fronted: Fronted) -> None:
    end = fronted.server.add(2500)
    journal = fronted.server.journal.journal_id
    with fronted.driver() as driver:
        lease = driver.open("default")
        window = driver.wait(lease, 0, timeout_s=0)
        assert window.end == end
        (ticket,) = driver.sign(journal, [(end - 2500, end)], incarnations=[window.incarnation])
        writing = driver.sign_writer("query")
        driver.release(lease)
    authority = fronted.pki.authority_text
    with GatewayClient(fronted.front.location, Access(), ticket=ticket, authority=authority) as worker:
        got = pa.Table.from_batches(worker.read(journal, end - 2500, end, incarnation=window.incarnation))
        assert got.equals(pa.Table.from_batches([rows(end - 2500, 2500)]))
    with GatewayClient(fronted.front.location, Access(), ticket=writing, authority=authority) as worker:
        batch = rows_of([{"topic": "t", "payload": b"%d" % number} for number in range(1000)])
        stored = worker.send("query/0", 0, [batch, batch], MESSAGE_SCHEMA)
        assert (stored.rows, stored.whole) == (2000, True)
        assert worker.place("query/0", 0).rows == 2000


def test_the_gateways_errors_come_in_its_own_words(fronted: Fronted) -> None:
    with fronted.driver() as driver:
        with pytest.raises(Fenced, match="TL-G04"):
            list(driver.read("another", 0, 1))
        with pytest.raises(GatewayError, match="TL-G06"):
            list(driver.read(fronted.server.journal.journal_id, 0, 1 << 40))
        with pytest.raises(GatewayError, match="TL-G21"):
            driver.send("query/1", 0, [rows(0, 1)], rows(0, 1).schema)


def test_it_is_started_again_on_the_same_port_and_nothing_is_forgotten(fronted: Fronted, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("another-token-of-some-length")
    stranger = GatewayClient(fronted.front.location, fronted.pki.access(token_file=str(wrong)))
    with stranger, pytest.raises(GatewayError, match="TL-G40"):
        stranger.status()
    wait_until(lambda: fronted.front.status()["refused"], what="the refused call")
    location, before = fronted.front.location, fronted.pid
    with fronted.driver() as driver:
        (ticket,) = driver.sign(fronted.server.journal.journal_id, [(0, 0)])
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: fronted.pid != before and fronted.front.status()["running"], what="another process")
        wait_until(lambda: answers(driver))
    assert fronted.front.location == location
    assert int(fronted.front.status()["refused"]) >= 1
    authority = fronted.pki.authority_text
    with GatewayClient(location, Access(), ticket=ticket, authority=authority) as worker:
        assert list(worker.read(fronted.server.journal.journal_id, 0, 0)) == []


@pytest.mark.long
def test_the_largest_row_passes(fronted: Fronted) -> None:
    end = fronted.server.add(1, payload=bytes(255 << 20))
    with fronted.driver() as driver:
        (batch,) = driver.read(fronted.server.journal.journal_id, end - 1, end)
        assert len(batch.column("payload")[0].as_buffer()) > 255 << 20


@pytest.mark.long
def test_a_message_without_end_of_a_stranger_costs_the_gateway_nothing(fronted: Fronted) -> None:
    """gRPC takes it in whole before it asks who sends it: at worst the process in front ends, and comes again."""
    me = psutil.Process()
    content = bytes(768 << 20)
    resident = me.memory_info().rss
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    authority = fronted.pki.authority_text.encode()
    stranger = flight.connect(fronted.front.location, tls_root_certs=authority, generic_options=options)
    with stranger, pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
        list(stranger.do_action(flight.Action("status", content)))
    del content
    assert me.memory_info().rss < resident + (1 << 30)  # the client is in this process too
    with fronted.driver() as driver:
        wait_until(lambda: answers(driver))
    assert fronted.server.add(1)


def test_its_end_and_its_failure_are_told(tmp_path: Path, fronted: Fronted) -> None:
    taken = {"address": fronted.front.location.removeprefix("grpc+tls://")}
    with pytest.raises(GatewayError, match=r"can't listen on this address.*TL-G45"):
        NetworkFront(settings(fronted.pki, tmp_path, **taken), fronted.server.location)
    with pytest.raises(ConfigError, match="TL-C98"):
        NetworkFront(settings(fronted.pki, tmp_path, token_file=tmp_path / "none"), fronted.server.location)


def test_it_ends_with_the_gateway(tmp_path: Path, fronted: Fronted) -> None:
    front = NetworkFront(settings(fronted.pki, tmp_path), fronted.server.location)
    process = psutil.Process(front._process.pid)
    assert front._process.stdin is not None
    front._closing.set()
    front._process.stdin.close()  # as the kernel does when the gateway is killed
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 10)
    front.close()
