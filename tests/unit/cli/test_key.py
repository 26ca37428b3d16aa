"""``towline key``: the key of one publisher, made of the line's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.test_main import ran
from towline.delivery.receipts.mark import ReceiptKeys
from towline.files import replace as write_private


def test_the_key_of_one_publisher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_private(tmp_path / "line", "00" * 32)
    code, out, _ = ran(capsys, "key", str(tmp_path / "line"), "3fa9c2d41e77")
    assert code == 0
    write_private(tmp_path / "own", out)
    own, line = ReceiptKeys.read_file(tmp_path / "own"), ReceiptKeys.read_file(tmp_path / "line")
    assert own.compute_code("3fa9c2d41e77", b"x") == line.compute_code("3fa9c2d41e77", b"x")
    assert not own.has_key_for("q")
    for name, publisher, text in (
        ("own", "q", "TL-C86"),
        ("line", "a/b", "not the id of a publisher"),
        ("none", "q", "TL-C85"),
    ):
        code, _, err = ran(capsys, "key", str(tmp_path / name), publisher)
        assert (code, text in err) == (2, True)
