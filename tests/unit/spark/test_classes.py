"""Archives of classes: one for each build of Java and for the very jars there are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from towline.spark.classes import archive_for, archive_once
from towline.spark.java import find_java


@pytest.fixture
def jars(tmp_path: Path) -> Path:
    place = tmp_path / "jars"
    place.mkdir()
    (place / "a.jar").write_bytes(b"classes")
    return place


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOWLINE_QUICK_START", raising=False)


def make(archive: Path) -> list[Path]:
    """The drafts that were made."""
    drafts: list[Path] = []

    def run(draft: Path) -> None:
        draft.write_bytes(b"archive")
        drafts.append(draft)

    archive_once(archive, run)
    return drafts


def test_an_archive_is_made_once(jars: Path) -> None:
    archive = archive_for(find_java(), jars, jars.with_name("some"))
    assert len(make(archive)) == 1
    assert archive.read_bytes() == b"archive"
    assert make(archive_for(find_java(), jars, jars.with_name("some"))) == []


def test_jars_that_were_installed_anew_have_another_and_the_old_one_goes(jars: Path) -> None:
    """Java would ignore it without a word, and every start would take twice as long again."""
    old = archive_for(find_java(), jars, jars.with_name("some"))
    make(old)
    os.utime(jars / "a.jar", (1, 1))
    new = archive_for(find_java(), jars, jars.with_name("some"))
    assert new != old
    assert len(make(new)) == 1
    assert (old.exists(), new.exists()) == (False, True)


def test_the_archive_of_other_jars_stays(jars: Path) -> None:
    one, other = (archive_for(find_java(), jars, jars.with_name(stem)) for stem in ("one", "other"))
    make(one)
    make(other)
    assert one.exists()
