"""``towline key``: the key of one publisher, made of the line's."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.cli import main
from towline.delivery.receipts.mark import ReceiptKeys
from towline.files import replace as write_private


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["key", *arguments])
    return int(str(end.value.code))


def test_the_key_of_one_publisher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_private(tmp_path / "line", "00" * 32)
    assert run(str(tmp_path / "line"), "3fa9c2d41e77") == 0
    write_private(tmp_path / "own", capsys.readouterr().out)
    own, line = ReceiptKeys.read_file(tmp_path / "own"), ReceiptKeys.read_file(tmp_path / "line")
    assert own.compute_code("3fa9c2d41e77", b"x") == line.compute_code("3fa9c2d41e77", b"x")
    assert not own.has_key_for("q")
    assert run(str(tmp_path / "own"), "q") == 2
    assert "TL-C86" in capsys.readouterr().err
    assert run(str(tmp_path / "line"), "a/b") == 2
    assert run(str(tmp_path / "none"), "q") == 2
    assert "TL-C85" in capsys.readouterr().err
