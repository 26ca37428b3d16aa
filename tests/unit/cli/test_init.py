"""`towline init`: questions on a terminal, none without, and nothing is replaced unasked."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.unit.cli.test_main import ran
from towline.bridge.config.file import load
from towline.bridge.draft import answers


def test_without_a_terminal_nothing_is_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bridge.toml"
    code, out, err = ran(capsys, "init", str(file), "--kafka", "k1:9092", "--name", "plant-7")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"wrote {file}, mode 0600",
        f"Next: towline doctor {file}   what broker, Kafka and this machine can keep",
        f"      towline run {file}      until Ctrl-C; what waits stays on disk",
    ]
    assert file.stat().st_mode & 0o777 == 0o600
    bridge = load(file, {})
    assert (bridge.name, bridge.kafka.bootstrap_servers) == ("plant-7", "k1:9092")
    assert ran(capsys, "check", str(file))[0] == 0


def test_a_file_that_is_there_stays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text("mine")
    told = f"{file}: the file exists. Name another file, or replace it with --force.   [TL-C162]\n"
    assert ran(capsys, "init", str(file)) == (2, "", told)
    assert file.read_text() == "mine"
    assert ran(capsys, "init", str(tmp_path / "no" / "b.toml"))[2].endswith("[TL-C164]\n")
    assert ran(capsys, "init", str(file), "--force")[0] == 0
    assert tomllib.loads(file.read_text())["name"]


def test_examples_are_written_and_none_is_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "new" / "examples"
    code, out, err = ran(capsys, "init", "--examples", str(place))
    assert (code, err) == (0, "")
    written = {Path(line.removeprefix("wrote ")) for line in out.splitlines()}
    assert written == {path for path in place.rglob("*") if path.is_file()}
    root = Path(__file__).parents[3] / "examples"
    for name in ("bridge.toml", "hono.toml", "plain_pyspark.py", "monitoring/alerts.yml", "monitoring/dashboard.json"):
        assert (place / name).read_bytes() == (root / name).read_bytes()
    assert not list(tmp_path.rglob("__pycache__"))
    kept = place / "monitoring" / "alerts.yml"
    for path in written - {kept}:
        path.unlink()
    kept.write_text("mine")
    told = f"{kept}: the file exists. Name another file, or replace it with --force.   [TL-C162]\n"
    assert ran(capsys, "init", "--examples", str(place)) == (2, "", told)
    assert [path for path in place.rglob("*") if path.is_file()] == [kept]
    assert kept.read_text() == "mine"
    assert ran(capsys, "init", "--examples", str(place), "--force")[0] == 0
    assert kept.read_bytes() == (root / "monitoring" / "alerts.yml").read_bytes()
    code, out, err = ran(capsys, "init", "--examples", str(kept))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "it can't be written (" in err
    monkeypatch.setattr(answers, "SOURCE_ROOT", tmp_path)
    assert ran(capsys, "init", "--examples", str(place))[2].endswith("[TL-S70]\n")
