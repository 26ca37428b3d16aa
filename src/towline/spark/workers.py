"""Spark's Python workers, which serve many tasks each.

After every task a worker looks for cycles in all that it has loaded (``pyspark.daemon.manager`` calls ``gc.collect``):
30 ms of CPU in each of the four workers that a micro-batch with a Python source and a Python sink passes.
"""

from __future__ import annotations

import gc
import sys
from functools import cache
from typing import Final

__all__ = ["settle"]

_DAEMON: Final = "pyspark.daemon"


@cache
def settle() -> None:
    """Leave what is loaded by now out of every later search for cycles; for the beginning of whatever Spark calls.

    Does something in a worker of Spark, and there at its first call alone: what a task makes, a producer with its
    callbacks for example, must be found when it is thrown away.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if getattr(main, "name", "") == _DAEMON:
        gc.freeze()
