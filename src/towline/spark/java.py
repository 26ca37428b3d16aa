"""Java, and jars fetched by their Maven coordinates into a cache that all processes of a user share."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from towline import files
from towline.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["OLDEST_JAVA", "cache_directory", "describe_java", "find_java", "java_version", "resolve_jars"]

OLDEST_JAVA = 17
"""Kafka 4 brokers and Spark 4 both ask for Java 17."""

RESOLVE_SECONDS = 600

POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>towline</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>
<dependencies>
{dependencies}
</dependencies></project>
"""
DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>{}</dependency>"
ALONE = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"


def cache_directory() -> Path | None:
    """Where downloads are kept: ``TOWLINE_CACHE``, else ``towline`` in the user's cache directory (XDG).

    Returns:
        None for a user without a home, as containers have them.
    """
    named = os.environ.get("TOWLINE_CACHE")
    if named:
        return Path(named).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "towline"
    except RuntimeError:
        return None


def find_java() -> Path:
    """A Java 17 or newer: that of ``JAVA_HOME`` first, then the one on PATH.

    Raises:
        SetupError: There is none, or only older ones (TL-S14).
    """
    home = os.environ.get("JAVA_HOME")
    found = [shutil.which("java", path=f"{home}/bin")] if home else []
    found.append(shutil.which("java"))
    versions = {Path(java): java_version(java) or 0 for java in found if java}
    for java, version in versions.items():
        if version >= OLDEST_JAVA:
            return java
    seen = ", ".join(f"{java} is version {version}" for java, version in versions.items()) or "there is none"
    advice = f"Run `make setup`, or install a Java runtime of version {OLDEST_JAVA} or newer."
    raise SetupError("TL-S14", "java", f"Kafka needs Java {OLDEST_JAVA} or newer, and {seen}", advice)


def java_version(java: str) -> int | None:
    """The feature release: 17 for ``17.0.15``, 8 for ``1.8.0_402``, None when it does not say."""
    match = re.search(r'version "(?:1\.)?(\d+)', describe_java(java))
    return int(match[1]) if match else None


@cache
def describe_java(java: str) -> str:
    """What ``java -version`` says: release, build and mode."""
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    return answer.stderr + answer.stdout


def resolve_jars(name: str, coordinates: Sequence[str], *, alone: bool = False) -> Path:
    """The directory with these artifacts and all they need at run time; Maven is asked once for each `name`.

    Two processes that ask at once wait for each other, and a directory appears only when it is complete.

    Args:
        name: The directory's name in the cache, with the version in it: what is there is never looked at again.
        coordinates: ``group:artifact:version`` each.
        alone: Only these, and nothing that they ask for.

    Raises:
        SetupError: Maven is missing, or can't resolve them (TL-S15); the cache can't be written (TL-S18).
    """
    cache = cache_directory()
    if cache is None:
        raise SetupError("TL-S18", name, "this user has no home, so there is no cache", "Set TOWLINE_CACHE.")
    target = cache / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.alone(target.parent / f"{name}.lock"):
            if not target.is_dir():
                _download(target, coordinates, ALONE if alone else "")
    except OSError as error:
        raise SetupError("TL-S18", str(target), error.strerror or str(error), "Set TOWLINE_CACHE.") from error
    return target


def _download(target: Path, coordinates: Sequence[str], exclusions: str) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise SetupError("TL-S15", "mvn", "Maven is missing, which fetches jars", "Run `make setup`.")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as draft:
        jars = Path(draft) / "jars"
        pom = Path(draft) / "pom.xml"
        dependencies = "\n".join(DEPENDENCY.format(*coordinate.split(":"), exclusions) for coordinate in coordinates)
        pom.write_text(POM.format(dependencies=dependencies), encoding="utf-8")
        _copy_dependencies(maven, pom, jars)
        jars.rename(target)


def _copy_dependencies(maven: str, pom: Path, jars: Path) -> None:
    goal = ["dependency:copy-dependencies", f"-DoutputDirectory={jars}", "-DincludeScope=runtime"]
    command = [maven, "-B", "-q", "-f", str(pom), *goal]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        what = f"gave no answer within {RESOLVE_SECONDS} s"
        raise SetupError("TL-S15", "mvn", what, "Look at the way to your repository.") from error
    if answer.returncode or not any(jars.glob("*.jar")):
        lines = [line for line in (answer.stdout + answer.stderr).splitlines() if line.startswith("[ERROR]")]
        what = lines[0].removeprefix("[ERROR]").strip() if lines else f"ended with exit code {answer.returncode}"
        advice = "Look at Maven's settings and the way to its repository, then try again."
        raise SetupError("TL-S15", "mvn", what.rstrip("."), advice)
