"""``towline doctor``: what a person and a script see."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.test_main import ran
from tests.unit.doctor.bridges import DOWN, UP, bridge_of
from towline import doctor
from towline.doctor import kafka, machine
from towline.doctor.table import Check, Finding, Verdict

LONG = "a fact of many words " * 20


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bridge whose broker is away, a Kafka that says something of a device's, and a check that fails."""

    def says(_facts: Any) -> list[Finding]:
        return [Finding(Verdict.WARNS, f"{LONG}\x1b[2J", remedy="do")]

    def fails(_facts: Any) -> list[Finding]:
        raise ZeroDivisionError("of ours")

    checks: Callable[..., Any] = Check
    monkeypatch.setattr(kafka, "CHECKS", (checks("TL-D34", "time to read", says),))
    monkeypatch.setattr(machine, "CHECKS", (checks("TL-D43", "room", fails), checks("TL-D42", "disk", says)))
    bridge_of(tmp_path, "mqtt://127.0.0.1:1", UP + DOWN)
    return tmp_path / "bridge.toml"


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_terminal_of_any_width_shows_every_row(
    file: Path, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = ran(capsys, "doctor", str(file), "--rate", "200")
    lines = out.splitlines()
    assert code == 1
    assert max(map(len, lines)) <= min(columns, 100)
    assert lines[0].startswith("✗ connection: mqtt://127.0.0.1:1")
    assert [line for line in lines if line.startswith("✗ connection")][-1] == "✗ connection"
    assert out.split().count("many") == 20  # two rows that say the same are one on the screen
    assert "! time to read, disk" in out
    assert "check failed: ZeroDivisionError: of ours" in " ".join(out.split())
    assert "\x1b" not in out
    assert "\\x1b[2J" in out
    assert "load of telemetry: 200.0 msg/s" in out
    assert lines[-1].startswith("1 broken, 2 near a limit, ")
    assert "towline-doctor-" in err
    assert max(map(len, err.splitlines())) <= 80


def test_what_is_kept_is_counted_and_shown_where_it_is_asked_for(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: Callable[..., Any] = Check
    well = checks("TL-D42", "disk", lambda _: [Finding(Verdict.HOLDS, "quick")])
    monkeypatch.setattr(machine, "CHECKS", (well,))
    monkeypatch.setattr(doctor, "broker_targets", lambda _bridge: ())
    monkeypatch.setattr(kafka, "CHECKS", ())
    code, out, _ = ran(capsys, "doctor", str(file), "--rate", "200")
    assert (code, out.splitlines()[-1], "quick" in out) == (0, "1 kept (-v)", False)
    code, out, _ = ran(capsys, "doctor", str(file), "--rate", "200", "-v")
    assert (code, out.splitlines()[-1], "quick" in out) == (0, "1 kept", True)


def test_json_has_rows_load_and_the_exit_code(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(capsys, "doctor", str(file), "--rate", "200", "--json")
    answer = json.loads(out)
    assert (code, answer["exit_code"], answer["worst"], err) == (1, 1, "broken", "")
    codes = [one["code"] for one in answer["findings"]]
    assert codes[:3] == ["TL-D02", "TL-D34", "TL-D42"]
    assert {"TL-D03", "TL-D05", "TL-D10", "TL-D11", "TL-D43"} <= set(codes[3:])
    assert answer["load"]["telemetry"]["messages_s"] == 200.0
