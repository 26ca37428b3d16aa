"""The command line: mistakes are one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from towline.errors import ConfigError
from towline_prove import commands
from towline_prove.commands import app, main
from towline_prove.load import LoadPlan
from towline_prove.scenario import RECEIPT_FAULTS, Run, Scenario


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"publishers": 0}, "publishers"),
        ({"publishers": 9, "devices": 8}, "devices"),
        ({"messages": 0}, "messages"),
        ({"qos": 3}, "qos"),
        ({"size": 20}, "size"),
        ({"rate": -1}, "rate"),
        ({"topic": "a/b"}, "{device}"),
        ({"window": 70_000}, "window"),
        ({"seconds": 0}, "seconds"),
    ],
)
def test_a_load_that_cannot_be_is_refused(change: dict[str, int], rule: str) -> None:
    with pytest.raises(ConfigError, match="TL-C80") as caught:
        LoadPlan(port=1883, **change)  # type: ignore[arg-type]
    assert rule in str(caught.value)


def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["prove", "load", str(tmp_path / "h"), "--messages", "0"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip().endswith("[TL-C80]")


def test_each_field_of_a_scenario_is_an_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Scenario] = []

    def noted(scenario: Scenario, *_: object) -> Iterator[Run]:
        asked.append(scenario)
        return iter(())

    monkeypatch.setattr(commands, "prove", noted)
    words = ["--roles", "none", "--outages", "kafka hangs", "--away", "3", "--messages", "9", "--size", "300"]
    runner = CliRunner()
    assert runner.invoke(app, ["soak", *words, "--own-limits", "--seed", "5"]).exit_code == 0
    assert runner.invoke(app, ["soak", "--receipts", "--guarantee", "exactly_once"]).exit_code == 0
    assert asked[0] == Scenario(targets=("kafka hangs",), away=3.0, messages=9, size=300, own_limits=True, seed=5)
    assert (asked[1].receipts, asked[1].own_limits, asked[1].runs, asked[1].faults) == (True, True, 1, RECEIPT_FAULTS)
    for option in ("kills", "memory-samples", "batches", "rate", "seconds", "guarantee"):
        assert f"--{option}" in runner.invoke(app, ["soak", "--help"], env={"COLUMNS": "200"}).output
