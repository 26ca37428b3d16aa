"""``towline doctor``: what a person and a script see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.test_main import ran
from tests.unit.doctor.bridges import DOWN, UP, bridge_of
from towline.doctor import examination
from towline.doctor.broker.examiner import examine_broker
from towline.doctor.case import Case
from towline.doctor.findings import Finding, Standing

LONG = "a fact of many words " * 20


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bridge whose broker is away, examined for that and for a device's words."""

    def look(_case: Case) -> Iterator[Finding]:
        yield Finding(code="TL-D05", promise="outage", verdict=Standing.WARNS, because=f"{LONG}\x1b[2J", mend="do")

    monkeypatch.setattr(examination, "EXAMINERS", {"broker": examine_broker, "other": look})
    bridge_of(tmp_path, "mqtt://127.0.0.1:1", UP + DOWN)
    return tmp_path / "bridge.toml"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_terminal_of_any_width_shows_every_row(
    file: Path, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = ran(capsys, "doctor", str(file), "--rate", "200")
    assert code == 1
    assert max(map(len, out.splitlines())) <= columns
    words = out.split()
    assert words.count("many") == 20
    assert "✗ connection" in out
    assert "! outage" in out
    assert "\x1b" not in out
    assert "\\x1b[2J" in "".join(words)
    assert "load of telemetry: 100.0 msg/s" not in out  # one uplink has all of it
    assert "1 broken, 1 near a limit" in " ".join(words)
    assert "towline-doctor-" in err


def test_json_has_rows_load_and_the_exit_code(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(capsys, "doctor", str(file), "--rate", "200", "--json")
    answer = json.loads(out)
    assert (code, answer["exit_code"], answer["worst"], err) == (1, 1, "broken", "")
    assert [one["code"] for one in answer["findings"]] == ["TL-D02", "TL-D05"]
    assert answer["load"]["telemetry"]["messages_s"] == 200.0


def test_a_mistake_in_the_command_is_one_line(file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = ran(capsys, "doctor", str(file), "--mosquitto-conf", str(tmp_path / "nowhere.conf"))
    assert (code, out) == (2, "")
    assert "TL-C155" in err
    code, _, err = ran(capsys, "doctor", str(tmp_path / "nowhere.toml"))
    assert code == 2
    assert "TL-C10" in err


def test_an_examiner_that_fails_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    bridge = bridge_of(tmp_path, "mqtt://127.0.0.1:1")
    case = Case(bridge, rate=1.0, mosquitto_conf=tmp_path / "nowhere.conf")
    found = dict(examination.examine(case, {"broker": examine_broker, "nothing": lambda _case: iter(())}))
    [row] = found["broker"]
    assert (row.code, row.verdict, found["nothing"]) == ("TL-D01", Standing.UNKNOWN, [])
    assert "TL-C155" in row.because
