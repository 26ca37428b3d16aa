from __future__ import annotations

from pathlib import Path

import pytest

from towline.errors import SetupError
from towline.spark.java import spark_kafka_conf, spark_kafka_jars

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


def test_a_session_gets_the_jars_that_maven_brings(maven: Path) -> None:
    knows(maven, "4.2.0")
    (jar,) = spark_kafka_jars("9.9.9")
    assert spark_kafka_conf("9.9.9") == {"spark.jars": str(jar)}


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
