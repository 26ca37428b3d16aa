"""`towline dlq` before it meets Kafka: help, and mistakes in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD
from tests.unit.cli.test_main import ran


@pytest.mark.parametrize("arguments", [["-h"], ["show", "-h"], ["replay", "-h"]])
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, _ = ran(capsys, "dlq", *arguments)
    assert code == 0
    assert "Example:" in out
    assert len(out.splitlines()) <= 30


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "no line has a dead-letter topic. Give the line dead_letter_topic"),
        (["--line", "telemetri"], 'no line is named "telemetri". Did you mean "telemetry"?   [TL-C73]'),
        (["--reason", "too_larg"], '--reason: there is no reason "too_larg". Did you mean "too_large"?   [TL-C21]'),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, more: list[str], told: str) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text(GOOD)
    code, out, err = ran(capsys, "dlq", "replay", str(file), *more)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
