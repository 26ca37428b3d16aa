from __future__ import annotations

import types
from pathlib import Path

import pytest

from towline.errors import SetupError
from towline.spark.connector import known_spark_kafka_jars
from towline.spark.home import is_light, light_home, sweep
from towline.spark.java import resolve_jars


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.delenv("TOWLINE_QUICK_START", raising=False)
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path))


def test_it_has_what_a_local_master_needs_and_no_zip() -> None:
    home = light_home()
    assert home is not None
    assert (home / "bin" / "spark-submit").exists()
    assert list((home / "jars").glob("spark-core_*.jar"))
    assert not (home / "python").exists()
    assert light_home() == home


def test_the_users_own_home_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert light_home() is None


def test_a_configuration_beside_pyspark_counts() -> None:
    home = light_home()
    assert home is not None
    assert (home / "conf").readlink() == (home / "jars").readlink().parent / "conf"


def test_links_into_nothing_are_no_home(tmp_path: Path) -> None:
    home = light_home()
    assert home is not None
    (home / "jars").unlink()
    (home / "jars").symlink_to(tmp_path / "removed")
    assert light_home() is None


def test_where_nothing_can_be_written_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path / "file"))
    assert light_home() is None


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOWLINE_QUICK_START", "off")
    assert light_home() is None
    assert not any(tmp_path.iterdir())


def test_the_home_of_an_environment_that_is_gone_can_be_swept_away(tmp_path: Path) -> None:
    gone = tmp_path / "spark-4.3.0-0123456789ab"
    gone.mkdir()
    (gone / "jars").symlink_to(tmp_path / "removed")
    (gone / "classes.jsa").touch()
    jars = tmp_path / "spark-kafka-4.2.0-4.0.0"
    jars.mkdir()
    home = light_home()
    assert home is not None
    assert gone.exists()
    sweep()
    assert sorted(tmp_path.iterdir()) == sorted((home, jars))


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with any uid."""

    def homeless() -> Path:
        raise RuntimeError

    for name in ("TOWLINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert light_home() is None
    assert not is_light("/opt/spark")
    assert known_spark_kafka_jars("4.3.0") == []
    with pytest.raises(SetupError, match="TL-S18"):
        resolve_jars("some", ["a:b:1"])


def test_each_pyspark_has_a_home_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Environments share the cache: with another's home the other's PySpark would run."""
    first = light_home()
    (tmp_path / "other" / "pyspark" / "jars").mkdir(parents=True)
    other = types.SimpleNamespace(origin=str(tmp_path / "other" / "pyspark" / "__init__.py"))
    monkeypatch.setattr("towline.spark.home.find_spec", lambda _: other)
    second = light_home()
    assert second is not None
    assert second != first
    assert (second / "jars").readlink() == tmp_path / "other" / "pyspark" / "jars"
