"""The set-up script: what it derives, and what it says when it can't."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "setup.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("towline_setup", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_backports_beside_a_stanza_of_the_release(script: ModuleType) -> None:
    text = "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\nComponents: main\n"
    sources = script.backports_sources({"debian.sources": text}, "bookworm")
    assert "Suites: bookworm bookworm-updates bookworm-backports\n" in sources["debian.sources"]
    assert "URIs: http://mirror.example/debian\n" in sources["debian.sources"]


def test_backports_beside_a_line_of_the_release(script: ModuleType) -> None:
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


def test_sources_of_others_are_left_out(script: ModuleType) -> None:
    ours = "deb http://mirror.example/debian bookworm main\n"
    theirs = "Types: deb\nURIs: http://tools.example/deb\nSuites: nodistro\nComponents: main\n"
    assert set(script.backports_sources({"a.list": ours, "tools.sources": theirs}, "bookworm")) == {"a.list"}


def test_a_machine_without_the_releases_sources_has_no_backports(script: ModuleType) -> None:
    assert script.backports_sources({"x.list": "deb http://mirror.example/x stable main\n"}, "bookworm") == {}
    assert script.backports_sources({"x.list": "deb http://mirror.example/s trixie-security main\n"}, "trixie") == {}


@pytest.fixture
def mended(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Root's commands are noted instead of run."""
    done: list[tuple[str, ...]] = []

    def note(*command: object, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
        done.append(tuple(map(str, command)))
        return subprocess.CompletedProcess(done[-1], 0, "", "")

    monkeypatch.setattr(script, "run_as_root", note)
    return done


def mosquitto(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *versions: tuple[int, ...]) -> tuple[str, str]:
    """The step's outcome when the machine shows these versions one after the other."""
    shown = list(versions)
    monkeypatch.setattr(script, "mosquitto_version", lambda: shown.pop(0) if len(shown) > 1 else shown[0])
    outcome: tuple[str, str] = script.mosquitto()
    return outcome


def test_only_an_old_mosquitto_is_replaced_from_backports(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, mended: list[tuple[str, ...]]
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(script, "install_from_backports", lambda *packages: asked.append(packages))
    monkeypatch.setattr(script, "which", lambda program: f"/usr/bin/{program}")
    assert mosquitto(script, monkeypatch, (2, 0, 11), (2, 0, 21)) == ("Mosquitto 2.0.21", "")
    assert asked == [("mosquitto", "mosquitto-clients")]
    assert mosquitto(script, monkeypatch, (2, 0, 13)) == ("Mosquitto 2.0.13", "")
    assert len(asked) == 1, "a sound one is left alone"


def test_without_backports_the_distributions_own_is_taken_with_the_reason(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, mended: list[tuple[str, ...]]
) -> None:
    monkeypatch.setattr(script, "install_from_backports", lambda *_: "no way there")
    monkeypatch.setattr(script, "which", lambda program: f"/usr/bin/{program}")
    name, warning = mosquitto(script, monkeypatch, (), (), (2, 0, 11))
    assert name == "Mosquitto 2.0.11"
    assert "loses QoS 2 messages by itself" in warning
    assert "no way there" in warning
    assert any(command[-1] == "mosquitto" and "install" in command for command in mended)


def test_no_service_is_started_by_an_installation(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_a_policy_of_the_machines_own_is_left_alone(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mended: list[tuple[str, ...]]
) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text("theirs")
    monkeypatch.setattr(script, "POLICY", policy)
    with script.no_services():
        pass
    assert policy.read_text() == "theirs"
    assert mended == []


def test_without_sudo_the_command_is_named(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(script.shutil, "which", lambda *_, **__: None)
    with pytest.raises(script.Problem, match="Have it done for you: apt-get install x"):
        script.run_as_root("apt-get", "install", "x")


def test_brokers_that_only_tests_need_may_be_missing(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*packages: str) -> None:
        raise script.Problem(f"no apt-get here. Install by hand: {' '.join(packages)}")

    monkeypatch.setattr(script, "which", lambda _: None)
    monkeypatch.setattr(script, "apt_install", refuse)
    name, warning = script.other_brokers()
    assert name == "not both here"
    assert "tests that need them skip: no apt-get here" in warning
