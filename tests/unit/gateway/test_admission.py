"""A call over a network comes in with a token or a ticket, judged by its headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from towline.errors import ConfigError, GatewayError
from towline.gateway.access import ClientAccess, TicketKey, TokenFile
from towline.gateway.front import CallAuthenticator

OLD, NEW = "an-old-token-of-16", "a-new-token-of-16+"


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def gatekeeper(path: Path) -> CallAuthenticator:
    return CallAuthenticator("plant", TokenFile(path), TicketKey("plant", bytes(32)))


def test_each_line_is_a_token_so_that_one_can_be_replaced_without_a_stop(tmp_path: Path) -> None:
    path = written(tmp_path / "t", f"{OLD}\n")
    allowed = TokenFile(path)
    assert allowed.accepts(OLD)
    assert not allowed.accepts(NEW)
    written(path, f"# since May\n{NEW}\n\n{OLD}\r\n")
    assert allowed.accepts(NEW)
    assert allowed.accepts(OLD)
    written(path, f"{NEW}\n")
    assert not allowed.accepts(OLD)


def test_a_client_shows_the_first_line_as_it_is_now(tmp_path: Path) -> None:
    path = written(tmp_path / "t", f"{NEW}\n{OLD}\n")
    access = ClientAccess(token_file=str(path))
    assert access.token() == NEW
    written(path, f"{OLD}\n")
    assert access.token() == OLD


@pytest.mark.parametrize(
    "text", ["", "\n# none\n", "short", "a token with spaces", "ümlaut-of-16-signs", f"{OLD}\nx\n"]
)
def test_a_file_that_holds_something_else(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "t", text)
    with pytest.raises(ConfigError, match="TL-C98") as refused:
        TokenFile(path)
    assert not text.strip() or text not in str(refused.value)
    with pytest.raises(GatewayError, match="TL-G46"):
        ClientAccess(token_file=str(path)).token()


def test_a_file_that_others_may_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chmod 600.*TL-C98"):
        TokenFile(written(tmp_path / "t", OLD, 0o604))


def test_a_file_that_went_lets_nobody_in_and_one_that_came_back_does(tmp_path: Path) -> None:
    path = written(tmp_path / "t", OLD)
    allowed = TokenFile(path)
    path.unlink()
    assert not allowed.accepts(OLD)
    written(path, OLD)
    assert allowed.accepts(OLD)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": []},
        {"authorization": [OLD]},
        {"authorization": [f"Basic {OLD}"]},
        {"authorization": [f"bearer {OLD}"]},
        {"authorization": [f"Bearer  {OLD}"]},
        {"authorization": [f"Bearer {OLD[:-1]}"]},
        {"authorization": [f"Bearer {OLD}", f"Bearer {OLD}"]},
        {"authorization": [f"Bearer {OLD}".encode()]},
        {"authorization": ["Bearer " + "x" * 100_000]},
        {"authorization": ["Bearer "]},
        {"authorization": [f"Ticket {OLD}"]},
        {"authorization": ["Bearer \udcff"]},
    ],
)
def test_everybody_else_stays_outside(tmp_path: Path, headers: dict[str, Any]) -> None:
    door = gatekeeper(written(tmp_path / "t", OLD))
    assert door.authenticate({"authorization": [f"Bearer {OLD}"]}) is None
    with pytest.raises(GatewayError, match=r"TL-G4[01]") as refused:
        door.authenticate(headers)
    assert OLD not in str(refused.value)


def test_refused_calls_are_told_once_a_minute_with_their_number(tmp_path: Path) -> None:
    door, now = gatekeeper(written(tmp_path / "t", OLD)), 0.0
    with capture_logs() as said:
        for count in range(1001):
            door.refused_calls = count
            door.log_refused_calls(now)
            now += 0.01
        for _ in range(2):
            door.log_refused_calls(now + 60)
    assert [(line["event"], line["log_level"], line["count"], line["total"]) for line in said] == [
        ("calls refused", "warning", 1, 1),
        ("calls refused", "warning", 999, 1000),
    ]
