"""``towline pub``: what can't be published is one line, and nothing waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.test_main import ran

NOWHERE = "mqtt://127.0.0.1:9"


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(
    ("topic", "more"),
    [("a/#", []), ("\udcff", []), ("a", ["--property", "a=\udcff"]), ("x" * 70_000, [])],
    ids=["wildcard", "bytes", "property", "long"],
)
def test_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], topic: str, more: list[str], *, durable: bool
) -> None:
    kept = ["--durable", str(tmp_path / "p")] if durable else []
    code, _, err = ran(capsys, "pub", NOWHERE, topic, "text", *more, *kept)
    told = err.splitlines()
    assert code == 2
    assert "TL-C5" in told[-1]
    assert len(told) == 1
    assert told[0].isprintable()
