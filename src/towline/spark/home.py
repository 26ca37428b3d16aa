"""A home for Spark in which its Python processes start in a quarter of the time.

Spark starts some seven Python processes for a query with Python data sources, and puts ``$SPARK_HOME``'s zipped copy of
PySpark first on their path (`PythonUtils.sparkPythonPath`). Python writes no byte code for a zip, so each of them
compiles PySpark anew: 1.5 s instead of 0.35 s. Without that copy they take the installed PySpark, which is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from towline.spark.java import cache_directory

__all__ = ["is_light", "light_home", "switched_off"]

#: Environment variable: ``off`` starts Spark as it is installed.
_SWITCH: Final = "TOWLINE_QUICK_START"
#: What a local master needs of its home; not ``python/lib``, where the zip is, which only YARN sends to its workers.
_PARTS: Final = ("bin", "sbin", "jars", "data", "conf")


def light_home() -> Path | None:
    """A ``SPARK_HOME`` for local masters, made on first use in the user's cache directory.

    Returns:
        None where the user has a ``SPARK_HOME``, ``TOWLINE_QUICK_START`` is ``off``, the cache can't be written, or
        there is no PySpark: Spark's own home will do.
    """
    package = _package()
    if "SPARK_HOME" in os.environ or switched_off() or package is None:
        return None
    home = _place(package)
    if not home.is_dir():
        with contextlib.suppress(OSError):  # another process was quicker, or nobody may write here
            _link(package, home)
    return home if (home / "jars").is_dir() else None


def switched_off() -> bool:
    """Whether nothing is to be kept in the cache that only makes starts shorter."""
    return os.environ.get(_SWITCH) == "off"


def is_light(home: str) -> bool:
    """Whether a ``SPARK_HOME`` is the one that `light_home` makes, which adds nothing to the installed Spark."""
    package = _package()
    return package is not None and Path(home) == _place(package)


def _package() -> Path | None:
    """Where PySpark is installed."""
    spec = find_spec("pyspark")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _place(package: Path) -> Path:
    """A home for each installation: two environments of a user have PySpark in two places."""
    name = hashlib.sha256(os.fsencode(package.resolve())).hexdigest()[:12]
    return cache_directory() / f"spark-{version('pyspark')}-{name}"


def _link(package: Path, home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".spark-", dir=home.parent) as place:
        draft = Path(place) / home.name
        draft.mkdir()
        for part in _PARTS:
            (draft / part).symlink_to(package / part)
        draft.rename(home)
    _sweep(home.parent)


def _sweep(cache: Path) -> None:
    """Remove the homes of environments that are gone: an archive of classes in one has 160 MB."""
    for home in cache.glob("spark-*"):
        jars = home / "jars"
        if jars.is_symlink() and not jars.exists():
            shutil.rmtree(home, ignore_errors=True)
