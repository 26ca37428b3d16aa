"""A line over several gateways: its file, its account, where its query begins, and what is told of one that is away."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bridge.noted import journals, planned, up
from tests.unit.bridge.test_config import changed, read, told
from tests.unit.gateway.serving import Served, served
from towline.bridge.config.model import Uplink
from towline.bridge.lines import statuses
from towline.bridge.lines.account import LineNotes, uplink_account
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.recovery import check_resume, reset_line
from towline.bridge.lines.statuses import combine_statuses, outage_problem
from towline.bridge.runtime.child_supervisors import GatewaySupervisor
from towline.bridge.runtime.state import BridgeState
from towline.bridge.uplink.query import UplinkQuery, initial_offsets, query_journals
from towline.checkpoint import Checkpoint
from towline.cli.gateway import gateway as run_gateway
from towline.errors import ConfigError, GatewayError, GatewayUnreachable, TowlineError
from towline.gateway.access import ClientAccess
from towline.gateway.identity import JournalPosition
from towline.guarantee import Guarantee
from towline.spark.sink_note import BatchMessages, BatchResult, BatchTotals, SinkNote, Span

SEVERAL = changed('name = "telemetry"', 'name = "telemetry"\ngateways = ["g1", "g2"]').replace(
    '[mqtt]\nbrokers = ["mqtt://a:1883"]\n', ""
)


def test_such_a_line_has_no_gateway_to_run(tmp_path: Path) -> None:
    for places, code in (('["g1", "g1"]', "TL-C05"), ('["g1"]\nack_after = "journal"', "TL-C111")):
        assert any(code in text for text in told(SEVERAL.replace('["g1", "g2"]', places), tmp_path))
    assert any("TL-C112" in text for text in told(SEVERAL.replace('["g1", "g2"]', '["grpc+tls://x:1"]'), tmp_path))
    (line,) = read(SEVERAL, tmp_path).uplinks
    assert line.gateways == (str(tmp_path / "g1"), str(tmp_path / "g2"))
    with pytest.raises(ConfigError, match=r'line "telemetry": it reads remote gateways.*TL-C113'):
        run_gateway(tmp_path / "bridge.toml", None)


# -- the account -----------------------------------------------------------------------------------------------------


def status(**parts: tuple[int, int, int]) -> dict[str, Any]:
    """Received, end and committed of each gateway, whose journal is named after it."""
    names = ("received", "end", "committed")
    gateways = {
        name: {"journal": f"j{name[1:]}", "state": "online", **dict(zip(names, numbers, strict=True))}
        for name, numbers in parts.items()
    }
    return {"received": 0, "gateways": gateways}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["batch", "batch", "again", "forgotten", "join", "leave", "come back"]),
        st.lists(st.integers(0, 3), min_size=3, max_size=3),
    ),
    max_size=15,
)


@given(STEPS)
def test_gateways_come_and_go_and_the_sum_holds(steps: list[tuple[str, list[int]]]) -> None:
    """A third of what comes is filtered; a batch may run again, and what was noted of it be lost."""
    note, ends, there, number = SinkNote(), {"j0": 0}, ["j0"], 0
    gone = list[str]()
    places: list[tuple[JournalPosition, ...]] = [()]
    note = note.with_totals(BatchTotals(-1, spans={"j0": Span(0, 0)}))
    for index, (step, sizes) in enumerate(steps):
        if step == "join" and len(there) < len(sizes):
            there.append(f"j{index + 1}")
        elif step == "leave" and len(there) > 1:
            gone.append(there.pop(0))
        elif step == "come back" and gone and len(there) < len(sizes):
            there.append(gone.pop())
        elif step in ("batch", "again", "forgotten"):
            joined = [name for name in there if all(place.journal != name for place in places[-1])] if number else []
            rows = {name: 0 if name in joined else size for name, size in zip(there, sizes, strict=False)}
            ends |= {name: ends.get(name, 0) + rows[name] for name in there}
            places.append(tuple(JournalPosition(name, name, ends[name]) for name in there))
            for _ in range(1 + (step == "again")):
                after = noted(note, number, places[-2], places[-1])
                note = note if step == "forgotten" else after
            number += 1
        told = {f"g{name[1:]}": (ends.get(name, 0),) * 3 for name in {*there, *ends}}
        account = uplink_account(LineNotes(note.totals[-1]), status(**told))
        assert account.adds_up, account.sentence()
        whole = sum(account.counts.values()) - account.received
        assert whole == account.received == sum(ends.values())


def noted(
    note: SinkNote, number: int, start: tuple[JournalPosition, ...], end: tuple[JournalPosition, ...]
) -> SinkNote:
    """As `LineWriter` counts a batch."""
    messages = BatchMessages.from_positions(note.totals_before(number), start, end)
    assert messages.row_count is not None
    sent = messages.row_count - messages.row_count // 3
    counts = Counter(unwitnessed=messages.uncounted_rows, filtered=messages.row_count // 3)
    counts.update(given=sent, acknowledged=sent)
    return note.with_batch(number, BatchResult(counts, spans=messages.spans))


def test_one_that_is_away_keeps_its_last_word_and_one_that_refuses_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the words of the bridge file: nobody gave an option of Spark's."""
    away = GatewayUnreachable("TL-G01", "/g2", "no gateway answers", "Start it.")
    one = {"name": "g1", "journal": "j1", "received": 12, "end": 12, "committed": 12, "state": "online", "oldest": 9.0}
    other = {"name": "g2", "journal": "j2", "received": 9, "end": 9, "committed": 4, "state": "online", "oldest": 3.5}
    monkeypatch.setattr(time, "time", iter([100.0, 200.0, 300.0]).__next__)
    before = combine_statuses({"/g1": one, "/g2": other}, {})
    assert (before["state"], before["received"], before["oldest"]) == ("online", 21, 3.5)
    now = combine_statuses({"/g1": one, "/g2": away}, before)
    later = combine_statuses({"/g1": one, "/g2": away}, now)
    assert later["gateways"]["g2"]["away_since"] == 100.0
    account = uplink_account(up({"j1": (0, 12), "j2": (0, 4)}), later)
    assert account.sum_text() == "received 21 = in Kafka 16 + waiting 5"
    (text,) = account.away
    assert text.startswith("gateway g2 unavailable since ")
    assert "away" not in combine_statuses({"/g1": one, "/g2": other}, later)["gateways"]["g2"]
    refused = GatewayError("TL-G40", "g2", "the token is missing", "gatewayTokenFile has to hold a line of it.")
    said = combine_statuses({"/g2": refused}, {})
    assert uplink_account(LineNotes(), said).away[0].startswith("gateway /g2 refuses access since ")
    assert outage_problem("/g2", said["gateways"]["/g2"]).endswith(
        "its messages wait there: the token is missing. token_file of [gateway] has to hold a line of it.   [TL-G40]"
    )
    assert combine_statuses({"/g2": away}, said)["gateways"]["/g2"]["code"] == "TL-G54"
    assert combine_statuses({"/g2": away}, said)["state"] == "away"


def test_the_outage_of_all_is_told_once_however_long_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = read(SEVERAL, tmp_path)
    state, clock = BridgeState("plant-7", tmp_path, {"telemetry": "up"}), iter(range(0, 10_000, 600))
    child = GatewaySupervisor(bridge.uplinks[0], bridge, state, threading.Event())
    one = {"name": "g1", "journal": "j1", "state": "online", "received": 1, "end": 1}
    away = GatewayUnreachable("TL-G01", "/g1", "no gateway answers", "Start it.")
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    for answer in (one, away, away, away):
        monkeypatch.setattr(statuses, "ask_each", lambda *_, answer=answer: {"/g1": answer})
        child.poll()
    told = [text for text in state.take_events() if "unavailable since" in text]
    assert len(told) == 1
    assert state.lines["telemetry"].is_silent


# -- where the query begins ------------------------------------------------------------------------------------------

KNOWN = Identity("telemetry", "plant-7.telemetry", query="q1", parallelism=1)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    with served(tmp_path / "g1", name="g1") as one, served(tmp_path / "g2", name="g2") as other:
        for each in (one, other):
            each.add(10)
            each.journal.commit("bridge", 5)
        yield one, other


def line_of(directory: Path) -> Uplink:
    once = 'name = "telemetry"\nguarantee = "exactly_once"\n'
    return read(SEVERAL.replace('name = "telemetry"', once), directory).uplinks[0]


def write(line: Uplink, number: int, *, done: bool = True, **places: tuple[Served, int]) -> None:
    """A batch as Spark writes it down."""
    ends = {}
    for name, (one, end) in places.items():
        written_by = one.journal.incarnation_of(end)
        ends[name] = {"journal": one.journal.journal_id, "offset": end, "incarnation": written_by}
    planned(line.checkpoint, number, journals(**ends), done=done, query="q1")


def begin(line: Uplink, identity: Identity) -> dict[str, int]:
    return dict(initial_offsets(line, identity, query_journals(line, ClientAccess(), identity)))


def resumed(line: Uplink) -> Identity:
    journals = query_journals(line, ClientAccess(), KNOWN)
    bridge = read(SEVERAL, line.gateway.state_dir.parent.parent)
    return check_resume(bridge, line, KNOWN, Checkpoint(str(line.checkpoint)), journals)


def test_each_gateway_is_held_against_the_checkpoint(tmp_path: Path, two: tuple[Served, Served]) -> None:
    line, (one, other) = line_of(tmp_path), two
    assert begin(line, Identity("telemetry", "plant-7.telemetry")) == {"g1": 5, "g2": 5}
    write(line, 3, g1=(one, 7), g2=(other, 5))
    found = {
        name: (journal.position and journal.position.offset, journal.committed_offset, journal.extent.end_offset)
        for name, journal in query_journals(line, ClientAccess(), KNOWN).items()
    }
    assert found == {"g1": (7, 5, 10), "g2": (5, 5, 10)}
    assert resumed(line).query == "q1"
    other.journal.commit("bridge", 9)
    with pytest.raises(TowlineError, match=r"gateway g2: the checkpoint is an older copy.*TL-B23"):
        resumed(line)
    entry = line.checkpoint / "offsets" / "3"
    entry.write_text(entry.read_text().replace(other.journal.journal_id, "0ther"))
    with pytest.raises(TowlineError, match=r"gateway g2: the query's checkpoint belongs to journal 0ther.*TL-B24"):
        resumed(line)


def test_a_line_begins_again_behind_what_is_done_at_each_and_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At committed it would begin too early at one that is away: only the checkpoint knew how far it had come."""
    monkeypatch.setattr(statuses, "_ANSWER_TIMEOUT_S", 0.2)
    line = line_of(tmp_path)
    KNOWN.save(line.gateway.state_dir)
    with served(tmp_path / "g1", name="g1") as one:
        with served(tmp_path / "g2", name="g2") as other:
            for each in (one, other):
                each.add(10)
            write(line, 3, g1=(one, 7), g2=(other, 6))
            write(line, 4, done=False, g1=(one, 9), g2=(other, 6))
        assert list(query_journals(line, ClientAccess(), KNOWN)) == ["g1"], "it goes on without one that is away"
        reset_line(line)
        identity = Identity.read(line.gateway.state_dir)
        assert identity is not None
        with pytest.raises(GatewayUnreachable, match="TL-G01"):
            begin(line, identity)
        with served(tmp_path / "g2", name="g2"):
            assert (identity.sink, begin(line, identity)) == ("plant-7.telemetry.2", {"g1": 7, "g2": 6})


def test_what_at_most_once_gives_up_at_a_changed_setting_is_counted(tmp_path: Path, two: tuple[Served, Served]) -> None:
    """The batch that was begun is dropped with its checkpoint: it is no loss without a reason."""
    bridge = read(SEVERAL, tmp_path)
    line, (one, other) = bridge.uplinks[0].model_copy(update={"guarantee": Guarantee.AT_MOST_ONCE}), two
    replace(KNOWN, guarantee="at_most_once").save(line.gateway.state_dir)
    write(line, 3, g1=(one, 7), g2=(other, 5))
    write(line, 4, done=False, g1=(one, 9), g2=(other, 6))
    (line.checkpoint / "state" / "0").mkdir(parents=True)  # of a dedupe that the file has no more
    spans = {each.journal.journal_id: Span(0, end) for each, end in ((one, 7), (other, 5))}
    SinkNote((BatchTotals(3, {"given": 12, "acknowledged": 12}, spans),)).write(Checkpoint(str(line.checkpoint)))
    UplinkQuery(bridge, line)._prepare_writer(MagicMock())
    notes = LineNotes.read(line.checkpoint)
    assert notes.totals is not None
    assert [span.end for span in notes.totals.spans.values()] == [9, 6]
    assert notes.counts["skipped"] == 3
