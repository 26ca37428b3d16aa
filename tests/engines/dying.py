"""Processes that kill themselves before or after a call: a gateway, and ``towline`` itself.

``python -m tests.engines.dying MODULE:CLASS.METHOD run FILE`` is ``towline run FILE`` that dies after that call.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def die_at(
    place: str, when: str = "after", is_due: Callable[[tuple[Any, ...], object], bool] = lambda _args, _answer: True
) -> None:
    """Have this process killed by a call: ``module:Class.method``, ``before`` or ``after`` it, when one is due."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for one in outer:
        owner = getattr(owner, one)
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def deadly(*args: Any, **named: Any) -> Any:
        if when == "before" and is_due(args, None):
            os.kill(os.getpid(), signal.SIGKILL)
        answer = inner(*args, **named)
        if when == "after" and is_due(args, answer):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, name, deadly)


if __name__ == "__main__":
    from towline.cli import main

    die_at(sys.argv[1])
    main(sys.argv[2:])
