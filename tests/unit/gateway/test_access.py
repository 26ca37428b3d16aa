"""Who may call a gateway on a network: everything with the token, a slice with a ticket, nothing without."""

from __future__ import annotations

import base64
import json
import re
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as pem
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight

from tests.helpers import wait_until
from tests.unit.gateway.remote import TOKEN, Pki, Remote
from towline.errors import ConfigError, GatewayError, GatewayUnreachable, JournalError
from towline.gateway.access import KEY_FILE, MAX_TICKET_S, ClientAccess, ServerCertificate, TicketKey, TokenFile
from towline.gateway.client import GatewayClient, Lease
from towline.gateway.front import CallAuthenticator, check_ticket_scope
from towline.gateway.service import GatewayService
from towline.schema import MESSAGE_SCHEMA, NO_MESSAGES

OLD, NEW = "an-old-token-of-16", "a-new-token-of-16+"
READ: dict[str, Any] = {"kind": "read", "journal": "j", "start": 10, "end": 20, "incarnation": "ab", "writer": "q"}
WRITE: dict[str, Any] = {**READ, "kind": "write"}
ROWS = {name: READ[name] for name in ("journal", "start", "end", "incarnation")}
BATCH = {"batch": {"writer": "q/0"}}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(secret: bytes = bytes(32)) -> TicketKey:
    return TicketKey("plant", secret, Clock())


TICKET = key().sign_ticket(60, **READ)


# -- tickets --


@given(st.integers(0, len(TICKET) - 1), st.sampled_from("AB_.é"))
def test_no_character_of_a_ticket_can_be_another(place: int, other: str) -> None:
    assert (said := key().verify(TICKET)).kind == "read"
    assert {name: getattr(said, name) for name in ROWS} == ROWS
    for text in (TICKET[:place], TICKET[:place] + other + TICKET[place + 1 :]):
        if text != TICKET:
            with pytest.raises(GatewayError, match="TL-G41"):
                key().verify(text)


def test_another_key_and_another_version_are_refused() -> None:
    content = json.loads(base64.urlsafe_b64decode(TICKET.partition(".")[0]))
    later = base64.urlsafe_b64encode(json.dumps({**content, "v": 2}).encode()).decode()
    for text in ("A" * 5000, "a.b.c", key(b"x" * 32).sign_ticket(60, **READ), f"{later}.{key()._signature(later)}"):
        with pytest.raises(GatewayError, match="TL-G41"):
            key().verify(text)


def test_a_ticket_ends_by_the_clock_of_the_gateway_after_a_week_at_most() -> None:
    made = TicketKey("plant", bytes(32), clock := Clock())
    text = made.sign_ticket(60, **READ)
    clock.now += 60
    assert made.verify(text).end == 20
    clock.now += 2
    with pytest.raises(GatewayError, match=r"expired 2 s ago.*gatewayTicketValidity.*TL-G42"):
        made.verify(text)
    assert made.verify(made.sign_ticket(1e12, **READ)).expires <= clock.now + 1 + MAX_TICKET_S


ACTIONS = [name.removeprefix("_on_") for name in vars(GatewayService) if name.startswith("_on_")]
OPEN = {"batch_status", "wait_delivered"}


@pytest.mark.parametrize(
    ("claims", "call", "body", "permitted"),
    [
        *((READ, "get", ROWS | {"start": start}, True) for start in (10, 15, 20)),
        (READ, "get", ROWS | {"start": 9}, False),
        *((READ, "get", ROWS | {name: value}, False) for name, value in (("journal", "k"), ("end", 21), ("end", 19))),
        *((READ, "get", ROWS | {"incarnation": value}, False) for value in ("cd", "")),
        *((WRITE, call, BATCH, True) for call in ("put", "batch_status")),
        (WRITE, "wait_delivered", {}, True),
        *((WRITE, "put", {"batch": {"writer": one}}, False) for one in ("q", "p/0", "qq/0", "/q/0", None)),
        *((WRITE, "put", {"batch": one, "writer": "q/0"}, False) for one in (None, "q/0", ["q/0"])),
        (READ, "put", BATCH, False),
        (WRITE, "get", ROWS, False),
        *((claims, call, BATCH | ROWS, False) for claims in (READ, WRITE) for call in sorted({*ACTIONS} - OPEN)),
    ],
)
def test_a_ticket_permits_its_rows_or_its_writer_alone(
    claims: dict[str, Any], call: str, body: dict[str, Any], permitted: bool
) -> None:
    ticket = key().verify(key().sign_ticket(60, **claims))
    if permitted:
        check_ticket_scope("plant", ticket, call, json.dumps(body).encode())
    else:
        with pytest.raises(GatewayError, match="TL-G43"):
            check_ticket_scope("plant", ticket, call, json.dumps(body).encode())


def test_the_key_outlives_the_gateway_and_is_its_owners_alone(tmp_path: Path) -> None:
    text = TicketKey.load("plant", tmp_path).sign_ticket(60, **READ)
    assert TicketKey.load("plant", tmp_path).verify(text).end == 20
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    for content in ("", "00", "g" * 64):
        (tmp_path / KEY_FILE).write_text(content)
        with pytest.raises(JournalError, match="TL-J01"):
            TicketKey.load("plant", tmp_path)


# -- tokens --


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_each_line_is_a_token_so_that_one_can_be_replaced_without_a_stop(tmp_path: Path) -> None:
    """A client shows the first line; while there is no file nobody is let in."""
    path = written(tmp_path / "t", OLD)
    allowed, access = TokenFile(path), ClientAccess(token_file=str(path))
    for text, accepted in ((f"# since May\n{NEW}\n\n{OLD}\r\n", [NEW, OLD]), (f"{NEW}\n", [NEW]), (OLD, [OLD])):
        written(path, text)
        assert [one for one in (NEW, OLD) if allowed.accepts(one)] == accepted
        assert access.token() == accepted[0]
        path.unlink()
        assert not allowed.accepts(accepted[0])


@pytest.mark.parametrize("text", ["", "\n# none\n", "short", "a token with spaces", "ümlaut-of-16-signs"])
def test_a_file_that_holds_no_token(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "t", text)
    with pytest.raises(ConfigError, match="TL-C98") as refused:
        TokenFile(path)
    assert not text.strip() or text not in str(refused.value)
    with pytest.raises(GatewayError, match="TL-G46"):
        ClientAccess(token_file=str(path)).token()
    with pytest.raises(ConfigError, match=r"chmod 600.*TL-C98"):
        TokenFile(written(path, OLD, 0o604))


@pytest.mark.parametrize(
    "given",
    [
        *([], [OLD], [f"Basic {OLD}"], [f"Bearer  {OLD}"], [f"Bearer {OLD[:-1]}"], [f"Bearer {OLD}"] * 2),
        *([f"Bearer {OLD}".encode()], ["Bearer " + "x" * 100_000], ["Bearer "], [f"Ticket {OLD}"], ["Bearer \udcff"]),
    ],
)
def test_a_call_is_judged_by_its_one_header(tmp_path: Path, given: Any) -> None:
    door = CallAuthenticator("plant", TokenFile(written(tmp_path / "t", OLD)), key())
    assert door.authenticate({"authorization": [f"Bearer {OLD}"]}) is None
    with pytest.raises(GatewayError, match=r"TL-G4[01]") as refused:
        door.authenticate({"authorization": given})
    assert OLD not in str(refused.value)


# -- certificates --


@pytest.mark.parametrize(
    ("cert", "secret", "said"),
    [
        ("none.pem", "server.key", "none.pem can't be read"),
        ("server.pem", "none.key", "none.key can't be read"),
        ("server.key", "server.key", "no matching PEM"),
        ("server.pem", "server.pem", "no matching PEM"),
        ("server.pem", "locked.key", "or one with a password"),
        ("server.pem", "client.key", "key values mismatch"),
        ("old.pem", "old.key", "certificate has expired"),
        ("next.pem", "next.key", "certificate is not yet valid"),
    ],
)
def test_files_of_the_gateway_that_cannot_be_used(tmp_path: Path, cert: str, secret: str, said: str) -> None:
    pki = Pki.made(tmp_path)
    pki.issue(
        "old", "127.0.0.1", not_before=datetime(2019, 1, 1, tzinfo=UTC), not_after=datetime(2020, 1, 1, tzinfo=UTC)
    )
    pki.issue("next", "127.0.0.1", not_before=datetime(2999, 1, 1, tzinfo=UTC))
    private = pem.load_pem_private_key((tmp_path / "server.key").read_bytes(), None)
    locked = private.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"x"))
    (tmp_path / "locked.key").write_bytes(locked)
    with pytest.raises(ConfigError, match="TL-C97") as refused:
        ServerCertificate.read(tmp_path / cert, tmp_path / secret)
    assert re.search(said, str(refused.value))


# -- on a network --


def as_driver(far: Remote) -> GatewayClient:
    return GatewayClient(far.location, far.pki.access())


def as_worker(far: Remote, ticket: str) -> GatewayClient:
    """It has no file at all."""
    return GatewayClient(far.location, ClientAccess(), ticket=ticket, ca_pem=far.pki.authority_text)


def test_a_ticket_is_asked_for_at_each_call(far: Remote) -> None:
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
