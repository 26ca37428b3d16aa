"""The process that faces the network: it hands on what is let in, may end at any time, and is started again."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyarrow import flight
from structlog.testing import capture_logs

from tests.helpers import wait_until
from tests.unit.gateway.remote import TOKEN, Pki
from tests.unit.gateway.serving import Served, rows, served
from towline.delivery.outrows import rows_from_messages
from towline.errors import ConfigError, GatewayError, GatewayUnreachable, ReaderFenced
from towline.gateway import service
from towline.gateway.access import ClientAccess
from towline.gateway.client import GatewayClient, Lease
from towline.gateway.process import NetworkFront
from towline.gateway.settings import GatewaySettings
from towline.journal import Limits, Outbox
from towline.schema import NO_MESSAGES, OUTBOX_SCHEMA
from towline.spark.link import GatewayAddress
from towline_prove.devstack.process import free_port


def listens_at(front: NetworkFront) -> str:
    return str(front.status()["location"])


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
        return GatewayClient(listens_at(self.front), self.pki.access())


def settings(pki: Pki, state_dir: Path, **listen: Any) -> GatewaySettings:
    given = {"name": "plant", "state_dir": state_dir, "brokers": "mqtt://h", "subscriptions": [{"pattern": "t"}]}
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
        server.service._outbox = kept
        front = NetworkFront(settings(pki, directory / "state"), server.location)
        yield Fronted(server, pki, front)
        front.close()
        kept.close()


def test_everything_passes_as_it_is(fronted: Fronted) -> None:
    end = fronted.server.add(2500)
    journal = fronted.server.journal.journal_id
    with fronted.driver() as driver:
        lease = Lease("default")
        window = driver.wait(lease, 0, journal=journal, timeout_s=0)
        assert window.end == end
        (ticket,) = driver.request_read_tickets(journal, [(end - 2500, end, window.incarnation)])
        writing = driver.request_write_ticket("query")
        driver.release(lease)
    authority = fronted.pki.authority_text
    with GatewayClient(listens_at(fronted.front), ClientAccess(), ticket=ticket, ca_pem=authority) as worker:
        got = pa.Table.from_batches(worker.read(journal, end - 2500, end, incarnation=window.incarnation))
        assert got.equals(pa.Table.from_batches([rows(end - 2500, 2500)]))
    with GatewayClient(listens_at(fronted.front), ClientAccess(), ticket=writing, ca_pem=authority) as worker:
        batch = rows_from_messages([{"topic": "t", "payload": b"%d" % number} for number in range(1000)])
        assert not worker.send("query/0", 0, batch, is_last=False).whole
        stored = worker.send("query/0", 0, batch, start=1000)
        assert (stored.rows, stored.whole) == (2000, True)
        assert worker.stored_batch("query/0", 0).rows == 2000
        assert worker.wait_delivered(0, timeout_s=0)


def test_the_gateways_errors_come_in_its_own_words(fronted: Fronted) -> None:
    with fronted.driver() as driver:
        with pytest.raises(ReaderFenced, match="TL-G04"):
            list(driver.read("another", 0, 1))
        with pytest.raises(GatewayError, match="TL-G06"):
            list(driver.read(fronted.server.journal.journal_id, 0, 1 << 40))
        with pytest.raises(GatewayError, match="TL-G21"):
            driver.send("query/1", 0, rows(0, 1))


def test_it_is_started_again_on_the_same_port_and_nothing_is_forgotten(fronted: Fronted, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("another-token-of-some-length")
    stranger = GatewayClient(listens_at(fronted.front), fronted.pki.access(token_file=str(wrong)))
    with stranger, pytest.raises(GatewayError, match="TL-G40"):
        stranger.status()
    wait_until(lambda: fronted.front.status()["refused"], what="the refused call")
    location, before = listens_at(fronted.front), fronted.pid
    with fronted.driver() as driver:
        (ticket,) = driver.request_read_tickets(fronted.server.journal.journal_id, [(0, 0, "")])
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: fronted.pid != before and fronted.front.status()["running"], what="another process")
        wait_until(lambda: answers(driver))
    assert listens_at(fronted.front) == location
    assert int(fronted.front.status()["refused"]) >= 1
    authority = fronted.pki.authority_text
    with GatewayClient(location, ClientAccess(), ticket=ticket, ca_pem=authority) as worker:
        assert list(worker.read(fronted.server.journal.journal_id, 0, 0)) == []


def shown(location: str) -> str:
    """The certificate that the gateway shows."""
    host, _, port = location.removeprefix("grpc+tls://").rpartition(":")
    return ssl.get_server_certificate((host, int(port)))


def shows_another(location: str, before: str) -> bool:
    """Whether the certificate is another by now; nobody listens for the milliseconds of the change."""
    try:
        return shown(location) != before
    except OSError:  # refused, reset, or cut off in the handshake
        return False


def test_a_renewed_certificate_is_taken_while_it_runs(fronted: Fronted) -> None:
    """Calls that run go on; the token, the port, the process and the connection of others stay as they are."""
    process = fronted.pid
    location, before = listens_at(fronted.front), shown(listens_at(fronted.front))
    end = fronted.server.journal.end
    with fronted.driver() as client, fronted.driver() as waiting:
        lease, journal = Lease("renewing"), fronted.server.journal.journal_id
        window: list[Any] = []
        thread = threading.Thread(target=lambda: window.append(waiting.wait(lease, end, journal=journal, timeout_s=50)))
        thread.start()
        wait_until(lambda: fronted.server.service._long_poll.waiters)
        fronted.pki.issue("server", "127.0.0.1")
        wait_until(lambda: shows_another(location, before), 30)
        wait_until(lambda: answers(client))
        fronted.server.add(1)
        thread.join(30)
        assert window[0].end == end + 1
        waiting.release(lease)
    assert (listens_at(fronted.front), fronted.pid) == (location, process)


def test_a_port_that_another_has_taken_meanwhile_is_told_and_tried_again(fronted: Fronted) -> None:
    front = NetworkFront(settings(fronted.pki, fronted.server.state_dir), fronted.server.location)
    host, _, port = listens_at(front).removeprefix("grpc+tls://").rpartition(":")
    with capture_logs() as said:
        os.kill(front._process.pid, signal.SIGKILL)
        taker = taken_within(60, host, int(port))
        assert taker is not None, "the port was never free"
        with taker:
            wait_until(lambda: len(said) > 1, 60)
        assert [line["code"] for line in said[:2]] == ["TL-G49", "TL-G49"]
        assert "(address already in use)" in said[1]["reason"]
    with GatewayClient(listens_at(front), fronted.pki.access()) as driver:
        wait_until(lambda: answers(driver), 60)
    front.close()


def taken_within(seconds: float, host: str, port: int) -> socket.socket | None:
    """Listen on a port in the milliseconds in which nobody else does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        taker = socket.socket()
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taker.bind((host, port))
            taker.listen()
        except OSError:
            taker.close()
            time.sleep(0.0005)
        else:
            return taker
    return None


def test_a_certificate_that_cannot_be_used_leaves_the_old_one(
    tmp_path: Path, fronted: Fronted, capfd: pytest.CaptureFixture[str]
) -> None:
    pki = Pki.made(tmp_path / "pki")
    front = NetworkFront(settings(pki, fronted.server.state_dir), fronted.server.location)
    before = shown(listens_at(front))
    (pki.directory / "server.key").write_text("half a k")
    heard: list[str] = []

    def told() -> bool:
        heard.append(capfd.readouterr().err)
        return "not renewed" in "".join(heard)

    wait_until(told, 30)
    assert "TL-C97" in "".join(heard)
    assert shown(listens_at(front)) == before
    with GatewayClient(listens_at(front), pki.access()) as driver:
        assert answers(driver)
    front.close()


@pytest.mark.long
def test_the_largest_row_passes(fronted: Fronted) -> None:
    end = fronted.server.add(1, payload=bytes(255 << 20))
    with fronted.driver() as driver:
        (batch,) = driver.read(fronted.server.journal.journal_id, end - 1, end)
        assert len(batch.column("payload")[0].as_buffer()) > 255 << 20


def test_a_message_without_end_of_a_stranger_ends_only_what_is_in_front(fronted: Fronted) -> None:
    """gRPC takes it in whole before it asks who sends it."""
    front = NetworkFront(settings(fronted.pki, fronted.server.state_dir), fronted.server.location, max_bytes=300 << 20)
    before = front._process.pid
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    authority = fronted.pki.authority_text.encode()
    stranger = flight.connect(listens_at(front), tls_root_certs=authority, generic_options=options)
    with capture_logs() as said, stranger:
        with pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
            list(stranger.do_action(flight.Action("status", bytes(256 << 20))))
        wait_until(lambda: front._process.pid != before, what="another process")
    assert [(line["code"], line["reason"]) for line in said] == [
        ("TL-G49", "the network's calls took more than 300 MB")
    ]
    with GatewayClient(listens_at(front), fronted.pki.access()) as driver:
        wait_until(lambda: answers(driver))
    front.close()


def test_a_stream_goes_on_where_it_broke_off(fronted: Fronted) -> None:
    for _ in range(20):
        fronted.server.add(10_000, payload=bytes(200))
    journal, end = fronted.server.journal.journal_id, fronted.server.journal.end
    with fronted.driver() as driver:
        (ticket,) = driver.request_read_tickets(journal, [(end - 200_000, end, "")])
    place = GatewayAddress(listens_at(fronted.front), ticket=ticket, ca_pem=fronted.pki.authority_text)
    offsets: list[int] = []
    for batch in place.rows(journal, end - 200_000, end):
        if not offsets:
            os.kill(fronted.pid, signal.SIGKILL)
        offsets += batch.column("offset").to_pylist()
    assert offsets == list(range(end - 200_000, end))


def test_a_machine_that_says_nothing_is_given_up(fronted: Fronted, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose power is off: its connections stay."""
    monkeypatch.setattr("towline.gateway.client.READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr("towline.gateway.client.WRITE_TIMEOUT_S", 0.5)
    end = fronted.server.add(1)
    with fronted.driver() as driver:
        driver.status()
        os.kill(fronted.pid, signal.SIGSTOP)
        try:
            with pytest.raises(GatewayUnreachable, match="TL-G01"):
                list(driver.read(fronted.server.journal.journal_id, end - 1, end))
            with pytest.raises(GatewayUnreachable, match="TL-G01"):
                driver.send("silent/0", 0, NO_MESSAGES)
        finally:
            os.kill(fronted.pid, signal.SIGCONT)
        assert sum(batch.num_rows for batch in driver.read(fronted.server.journal.journal_id, end - 1, end)) == 1


def test_its_end_and_its_failure_are_told(tmp_path: Path, fronted: Fronted) -> None:
    taken = {"address": listens_at(fronted.front).removeprefix("grpc+tls://")}
    with pytest.raises(GatewayError, match=r"can't listen on this address \(address already in use\).*TL-G45"):
        NetworkFront(settings(fronted.pki, tmp_path, **taken), fronted.server.location)
    with pytest.raises(ConfigError, match="TL-C98"):
        NetworkFront(settings(fronted.pki, tmp_path, token_file=tmp_path / "none"), fronted.server.location)


def test_handshakes_that_fail_leave_no_line(fronted: Fronted, tmp_path: Path) -> None:
    """Whoever reaches the port can make as many as he likes."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)  # the process in front inherits it
        try:
            front = NetworkFront(settings(fronted.pki, fronted.server.state_dir), fronted.server.location)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    for _ in range(5):
        with flight.connect(listens_at(front)) as stranger, pytest.raises(flight.FlightUnavailableError):
            list(stranger.do_action(flight.Action("status", b"")))
        host, _, port = listens_at(front).removeprefix("grpc+tls://").rpartition(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            raw.settimeout(10)
            while raw.recv(1000):
                continue
    front.close()
    assert log.read_text() == ""


def test_it_ends_with_the_gateway(tmp_path: Path, fronted: Fronted) -> None:
    front = NetworkFront(settings(fronted.pki, tmp_path), fronted.server.location)
    process = psutil.Process(front._process.pid)
    assert front._process.stdin is not None
    front._closing.set()
    front._process.stdin.close()  # as the kernel does when the gateway is killed
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 10)
    front.close()


#: A task that is killed in the midst of a batch: MANY record batches are on their way when its process goes.
TASK = """
import json, os, signal, sys
from pyarrow import flight
from towline.delivery.outrows import rows_from_messages
from towline.schema import MESSAGE_SCHEMA
location, authorization, authority, writer, start, many = sys.argv[1:]
given = {"tls_root_certs": open(authority, "rb").read()} if "tls" in location else {}
stranger = flight.connect(location, **given)
fields = {"batch": {"writer": writer, "number": 0}, "start": int(start), "is_last": 1}
descriptor = flight.FlightDescriptor.for_command(json.dumps(fields).encode())
options = flight.FlightCallOptions(headers=[(b"authorization", authorization.encode())])
stream, answers = stranger.do_put(descriptor, MESSAGE_SCHEMA, options)
for _ in range(int(many)):
    stream.write_batch(rows_from_messages([{"topic": "t", "payload": b"x"}] * 10))
sys.stdout.write("on their way\\n")
sys.stdout.flush()
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("way", ["unix", "network"])
@pytest.mark.parametrize(("many", "outcome"), [(0, "TL-G39"), (1, "taken"), (2, "TL-G08")])
def test_what_a_task_brings_that_was_killed_is_there_as_a_whole_or_not_at_all(
    fronted: Fronted, monkeypatch: pytest.MonkeyPatch, way: str, many: int, outcome: str
) -> None:
    """For gRPC such a stream ends as any other: of several record batches those still to come would be lost."""
    location = fronted.server.location if way == "unix" else listens_at(fronted.front)
    writer = f"{way}-{many}/0"
    half = rows_from_messages([{"topic": "t", "payload": b"%d" % number} for number in range(20)])
    with GatewayClient(fronted.server.location) as client:
        assert client.send(writer, 0, half, is_last=False).rows == 20
        outcomes: list[str] = []
        with monkeypatch.context() as patched:
            patched.setattr(service, "store_batch", partial(told, service.store_batch, outcomes))
            given = [location, f"Bearer {TOKEN}", str(fronted.pki.directory / "ca.pem"), writer, "20", str(many)]
            with subprocess.Popen(
                [sys.executable, "-c", TASK, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as task:
                wait_until(lambda: outcomes, what="the stream")
                task.communicate("\n")
            wait_until(lambda: len(outcomes) > 1, what="the end of the stream")
        assert outcomes == ["begun", outcome]
        stored = client.stored_batch(writer, 0)
        if outcome == "taken":
            assert (stored.rows, stored.whole) == (30, True)
            return
        assert (stored.rows, stored.whole) == (20, False)
        rest = rows_from_messages([{"topic": "t", "payload": b"%d" % number} for number in range(20, 50)])
        stored = client.send(writer, 0, rest, start=20)
        assert (stored.rows, stored.whole) == (50, True)


def told(take: Callable[..., Any], outcomes: list[str], *args: Any, **given: Any) -> Any:
    """Take the rows of a stream, and note what became of it."""
    outcomes.append("begun")
    try:
        stored = take(*args, **given)
    except GatewayError as error:
        outcomes.append(error.code)
        raise
    outcomes.append("taken")
    return stored
