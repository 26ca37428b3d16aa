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

__all__ = ["is_light", "light_home", "sweep", "switched_off"]

#: Environment variable: ``off`` starts Spark as it is installed.
_SWITCH: Final = "TOWLINE_QUICK_START"
#: What a local master needs of its home; not ``python/lib``, where the zip is, which only YARN sends to its workers.
_PARTS: Final = ("bin", "sbin", "jars", "data", "conf")


def light_home() -> Path | None:
    """A ``SPARK_HOME`` for local masters, made on first use in the user's cache directory.

    Returns:
        None where the user has a ``SPARK_HOME``, ``TOWLINE_QUICK_START`` is ``off``, the cache can't be written, there
        is no PySpark, or it was moved and links lead nowhere: Spark's own home will do.
    """
    package, home = _package(), _place()
    if "SPARK_HOME" in os.environ or switched_off() or package is None or home is None:
        return None
    if not home.is_dir():
        with contextlib.suppress(OSError):  # another process was quicker, or nobody may write here
            _link(package, home)
    return home if (home / "jars").is_dir() else None


def switched_off() -> bool:
    """Whether nothing is to be kept in the cache that only makes starts shorter."""
    return os.environ.get(_SWITCH) == "off"


def is_light(home: str) -> bool:
    """Whether a ``SPARK_HOME`` is the one that `light_home` makes, which adds nothing to the installed Spark."""
    return Path(home) == _place()


def sweep() -> None:
    """Remove the homes whose PySpark is gone: the archive of classes in one has 160 MB.

    For set-ups only. A cache that two machines share may hold a home whose links lead somewhere on the other.
    """
    cache = cache_directory()
    for home in cache.glob("spark-*") if cache is not None else ():
        jars = home / "jars"
        if jars.is_symlink() and not jars.exists():
            shutil.rmtree(home, ignore_errors=True)


def _package() -> Path | None:
    """Where PySpark is installed."""
    spec = find_spec("pyspark")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _place() -> Path | None:
    """A home for each installation: two environments of a user have PySpark in two places."""
    package, cache = _package(), cache_directory()
    if package is None or cache is None:
        return None
    name = hashlib.sha256(os.fsencode(package.resolve())).hexdigest()[:12]
    return cache / f"spark-{version('pyspark')}-{name}"


def _link(package: Path, home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".spark-", dir=home.parent) as place:
        draft = Path(place) / home.name
        draft.mkdir()
        for part in _PARTS:
            (draft / part).symlink_to(package / part)
        draft.rename(home)
