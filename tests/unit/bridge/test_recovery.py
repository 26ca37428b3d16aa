"""Checkpoint, journal and identity that no longer belong together: each is recognised, and told with two ways out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, changed, read
from towline.bridge.failures import reason
from towline.bridge.identity import Identity, settle
from towline.bridge.model import Line
from towline.bridge.recovery import Evidence, begin_again, examine
from towline.errors import TowlineError

KNOWN = Identity("telemetry", "plant-7.telemetry", query="q1", parallelism=1)
FINE = Evidence("q1", 7, 7, "j1", 700, 700, "j1", 700, 900)


def line(directory: Path, parallelism: int = 1) -> Line:
    text = changed('name = "telemetry"', f'name = "telemetry"\nguarantee = "exactly_once"\nparallelism = {parallelism}')
    return read(text, directory).lines[0]


@pytest.mark.parametrize(
    ("identity", "seen"),
    [
        (KNOWN, FINE),
        (KNOWN, replace(FINE, planned=8, planned_end=800)),
        (KNOWN, replace(FINE, committed=650)),
        (replace(KNOWN, query="", parallelism=0), Evidence(gateway_journal="j1", committed=700, tip=900)),
        (replace(KNOWN, query="", parallelism=0), Evidence("", None, None, "", 0, None, "j2", 5, 5)),
        (KNOWN, Evidence("q1", 0, None, "j1", 5, None, "j1", 3, 9)),
    ],
)
def test_what_belongs_together_goes_on(tmp_path: Path, identity: Identity, seen: Evidence) -> None:
    examine(line(tmp_path), tmp_path / "bridge.toml", identity, seen)


FOUND = [
    (replace(FINE, query="", planned=None), "the checkpoint is gone; it belonged to query q1", "TL-B22"),
    (replace(FINE, query="q9"), "the checkpoint is that of query q9, this line's is q1", "TL-B22"),
    (replace(FINE, gateway_journal="j2"), "belongs to journal j1, the gateway serves journal j2", "TL-B24"),
    (replace(FINE, tip=600, committed=500), "come to offset 700, the journal ends at 600: an older copy", "TL-B24"),
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
    examine(line(tmp_path, 4), tmp_path / "b", KNOWN, FINE)
    with pytest.raises(TowlineError, match=r"batch 8 was begun with parallelism 1, and it is 4 now.*TL-B25"):
        examine(line(tmp_path, 4), tmp_path / "b", KNOWN, replace(FINE, planned=8, planned_end=800))


def test_beginning_again_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    bridge = read(GOOD, tmp_path)
    settle(bridge)
    (one,) = bridge.lines
    (one.checkpoint / "offsets").mkdir(parents=True)
    told = begin_again(one)
    assert told == (
        'line "telemetry" begins again as sink "plant-7.telemetry.2", the old checkpoint is kept as checkpoint.1'
    )
    assert not one.checkpoint.exists()
    assert (one.gateway.state_dir / "checkpoint.1" / "offsets").is_dir()
    assert json.loads((one.gateway.state_dir / "identity.json").read_text())["generation"] == 2
