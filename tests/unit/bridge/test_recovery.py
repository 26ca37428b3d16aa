"""Checkpoint, journal and identity that no longer belong together: each is recognised, and told with two ways out."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bridge.noted import journals, planned
from tests.unit.bridge.test_config import GOOD, changed, read
from towline.bridge.config.model import Downlink, Uplink
from towline.bridge.lines import recovery
from towline.bridge.lines.account import LineNotes
from towline.bridge.lines.identity import Identity, assign_identities
from towline.bridge.lines.recovery import (
    ResumeStep,
    ServedJournal,
    check_resume,
    journal_refusal,
    reset_line,
    resume_step,
)
from towline.bridge.runtime.failures import failure_reason
from towline.bridge.uplink.query import initial_offsets
from towline.checkpoint import Checkpoint
from towline.errors import TowlineError, is_permanent
from towline.gateway.identity import INBOX_MISMATCH_CODES, Extent, JournalPosition
from towline.kafka.markerstore import MarkerStore
from towline.spark.sink_note import BatchTotals, SinkNote, Span

KNOWN = Identity("telemetry", "plant-7.telemetry", query="q1", parallelism=1)


@dataclass(frozen=True)
class Seen:
    """What a checkpoint has: its query, its newest batches, and state."""

    query_id: str = ""
    planned_batch: int | None = None
    committed_batch: int | None = None
    stateful: bool = False


FINE = Seen("q1", 7, 7)
DEDUPE = 'dedupe = { key = "{mqtt.user.id}" }\n'
DOWN = '\n[[downlink]]\nname = "c"\nfrom = "commands"\ntopic = "a/{key}"\nstarting_offsets = "latest"\n'


def line(directory: Path, parallelism: int = 1, guarantee: str = "exactly_once", more: str = "") -> Uplink:
    own = f'guarantee = "{guarantee}"\nparallelism = {parallelism}\n{more}'
    return read(changed('name = "telemetry"', f'name = "telemetry"\n{own}'), directory).uplinks[0]


def downlink(directory: Path) -> Downlink:
    return read(GOOD + DOWN, directory).downlinks[0]


def resume(one: Uplink, identity: Identity, checkpoint: Checkpoint, **journals: ServedJournal) -> Identity:
    bridge = read(GOOD, one.gateway.state_dir.parent.parent).model_copy(update={"lines": (one,)})
    return check_resume(bridge, one, identity, checkpoint, journals)


def written(one: Uplink | Downlink, **files: str) -> None:
    """Files of a checkpoint as Spark writes them; ``offsets_7`` is offsets/7."""
    for name, text in files.items():
        file = one.checkpoint / name.replace("_", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def batch(one: Uplink, number: int, end: int, *, done: bool = True, **more: str) -> None:
    """A batch of query q1."""
    place = {"journal": "j1", "offset": end, **more}
    planned(one.checkpoint, number, journals(telemetry=place), done=done, query="q1")


def on_disk(one: Uplink, seen: Seen) -> Checkpoint:
    shutil.rmtree(one.checkpoint, ignore_errors=True)
    for number in {seen.planned_batch, seen.committed_batch} - {None}:
        assert number is not None
        batch(one, number, 700, done=number == seen.committed_batch)
    if seen.query_id:
        written(one, metadata=json.dumps({"id": seen.query_id}))
    if seen.stateful:
        written(one, state_0="")
    return Checkpoint(str(one.checkpoint))


def at(offset: int, **more: str) -> tuple[JournalPosition, ...]:
    """Where a line begins that has the one gateway."""
    return (JournalPosition("telemetry", "j1", offset, **more),)


def journal(tip: int = 900, committed: int = 700, name: str = "j1", first: int = 0, **more: Any) -> ServedJournal:
    """That of the line's gateway; `more` are the `position` and the `committed_position`, offsets in "j1"."""
    opened = more.pop("written_by", "")
    places = {key: JournalPosition("telemetry", "j1", *at) for key, at in more.items()}
    return ServedJournal(Extent(name, first, tip, opened), committed, **places)


WELL = journal(position=(700,), committed_position=(700,))


def begin(one: Uplink, identity: Identity, here: ServedJournal) -> int:
    (place,) = identity.positions or (None,)
    return initial_offsets(one, identity, {"telemetry": here._replace(position=place)})["telemetry"]


def saved(one: Uplink | Downlink) -> Identity:
    identity = Identity.read(one.gateway.state_dir)
    assert identity is not None
    return identity


@pytest.mark.parametrize(
    ("identity", "seen", "here"),
    [
        (KNOWN, FINE, WELL),
        (KNOWN, replace(FINE, planned_batch=8), journal(position=(800,), committed_position=(700,))),
        (replace(KNOWN, query="", parallelism=0), Seen(), journal(5, 5, "j2", position=(7,))),
        (KNOWN, Seen("q1", 0), journal(9, 3, position=(5,))),
        (KNOWN, FINE, journal(position=(700, "a1"), committed_position=(700,), written_by="a1")),
    ],
)
def test_what_belongs_together_goes_on(tmp_path: Path, identity: Identity, seen: Seen, here: ServedJournal) -> None:
    one = line(tmp_path)
    resume(one, identity, on_disk(one, seen), telemetry=here)


FOUND = [
    (Seen(), WELL, "checkpoint is missing, this line's is that of query q1", "TL-B22"),
    (Seen("q9", 7, 7), WELL, "the checkpoint is that of query q9, this line's is that of query q1", "TL-B22"),
    (FINE, journal(name="j2", position=(700,)), "belongs to journal j1, this gateway has journal j2", "TL-B24"),
    (FINE, journal(600, 500, position=(700,)), "at offset 700, the journal ends at 600: an older copy", "TL-B24"),
    (
        FINE,
        journal(position=(700, "a1"), written_by="b2"),
        "below offset 700 was written by opening a1 of the journal when the query saw it, and here by opening b2",
        "TL-B24",
    ),
    (FINE, journal(first=699, position=(700, "a1")), "an older copy that was written to since", "TL-B24"),
    (FINE, WELL._replace(committed_offset=701), "its last batch 7 ends at offset 700, and 701 was", "TL-B23"),
]


@pytest.mark.parametrize(("seen", "here", "what", "code"), FOUND)
def test_what_does_not_is_told_with_two_ways_out(
    tmp_path: Path, seen: Seen, here: ServedJournal, what: str, code: str
) -> None:
    one = line(tmp_path)
    with pytest.raises(TowlineError) as caught:
        resume(one, KNOWN, on_disk(one, seen), telemetry=here)
    message = str(caught.value)
    assert what in message
    assert "Bring " in message
    assert f"towline reset {tmp_path}/bridge.toml telemetry" in message
    assert message.endswith(f"[{code}]")
    assert failure_reason(caught.value, "x").permanent


@pytest.mark.parametrize("code", sorted(INBOX_MISMATCH_CODES))
def test_a_gateway_that_refuses_its_journal_stops_the_line(tmp_path: Path, code: str) -> None:
    one = line(tmp_path)
    error = journal_refusal(one, tmp_path / "b", TowlineError(code, "telemetry", "the journal is older", "Bring."))
    assert error is not None
    assert re.fullmatch(
        rf'line "telemetry": the journal is older; nothing was taken in\. Bring back .*{tmp_path}.*; or reset it .*'
        rf"towline reset {tmp_path}/b telemetry \(what waits .*\)\.   \[TL-B24\]",
        str(error),
    )
    assert is_permanent(error.code)
    assert journal_refusal(one, tmp_path / "b", TowlineError("TL-G02", "x", "late")) is None


def test_a_checkpoint_of_another_spark_is_told_as_such(tmp_path: Path) -> None:
    one = line(tmp_path)
    batch(one, 7, 700)
    entry = one.checkpoint / "offsets" / "7"
    entry.write_text(entry.read_text().replace("v1", "v2"))
    with pytest.raises(TowlineError, match=r"offset log has version v2, and this Towline reads v1.*PySpark.*TL-B53"):
        resume(one, KNOWN, Checkpoint(str(one.checkpoint)))


# -- what a changed setting takes --------------------------------------------------------------------------------------

STATEFUL = replace(FINE, stateful=True)
UNDECIDED = replace(FINE, planned_batch=8)
NEW = replace(FINE, planned_batch=0, committed_batch=None)


@pytest.mark.parametrize(
    ("was", "now", "seen", "how"),
    [
        ({}, {}, FINE, ResumeStep.CONTINUE),  # also where no guarantee is noted: it never ran
        ({}, {"parallelism": 2}, FINE, ResumeStep.NEW_CHECKPOINT),
        ({"parallelism": 0}, {"parallelism": 2}, FINE, ResumeStep.CONTINUE),
        ({}, {"more": DEDUPE}, STATEFUL, ResumeStep.CONTINUE),
        ({}, {"more": DEDUPE}, FINE, ResumeStep.NEW_CHECKPOINT),
        ({}, {}, STATEFUL, ResumeStep.NEW_CHECKPOINT),
        ({}, {"parallelism": 2, "more": DEDUPE}, STATEFUL, ResumeStep.NEW_SINK),
        ({}, {"more": DEDUPE}, NEW, ResumeStep.CONTINUE),
        ({}, {}, replace(NEW, stateful=True), ResumeStep.NEW_CHECKPOINT),
        ({"guarantee": "at_least_once"}, {}, FINE, ResumeStep.NEW_CHECKPOINT),  # no marker of the last batch
        ({"guarantee": "at_most_once"}, {}, UNDECIDED, ResumeStep.NEW_CHECKPOINT),
        ({"guarantee": "exactly_once"}, {"guarantee": "at_least_once"}, UNDECIDED, ResumeStep.CONTINUE),
        ({"guarantee": "at_least_once"}, {"guarantee": "at_most_once"}, FINE, ResumeStep.CONTINUE),
        ({"guarantee": "at_least_once"}, {}, Seen(), ResumeStep.CONTINUE),
    ],
)
def test_what_another_guarantee_takes(
    tmp_path: Path, was: dict[str, Any], now: dict[str, Any], seen: Seen, how: ResumeStep
) -> None:
    """Or parallelism or dedupe; the line is exactly once, with one writer, without dedupe, but for what is said."""
    one = line(tmp_path, **now)
    assert resume_step(one, replace(KNOWN, **was), on_disk(one, seen)) is how


def test_a_batch_that_may_be_in_kafka_is_written_by_no_other_sink(tmp_path: Path) -> None:
    """What it was begun by is not known: its identity is gone, and the file's dedupe is another."""
    one = line(tmp_path, more=DEDUPE)
    identity = Identity("telemetry", "plant-7.telemetry")
    with pytest.raises(TowlineError, match=r"batch 8 was begun, and by other settings.*reset.*TL-C210"):
        resume(one, identity, on_disk(one, UNDECIDED))
    assert one.checkpoint.exists()


def test_a_change_begins_behind_the_last_batch_and_is_taken_back_before_there_was_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gateway's watermark is behind that batch."""
    one = line(tmp_path, 2)
    batch(one, 7, 700)
    written(one, **{"towline.topics": '{"t": "id"}'})
    cut = resume(one, KNOWN, Checkpoint(str(one.checkpoint)))
    assert (cut.sink, cut.generation, cut.positions, cut.topic_ids) == ("plant-7.telemetry.2", 2, at(700), {"t": "id"})
    assert (cut.parallelism, cut.guarantee, one.checkpoint.exists()) == (2, "exactly_once", False)
    assert "a changed setting: the line begins a new checkpoint behind the last batch" in capsys.readouterr().err
    back = resume(line(tmp_path), cut, Checkpoint(str(one.checkpoint)))
    assert back == replace(cut, parallelism=1)
    assert begin(one, back, journal(committed=650)) == 700
    reset_line(one)
    assert (saved(one).positions, saved(one).topic_ids) == (at(700), {"t": "id"}), "nothing was carried since"


def test_a_line_that_has_lost_its_checkpoint_begins_where_the_gateway_says(tmp_path: Path) -> None:
    """Not where it began before that checkpoint: what was carried since came twice."""
    one = line(tmp_path, guarantee="at_most_once")
    replace(KNOWN, generation=2, positions=at(700), guarantee="at_most_once").save(one.gateway.state_dir)
    reset_line(one)
    assert begin(one, saved(one), journal(tip=6000, committed=5000)) == 6000


@pytest.mark.parametrize(("was", "parallelism"), [(KNOWN, 2), (replace(KNOWN, guarantee="at_least_once"), 1)])
def test_another_parallelism_or_guarantee_forgets_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was: Identity, parallelism: int
) -> None:
    one = line(tmp_path, parallelism, more=DEDUPE)
    marked: list[tuple[str, int]] = []
    stateful = on_disk(one, STATEFUL)
    monkeypatch.setattr(MarkerStore, "reset", lambda store, upto: marked.append((store.sink_id, upto)))
    fresh = resume(one, was, stateful)
    sink = "plant-7.telemetry.2"
    assert fresh == replace(KNOWN, sink=sink, generation=2, parallelism=parallelism, guarantee="exactly_once")
    assert (marked, one.checkpoint.exists(), saved(one)) == ([(sink, 7)], True, fresh)
    assert resume(one, fresh, stateful) == fresh


@pytest.mark.parametrize(("was", "start"), [("at_least_once", 700), ("at_most_once", 800)])
def test_a_batch_begun_with_at_most_once_is_given_up_by_its_successor(tmp_path: Path, was: str, start: int) -> None:
    one = line(tmp_path)
    batch(one, 7, 700)
    batch(one, 8, 800, done=False)
    logs = Checkpoint(str(one.checkpoint))
    assert resume(one, replace(KNOWN, guarantee=was), logs).positions == at(start)


def test_a_batch_begun_before_at_most_once_is_given_up_by_a_reset(tmp_path: Path) -> None:
    one = line(tmp_path, guarantee="at_most_once")
    batch(one, 7, 700)
    batch(one, 8, 800, done=False)
    replace(KNOWN, guarantee="exactly_once").save(one.gateway.state_dir)
    reset_line(one)
    assert saved(one).positions == at(800)


# -- where a line begins, and begins again -----------------------------------------------------------------------------


def test_where_a_checkpoint_begins_is_known_before_its_first_batch(tmp_path: Path) -> None:
    """Spark does not report it, and what was left out of that batch is counted from there."""
    part = journal(first=650)
    fresh, least, most = replace(KNOWN, query=""), line(tmp_path), line(tmp_path, guarantee="at_most_once")
    again = replace(fresh, generation=2)
    assert [begin(one, fresh, part) for one in (least, most)] == [700, 700]
    assert [begin(one, again, part) for one in (least, most)] == [700, 900]
    assert [begin(one, replace(again, positions=at(720)), part) for one in (least, most)] == [720, 720]
    assert begin(least, fresh, part._replace(committed_offset=0)) == 650


def test_beginning_again_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    bridge = read(GOOD, tmp_path)
    (one,) = bridge.uplinks
    assert reset_line(one) == 'line "telemetry" needs no reset: it has never run here'
    assign_identities(bridge)
    assert reset_line(one) == 'line "telemetry" is reset, its new sink is "plant-7.telemetry.2"', "as its markers ask"
    KNOWN.save(one.gateway.state_dir)
    batch(one, 0, 100, incarnation="a1")
    assert reset_line(one).endswith('.2"; an old checkpoint is kept beside the new one')
    assert not one.checkpoint.exists()
    assert len([*one.gateway.state_dir.glob("checkpoint.1.*/offsets")]) == 1
    fresh = saved(one)
    assert fresh == Identity("telemetry", "plant-7.telemetry.2", 2, positions=at(100, incarnation="a1"))
    assert begin(one, fresh, journal(300, 90, written_by="a1")) == 100
    assert begin(one, fresh, journal(300, 200, first=150)) == 200
    assert begin(one, fresh, journal(300, 5, "j2")) == 5
    older = journal(300, 90, written_by="b2")
    assert begin(one, fresh, older) == 90, "an older copy that was written to since: what is below 100 is new"


def test_a_downlink_that_finished_no_batch_begins_where_it_began(tmp_path: Path) -> None:
    """With ``latest`` its successor would begin behind what it has not sent."""
    one = downlink(tmp_path)
    planned(one.checkpoint, 0, {"commands": {"0": 200}}, done=False)
    written(one, sources_0_0='\0v1\n{"commands":{"0":100}}')
    Identity("c", "plant-7.c", query="q1").save(one.gateway.state_dir)
    reset_line(one)
    assert saved(one).offsets == {"commands": {"0": 100}}


@pytest.mark.parametrize("killed_at", ["copy_totals", "SinkNote.write", "Path.rename", "Identity.save"])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_beginning_again_goes_on_where_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str, killed_at: str
) -> None:
    """Between the move of the checkpoint and the new identity: offsets, places and totals are those of the old one."""
    one: Uplink | Downlink = line(tmp_path) if direction == "up" else downlink(tmp_path)
    if isinstance(one, Uplink):
        batch(one, 7, 700)
    else:
        planned(one.checkpoint, 7, {"commands": {"0": 200}}, query="q1")
    SinkNote((BatchTotals(7, spans={"j1": Span(0, 700)}),)).write(Checkpoint(str(one.checkpoint)))
    Identity(one.name, f"plant-7.{one.name}", query="q1").save(one.gateway.state_dir)

    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        owner, _, name = killed_at.rpartition(".")
        patched.setattr({"": recovery, "SinkNote": SinkNote, "Path": Path, "Identity": Identity}[owner], name, kill)
        reset_line(one)
    assert saved(one).generation == 1
    reset_line(one)
    fresh = saved(one)
    assert fresh.generation == 2
    assert (fresh.positions, fresh.offsets or {}) == (
        (at(700), {}) if direction == "up" else ((), {"commands": {"0": 200}})
    )
    totals = LineNotes.read(one.checkpoint).totals
    assert totals is not None
    assert [span.end for span in totals.spans.values()] == [700]


def test_checkpoints_that_were_put_aside_do_not_pile_up(tmp_path: Path) -> None:
    one = line(tmp_path)
    (one.checkpoint.parent / "checkpoint.2026-10-01").mkdir(parents=True)
    for generation in range(1, 6):
        batch(one, 7, 700)
        Identity("telemetry", "plant-7.telemetry", query="q1", generation=generation).save(one.gateway.state_dir)
        reset_line(one)
    kept = {re.sub(r"\d{15,}", "TIME", path.name) for path in one.checkpoint.parent.glob("checkpoint*")}
    assert kept == {f"checkpoint.{name}" for name in ("3.TIME", "4.TIME", "5.TIME", "2026-10-01")}
