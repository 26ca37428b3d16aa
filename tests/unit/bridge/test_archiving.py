"""The archive of classes is made once, beside a first run, and never for a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from towline.bridge.runtime import archiving
from towline.bridge.runtime.archiving import Archiving


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "classes.jsa"
    monkeypatch.setattr(archiving, "light_home", lambda: tmp_path)
    monkeypatch.setattr(archiving, "archive_of", lambda _home: path)
    return path


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """What it starts; a process that only sleeps stands for the one that takes 40 s of two cores."""
    processes: list[subprocess.Popen[bytes]] = []

    def popen(_command: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return processes[-1]

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    return processes


def of(master: str) -> Archiving:
    bridge: Any = SimpleNamespace(spark=SimpleNamespace(master=master))
    return Archiving(bridge)


@pytest.mark.usefixtures("archive")
def test_it_is_made_once_and_ended_with_the_bridge(begun: list[subprocess.Popen[bytes]]) -> None:
    making = of("local[2]")
    for _ in range(3):
        making.begin()
    (process,) = begun
    assert process.poll() is None
    making.stop()
    assert process.poll() is not None
    making.begin()
    assert len(begun) == 1, "a bridge that ends begins nothing"


def test_one_that_is_there_is_not_made_again(archive: Path, begun: list[subprocess.Popen[bytes]]) -> None:
    archive.touch()
    of("local[2]").begin()
    assert not begun


@pytest.mark.usefixtures("archive")
def test_a_cluster_has_its_own(begun: list[subprocess.Popen[bytes]]) -> None:
    of("spark://m:7077").begin()
    assert not begun


def test_without_a_home_there_is_nothing_to_make(
    begun: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archiving, "light_home", lambda: None)
    of("local[2]").begin()
    assert not begun
