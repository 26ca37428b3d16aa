"""The command line: mistakes are one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from towline.errors import ConfigError
from towline_prove.commands import app, main
from towline_prove.load import LoadPlan


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


def test_the_password_is_in_no_history() -> None:
    plan = LoadPlan(port=1, username="u", password=b"secret")
    assert "secret" not in repr(plan)
    assert "password" not in plan.public()


def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["prove", "load", str(tmp_path / "h"), "--messages", "0"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip().endswith("[TL-C80]")


def test_help_names_the_commands() -> None:
    out = CliRunner().invoke(app, ["--help"]).output
    assert "load" in out
    assert "judge" in out
