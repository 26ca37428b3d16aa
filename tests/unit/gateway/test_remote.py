"""The gateway on a network: everything with the token, a slice with a ticket, nothing without."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyarrow import flight

from tests.helpers import wait_until
from tests.unit.gateway.remote import TOKEN, Pki, Remote, remote
from towline.errors import ConfigError, GatewayError, GatewayUnreachable
from towline.gateway.access import ClientAccess, ServerCertificate
from towline.gateway.client import GatewayClient, Lease
from towline.gateway.settings import ListenSettings
from towline.schema import MESSAGE_SCHEMA, NO_MESSAGES


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Remote]:
    with remote(tmp_path, outbox=True) as running:
        yield running


def as_driver(far: Remote) -> GatewayClient:
    return GatewayClient(far.location, far.pki.access())


def as_worker(far: Remote, ticket: str) -> GatewayClient:
    """It has no file at all."""
    return GatewayClient(far.location, ClientAccess(), ticket=ticket, ca_pem=far.pki.authority_text)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.status(),
        lambda client: client.acquire(Lease("default")),
        lambda client: client.extent(1),
        lambda client: client.extent(0, outbox=True),
        lambda client: client.end_job("job-1"),
        lambda client: client.refused_messages("page", 0),
        lambda client: client.request_read_tickets("j", [(0, 1, "")]),
        lambda client: client.request_write_ticket("query"),
    ],
)
@pytest.mark.parametrize("kind", ["read", "write"])
def test_no_ticket_opens_anything_else(far: Remote, kind: str, call: Any) -> None:
    with as_driver(far) as driver:
        journal = far.server.journal.journal_id
        ticket = (
            driver.request_read_tickets(journal, [(0, 0, "")])[0]
            if kind == "read"
            else driver.request_write_ticket("query")
        )
    with as_worker(far, ticket) as worker, pytest.raises(GatewayError, match="TL-G43"):
        call(worker)


def test_one_kind_of_ticket_does_not_stand_for_the_other(far: Remote) -> None:
    journal = far.server.journal.journal_id
    with as_driver(far) as driver:
        reading, writing = driver.request_read_tickets(journal, [(0, 0, "")])[0], driver.request_write_ticket("query")
    with as_worker(far, reading) as worker:
        with pytest.raises(GatewayError, match="TL-G43"):
            worker.stored_batch("query/0", 0)
        with pytest.raises(GatewayError, match="TL-G43"):
            worker.send("query/0", 0, NO_MESSAGES)
    with as_worker(far, writing) as worker, pytest.raises(GatewayError, match="TL-G43"):
        list(worker.read(journal, 0, 0))


def test_without_a_token_or_with_a_wrong_one_nothing(far: Remote, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("another-token-of-some-length")
    with GatewayClient(far.location, far.pki.access(token_file=str(wrong))) as client:
        for call in (client.status, lambda: list(client.read("j", 0, 1)), lambda: client.stored_batch("q/0", 0)):
            with pytest.raises(GatewayError, match="TL-G40") as refused:
                call()
            assert "another-token" not in str(refused.value)
            assert TOKEN not in str(refused.value)
    none = GatewayClient(far.location, far.pki.access(token_file=""))
    with none, pytest.raises(GatewayError, match=r"gatewayTokenFile.*TL-G46"):
        none.status()
    assert far.service.status()["refused"] == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda one: list(one.do_action(flight.Action("status", b""))),
        lambda one: one.do_get(flight.Ticket(b"{}")).read_all(),
        lambda one: list(one.list_flights()),
        lambda one: list(one.list_actions()),
        lambda one: one.get_flight_info(flight.FlightDescriptor.for_command(b"{}")),
        lambda one: one.get_schema(flight.FlightDescriptor.for_command(b"{}")),
        lambda one: one.do_exchange(flight.FlightDescriptor.for_command(b"{}"))[1].read_all(),
        lambda one: one.do_put(flight.FlightDescriptor.for_command(b"{}"), MESSAGE_SCHEMA)[1].read(),
    ],
)
def test_no_call_of_flight_is_forgotten(far: Remote, call: Any) -> None:
    """Those that the gateway does not have too: the refusal comes before."""
    authority = far.pki.authority_text.encode()
    stranger = flight.connect(far.location, tls_root_certs=authority)
    # pyarrow gives the refusal of get_schema as an OSError
    with stranger, pytest.raises((flight.FlightUnauthenticatedError, OSError), match="TL-G40"):
        call(stranger)


def test_a_certificate_that_the_client_does_not_trust(far: Remote, tmp_path: Path) -> None:
    other = Pki.made(tmp_path / "other")
    access = far.pki.access(ca_file=str(other.directory / "ca.pem"))
    with GatewayClient(far.location, access) as client:
        with pytest.raises(GatewayError, match=r"certificate is not accepted.*gatewayCaFile.*TL-G44") as refused:
            client.status()
        assert not isinstance(refused.value, GatewayUnreachable)  # waiting does not help


def test_a_certificate_for_another_name(far: Remote) -> None:
    client = GatewayClient(far.location, far.pki.access(server_name="g2.example"))
    with client, pytest.raises(GatewayError, match=r"g2\.example.*TL-G44"):
        client.status()


def test_files_of_a_client_that_are_missing(far: Remote) -> None:
    for name in ("token_file", "ca_file"):
        client = GatewayClient(far.location, far.pki.access(**{name: "/nowhere"}))
        with client, pytest.raises(GatewayError, match=r"/nowhere can't be read.*TL-G46"):
            client.status()


def test_status_says_where_it_listens(far: Remote) -> None:
    said = far.service.status()
    assert said["location"] == far.location
    assert datetime.fromisoformat(str(said["certificate_until"])) > datetime.now(UTC)
    assert TOKEN not in json.dumps(said)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"cert_file": "none.pem"}, "cert_file .*can't be read"),
        ({"key_file": "none.key"}, "key_file .*can't be read"),
        ({"cert_file": "server.key"}, "cert_file .*no certificate"),
        ({"key_file": "server.pem"}, "key_file .*no private key"),
        ({"key_file": "client.key"}, "key does not fit the certificate"),
        ({"cert_file": "old.pem", "key_file": "old.key"}, "the certificate has expired"),
        ({"cert_file": "next.pem", "key_file": "next.key"}, "not valid yet"),
    ],
)
def test_files_of_the_gateway_that_cannot_be_used(tmp_path: Path, broken: dict[str, str], said: str) -> None:
    pki = Pki.made(tmp_path / "pki")
    pki.issue(
        "old", "127.0.0.1", not_after=datetime(2020, 1, 1, tzinfo=UTC), not_before=datetime(2019, 1, 1, tzinfo=UTC)
    )
    pki.issue("next", "127.0.0.1", not_before=datetime(2999, 1, 1, tzinfo=UTC))
    paths = {name: pki.directory / file for name, file in broken.items()}
    with pytest.raises(ConfigError, match=rf"{said}.*TL-C97"):
        ServerCertificate.read(pki.settings(**paths))


def test_an_encrypted_key_is_refused_and_asks_nobody(tmp_path: Path) -> None:
    pki = Pki.made(tmp_path / "pki")
    openssl = shutil.which("openssl")
    assert openssl is not None
    key = pki.directory / "server.key"
    command: list[str | Path] = [
        openssl,
        "pkey",
        "-aes256",
        "-passout",
        "pass:x",
        "-in",
        key,
        "-out",
        tmp_path / "locked.key",
    ]
    subprocess.run(command, check=True, timeout=30)
    with pytest.raises(ConfigError, match=r"without a password.*TL-C97"):
        ServerCertificate.read(pki.settings(key_file=tmp_path / "locked.key"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"address": "0.0.0.0:8815"}, "cert_file and key_file and token_file is missing"),
        ({"address": "h:1", "cert_file": "c", "key_file": "k"}, "token_file is missing"),
        ({"address": "127.0.0.1:8815", "token_file": "t"}, "cert_file and key_file is missing"),
        ({"address": "host", "cert_file": "c", "key_file": "k", "token_file": "t"}, "it is no address to listen on"),
        ({"address": "h:99999", "cert_file": "c", "key_file": "k", "token_file": "t"}, "it is no address to listen on"),
    ],
)
def test_what_listens_has_tls_and_a_token_or_does_not(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ListenSettings.model_validate(given)


def test_a_port_alone_is_one_of_loopback() -> None:
    files = {"cert_file": "c", "key_file": "k", "token_file": "t"}
    assert ListenSettings.model_validate({"address": "8815", **files}).location == "grpc+tls://127.0.0.1:8815"


def test_a_reader_on_a_network_sends_signs_of_life(far: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may take longer than its lease; what has ended sends none, and somebody else reads on."""
    monkeypatch.setattr("towline.gateway.client.HEARTBEAT_S", 0.02)
    with as_driver(far) as client:
        client.acquire(Lease("default"))
        held = far.server.service._leases._leases["default"]
        assert held.holder.host.endswith(" (network)")
        opened = held.last_call_at
        wait_until(lambda: held.last_call_at > opened)
    far.server.service._leases._leases["default"].last_call_at -= 31
    with as_driver(far) as successor:
        assert successor.acquire(Lease("default"))["consumers"] == {"default": 0}
