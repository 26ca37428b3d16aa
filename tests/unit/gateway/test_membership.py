"""What a journal remembers of its gateway's part: a share stays while messages wait, and who is drained stays away."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from towline.errors import ConfigError, GatewayError, JournalFailed
from towline.gateway.clients import ClientSession, abandoned, end_client, note_client, read_clients
from towline.gateway.draining import Drain, DrainFacts, DrainStep, Stillness, step_of
from towline.gateway.membership import DRAIN_NOTE, SHARE_NOTE, Start, enter, since_of
from towline.gateway.settings import GatewaySettings
from towline.gateway.sharing import ShareSettings
from towline.journal import Journal
from towline.schema import ROW_SCHEMA


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "inbox", schema=ROW_SCHEMA) as opened:
        yield opened


def settings(place: Path, share: dict[str, Any] | None = None, **more: Any) -> GatewaySettings:
    given: dict[str, Any] = {"name": "g", "state_dir": place, "brokers": "mqtt://b"}
    given |= {"subscriptions": [{"filter": "t/#"}], "share": share}
    return GatewaySettings.model_validate(given | more)


def hashed(member: str = "g1", members: tuple[str, ...] = ("g1", "g2"), key: str = "{device}") -> dict[str, Any]:
    return {"line": "l", "member": member, "members": members, "way": "hash", "key": key, "keys": [["t/+", 1]]}


# The share ------------------------------------------------------------------------------------------------------------


def test_a_share_is_written_down_and_holds(journal: Journal, tmp_path: Path) -> None:
    assert enter(settings(tmp_path, hashed()), journal).share == ShareSettings.model_validate(hashed())
    enter(settings(tmp_path, hashed()), journal)
    for other in (
        hashed(members=("g1", "g2", "g3")),
        hashed(members=("g1", "gX")),
        hashed(key=""),
        {"line": "l", "member": "g1", "members": ["g1"], "way": "filters"},
        None,
    ):
        with pytest.raises(ConfigError, match="TL-G56"):
            enter(settings(tmp_path, other), journal)
    assert journal.notes[SHARE_NOTE]["members"] == ["g1", "g2"]


def test_a_drain_goes_by_the_share_that_was(journal: Journal, tmp_path: Path) -> None:
    """The file may be changed already: what waits at the broker was shared as before."""
    enter(settings(tmp_path, hashed()), journal)
    three = settings(tmp_path, hashed(members=("g1", "g2", "g3")))
    share = enter(three, journal, Start.DRAIN).share
    assert share is not None
    assert share.members == ("g1", "g2")
    assert enter(three, journal).share == share, "it goes on with its drain"
    Drain(journal).done()
    assert SHARE_NOTE not in journal.notes
    share = enter(three, journal, Start.JOIN).share
    assert share is not None
    assert share.members == ("g1", "g2", "g3")


def test_members_beside_share_alike_or_are_drained(journal: Journal, tmp_path: Path) -> None:
    beside = tmp_path.parent / f"{tmp_path.name}-beside"
    beside.mkdir()
    two = ShareSettings.model_validate(hashed("g2"))
    note_client(beside, ClientSession("c-g2", share=two.promise))
    enter(settings(tmp_path, hashed()), journal)
    with Journal.open(tmp_path / "other", schema=ROW_SCHEMA) as fresh:
        third = settings(tmp_path, hashed("g3", ("g1", "g2", "g3")))
        with pytest.raises(
            ConfigError, match=r"-beside\" beside it is one of 2 members \(g1, g2\) by hash of {device}"
        ):
            enter(third, fresh)
        end_client(beside, "c-g2", "drained")
        enter(third, fresh)


def test_filters_of_a_member_may_change(journal: Journal, tmp_path: Path) -> None:
    """What each takes is the user's to say; a further member, too."""
    share: dict[str, Any] = {"line": "l", "member": "g1", "members": ["g1", "g2"], "way": "filters"}
    enter(settings(tmp_path, share), journal)
    enter(settings(tmp_path, share | {"members": ["g1", "g2", "g3"]}), journal)


@pytest.mark.parametrize(
    "more",
    [
        {"subscriptions": [{"filter": "$share/g/t"}], "share": hashed()},
        {"subscriptions": [{"filter": "t"}], "share": hashed() | {"way": "subscription"}},
        {"outbox": {}, "share": hashed()},
        {"share": hashed("g3")},
        {"share": hashed(members=("g2", "g1"))},
    ],
)
def test_a_share_that_says_two_things_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"share|members are names"):
        settings(tmp_path, **more)


# A drain --------------------------------------------------------------------------------------------------------------


def test_a_drained_gateway_starts_only_to_take_part_again(journal: Journal, tmp_path: Path) -> None:
    given = settings(tmp_path)
    note_client(tmp_path, ClientSession("g", ("mqtt://b:1883",), 1.0))
    enter(given, journal, Start.DRAIN)
    began = since_of(journal)
    assert began is not None
    enter(given, journal, Start.DRAIN)
    assert since_of(journal) == began
    Drain(journal).done()
    assert journal.session == {}
    for start in (Start.GO_ON, Start.DRAIN):
        with pytest.raises(GatewayError, match="TL-G55"):
            enter(given, journal, start)
    assert [one.how for one in read_clients(tmp_path)] == ["drained"], "though a kill came before it was written there"
    enter(given, journal, Start.JOIN)
    assert DRAIN_NOTE not in journal.notes
    enter(given, journal)


def test_what_has_an_outbox_or_several_sessions_is_not_drained(journal: Journal, tmp_path: Path) -> None:
    cases: tuple[dict[str, Any], ...] = ({"outbox": {}}, {"brokers": "mqtt://a,mqtt://b"})
    for more in cases:
        with pytest.raises(ConfigError, match="TL-G57"):
            enter(settings(tmp_path, **more), journal, Start.DRAIN)
    enter(settings(tmp_path, brokers="mqtt://a,mqtt://b", brokers_share_sessions=True), journal, Start.DRAIN)


FACTS = DrainFacts(
    online=True, subscribed=False, open=0, handshakes=0, received=5, connection=1, probed=True, uncommitted=0
)


@pytest.mark.parametrize(
    ("changed", "still", "step"),
    [
        ({"subscribed": True}, True, DrainStep.LEAVING),
        ({}, False, DrainStep.TAKING),
        ({"uncommitted": 1}, True, DrainStep.COMMITTING),
        ({"owing": True}, True, DrainStep.COMMITTING),
        ({"unheard": True, "uncommitted": 1}, True, DrainStep.COMMITTING),
        ({"unheard": True}, True, DrainStep.TELLING),
        ({}, True, DrainStep.ENDING),
    ],
)
def test_the_steps(changed: dict[str, Any], still: bool, step: DrainStep) -> None:
    facts = DrainFacts(**{name: getattr(FACTS, name) for name in DrainFacts.__slots__} | changed)
    assert step_of(facts, still=still) is step


def test_a_broker_is_still_when_it_answered_and_nothing_came_for_a_moment() -> None:
    still, asked = Stillness(1.0, 10.0), list[int]()

    def look(now: float, **changed: Any) -> bool:
        facts = DrainFacts(**{name: getattr(FACTS, name) for name in DrainFacts.__slots__} | changed)
        return still.look(facts, now, lambda: asked.append(1))

    assert not look(0.0, open=1)
    assert not asked, "not while something is open"
    assert not look(1.0)
    assert len(asked) == 1
    assert not look(3.0, probed=False), "no answer yet"
    assert look(3.0)
    assert not look(3.5, received=6), "something came: asked anew"
    assert not look(4.0, received=6)
    assert look(4.5, received=6)
    assert not look(5.0, received=6, connection=2), "another connection, which may bring more"
    assert not look(5.5, received=6, connection=2, online=False)
    assert not look(9.0, received=6, connection=2), "asked anew"
    assert len(asked) == 4
    assert not look(10.0, received=6, connection=2, handshakes=3)
    assert not look(19.0, received=6, connection=2, handshakes=3), "a PUBREL may be on its way"
    assert look(20.0, received=6, connection=2, handshakes=3), "a broker that was killed may have forgotten it"
    assert not look(21.0, received=6, connection=2, handshakes=2), "one came"
    assert still.due() == 31.0


# Client ids -----------------------------------------------------------------------------------------------------------


def test_client_ids_are_written_down_once_and_ended_once(tmp_path: Path) -> None:
    assert read_clients(tmp_path) == ()
    note_client(tmp_path, ClientSession("a", ("mqtt://b:1883",), 1.0))
    note_client(tmp_path, ClientSession("a", ("mqtt://c:1883",), 2.0))
    note_client(tmp_path, ClientSession("b", (), 3.0))
    assert [(one.client_id, one.brokers, one.since) for one in read_clients(tmp_path)] == [
        ("a", ("mqtt://c:1883",), 1.0),
        ("b", (), 3.0),
    ]
    assert abandoned(tmp_path, "a")
    end_client(tmp_path, "a", "discarded")
    ended = read_clients(tmp_path)
    end_client(tmp_path, "a", "drained")
    assert read_clients(tmp_path) == ended, "what was discarded was not drained"
    assert not abandoned(tmp_path, "a")
    note_client(tmp_path, ClientSession("a", (), 4.0))
    assert abandoned(tmp_path, "a"), "it is in use once more"


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, OSError), (errno.EIO, JournalFailed)])
def test_a_full_disk_is_no_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    """Of the second the gateway ends [I6], of the first nobody is kept from going on [I7]."""

    def fail(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(kind):
        note_client(tmp_path, ClientSession("a"))
    assert read_clients(tmp_path) == ()


@pytest.mark.parametrize("text", ["", "[]", '{"clients": [1]}', '{"clients": [{}]}', "\xff"])
def test_a_file_that_is_none_of_ours_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "sessions.json").write_text(text, encoding="latin-1")
    assert read_clients(tmp_path) == ()
