"""The set-up script: what it derives, and what it says when it can't."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from scripts import setup as script


def test_backports_beside_a_stanza_of_the_release() -> None:
    text = "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\nComponents: main\n"
    sources = script.backports_sources({"debian.sources": text}, "bookworm")
    assert "Suites: bookworm bookworm-updates bookworm-backports\n" in sources["debian.sources"]
    assert "URIs: http://mirror.example/debian\n" in sources["debian.sources"]


def test_backports_beside_a_line_of_the_release() -> None:
    text = (
        "# a comment\n"
        "deb [signed-by=/k.gpg arch=amd64] http://mirror.example/debian bookworm main contrib\n"
        "deb-src http://mirror.example/debian bookworm main\n"
        "deb http://mirror.example/debian-security bookworm-security main\n"
    )
    assert script.backports_sources({"sources.list": text}, "bookworm")["sources.list"].splitlines() == [
        "deb [signed-by=/k.gpg arch=amd64] http://mirror.example/debian bookworm main contrib",
        "deb [signed-by=/k.gpg arch=amd64] http://mirror.example/debian bookworm-backports main contrib",
        "deb http://mirror.example/debian-security bookworm-security main",
    ]


def test_sources_of_others_are_left_out() -> None:
    ours = "deb http://mirror.example/debian bookworm main\n"
    theirs = "Types: deb\nURIs: http://tools.example/deb\nSuites: nodistro\nComponents: main\n"
    assert set(script.backports_sources({"a.list": ours, "tools.sources": theirs}, "bookworm")) == {"a.list"}


def test_no_service_is_started_by_an_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    monkeypatch.setattr(script, "POLICY", policy)
    monkeypatch.setattr(script, "run_as_root", script.run)

    def fail() -> None:
        with script.no_services():
            assert subprocess.run([policy], check=False).returncode == 101
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not policy.exists()


def test_without_sudo_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(script.Problem, match="Have it done for you: apt-get install x"):
        script.run_as_root("apt-get", "install", "x")
