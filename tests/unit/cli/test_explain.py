"""``towline explain``: each code that the page of errors has, however it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.test_main import ran

PAGE = Path(__file__).parents[3] / "docs" / "errors.md"
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
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| TL-G06 |")]
    said = json.loads(out)
    assert (code, list(said)) == (0, ["code", "happened", "stake", "do"])
    assert row == f"| {' | '.join(said.values())} |"
