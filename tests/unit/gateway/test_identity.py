"""What belongs to a state directory: its journal, its outbox and its MQTT sessions [I14]."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import gateway_settings
from tests.unit.gateway.serving import rows
from towline.errors import GatewayError, JournalFailed, TowlineError
from towline.gateway.identity import (
    OUTBOX_FILE,
    Extent,
    JournalPosition,
    abandoned_client_id,
    check_checkpoint,
    check_offset,
    read_client_sessions,
    record_client_session,
    record_session_end,
)
from towline.journal import Journal, Limits
from towline.schema import ROW_SCHEMA
from towline.spark.offsets import SourceOffset

BROKER = "mqtt://b:1883"
SHARE = {"member": "g1", "members": ["g1", "g2"], "way": "filters", "client_id": "plant-l"}


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """100 rows, the first of which are gone."""
    limits = Limits(min_free_bytes=0, segment_bytes=8192)
    with Journal.open(tmp_path / "inbox", schema=ROW_SCHEMA, limits=limits) as journal:
        for start in range(0, 100, 10):
            journal.append(rows(start, 10))
        journal.commit("spark", 60)
        assert 0 < journal.first_offset <= 60
        yield journal


def plan(place: Path, batch: int, *sources: Any) -> None:
    """An entry of the offset log, as Spark writes it."""
    (place / "offsets").mkdir(parents=True, exist_ok=True)
    (place / "metadata").write_text('{"id":"q"}')
    lines = [source if isinstance(source, str) else json.dumps(source) for source in sources]
    (place / "offsets" / str(batch)).write_text("\n".join(["v1", '{"batchWatermarkMs":0}', *lines]))


def at(journal: Journal, offset: int, *, name: str = "plant", of: str = "", incarnation: str | None = None) -> Any:
    known = journal.incarnation if incarnation is None else incarnation
    return SourceOffset((JournalPosition(name, of or journal.journal_id, offset, known),)).to_json()


def verdict(journal: Journal, place: Path | str) -> str:
    try:
        check_checkpoint("plant", journal, str(place))
    except TowlineError as error:
        return error.code if "new checkpoint directory" in error.remedy else str(error)
    return ""


def test_the_newest_batch_of_a_query_lies_in_this_journal(journal: Journal, tmp_path: Path) -> None:
    kafka, elsewhere = {"orders": {"0": 17}}, at(journal, 7, name="elsewhere", of="other")
    cases: list[tuple[list[Any], str]] = [
        ([at(journal, 100)], ""),
        ([at(journal, 70)], ""),
        ([at(journal, 101)], "TL-G06"),
        ([at(journal, 100, incarnation="0badf00d")], "TL-G26"),
        ([at(journal, journal.first_offset, incarnation="0badf00d")], "TL-G26"),
        ([at(journal, journal.first_offset - 1, incarnation="0badf00d")], ""),  # committed, and the reader's business
        ([at(journal, 100, incarnation="")], ""),  # nothing to compare
        ([at(journal, 101, incarnation="")], "TL-G06"),
        ([at(journal, 5, of="other")], "TL-G04"),
        ([at(journal, 100, name="renamed")], ""),
        ([at(journal, 5, name="renamed", of="other")], "TL-G04"),
        ([kafka, "-", at(journal, 100), elsewhere], ""),
        ([kafka, at(journal, 101), elsewhere], "TL-G06"),
        ([at(journal, 7, of="other"), elsewhere], "TL-G04"),
        ([elsewhere, elsewhere], ""),
        ([kafka], ""),
    ]
    for number, (sources, code) in enumerate(cases):
        plan(tmp_path / "ck", number, *sources)
        assert verdict(journal, f"file:{tmp_path}/ck") == code, number
    for nowhere in ("", tmp_path / "nowhere", "s3a://bucket/ck"):
        assert verdict(journal, nowhere) == ""


@pytest.mark.parametrize(
    ("extent", "code"),
    [
        (Extent("j", 0, 5, "aa"), ""),
        (Extent("j", 0, 9, "aa"), ""),
        (Extent("j", 6, 9, ""), ""),  # who wrote the row is not known any more
        (Extent("j", 4, 9, ""), "TL-G35"),
        (Extent("j", 0, 9, "bb"), "TL-G35"),
        (Extent("j", 0, 4, "aa"), "TL-G35"),
        (Extent("k", 0, 9, "aa"), "TL-G36"),
    ],
)
def test_the_outbox_of_a_checkpoint_is_the_newest(tmp_path: Path, extent: Extent, code: str) -> None:
    assert JournalPosition.read_outbox_note(str(tmp_path)) is None
    JournalPosition("", "j", 5, "aa").write_outbox_note(str(tmp_path))
    position = JournalPosition.read_outbox_note(str(tmp_path))
    assert position is not None
    with pytest.raises(GatewayError, match=f"reset.*{code}") if code else contextlib.nullcontext():
        check_offset("g", position, extent, kind="outbox")
    JournalPosition("", "j", 5, "aa").write_outbox_note("hdfs://name/ck")


@pytest.mark.parametrize("text", ["", "[]", '{"journal": "j"}', '{"journal": "j", "offset": "x", "incarnation": ""}'])
def test_files_that_are_none_of_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / OUTBOX_FILE).write_text(text)
    with pytest.raises(GatewayError, match="TL-G37"):
        JournalPosition.read_outbox_note(str(tmp_path))
    (tmp_path / "sessions.json").write_text(text.replace("journal", "clients"))
    assert read_client_sessions(tmp_path) == ()


# -- sessions --


def test_client_ids_are_written_down_once_and_ended_once(tmp_path: Path) -> None:
    record_client_session(tmp_path, "a", BROKER)
    (first,) = read_client_sessions(tmp_path)
    record_client_session(tmp_path, "a", "mqtt://c:1883")
    record_client_session(tmp_path, "b", BROKER)
    a, b = read_client_sessions(tmp_path)
    assert (a.client_id, a.broker, a.since) == ("a", "mqtt://c:1883", first.since)
    assert (b.client_id, b.ended) == ("b", None)
    record_session_end(tmp_path, "a", "discarded")
    ended = read_client_sessions(tmp_path)
    record_session_end(tmp_path, "a", "drained")
    assert read_client_sessions(tmp_path) == ended, "what was discarded was not drained"
    record_client_session(tmp_path, "a", BROKER)
    assert {one.client_id: one.ended for one in read_client_sessions(tmp_path)} == {"a": None, "b": None}


def test_a_session_is_given_up_only_if_it_is_this_lines(tmp_path: Path) -> None:
    own, beside = tmp_path / "members" / "g1", tmp_path / "members" / "g3"
    for directory, client_id in ((own, "old-1"), (beside, "old-3"), (tmp_path, "alone")):
        directory.mkdir(parents=True, exist_ok=True)
        record_client_session(directory, client_id, BROKER)

    def given(client_id: str, share: dict[str, Any] | None = None) -> str:
        made = gateway_settings(state_dir=own, share=share, abandon_session=client_id, client_id="plant-l-g1")
        return abandoned_client_id(made, {"client_id": "known"})

    assert [given(one) for one in ("", "other", "old-3", "plant-l-g1")] == [""] * 4
    assert [given(one) for one in ("known", "old-1")] == ["known", "old-1"]
    assert [given(one, SHARE) for one in ("old-3", "alone", "plant-l-gone")] == ["old-3", "alone", "plant-l-gone"]
    assert [given(one, SHARE) for one in ("plant-l-g2", "plant-lx")] == ["", ""], "in use; another line's"
    record_session_end(own, "old-1", "discarded")
    assert given("old-1") == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_is_no_broken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Of the second the gateway ends [I6], of the first nobody is kept from going on [I7]."""

    def fail(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    broken = pytest.raises(JournalFailed, match=r"sessions\.json.*TL-J04")
    with broken if number == errno.EIO else contextlib.nullcontext():
        record_client_session(tmp_path, "a", BROKER)
    assert read_client_sessions(tmp_path) == ()
