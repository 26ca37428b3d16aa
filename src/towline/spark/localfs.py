"""Local file system for checkpoints that starts no process.

Hadoop's own starts a ``chmod`` for every file it creates, two in a micro-batch: 12 ms of the 75 of a small one. The one
used here, ``BareLocalFileSystem`` by GlobalMentor (Apache-2.0), sets permissions in Java. It is a jar of 16 KB;
``python -m towline.spark.localfs`` downloads it with Maven into the user's cache. It is optional, and only a bridge
with a local master uses it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from towline.errors import SetupError
from towline.spark.java import cache_directory, resolve_jars

_ARTIFACT: Final = "hadoop-bare-naked-local-fs"
_VERSION: Final = "0.1.0"
_JAR_STEM: Final = f"{_ARTIFACT}-{_VERSION}"
#: Spark appends it to its own jars (`AbstractCommandBuilder.buildClassPath`): an archive of their classes stays valid,
#: since it depends only on the beginning of the class path.
_EXTRA_CLASS_PATH: Final = "SPARK_DIST_CLASSPATH"


def download_jar() -> Path:
    """Download the jar with Maven, once.

    Raises:
        SetupError: TL-S15, Maven can't resolve it; TL-S18, the cache can't be written.
    """
    return resolve_jars(_JAR_STEM, [f"com.globalmentor:{_ARTIFACT}:{_VERSION}"], without_dependencies=True)


def class_path_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that add the jar to a Spark JVM's class path; empty if it was not downloaded.

    Args:
        environ: Environment of that JVM.
    """
    cache = cache_directory()
    jar = cache / _JAR_STEM / f"{_JAR_STEM}.jar" if cache is not None else None
    if jar is None or not jar.is_file():
        return {}
    return {_EXTRA_CLASS_PATH: os.pathsep.join(filter(None, (environ.get(_EXTRA_CLASS_PATH), str(jar))))}


def session_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the session settings for the file system, if its jar is on the class path."""
    if f"{_JAR_STEM}.jar" not in environ.get(_EXTRA_CLASS_PATH, ""):
        return {}
    return {"spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"}


if __name__ == "__main__":
    try:
        download_jar()
    except SetupError as problem:
        sys.exit(str(problem))
