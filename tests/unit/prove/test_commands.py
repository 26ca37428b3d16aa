"""The command line of the proof, and the record of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from towline_prove import commands
from towline_prove.commands import app, main
from towline_prove.scenario import RECEIPT_FAULTS, Run, Scenario


def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["prove", "load", str(tmp_path / "h"), "--messages", "0"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip().endswith("[TL-C80]")


def test_each_field_of_a_scenario_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Scenario] = []

    def noted(scenario: Scenario, *_: object) -> Iterator[Run]:
        asked.append(scenario)
        return iter(())

    monkeypatch.setattr(commands, "prove", noted)
    words = ["--roles", "none", "--outages", "kafka hangs", "--away", "3", "--messages", "9", "--size", "300"]
    assert CliRunner().invoke(app, ["soak", *words, "--own-limits", "--seed", "5"]).exit_code == 0
    assert CliRunner().invoke(app, ["soak", "--receipts", "--guarantee", "exactly_once"]).exit_code == 0
    assert asked[0] == Scenario(targets=("kafka hangs",), away=3.0, messages=9, size=300, own_limits=True, seed=5)
    assert (asked[1].receipts, asked[1].own_limits, asked[1].runs, asked[1].faults) == (True, True, 1, RECEIPT_FAULTS)
