"""Which Towline this is, in a checkout and where it was built."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from towline import version as module
from towline.version import release, revision, version


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    yield
    version.cache_clear()
    revision.cache_clear()


def test_a_checkout_asks_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision.cache_clear()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    monkeypatch.setattr(module, "SOURCE_ROOT", tmp_path)
    assert revision() == "unknown", "nothing is committed"
    revision.cache_clear()
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert revision() == head[:10]
    assert release() == f"{version()} (revision {head[:10]})"


def test_a_build_has_noted_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision.cache_clear()
    monkeypatch.setattr(module, "SOURCE_ROOT", tmp_path)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "version.py"))
    assert revision() == "unknown"
    revision.cache_clear()
    (tmp_path / "revision.txt").write_text("0123456789\n")
    assert revision() == "0123456789"
