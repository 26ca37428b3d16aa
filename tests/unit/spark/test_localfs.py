from __future__ import annotations

from pathlib import Path

import pytest

from towline.spark import localfs

NAME = "hadoop-bare-naked-local-fs-0.1.0"


@pytest.fixture
def jar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path))
    place = tmp_path / NAME / f"{NAME}.jar"
    place.parent.mkdir()
    place.touch()
    return place


def test_a_jar_that_is_there_is_put_behind_what_the_user_has(jar: Path) -> None:
    assert localfs.class_path_variables({}) == {"SPARK_DIST_CLASSPATH": str(jar)}
    assert localfs.class_path_variables({"SPARK_DIST_CLASSPATH": "/a.jar"}) == {"SPARK_DIST_CLASSPATH": f"/a.jar:{jar}"}
    assert localfs.download_jar() == jar.parent, "it is not fetched again"


def test_it_is_used_where_it_is_on_the_class_path_alone(jar: Path) -> None:
    used = localfs.session_settings(localfs.class_path_variables({}))
    assert used == {"spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"}
    assert localfs.session_settings({}) == {}
    assert localfs.session_settings({"SPARK_DIST_CLASSPATH": "/a.jar"}) == {}
    jar.unlink()
    assert localfs.class_path_variables({"SPARK_DIST_CLASSPATH": "/a.jar"}) == {}
