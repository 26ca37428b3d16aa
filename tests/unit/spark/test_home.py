from __future__ import annotations

from pathlib import Path

import pytest

from towline.spark.home import light_home


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


def test_the_home_of_an_environment_that_is_gone_goes_too(tmp_path: Path) -> None:
    gone = tmp_path / "spark-4.3.0-0123456789ab"
    gone.mkdir()
    (gone / "jars").symlink_to(tmp_path / "removed")
    (gone / "classes.jsa").touch()
    jars = tmp_path / "spark-kafka-4.2.0-4.0.0"
    jars.mkdir()
    home = light_home()
    assert home is not None
    assert sorted(tmp_path.iterdir()) == sorted((home, jars))
