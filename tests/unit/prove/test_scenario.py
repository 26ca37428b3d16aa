"""What a scenario asks for, what makes its run a bad one, and growth of memory; without brokers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from towline.bridge.runtime.child_supervisors import DriverSupervisor
from towline.errors import ConfigError
from towline_prove import processes
from towline_prove.commands import main
from towline_prove.load import LoadPlan
from towline_prove.processes import MemorySample, Peaks, Role, growth_problems, role_of
from towline_prove.referee import RunAccount, RunVerdict
from towline_prove.scenario import Fault, Run, Scenario

DONE = Fault(Role.JVM, 0.5, at=11, back_s=0.5)
KEPT = RunVerdict(attempted=20, acked=20, delivered=20, copies=20)
SCENARIO = Scenario(messages=20, seed=4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"faults": [Fault(Role.JVM)]}, "killed jvm (kill -9): never, NEVER RECOVERED"),
        ({"faults": [Fault("kafka hangs", at=5)]}, "kafka hangs at 5, NEVER RECOVERED"),
        ({"account": RunAccount(replace(KEPT, delivered=19, copies=19, lost=1))}, "at_least_once was not kept"),
        ({"account": RunAccount(replace(KEPT, acked=19))}, "19 of 20 messages were acknowledged"),
        ({"account": None}, "it has not ended"),
        ({"peaks": Peaks(rss=400_000_001 + SCENARIO.size)}, "the gateway took 400 MB"),
        ({"peaks": Peaks()}, "the gateway's memory was never measured"),
        ({"broker_dropped": 3}, "the broker itself dropped 3 messages"),
        ({"scenario": replace(SCENARIO, batches=7), "batches": 6}, "6 batches, not 7"),
        ({"scenario": replace(SCENARIO, memory_samples=3)}, "0 memory samples, not 3"),
        ({"account": RunAccount(RunVerdict())}, "nothing arrived"),
    ],
)
def test_a_fault_that_was_not_done_a_loss_and_growth_make_a_bad_run(changes: dict[str, Any], problem: str) -> None:
    run = replace(Run(SCENARIO, 2, [DONE], RunAccount(KEPT), Peaks(rss=300_000_000)), **changes)
    assert problem in run.problems() if problem else run.ok
    assert run.summary_text().startswith("BAD" if problem else "ok ")
    assert problem in run.summary_text()


def looks(driver: float = 121.0, *, heap: float = 91.0, files: int = 420) -> list[MemorySample]:
    settled = [MemorySample(batch, {"driver": 120.0, "jvm": 800.0}, 90.0, 420, 3000) for batch in range(5, 100, 5)]
    last = MemorySample(100, {"driver": driver, "jvm": 1300.0}, heap, files, 3000)
    return [MemorySample(1, {"driver": 60.0, "jvm": 300.0}, 50.0, 19, 300), *settled, last]


@pytest.mark.parametrize(
    ("seen", "problems"),
    [
        (looks(), []),  # what grows before the first tenth is a start
        (looks(150.0), ["driver grew from 120 to 150 MB"]),
        (looks(heap=130.0), ["the JVM's heap grew from 90 to 130 MB"]),
        (looks(files=20_000), ["20,000 files in the state directory"]),
    ],
)
def test_growth_is_a_problem(seen: list[MemorySample], problems: list[str]) -> None:
    assert growth_problems(seen) == problems


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("/usr/bin/java\0-cp\0x\0org.apache.spark.deploy.SparkSubmit", Role.JVM),
        ("/v/bin/python\0-m\0pyspark.daemon\0pyspark.worker", Role.WORKER),
        ("/v/bin/python\0-m\0towline.gateway", Role.GATEWAY),
        ("\0".join(DriverSupervisor.command), Role.DRIVER),
        ("/v/bin/python\0/v/bin/towline\0run\0bridge.toml", Role.BRIDGE),
        ("/v/bin/python\0-m\0pytest", Role.OTHER),
    ],
)
def test_roles(line: str, role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "command_line", lambda _: line)
    assert role_of(1) is role


@pytest.mark.parametrize(
    ("kind", "fields", "problem"),
    [
        (Scenario, {"memory_samples": 1}, "one memory sample shows no growth.*TL-C83"),
        (Scenario, {"targets": ("cat",)}, r"unknown roles or outages: cat\. Choose from .*kafka hangs.*TL-C83"),
        (LoadPlan, {"publishers": 9, "devices": 8}, "devices.*TL-C80"),
        (LoadPlan, {"messages": 0}, "messages.*TL-C80"),
        (LoadPlan, {"qos": 3}, "qos.*TL-C80"),
        (LoadPlan, {"size": 20}, "size.*TL-C80"),
        (LoadPlan, {"topic": "a/b"}, "{device}.*TL-C80"),
        (LoadPlan, {"window": 70_000}, "window.*TL-C80"),
    ],
)
def test_what_can_not_be_is_refused(kind: Any, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        kind(**fields)


def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["prove", "load", str(tmp_path / "h"), "--messages", "0"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip().endswith("[TL-C80]")
