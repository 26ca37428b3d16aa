from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from towline_prove.devstack import spark
from towline_prove.devstack.spark import enable_fast_start


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the archive would be, in a directory whose name has a blank."""
    place = tmp_path / "a b" / "spark.jsa"
    place.parent.mkdir()
    monkeypatch.setattr(spark, "light_spark_home", lambda: place.parent)
    monkeypatch.setattr(spark, "spark_archive_path", lambda _home: place)
    return place


def test_what_is_there_already_comes_last_and_wins(archive: Path) -> None:
    archive.touch()
    environment = {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=4"}
    enable_fast_start(environment)
    options = shlex.split(environment["SPARK_SUBMIT_OPTS"])
    assert f"-XX:SharedArchiveFile={archive}" in options
    assert environment["SPARK_HOME"] == str(archive.parent)
    assert [o for o in options if "Tiered" in o] == ["-XX:TieredStopAtLevel=1", "-XX:TieredStopAtLevel=4"]


@pytest.mark.usefixtures("archive")
def test_without_an_archive_none_is_named() -> None:
    environment: dict[str, str] = {}
    enable_fast_start(environment)
    assert "-XX:+UseSerialGC" in environment["SPARK_SUBMIT_OPTS"]
    assert "SharedArchiveFile" not in environment["SPARK_SUBMIT_OPTS"]


@pytest.mark.usefixtures("archive")
def test_what_the_user_says_of_kafka_stays() -> None:
    environment: dict[str, str] = {}
    enable_fast_start(environment)
    assert environment["KAFKA_JVM_PERFORMANCE_OPTS"] == "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    environment = {"KAFKA_JVM_PERFORMANCE_OPTS": "-XX:+UseZGC"}
    enable_fast_start(environment)
    assert environment["KAFKA_JVM_PERFORMANCE_OPTS"] == "-XX:+UseZGC"
