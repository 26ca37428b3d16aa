"""What a scenario asks for, and what becomes of its runs, without brokers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from towline.errors import ConfigError
from towline_prove.processes import MemorySample, Peaks, Role
from towline_prove.referee import RunAccount, RunVerdict
from towline_prove.scenario import RECEIPT_FAULTS, Fault, Run, Scenario, prove

DONE = Fault(Role.JVM, 0.5, at=11, back_s=0.5)
KEPT = RunVerdict(attempted=20, acked=20, delivered=20, copies=20)
SCENARIO = Scenario(messages=20, seed=4)


def run(**changes: Any) -> Run:
    made = Run(SCENARIO, 2, [DONE], RunAccount(KEPT, notes=["killed"]), Peaks(rss=300_000_000), seconds=9.0)
    return replace(made, **changes)


def test_a_good_run_is_one_line() -> None:
    assert run().ok
    assert run().summary_text().startswith("ok    2   killed jvm (kill -9) at 11, running again after 0.5 s   sent 20")
    assert "\n" not in run().summary_text()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"faults": [Fault(Role.JVM)]}, "killed jvm (kill -9): never, NEVER RECOVERED"),
        ({"faults": [Fault("kafka hangs", at=5)]}, "kafka hangs at 5, NEVER RECOVERED"),
        ({"account": RunAccount(replace(KEPT, delivered=19, copies=19, lost=1))}, "at_least_once was not kept"),
        ({"account": RunAccount(replace(KEPT, acked=19))}, "19 of 20 messages were acknowledged"),
        ({"account": None}, "it has not ended"),
        ({"peaks": Peaks(rss=400_000_001)}, "the gateway took 400 MB"),
        ({"broker_dropped": 3}, "the broker itself dropped 3 messages"),
        ({"scenario": replace(SCENARIO, batches=7), "batches": 6}, "6 batches, not 7"),
        ({"scenario": replace(SCENARIO, memory_samples=3)}, "0 memory samples, not 3"),
        ({"peaks": Peaks()}, "the gateway's memory was never measured"),
        ({"account": RunAccount(RunVerdict())}, "nothing arrived"),
        (
            {
                "scenario": replace(SCENARIO, guarantee="at_most_once"),
                "account": RunAccount(RunVerdict(), "at_most_once"),
            },
            "0 of 20 messages were sent",
        ),
        (
            {"memory_samples": [MemorySample(1, {}, 10.0, 1, 1), MemorySample(2, {}, 31.0, 1, 1)]},
            "the JVM's heap grew from 10 to 31 MB",
        ),
    ],
)
def test_a_fault_that_was_not_done_a_loss_and_growth_make_a_bad_run(changes: dict[str, Any], problem: str) -> None:
    bad = run(**changes)
    assert problem in bad.problems()
    assert not bad.ok
    assert bad.summary_text().startswith("BAD")
    assert problem in bad.summary_text()


def test_the_record_has_what_was_asked_for_and_what_was_found() -> None:
    record = run(faults=[Fault("kafka hangs", at=1, back_s=60.0, backlog=40_000)]).record()
    assert (record["program"], record["ok"], record["run"], record["seed"]) == ("soak", True, 2, 4)
    assert record["struck"] == [{"what": "kafka hangs", "at": 1, "mended_at": -1, "back_s": 60.0, "backlog": 40_000}]
    assert (record["messages"], record["attempted"], record["lost"], record["longest_s"]) == (20, 20, 0, 7200.0)
    assert (record["gateway_peak_rss_mb"], record["backlog_mb"]) == (300.0, 6.0)
    assert (record["problems"], record["notes"]) == ([], ["killed"])
    assert json.loads(json.dumps(record))["guarantee"] == "at_least_once"


def test_each_role_has_its_runs_and_chance_their_moments() -> None:
    scenario = Scenario(targets=(Role.GATEWAY, "kafka hangs"), runs=2, kills=3, at=0.25, away=5.0)
    plans = list(scenario.plans())
    assert [(number, [fault.what for fault in faults]) for number, faults in plans] == [
        (1, [Role.GATEWAY] * 3),
        (2, [Role.GATEWAY] * 3),
        (1, ["kafka hangs"]),
        (2, ["kafka hangs"]),
    ]
    assert all(0.05 <= fault.start_share <= 0.9 for _, faults in plans[:2] for fault in faults)
    assert [(fault.start_share, fault.duration_s) for fault in plans[2][1]] == [(0.25, 5.0)]
    assert plans == list(scenario.plans())
    assert plans != list(replace(scenario, seed=2).plans())


def test_given_faults_are_made_anew_for_each_run() -> None:
    ((_, first), (_, second)) = Scenario(faults=RECEIPT_FAULTS, runs=2).plans()
    first[0].at = 7
    assert second[0].at == RECEIPT_FAULTS[0].at == -1
    assert list(Scenario(runs=1).plans()) == [(1, [])]


@pytest.mark.parametrize("good", [True, False])
def test_the_logs_of_a_run_that_was_not_good_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: bool) -> None:
    place, rig = tmp_path / "runs", MagicMock()
    place.mkdir()
    monkeypatch.setattr("towline_prove.scenario.tempfile.mkdtemp", lambda **_: str(place))
    monkeypatch.setattr(Scenario, "create_rig", lambda *_: rig)
    monkeypatch.setattr("towline_prove.scenario._RunInProgress", MagicMock())
    monkeypatch.setattr(Run, "ok", good)
    list(prove(Scenario(runs=1), None, MagicMock()))
    assert place.exists() is not good


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"memory_samples": 1}, "one memory sample shows no growth"),
        ({"targets": ("gateway", "cat")}, r"unknown roles or outages: cat\. Choose from gateway, .*kafka hangs"),
    ],
)
def test_a_scenario_that_can_not_be_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"{problem}.*TL-C83"):
        Scenario(**fields)
