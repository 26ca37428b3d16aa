"""Which PySpark is there, and which ones Towline works with; PySpark itself is not imported."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from towline.errors import SetupError

__all__ = ["PYSPARK", "check_pyspark", "pyspark_version"]

#: The first brought admission control for Python sources, the last is what `make test` runs on (docs/versions.md).
PYSPARK: Final = ((4, 2), (4, 3))


def pyspark_version() -> str | None:
    """As it says itself, also in ``$SPARK_HOME/python`` or its ``pyspark.zip``; None where there is none."""
    spec = find_spec("pyspark")
    data = getattr(spec and spec.loader, "get_data", None)
    if spec is None or spec.origin is None or data is None:
        return None
    text = data(str(Path(spec.origin).with_name("version.py"))).decode()
    version = re.search(r"""^__version__.*?=\s*["'](.+?)["']""", text, re.MULTILINE)
    return version[1] if version else None


def check_pyspark(where: str = "pyspark") -> tuple[str, bool]:
    """See that there is a PySpark that has what Towline is built on.

    Args:
        where: It is needed; begins the error.

    Returns:
        Its version, and whether Towline is tried with it.

    Raises:
        SetupError: TL-S20, with the line to type.
    """
    installed = pyspark_version()
    numbers = tuple(map(int, re.findall(r"\d+", installed or "")[:2]))
    if numbers >= PYSPARK[0]:
        return str(installed), numbers in PYSPARK
    what = "PySpark is not installed, which runs the lines of a bridge; a gateway, Publisher and pub do without"
    if installed is not None:
        what = f"PySpark is {installed}; Towline works with {' and '.join('.'.join(map(str, one)) for one in PYSPARK)}"
    raise SetupError("TL-S20", where, what, 'Type: pip install "towline[spark]"')
