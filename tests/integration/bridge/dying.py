"""``towline`` that kills itself at a step of a reload: ``python -m tests.integration.bridge.dying STEP run FILE``."""

from __future__ import annotations

import functools
import os
import signal
import sys
from typing import Any, Final

from towline.bridge.runtime.reload import Reloader
from towline.cli import main

__all__ = ["STEPS"]

#: The steps of a reload between two effects: the method that is the last one before the kill.
STEPS: Final = {
    "the queries stand": "_hold_queries",
    "a gateway has its new settings": "_start_gateway",
}


def _die_at(step: str) -> None:
    inner = getattr(Reloader, STEPS[step])

    @functools.wraps(inner)
    def deadly(*args: Any) -> Any:
        inner(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(Reloader, STEPS[step], deadly)


if __name__ == "__main__":
    _die_at(sys.argv[1])
    main(sys.argv[2:])
