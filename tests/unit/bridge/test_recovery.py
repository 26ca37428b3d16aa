"""Checkpoint, journal and identity that no longer belong together: each is recognised, and told with two ways out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, changed, read
from towline.bridge.failures import reason
from towline.bridge.identity import Identity, settle
from towline.bridge.model import Line
from towline.bridge.recovery import PERMANENT, Evidence, begin_again, examine, refused, starting
from towline.errors import TowlineError
from towline.gateway.belonging import MISMATCHES

KNOWN = Identity("telemetry", "plant-7.telemetry", query="q1", parallelism=1)
FINE = Evidence("q1", 7, 7, "j1", 700, 700, "j1", 700, 900)


def line(directory: Path, parallelism: int = 1) -> Line:
    text = changed('name = "telemetry"', f'name = "telemetry"\nguarantee = "exactly_once"\nparallelism = {parallelism}')
    return read(text, directory).uplinks[0]


def batch(one: Line, number: int, end: int, **more: str) -> None:
    """A batch that is done, as Spark writes it down."""
    for name in ("offsets", "commits"):
        (one.checkpoint / name).mkdir(parents=True, exist_ok=True)
    place = {"gateways": {"telemetry": {"journal": "j1", "offset": end, **more}}, "tick": 0}
    (one.checkpoint / "offsets" / str(number)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(place)}')
    (one.checkpoint / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')


@pytest.mark.parametrize(
    ("identity", "seen"),
    [
        (KNOWN, FINE),
        (KNOWN, replace(FINE, planned=8, planned_end=800)),
        (KNOWN, replace(FINE, committed=650)),
        (replace(KNOWN, query="", parallelism=0), Evidence(gateway_journal="j1", committed=700, tip=900)),
        (replace(KNOWN, query="", parallelism=0), Evidence("", None, None, "", 0, None, "j2", 5, 5)),
        (KNOWN, Evidence("q1", 0, None, "j1", 5, None, "j1", 3, 9)),
        (KNOWN, replace(FINE, incarnation="a1", found="a1")),
        (KNOWN, replace(FINE, found="a1")),  # a checkpoint from before incarnations
        (KNOWN, replace(FINE, incarnation="a1", found="", first=700)),  # a version from before them removed the row
    ],
)
def test_what_belongs_together_goes_on(tmp_path: Path, identity: Identity, seen: Evidence) -> None:
    examine(line(tmp_path), tmp_path / "bridge.toml", identity, seen)


FOUND = [
    (replace(FINE, query="", planned=None), "the checkpoint is gone; it belonged to query q1", "TL-B22"),
    (replace(FINE, query="q9"), "the checkpoint is that of query q9, this line's is q1", "TL-B22"),
    (replace(FINE, gateway_journal="j2"), "belongs to journal j1, the gateway serves journal j2", "TL-B24"),
    (replace(FINE, tip=600, committed=500), "come to offset 700, the journal ends at 600: an older copy", "TL-B24"),
    (
        replace(FINE, incarnation="a1", found="b2"),
        "the row below offset 700 was written by opening a1 of the journal when the checkpoint took it, and here by b2",
        "TL-B24",
    ),
    (replace(FINE, incarnation="a1", found="", first=699), "by another: an older copy that has gone on", "TL-B24"),
    (replace(FINE, committed=701), "an older copy: its last batch 7 ends at offset 700, and 701 was", "TL-B23"),
]


@pytest.mark.parametrize(("seen", "what", "code"), FOUND)
def test_what_does_not_is_told_with_two_ways_out(tmp_path: Path, seen: Evidence, what: str, code: str) -> None:
    with pytest.raises(TowlineError) as caught:
        examine(line(tmp_path), tmp_path / "bridge.toml", KNOWN, seen)
    told = str(caught.value)
    assert what in told
    assert "Bring " in told
    assert f"towline run {tmp_path}/bridge.toml --begin-again telemetry" in told
    assert told.endswith(f"[{code}]")
    assert reason(caught.value, "x").permanent


def test_another_parallelism_waits_for_the_end_of_a_batch(tmp_path: Path) -> None:
    one = line(tmp_path, 4)
    batch(one, 7, 700)
    fresh = examine(one, tmp_path / "b", KNOWN, FINE)
    assert fresh == Identity("telemetry", "plant-7.telemetry.2", 2, journal="j1", start=700)
    assert not one.checkpoint.exists()
    with pytest.raises(TowlineError, match=r"batch 8 was begun with parallelism 1, and it is 4 now.*TL-B25"):
        examine(line(tmp_path, 4), tmp_path / "b", KNOWN, replace(FINE, planned=8, planned_end=800))


def test_beginning_again_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    bridge = read(GOOD, tmp_path)
    settle(bridge)
    (one,) = bridge.uplinks
    assert begin_again(one) == 'line "telemetry" begins anyway: it has no checkpoint'
    KNOWN.save(one.gateway.state_dir)
    batch(one, 0, 100, incarnation="a1")
    told = begin_again(one)
    assert told == (
        'line "telemetry" begins again as sink "plant-7.telemetry.2"; an old checkpoint is kept beside the new one'
    )
    assert not one.checkpoint.exists()
    assert (one.gateway.state_dir / "checkpoint.1" / "offsets").is_dir()
    fresh = Identity.read(one.gateway.state_dir)
    assert fresh == Identity("telemetry", "plant-7.telemetry.2", 2, journal="j1", start=100, incarnation="a1")
    assert starting(one, fresh, Evidence(gateway_journal="j1", committed=90, tip=300, found="a1")) == "100"
    assert starting(one, fresh, Evidence(gateway_journal="j1", committed=200, tip=300, found="a1")) == "200"
    assert starting(one, fresh, Evidence(gateway_journal="j1", committed=200, tip=300, first=150)) == "200"
    assert starting(one, fresh, Evidence(gateway_journal="j2", committed=5, tip=300)) == "committed"
    older = Evidence(gateway_journal="j1", committed=90, tip=300, found="b2")
    assert starting(one, fresh, older) == "committed", "an older copy that has gone on: what is below 100 is new"
    unknown = Evidence(gateway_journal="j1", committed=90, tip=300, first=100)
    assert starting(one, fresh, unknown) == "100", "a version from before incarnations removed the row"
    assert starting(one, replace(fresh, incarnation=""), older) == "100", "an identity from before incarnations"


def test_checkpoints_that_were_put_aside_do_not_pile_up(tmp_path: Path) -> None:
    one = line(tmp_path)
    (one.checkpoint.parent / "checkpoint.mine").mkdir(parents=True)
    for generation in range(1, 6):
        batch(one, 7, 700)
        (one.checkpoint / "metadata").write_text('{"id":"q1"}')
        Identity("telemetry", "plant-7.telemetry", query="q1", generation=generation).save(one.gateway.state_dir)
        begin_again(one)
    kept = {path.name for path in one.checkpoint.parent.glob("checkpoint*")}
    assert kept == {"checkpoint.3", "checkpoint.4", "checkpoint.5", "checkpoint.mine"}


def test_the_gateway_of_a_line_is_told_its_checkpoint(tmp_path: Path) -> None:
    one = line(tmp_path)
    assert one.gateway.checkpoint == str(one.checkpoint)


@pytest.mark.parametrize("code", sorted(MISMATCHES))
def test_a_gateway_that_refuses_its_journal_stops_the_line(tmp_path: Path, code: str) -> None:
    told = refused(line(tmp_path), tmp_path / "b", TowlineError(code, "telemetry", "the journal is older", "Bring."))
    assert told is not None
    assert re.fullmatch(
        rf'line "telemetry": the journal is older; nothing was taken in\. Bring back .*{tmp_path}.*; or begin again .*'
        rf"towline run {tmp_path}/b --begin-again telemetry \(what waits .*\)\.   \[TL-B24\]",
        str(told),
    )
    assert told.code in PERMANENT
    assert refused(line(tmp_path), tmp_path / "b", TowlineError("TL-G02", "x", "late")) is None
