"""A ticket opens what it says, for as long as it says, at the gateway that signed it."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from towline.errors import GatewayError, JournalError
from towline.gateway.access import KEY_FILE, MAX_TICKET_S, TicketKey
from towline.gateway.front import check_ticket_scope

READ: dict[str, Any] = {"kind": "read", "journal": "j", "start": 10, "end": 20, "incarnation": "ab"}
WRITE: dict[str, Any] = {"kind": "write", "writer": "q"}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(clock: Clock | None = None, secret: bytes = bytes(32)) -> TicketKey:
    return TicketKey("plant", secret, clock or Clock())


def asking(**fields: Any) -> bytes:
    return json.dumps({"journal": "j", "start": 10, "end": 20, "incarnation": "ab", **fields}).encode()


def test_it_says_what_was_signed() -> None:
    said = key().verify(key().sign_ticket(60, **READ))
    assert (said.kind, said.journal, said.start, said.end, said.incarnation) == ("read", "j", 10, 20, "ab")


@pytest.mark.parametrize("claims", [READ, WRITE])
def test_no_character_of_it_can_be_another(claims: dict[str, Any]) -> None:
    text = key().sign_ticket(60, **claims)
    for place, character in enumerate(text):
        for other in "AB_.":
            if other != character:
                with pytest.raises(GatewayError, match="TL-G41"):
                    key().verify(text[:place] + other + text[place + 1 :])


@pytest.mark.parametrize("text", ["", ".", "a", "a.b", "a.b.c", "é.é", "=.=", "A" * 5000])
def test_what_is_no_ticket(text: str) -> None:
    with pytest.raises(GatewayError, match="TL-G41"):
        key().verify(text)


def test_every_length_of_it_is_another_text() -> None:
    text = key().sign_ticket(60, **READ)
    for length in range(len(text)):
        with pytest.raises(GatewayError, match="TL-G41"):
            key().verify(text[:length])


def test_another_gateway_did_not_sign_it() -> None:
    with pytest.raises(GatewayError, match="TL-G41"):
        key(secret=b"x" * 32).verify(key().sign_ticket(60, **READ))


def test_another_version_is_not_read() -> None:
    """Signed with the right key, as a later Towline could do."""
    made = key()
    content = base64.urlsafe_b64decode(made.sign_ticket(60, **READ).partition(".")[0])
    later = base64.urlsafe_b64encode(json.dumps({**json.loads(content), "v": 2}).encode()).decode()
    with pytest.raises(GatewayError, match="TL-G41"):
        made.verify(f"{later}.{made._signature(later)}")


def test_it_ends_by_the_clock_of_the_gateway() -> None:
    clock = Clock()
    made = key(clock)
    text = made.sign_ticket(60, **READ)
    clock.now += 60
    assert made.verify(text).end == 20
    clock.now += 2
    with pytest.raises(GatewayError, match=r"expired 2 s ago.*gatewayTicketValidity.*TL-G42"):
        made.verify(text)


def test_none_is_for_longer_than_a_week() -> None:
    assert key().verify(key().sign_ticket(1e12, **READ)).expires <= 1001 + MAX_TICKET_S


def test_a_reader_may_begin_later_as_after_a_broken_connection() -> None:
    ticket = key().verify(key().sign_ticket(60, **READ))
    for start in (10, 15, 20):
        check_ticket_scope("plant", ticket, "get", asking(start=start))


@pytest.mark.parametrize(
    "fields", [{"journal": "k"}, {"start": 9}, {"end": 21}, {"end": 19}, {"incarnation": "cd"}, {"incarnation": ""}]
)
def test_a_reader_gets_no_other_rows(fields: dict[str, Any]) -> None:
    with pytest.raises(GatewayError, match="TL-G43"):
        check_ticket_scope("plant", key().verify(key().sign_ticket(60, **READ)), "get", asking(**fields))


@pytest.mark.parametrize("writer", ["q", "p/0", "qq/0", "q2/0", "/q/0"])
def test_a_writer_is_no_other(writer: str) -> None:
    ticket = key().verify(key().sign_ticket(60, **WRITE))
    for call in ("put", "batch_status"):
        check_ticket_scope("plant", ticket, call, b'{"batch": {"writer": "q/0"}}')
        with pytest.raises(GatewayError, match=r"something else than this writer.*TL-G43"):
            check_ticket_scope("plant", ticket, call, json.dumps({"batch": {"writer": writer}}).encode())
    none: list[Any] = [None, "q/0", ["q/0"], {}]
    for batch in none:
        with pytest.raises(GatewayError, match="TL-G43"):
            check_ticket_scope("plant", ticket, "put", json.dumps({"batch": batch, "writer": "q/0"}).encode())
    check_ticket_scope("plant", ticket, "wait_delivered", b"{}")
    with pytest.raises(GatewayError, match=r'something else than the action "wait".*TL-G43'):
        check_ticket_scope("plant", ticket, "wait", b"{}")


def test_one_kind_does_not_stand_for_another() -> None:
    """Fields of both kinds in one, so that only the kind keeps them apart."""
    both = {**READ, "writer": "q"}
    with pytest.raises(GatewayError, match="TL-G43"):
        check_ticket_scope("plant", key().verify(key().sign_ticket(60, **{**both, "kind": "write"})), "get", asking())
    with pytest.raises(GatewayError, match="TL-G43"):
        check_ticket_scope("plant", key().verify(key().sign_ticket(60, **both)), "put", b'{"batch": {"writer": "q/0"}}')


def test_the_key_outlives_the_gateway_and_is_its_owners_alone(tmp_path: Path) -> None:
    text = TicketKey.load("plant", tmp_path).sign_ticket(60, **READ)
    assert TicketKey.load("plant", tmp_path).verify(text).end == 20
    file = tmp_path / KEY_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() not in text
    file.unlink()
    with pytest.raises(GatewayError, match="TL-G41"):
        TicketKey.load("plant", tmp_path).verify(text)


@pytest.mark.parametrize("content", ["", "00", "g" * 64, "0" * 63])
def test_a_key_that_is_none_is_not_used(tmp_path: Path, content: str) -> None:
    (tmp_path / KEY_FILE).write_text(content)
    with pytest.raises(JournalError, match="TL-J01"):
        TicketKey.load("plant", tmp_path)
