"""Which client ids had a session at a broker, and which session may be ended because its owner gave it up."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from towline.errors import JournalFailed
from towline.gateway.identity import (
    abandoned_client_id,
    read_client_sessions,
    record_client_session,
    record_session_end,
)
from towline.gateway.settings import GatewaySettings


def settings(state_dir: Path, share: dict[str, Any] | None = None, **more: Any) -> GatewaySettings:
    given: dict[str, Any] = {"name": "g", "state_dir": state_dir, "brokers": "mqtt://b"}
    return GatewaySettings.model_validate(given | {"subscriptions": [{"pattern": "t/#"}], "share": share} | more)


def member(name: str) -> dict[str, Any]:
    return {"member": name, "members": ["g1", "g2"], "way": "filters", "client_id": "plant-l"}


def test_client_ids_are_written_down_once_and_ended_once(tmp_path: Path) -> None:
    assert read_client_sessions(tmp_path) == ()
    record_client_session(tmp_path, "a", "mqtt://b:1883")
    (first,) = read_client_sessions(tmp_path)
    record_client_session(tmp_path, "a", "mqtt://c:1883")
    record_client_session(tmp_path, "b", "mqtt://b:1883")
    a, b = read_client_sessions(tmp_path)
    assert (a.client_id, a.broker, a.since) == ("a", "mqtt://c:1883", first.since)
    assert (b.client_id, b.ended) == ("b", None)
    record_session_end(tmp_path, "a", "discarded")
    ended = read_client_sessions(tmp_path)
    record_session_end(tmp_path, "a", "drained")
    assert read_client_sessions(tmp_path) == ended, "what was discarded was not drained"
    record_client_session(tmp_path, "a", "mqtt://b:1883")
    assert {one.client_id: one.ended for one in read_client_sessions(tmp_path)} == {"a": None, "b": None}, (
        "in use once more"
    )


def test_a_session_is_given_up_only_if_it_is_this_lines(tmp_path: Path) -> None:
    own, beside = tmp_path / "members" / "g1", tmp_path / "members" / "g3"
    for directory, client_id in ((own, "old-1"), (beside, "old-3"), (tmp_path, "alone")):
        directory.mkdir(parents=True, exist_ok=True)
        record_client_session(directory, client_id, "mqtt://b:1883")

    def given(client_id: str, share: dict[str, Any] | None = None) -> str:
        return abandoned_client_id(
            settings(own, share, abandon_session=client_id, client_id="plant-l-g1"), {"client_id": "known"}
        )

    assert [given(one) for one in ("", "other", "old-3", "plant-l-g1")] == [""] * 4
    assert [given(one) for one in ("known", "old-1")] == ["known", "old-1"]
    mine = member("g1")
    assert [given(one, mine) for one in ("old-3", "alone", "plant-l-gone")] == ["old-3", "alone", "plant-l-gone"]
    assert [given(one, mine) for one in ("plant-l-g2", "plant-lx")] == ["", ""], "in use; another line's"
    record_session_end(own, "old-1", "discarded")
    assert given("old-1") == ""


@pytest.mark.parametrize(
    "more",
    [
        {"subscriptions": [{"pattern": "$share/g/t"}], "share": member("g1")},
        {"subscriptions": [{"pattern": "t"}], "share": member("g1") | {"way": "subscription"}},
        {"outbox": {}, "share": member("g1")},
    ],
)
def test_a_share_that_says_two_things_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="share"):
        settings(tmp_path, **more)


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (errno.ENOSPC, contextlib.nullcontext()),
        (errno.EIO, pytest.raises(JournalFailed, match=r"sessions\.json.*TL-J04")),
    ],
)
def test_a_full_disk_is_no_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: contextlib.AbstractContextManager[object]
) -> None:
    """Of the second the gateway ends [I6], of the first nobody is kept from going on [I7]."""

    def fail(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with outcome:
        record_client_session(tmp_path, "a", "mqtt://b:1883")
    assert read_client_sessions(tmp_path) == ()


@pytest.mark.parametrize("text", ["", "[]", '{"clients": [1]}', '{"clients": [{}]}', "\xff"])
def test_a_file_that_is_none_of_ours_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "sessions.json").write_text(text, encoding="latin-1")
    assert read_client_sessions(tmp_path) == ()
