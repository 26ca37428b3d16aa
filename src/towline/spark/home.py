"""A home for Spark in which its Python processes start in a quarter of the time.

Spark starts some seven Python processes for a query with Python data sources, and puts ``$SPARK_HOME``'s zipped copy of
PySpark first on their path (`PythonUtils.sparkPythonPath`). Python writes no byte code for a zip, so each of them
compiles PySpark anew: 1.5 s instead of 0.35 s. Without that copy they take the installed PySpark, which is the same.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

__all__ = ["is_light", "light_home"]

#: What a local master needs of its home; not ``python/lib``, where the zip is, which only YARN sends to its workers.
_PARTS: Final = ("bin", "sbin", "jars", "data", "conf")


def light_home() -> Path | None:
    """A ``SPARK_HOME`` for local masters, made on first use in this Python environment's ``share/towline``.

    Returns:
        None where the user has a ``SPARK_HOME``, the environment's directory can't be written, or the links lead
        nowhere because PySpark was moved: Spark's own will do.
    """
    found = find_spec("pyspark")
    if "SPARK_HOME" in os.environ or found is None or found.origin is None:
        return None
    home = _place()
    if not home.is_dir():
        with contextlib.suppress(OSError):  # another process was quicker, or nobody may write here
            _link(Path(found.origin).parent, home)
    return home if (home / "jars").is_dir() else None


def is_light(home: str) -> bool:
    """Whether a ``SPARK_HOME`` is the one that `light_home` makes, which adds nothing to the installed Spark."""
    return Path(home) == _place()


def _place() -> Path:
    return Path(sys.prefix) / "share" / "towline" / f"spark-{version('pyspark')}"


def _link(package: Path, home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".spark-", dir=home.parent) as place:
        draft = Path(place) / home.name
        draft.mkdir()
        for part in _PARTS:
            (draft / part).symlink_to(package / part)
        draft.rename(home)
