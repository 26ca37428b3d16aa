"""Which Towline this is, in a checkout and where it was built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from towline import version as module
from towline.version import revision, version


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    yield
    version.cache_clear()
    revision.cache_clear()


def test_a_build_has_noted_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision.cache_clear()
    monkeypatch.setattr(module, "SOURCE_ROOT", tmp_path)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "version.py"))
    assert revision() == "unknown"
    revision.cache_clear()
    (tmp_path / "revision.txt").write_text("0123456789\n")
    assert revision() == "0123456789"
