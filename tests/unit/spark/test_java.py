from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from towline.errors import ConfigError, SetupError
from towline.spark import java
from towline.spark.java import cache_directory, find_java, resolve_jars, spark_kafka_conf, spark_kafka_jars


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


@pytest.mark.parametrize(
    ("home", "on_path", "found"),
    [
        (None, "21.0.1", "path"),
        ("21.0.1", "17.0.1", "home"),
        ("11.0.2", "17.0.1", "path"),
        (None, None, r"needs Java 17 or newer, and there is none\. Install Java 17 .*TL-S14"),
        (None, "11.0.2", r"java is version 11.*TL-S14"),
        (None, "unknown", r"java is version 0.*TL-S14"),
    ],
)
def test_java_home_comes_before_the_path_and_an_old_java_is_passed_over(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None, on_path: str | None, found: str
) -> None:
    places = {"home": tmp_path / "home" / "bin" / "java", "path": alone / "java"}
    for place, version in ((places["home"], home), (places["path"], on_path)):
        if version:
            fake_java(place, version)
    if home:
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    if found in places:
        assert find_java() == places[found]
        return
    with pytest.raises(SetupError, match=found):
        find_java()


def test_the_cache_is_the_named_directory_or_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("TOWLINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "towline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "towline"


def test_a_cache_where_others_can_put_jars_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there goes onto class paths: it is code of whoever put it there."""
    shared = tmp_path / "shared"
    shared.mkdir()
    cache = shared / "cache"
    monkeypatch.setenv("TOWLINE_CACHE", str(cache))
    for mode in (0o777, 0o1777):
        shared.chmod(mode)
        if mode == 0o777:  # whoever may rename it may put another one there
            with pytest.raises(ConfigError, match=f"^cache {cache}: any user may write in {shared}, .*TL-C193"):
                cache_directory()
        else:
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


def test_jars_are_fetched_once_into_a_cache_for_this_user_alone(alone: Path) -> None:
    """By two processes at once, and by one that comes later."""
    maven = fake_maven(alone / "mvn")
    code = "from towline.spark.java import resolve_jars; print(resolve_jars('kafka-1', ['g:a:1']))"
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate()[0].strip() for process in both}
    assert said == {str(alone.parent / "cache" / "kafka-1")} == {str(resolve_jars("kafka-1", ["g:a:1"]))}
    assert [jar.name for jar in (alone.parent / "cache" / "kafka-1").iterdir()] == ["a.jar"]
    assert (maven.parent / "calls").read_text().split() == ["called"]
    assert stat.S_IMODE((alone.parent / "cache").stat().st_mode) == 0o700


def test_no_maven(alone: Path) -> None:
    with pytest.raises(SetupError, match=r"Maven is missing.*apt install maven.*TL-S15"):
        resolve_jars("kafka-1", ["g:a:1"])


@pytest.mark.parametrize(
    ("output", "cause"),
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
    ],
)
def test_the_cause_that_maven_gives_is_told_in_one_line(alone: Path, output: str, cause: str) -> None:
    """Debian's Maven begins with escape sequences, whatever it writes to: "can't be had ()"."""
    said = Path(__file__).parent / "maven_3_8_7" / f"{output}.txt"
    program(alone / "mvn", f"/bin/cat {said}; exit 1")
    with pytest.raises(SetupError, match=f"^mvn: {cause}\\. Check Maven's settings .*TL-S15") as caught:
        resolve_jars("kafka-1", ["g:a:1"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("code", "said"), [(1, "exit code 1.*TL-S15"), (0, "TL-S15")])
def test_a_failed_fetch_leaves_nothing_behind(alone: Path, code: int, said: str) -> None:
    program(alone / "mvn", f"exit {code}")
    with pytest.raises(SetupError, match=said):
        resolve_jars("kafka-1", ["g:a:1"])
    assert [path.name for path in (alone.parent / "cache").iterdir()] == ["kafka-1.lock"]
    fake_maven(alone / "mvn")
    assert resolve_jars("kafka-1", ["g:a:1"]).is_dir()


def test_a_cache_that_can_not_be_written(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SetupError, match=r"Not a directory\. Set TOWLINE_CACHE.*TL-S18"):
        resolve_jars("kafka-1", ["g:a:1"])


#: A Maven that knows some versions of the connector only, writes down what it is asked, and brings one jar.
MAVEN = """#!/bin/sh
PATH=/usr/bin:/bin
for word in "$@"; do case "$word" in -DoutputDirectory=*) out="${word#*=}";; *pom.xml) pom="$word";; esac; done
cat "$pom" >> "$(dirname "$0")/asked"
grep -q "<version>KNOWN</version>" "$pom" || { echo "[ERROR] not found"; exit 1; }
mkdir -p "$out"; touch "$out/a.jar"
"""


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "bin" / "mvn"
    place.parent.mkdir()
    monkeypatch.setenv("PATH", str(place.parent))
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path / "cache"))
    return place


def knows(maven: Path, version: str) -> None:
    maven.write_text(MAVEN.replace("KNOWN", version))
    maven.chmod(0o755)


def test_the_matching_version_comes_first(maven: Path) -> None:
    knows(maven, "9.9.9")
    (jar,) = spark_kafka_jars("9.9.9")
    assert jar.parent.name == "spark-kafka-9.9.9-9.9.9"
    assert maven.with_name("asked").read_text().count("<exclusion>") == 4, "nothing that nobody asked for"


def test_the_tested_pair_is_next_and_is_remembered(maven: Path) -> None:
    knows(maven, "4.2.0")
    first = spark_kafka_jars("9.9.9")
    assert first[0].parent.name == "spark-kafka-4.2.0-4.0.0"
    asked = maven.with_name("asked").read_text()
    assert spark_kafka_jars("9.9.9") == first
    assert maven.with_name("asked").read_text() == asked
    assert spark_kafka_conf("9.9.9") == {"spark.jars": str(first[0])}


def test_without_maven_spark_brings_them_itself(maven: Path) -> None:
    """Who installed with pip has Java and no Maven."""
    assert spark_kafka_conf("9.9.9") == {
        "spark.jars.packages": "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
        "spark.jars.excludes": "org.apache.hadoop:hadoop-client-api,org.apache.hadoop:hadoop-client-runtime",
    }


def test_neither_is_one_line(maven: Path) -> None:
    knows(maven, "1.0.0")
    with pytest.raises(SetupError, match=r"mvn: not found\. .*TL-S15"):
        spark_kafka_jars("9.9.9")
