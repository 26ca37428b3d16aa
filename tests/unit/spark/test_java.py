from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from towline.errors import SetupError
from towline.spark import java
from towline.spark.java import cache_directory, find_java, resolve_jars


def program(place: Path, text: str) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return place


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but sh's tools that the test puts there, and a cache of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path / "cache"))
    return folder


def fake_java(place: Path, version: str) -> Path:
    return program(place, f"echo 'openjdk version \"{version}\" 2025-04-15' >&2")


def fake_maven(place: Path) -> Path:
    """UplinkCounts its calls, takes its time, and makes one jar where it was told to."""
    script = (
        'PATH=/usr/bin:/bin; echo called >> "$(dirname "$0")/calls"; sleep 0.2\n'
        'for word in "$@"; do case "$word" in -DoutputDirectory=*) out="${word#*=}";; esac; done\n'
        'mkdir -p "$out"; touch "$out/a.jar"'
    )
    return program(place, script)


@pytest.mark.parametrize(("said", "version"), [("17.0.15", 17), ("21", 21), ("1.8.0_402", 8), ("25-ea", 25)])
def test_java_versions(tmp_path: Path, said: str, version: int) -> None:
    assert java.java_version(str(fake_java(tmp_path / "java", said))) == version


def test_java_on_the_path(alone: Path) -> None:
    there = fake_java(alone / "java", "21.0.1")
    assert find_java() == there


def test_java_home_comes_first(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(alone / "java", "17.0.1")
    at_home = fake_java(tmp_path / "home" / "bin" / "java", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert find_java() == at_home


def test_an_old_java_home_is_passed_over(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = fake_java(alone / "java", "17.0.1")
    fake_java(tmp_path / "home" / "bin" / "java", "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert find_java() == on_path


def test_no_java(alone: Path) -> None:
    with pytest.raises(SetupError, match=r"needs Java 17 or newer, and there is none\. Run `make setup`.*TL-S14"):
        find_java()


def test_only_an_old_java(alone: Path) -> None:
    old = fake_java(alone / "java", "11.0.2")
    with pytest.raises(SetupError, match=f"{old} is version 11.*TL-S14"):
        find_java()


def test_the_cache_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path


def test_the_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOWLINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "towline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "towline"


def test_jars_are_fetched_once(alone: Path) -> None:
    maven = fake_maven(alone / "mvn")
    first = resolve_jars("kafka-1", ["g:a:1"])
    assert resolve_jars("kafka-1", ["g:a:1"]) == first
    assert [jar.name for jar in first.iterdir()] == ["a.jar"]
    assert (maven.parent / "calls").read_text().split() == ["called"]


def test_two_processes_that_ask_at_once_fetch_once(alone: Path) -> None:
    maven = fake_maven(alone / "mvn")
    code = "from towline.spark.java import resolve_jars; print(resolve_jars('kafka-1', ['g:a:1']))"
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate()[0].strip() for process in both}
    assert said == {str(alone.parent / "cache" / "kafka-1")}
    assert (maven.parent / "calls").read_text().split() == ["called"]


def test_no_maven(alone: Path) -> None:
    with pytest.raises(SetupError, match=r"Maven is missing.*make setup.*TL-S15"):
        resolve_jars("kafka-1", ["g:a:1"])


def test_what_maven_says_is_told_in_one_line(alone: Path) -> None:
    program(alone / "mvn", "echo 'noise'; echo '[ERROR] no such artifact: g:a:1.'; echo '[ERROR] more'; exit 1")
    with pytest.raises(SetupError, match=r"mvn: no such artifact: g:a:1\. Look at Maven.*TL-S15") as caught:
        resolve_jars("kafka-1", ["g:a:1"])
    assert "\n" not in str(caught.value)


def test_a_failed_fetch_leaves_nothing_behind(alone: Path) -> None:
    program(alone / "mvn", "exit 1")
    with pytest.raises(SetupError, match="exit code 1"):
        resolve_jars("kafka-1", ["g:a:1"])
    assert [path.name for path in (alone.parent / "cache").iterdir()] == ["kafka-1.lock"]
    (alone / "mvn").unlink()
    fake_maven(alone / "mvn")
    assert resolve_jars("kafka-1", ["g:a:1"]).is_dir()


def test_a_maven_that_fetches_nothing_is_an_error(alone: Path) -> None:
    program(alone / "mvn", "exit 0")
    with pytest.raises(SetupError, match="TL-S15"):
        resolve_jars("kafka-1", ["g:a:1"])


def test_a_cache_that_can_not_be_written(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SetupError, match=r"Not a directory\. Set TOWLINE_CACHE.*TL-S18"):
        resolve_jars("kafka-1", ["g:a:1"])


def test_an_unknown_java_is_no_java(alone: Path) -> None:
    program(alone / "java", "echo hello")
    with pytest.raises(SetupError, match="is version 0"):
        find_java()
    assert os.environ["PATH"] == str(alone)
