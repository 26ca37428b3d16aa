"""``towline`` that kills itself in a reload, when a gateway has its new settings: ``-m ...dying run FILE``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from towline.bridge.runtime.reload import Reloader
from towline.cli import main


def _start_gateway_and_die(*args: Any) -> None:
    _START_GATEWAY(*args)
    os.kill(os.getpid(), signal.SIGKILL)


_START_GATEWAY = Reloader._start_gateway

if __name__ == "__main__":
    Reloader._start_gateway = _start_gateway_and_die  # type: ignore[method-assign,assignment]
    main(sys.argv[1:])
