"""How Spark's JVM is tuned, its home, and an archive of classes for each build of Java and the very jars there are."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest

from towline.errors import SetupError
from towline.spark import java
from towline.spark.java import (
    Tier,
    cached_spark_kafka_jars,
    class_archive_path,
    create_archive_once,
    jvm_options,
    light_spark_home,
    resolve_jars,
)

ONE_COMPILER = "-XX:TieredStopAtLevel=1"


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path))


@pytest.mark.parametrize(("cores", "quick"), [(1, True), (2, True), (3, False), (16, False)])
def test_auto_takes_one_compiler_where_cores_are_few(monkeypatch: pytest.MonkeyPatch, cores: int, quick: bool) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    assert (ONE_COMPILER in jvm_options(Tier.AUTO)) is quick
    assert ONE_COMPILER in jvm_options(Tier.QUICK)
    assert ONE_COMPILER not in jvm_options(Tier.PEAK)


@pytest.mark.parametrize(("release", "known"), [(17, True), (23, True), (24, False), (None, False)])
def test_what_a_newer_java_does_not_know_is_left_out(
    monkeypatch: pytest.MonkeyPatch, release: int | None, known: bool
) -> None:
    monkeypatch.setattr(java, "find_java", lambda: "java")
    monkeypatch.setattr(java, "java_version", lambda _java: release)
    assert ("-Djdk.lang.Process.launchMechanism=VFORK" in jvm_options(Tier.PEAK)) is known


def test_a_java_that_only_spark_knows_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise SetupError("TL-S14", "java", "none", "Install it.")

    monkeypatch.setattr(java, "find_java", none)
    assert jvm_options(Tier.QUICK)


def test_it_has_what_a_local_master_needs_and_no_zip() -> None:
    home = light_spark_home()
    assert home is not None
    assert (home / "bin" / "spark-submit").exists()
    assert list((home / "jars").glob("spark-core_*.jar"))
    assert not (home / "python").exists()
    assert (home / "conf").readlink() == (home / "jars").readlink().parent / "conf", "a configuration beside PySpark"
    assert light_spark_home() == home


@pytest.mark.parametrize("why", ["the user has a home", "links lead nowhere", "nothing can be written"])
def test_there_is_none_where_another_one_must_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str) -> None:
    home = light_spark_home()
    assert home is not None
    if why == "the user has a home":
        monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    elif why == "links lead nowhere":
        (home / "jars").unlink()
        (home / "jars").symlink_to(tmp_path / "removed")
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path / "file"))
    assert light_spark_home() is None


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with any uid."""

    def homeless() -> Path:
        raise RuntimeError

    for name in ("TOWLINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert light_spark_home() is None
    assert cached_spark_kafka_jars("4.3.0") == []
    with pytest.raises(SetupError, match="TL-S18"):
        resolve_jars("some", ["a:b:1"])


def test_each_pyspark_has_a_home_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Environments share the cache: with another's home the other's PySpark would run."""
    first = light_spark_home()
    (tmp_path / "other" / "pyspark" / "jars").mkdir(parents=True)
    other = types.SimpleNamespace(origin=str(tmp_path / "other" / "pyspark" / "__init__.py"))
    monkeypatch.setattr("towline.spark.java.find_spec", lambda _: other)
    second = light_spark_home()
    assert second is not None
    assert second != first
    assert (second / "jars").readlink() == tmp_path / "other" / "pyspark" / "jars"


@pytest.fixture
def jars(tmp_path: Path) -> Path:
    place = tmp_path / "jars"
    place.mkdir()
    (place / "a.jar").write_bytes(b"classes")
    return place


def make(archive: Path) -> list[Path]:
    """The drafts that were made."""
    drafts: list[Path] = []

    def run(place: Path, recording: str) -> None:
        draft = Path(recording.removeprefix("-XX:ArchiveClassesAtExit="))
        assert draft.parent == place
        draft.write_bytes(b"archive")
        drafts.append(draft)

    create_archive_once(archive, run)
    return drafts


def test_an_archive_is_made_once(jars: Path) -> None:
    archive = class_archive_path(jars, jars.with_name("some"))
    assert len(make(archive)) == 1
    assert archive.read_bytes() == b"archive"
    assert make(class_archive_path(jars, jars.with_name("some"))) == []


def test_jars_that_were_installed_anew_have_another_and_only_the_old_one_goes(jars: Path) -> None:
    """Java would ignore it without a word, and every start would take twice as long again."""
    old, other = (class_archive_path(jars, jars.with_name(stem)) for stem in ("some", "other"))
    make(old)
    make(other)
    os.utime(jars / "a.jar", (1, 1))
    new = class_archive_path(jars, jars.with_name("some"))
    assert new != old
    assert len(make(new)) == 1
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True), "that of other jars stays"
