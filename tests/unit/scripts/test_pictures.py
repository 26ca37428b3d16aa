"""Pictures of records: what stands in docs/pictures is what docs/proof says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripts import pictures

RECORDS = Path(__file__).parents[3] / "docs" / "proof"


def test_every_picture_is_what_its_records_say() -> None:
    assert pictures.main(["--check"]) == 0


def test_another_record_makes_another_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = (RECORDS / "soak.jsonl").read_text().splitlines()
    (tmp_path / "soak.jsonl").write_text("\n".join(records[:-1]))
    monkeypatch.setattr(pictures, "PROOF", tmp_path)
    assert pictures.main(["--check"]) == 1


def dots(svg: str) -> dict[str, int]:
    """How many of each kind, without the one of the legend."""
    return {kind: len(re.findall("h0", path)) - 1 for kind, path in _paths(svg).items()}


def _paths(svg: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind, path in re.findall(r'<path class="(good|more|bad)" d="([^"]+)"', svg):
        found[kind] = found.get(kind, "") + path
    return found


def test_a_lost_message_and_a_broken_promise_are_red() -> None:
    run = {
        "day": "2026-11-29",
        "role": "jvm",
        "guarantee": "exactly_once",
        "ok": True,
        "acked": 5,
        "lost": 0,
        "doubled": 0,
    }
    more: dict[str, Any] = run | {"guarantee": "at_least_once", "doubled": 3}
    svg = pictures.kills([run, run, more, more | {"lost": 1}, run | {"ok": False}])
    assert dots(svg) == {"good": 2, "more": 1, "bad": 2}
    assert "exactly_once: 3 kills, 15 messages, lost 0, doubled 0" in svg
    assert "at_least_once: 2 kills, 10 messages, lost 1, doubled 6" in svg


def test_an_outage_is_no_kill_and_several_kills_of_a_run_count() -> None:
    run = {"day": "d", "guarantee": "exactly_once", "ok": True, "acked": 5, "lost": 0, "doubled": 0}
    outage = run | {"kills": 0, "struck": [{"what": "kafka hangs"}]}
    svg = pictures.kills([outage, run | {"kills": 2, "struck": [{"what": "gateway"}, {"what": "gateway"}]}])
    assert "kafka hangs" not in svg
    assert "exactly_once: 2 kills, 5 messages" in svg


def test_a_test_that_failed_is_shown() -> None:
    svg = pictures.tests([{"day": "2026-11-29", "ok": ok} for ok in (True, True, False)])
    assert "2026-11-29: 2 passed, 1 did not" in svg


def test_of_a_benchmark_the_newest_full_run_is_drawn() -> None:
    def run(quick: bool, figures: dict[str, list[float]]) -> str:
        unit = {"unit": "µs", "day": "2026-11-29", "revision": "abc", "cores": 2}
        return json.dumps({"program": "benchmark ratios", "quick": quick, "figures": figures} | unit)

    lines = [
        run(False, {"Towline": [1.0], "peer": [9.0]}),
        run(False, {"Towline": [4, 3, 8], "peer": [6]}),
        run(True, {"Towline": [99]}),
    ]
    svg = pictures.benchmarks([json.loads(line) for line in lines])
    assert re.findall(r">([\d.]+(?: \(.+\))?)</text>", svg) == ["4.0 (3.0 to 8.0)", "6.0"]
    assert re.findall(r'class="(good|peer)" x="320" y="\d+" width="([\d.]+)"', svg) == [
        ("good", "210.0"),
        ("peer", "315.0"),
    ]
