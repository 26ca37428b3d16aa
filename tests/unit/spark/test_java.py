"""Java, jars in a cache that several processes share, Spark's home, and an archive of classes."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from towline.errors import ConfigError, SetupError
from towline.spark import java
from towline.spark.java import (
    cache_directory,
    check_java,
    find_java,
    light_spark_home,
    local_fs_settings,
    local_fs_variables,
    resolve_jars,
    spark_kafka_conf,
    spark_kafka_jars,
)

Said = tuple[int, str]


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it, and a cache of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path / "cache"))
    for name in ("JAVA_HOME", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(java, "describe_java", lambda path: f'openjdk version "{Path(path).read_text()}" 2025-04-15')
    return folder


def program(place: Path, text: str = "") -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    place.chmod(0o755)
    return place


class Maven:
    """Brings one jar where it is told to, for poms that it knows; says an error for others."""

    def __init__(self, knows: str = "", error: Said = (1, "[ERROR] not found")) -> None:
        self.poms: list[str] = []
        self._knows, self._error = knows, error

    def __call__(self, command: list[str], _timeout_s: float) -> subprocess.CompletedProcess[str]:
        (out,) = (word.partition("=")[2] for word in command if word.startswith("-DoutputDirectory="))
        self.poms.append(Path(command[command.index("-f") + 1]).read_text())
        time.sleep(0.02)
        if self._knows not in self.poms[-1]:
            return subprocess.CompletedProcess(command, *self._error, "")
        Path(out).mkdir(parents=True)
        (Path(out) / "a.jar").touch()
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def maven(programs: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Maven]:
    def install(*given: str | Said) -> Maven:
        program(programs / "mvn")
        made = Maven(*given)  # type: ignore[arg-type]
        monkeypatch.setattr(java, "_run", made)
        return made

    return install


@pytest.mark.parametrize(
    ("home", "on_path", "found"),
    [
        (None, "21.0.1", "path"),
        ("21.0.1", "17.0.1", "home"),
        (None, "unknown", "path"),
        ("11.0.2", "17.0.1", r"java is version 11.*TL-S21"),
        ("", "17.0.1", r"JAVA_HOME is .*/home, which has no bin/java.*TL-S21"),
        (
            None,
            None,
            r"Java 17 or newer, and there is none on PATH\. Install Java 17 .*TL-S21",
        ),
        (None, "1.8.0_402", r"java is version 8.*TL-S21"),
    ],
)
def test_java_is_found_where_spark_looks(programs: Path, home: str | None, on_path: str | None, found: str) -> None:
    """In JAVA_HOME, where it is set, and then not on the PATH."""
    places = {"home": programs.with_name("home") / "bin" / "java", "path": programs / "java"}
    for place, version in ((places["home"], home), (places["path"], on_path)):
        if version:
            program(place, version)
    environ = {"PATH": str(programs)} | ({} if home is None else {"JAVA_HOME": str(programs.with_name("home"))})
    if found in places:
        assert find_java(environ) == places[found]
        return
    with pytest.raises(SetupError, match=found):
        check_java(environ)
    for name in ("SPARK_HOME", "SPARK_CONF_DIR"):  # its own files may name one
        check_java({**environ, name: "/opt/spark"})


# -- jars ------------------------------------------------------------------------------------------------------------


def test_a_cache_where_others_can_put_jars_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there goes onto class paths: it is code of whoever put it there."""
    shared = tmp_path / "shared"
    shared.mkdir()
    cache = shared / "cache"
    monkeypatch.setenv("TOWLINE_CACHE", str(cache))
    shared.chmod(0o777)  # whoever may rename it may put another one there
    with pytest.raises(ConfigError, match=f"^cache {cache}: any user may write in {shared}, .*TL-C193"):
        cache_directory()
    shared.chmod(0o1777)
    assert cache_directory() == cache
    monkeypatch.setenv("TOWLINE_CACHE", str(shared))
    with pytest.raises(ConfigError, match=r"any user may write in .*\[TL-C193\]"):
        resolve_jars("kafka-1", ["g:a:1"])
    shared.chmod(0o2770)  # as a volume of Kubernetes has it: of the pod's own group
    assert cache_directory() == shared


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made before ours in a directory like /tmp, or reached by a link of theirs."""
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    (tmp_path / "link").symlink_to("theirs")
    for name in ("theirs", "theirs/below", "link"):
        monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path / name))
        with pytest.raises(ConfigError, match=r"theirs belongs to another user.*TL-C193"):
            cache_directory()


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container that runs with any uid."""

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.delenv("TOWLINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "towline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert light_spark_home() is None
    with pytest.raises(SetupError, match="TL-S18"):
        resolve_jars("some", ["a:b:1"])
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SetupError, match=r"Not a directory\. Set TOWLINE_CACHE.*TL-S18"):
        resolve_jars("some", ["a:b:1"])


def test_jars_are_fetched_once_into_a_cache_for_this_user_alone(maven: Callable[..., Maven], tmp_path: Path) -> None:
    """By two at once, and by one that comes later."""
    fetched = maven()
    with ThreadPoolExecutor(2) as pool:
        both = {pool.submit(resolve_jars, "kafka-1", ["g:a:1"]) for _ in range(2)}
    cache = tmp_path / "cache"
    assert {one.result() for one in both} == {cache / "kafka-1"} == {resolve_jars("kafka-1", ["g:a:1"])}
    assert [jar.name for jar in (cache / "kafka-1").iterdir()] == ["a.jar"]
    assert len(fetched.poms) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "no_repository",
            (
                r"Could not transfer artifact org\.apache\.maven\.plugins:maven-dependency-plugin:pom:2\.8 from/to m "
                r"\(http://127\.0\.0\.1:9/maven\): .*: Connect to 127\.0\.0\.1:9 .* failed: Connection refused"
            ),
        ),
        (
            "no_artifact",
            r"Could not find artifact org\.apache\.kafka:kafka-clients:jar:3\.9\.99 in central \(https://…@nexus.example/maven\)",
        ),
        ("", "ended with exit code 1"),
    ],
)
def test_a_failed_fetch_tells_its_cause_in_one_line_and_leaves_nothing_behind(
    maven: Callable[..., Maven], tmp_path: Path, error: str, said: str
) -> None:
    """Debian's Maven begins with escape sequences, whatever it writes to: "can't be had ()"."""
    output = (Path(__file__).parent / "maven_3_8_7" / f"{error}.txt").read_text() if error else ""
    maven("another", (1, output))
    with pytest.raises(SetupError, match=f"^mvn: {said}\\. Check Maven's settings .*TL-S15") as caught:
        resolve_jars("kafka-1", ["g:a:1"])
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["kafka-1.lock"]
    maven()
    assert resolve_jars("kafka-1", ["g:a:1"]).is_dir()


def test_maven_brings_the_jars_of_sparks_kafka_source_once(maven: Callable[..., Maven]) -> None:
    asked = maven().poms
    found = spark_kafka_jars()
    assert spark_kafka_conf() == {"spark.jars": str(found[0])}
    (pom,) = asked
    assert pom.count("<exclusion>") == 4, "nothing that nobody asked for"


def test_without_maven_spark_brings_them_itself() -> None:
    """Who installed with pip has Java and no Maven."""
    assert spark_kafka_conf() == {
        "spark.jars.packages": "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
        "spark.jars.excludes": "org.apache.hadoop:hadoop-client-api,org.apache.hadoop:hadoop-client-runtime",
    }
    with pytest.raises(SetupError, match=r"Maven is missing.*apt install maven.*TL-S15"):
        spark_kafka_jars()


def test_the_jar_of_checkpoints_is_put_behind_what_the_user_has(
    tmp_path: Path,
) -> None:
    assert local_fs_variables({"SPARK_DIST_CLASSPATH": "/a.jar"}) == {}
    jar = tmp_path / "cache" / "hadoop-bare-naked-local-fs-0.1.0" / "hadoop-bare-naked-local-fs-0.1.0.jar"
    jar.parent.mkdir(0o700, parents=True)
    jar.touch()
    found = local_fs_variables({"SPARK_DIST_CLASSPATH": "/a.jar"})
    assert found == {"SPARK_DIST_CLASSPATH": f"/a.jar:{jar}"}
    used = {"spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"}
    assert (local_fs_settings(found), local_fs_settings({})) == (used, {})
