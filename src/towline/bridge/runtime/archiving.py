"""The archive of Spark's classes, made beside the first run of a bridge for the starts that follow."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from towline.errors import SetupError
from towline.spark.home import light_home
from towline.spark.masters import is_cluster
from towline.spark.quickstart import archive_of

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge

__all__ = ["Archiving"]


class Archiving:
    """Makes the archive in a process of its own that gives way to all others; once, and only with a local master.

    Args:
        bridge: What runs.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._begun = False
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin, unless it is there or was begun; call it when Spark is warm and has the cores no more to itself."""
        with self._lock:
            if self._begun or is_cluster(self._bridge.spark.master):
                return
            self._begun = True
            with contextlib.suppress(SetupError, OSError):
                home = light_home()
                if home is not None and not archive_of(home).exists():
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "towline.spark.quickstart"],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                    )

    def stop(self) -> None:
        """End it: what is half made is removed by the next one."""
        with self._lock:
            self._begun = True
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGTERM)
                self._process.wait()
