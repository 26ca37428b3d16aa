"""The command line: help, exit codes, and no traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.unit.bridge.test_downlink_file import GOOD
from towline.cli import COMMANDS, main
from towline.cli.screen import is_terminal, terminal_text
from towline.errors import ConfigError, KafkaError
from towline.spark import session
from towline.version import release

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "bridge.toml"
FAULT = "This is a fault in Towline; please report it with the output of TOWLINE_DEBUG=1."


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return code, out, err


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["help"]])
def test_help_fits_a_screen_and_has_an_example(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = ran(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "Example:" in out
    assert len(out.splitlines()) <= 24
    assert all(len(line) <= 80 for line in out.splitlines())
    assert all(f"  {name}" in out for name in ("run", "check", "status", "gateway", "explain"))


def test_help_loads_nothing_heavy() -> None:
    heavy = "['typer', 'rich', 'pydantic', 'pyarrow', 'pyspark', 'confluent_kafka']"
    code = f"import sys\nfrom towline.cli import _run\n_run(['--help'])\nassert not set({heavy}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)


@pytest.mark.parametrize("name", [*COMMANDS, "dlq show", "dlq replay", "kafka marker show", "kafka marker reset"])
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = ran(capsys, *name.split(), "-h")
    assert code == 0
    assert "Example:" in out or name == "kafka"
    assert len(out.splitlines()) <= 40


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys, "--version")
    assert code == 0
    assert out == f"towline {release()}\n"
    assert release().startswith("0.2.0 (revision ")


def test_check_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(capsys, "check", str(EXAMPLE))
    assert (code, err) == (0, "")
    for text in ("telemetry/+/+/# (QoS 1)", "kafka:telemetry", "client id plant-7-telemetry", "lost", "doubled"):
        assert text in out


def test_without_pyspark_run_ends_with_2_and_check_says_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "pyspark_version", lambda: None)
    file = tmp_path / "bridge.toml"
    file.write_text(GOOD)
    code, out, err = ran(capsys, "check", str(file))
    assert (code, err) == (0, ""), "the file is right"
    assert "  ! pyspark: PySpark is not installed" in out
    code, out, err = ran(capsys, "run", str(file))
    assert (code, out) == (2, "")
    assert err.endswith('pub don\'t need it. Run: pip install "towline[spark]"   [TL-S20]\n')
    assert err.count("\n") == 1


def test_check_lists_every_mistake_and_ends_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text('nam = "x"\nstate_dir = 3\n')
    code, out, err = ran(capsys, "check", str(file))
    assert (code, out) == (2, "")
    assert err.count("\n") == err.count("[TL-C") >= 4


def test_check_warns_of_what_is_allowed_and_odd(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bridge.toml"
    text = EXAMPLE.read_text().replace('name = "telemetry" ', 'dead_letter_topic = false\nname = "telemetry" ')
    text += '\n[[uplink.route]]\nfrom = "telemetry/{a}/b"\ntopic = "x.{a}"\n'
    file.write_text(text + '[[uplink.route]]\nfrom = "{kind}/t/c"\ntopic = "z"\n')
    code, out, _ = ran(capsys, "check", str(file))
    assert code == 0
    assert "route 3 never gets a message: route 1 takes all of them" in out
    assert 'the filters "telemetry/+/+/#" and "+/t/c" overlap' in out
    assert "route 3 has no dead letters" in out


def test_a_terminal_of_80_columns_shows_no_longer_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    Path("plant.toml").write_text(EXAMPLE.read_text())
    piped = ran(capsys, "check", "plant.toml")[1]
    Path("bad.toml").write_text('nam = "x"\nstate_dir = 3\n')
    mistakes = ran(capsys, "check", "bad.toml")[2]
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    for text, shown in (
        (piped, ran(capsys, "check", "plant.toml")[1]),
        (mistakes, ran(capsys, "check", "bad.toml")[2]),
    ):
        assert max(map(len, text.splitlines())) > 80
        assert all(len(row) <= 80 or len(row.split()) == 1 for row in shown.splitlines()), "a path may be longer"
        assert shown.split() == text.split(), "no word is cut"
        for row in shown.splitlines():
            assert row[:2] == "  " or any(line.startswith(row) for line in text.splitlines()), row


TL_C01 = """\
TL-C01
  what happened  an unknown key, option or command
  at stake       the setting you meant would be silently missing; it does not start
  what to do     take the suggested name, or omit it
"""


@pytest.mark.parametrize("written", ["TL-C01", "tl-c01", "C01", "c1", "[TL-C01]"])
def test_a_code_is_explained_as_it_may_be_written(capsys: pytest.CaptureFixture[str], written: str) -> None:
    assert ran(capsys, "explain", written) == (0, TL_C01, "")


def test_a_code_is_explained_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys, "explain", "--json", "g06")
    (row,) = [line for line in (ROOT / "docs" / "errors.md").read_text().splitlines() if line.startswith("| TL-G06 |")]
    said = json.loads(out)
    assert (code, list(said)) == (0, ["code", "happened", "stake", "do"])
    assert row == f"| {' | '.join(said.values())} |"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("TL-C99", "x", "wrong", "Mend it."), 2, "x: wrong. Mend it.   [TL-C99]\n"),
        (KafkaError("TL-K99", "x", "gone"), 1, "x: gone.   [TL-K99]\n"),
        (KeyboardInterrupt(), 130, ""),
        (ValueError("odd.\nmore"), 1, f"towline fake: unexpected ValueError: odd. {FAULT}   [TL-X01]\n"),
    ],
)
def test_nothing_ends_in_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    def fake() -> None:
        raise error

    module = types.ModuleType("towline.cli.fake")
    vars(module)["fake"] = fake
    monkeypatch.setitem(sys.modules, "towline.cli.fake", module)
    monkeypatch.setitem(COMMANDS, "fake", "fails")
    assert ran(capsys, "fake") == (code, "", line)


@pytest.mark.parametrize(("term", "redrawn"), [("xterm", True), ("dumb", False), ("unknown", False)])
def test_which_terminal_can_be_redrawn(monkeypatch: pytest.MonkeyPatch, term: str, *, redrawn: bool) -> None:
    main, side = os.openpty()
    with os.fdopen(main, "rb"), os.fdopen(side, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", term)
        assert is_terminal() is redrawn
        monkeypatch.delenv("TERM")
        assert not is_terminal()


def test_marks_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert terminal_text("▸ a → b ✓") == "> a > b +"
