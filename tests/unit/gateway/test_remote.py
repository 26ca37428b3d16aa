"""The gateway on a network: everything with the token, a slice with a ticket, nothing without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow import flight

from tests.helpers import wait_until
from tests.unit.gateway.remote import TOKEN, Pki, Remote
from towline.errors import GatewayError, GatewayUnreachable
from towline.gateway.access import ClientAccess
from towline.gateway.client import GatewayClient, Lease
from towline.schema import MESSAGE_SCHEMA, NO_MESSAGES


def as_driver(far: Remote) -> GatewayClient:
    return GatewayClient(far.location, far.pki.access())


def as_worker(far: Remote, ticket: str) -> GatewayClient:
    """It has no file at all."""
    return GatewayClient(far.location, ClientAccess(), ticket=ticket, ca_pem=far.pki.authority_text)


def test_a_ticket_is_asked_for_at_each_call(far: Remote) -> None:
    """What each permits: `test_access`."""
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


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"ca_file": "other/ca.pem"}, r"certificate is not accepted.*gatewayCaFile.*TL-G44"),
        ({"server_name": "g2.example"}, r"g2\.example.*TL-G44"),
        ({"token_file": "/nowhere"}, "/nowhere can't be read.*TL-G46"),
        ({"ca_file": "/nowhere"}, "/nowhere can't be read.*TL-G46"),
    ],
)
def test_what_a_client_brings_does_not_fit(
    far: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, str], said: str
) -> None:
    Pki.made(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    with GatewayClient(far.location, far.pki.access(**more)) as client:
        with pytest.raises(GatewayError, match=said) as refused:
            client.status()
        assert not isinstance(refused.value, GatewayUnreachable)  # waiting does not help


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
