"""A local file system for checkpoints that starts no process.

Hadoop's own starts a ``chmod`` for every file that it makes, two in a micro-batch: 12 ms of the 75 that a small one
takes. The one used here, ``BareLocalFileSystem`` by GlobalMentor (Apache-2.0), asks Java to do it. It is a jar of 16
KB, which ``python -m towline.spark.localfs`` has Maven bring into the user's cache. Nothing needs it,
and nothing but a bridge with a local master uses it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from towline.errors import SetupError
from towline.spark.java import cache_directory, resolve_jars

_NAME: Final = "hadoop-bare-naked-local-fs"
_VERSION: Final = "0.1.0"
_PLACE: Final = f"{_NAME}-{_VERSION}"
#: Spark puts it behind its own jars (`AbstractCommandBuilder.buildClassPath`): an archive of their classes stays good,
#: which holds only for the beginning of a class path.
_BEHIND: Final = "SPARK_DIST_CLASSPATH"


def fetch() -> Path:
    """Have Maven bring the jar, once.

    Raises:
        SetupError: TL-S15 when Maven can't, TL-S18 when the cache can't be written.
    """
    return resolve_jars(_PLACE, [f"com.globalmentor:{_NAME}:{_VERSION}"], alone=True)


def class_path(environ: Mapping[str, str]) -> dict[str, str]:
    """What puts the jar on the class path of a JVM of Spark, as variables; none where it was not fetched.

    Args:
        environ: What that JVM inherits beside them.
    """
    cache = cache_directory()
    jar = cache / _PLACE / f"{_PLACE}.jar" if cache is not None else None
    if jar is None or not jar.is_file():
        return {}
    return {_BEHIND: os.pathsep.join(filter(None, (environ.get(_BEHIND), str(jar))))}


def settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The settings of a session that use it, where it is on the class path."""
    if f"{_PLACE}.jar" not in environ.get(_BEHIND, ""):
        return {}
    return {"spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"}


if __name__ == "__main__":
    try:
        fetch()
    except SetupError as problem:
        sys.exit(str(problem))
