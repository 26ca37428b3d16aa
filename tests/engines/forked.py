"""Gateways forked from a process that has imported them, which takes ten times the CPU of what such a gateway does."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerProcess
    from pathlib import Path

    from towline.gateway.settings import GatewaySettings

_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(["__main__", "towline.gateway.process"])


class ForkedProcess:
    """A gateway process; a part of what `subprocess.Popen` has."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a forked gateway", timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork_gateway(
    settings: GatewaySettings,
    log: Path,
    *,
    drain_s: float | None = None,
    prepare: Callable[[], None] | None = None,
) -> ForkedProcess:
    """Start a gateway.

    Args:
        settings: Its settings.
        log: For its output.
        drain_s: In place of that of the settings.
        prepare: Called in the new process, before anything else; of a module that can be imported.
    """
    settings = settings.model_copy(update={"drain_s": drain_s})
    given = (settings.model_dump_json().encode(), log, prepare)
    process = _forkserver.Process(target=_run, args=given)
    process.start()
    return ForkedProcess(process)


def _run(settings: bytes, log: Path, prepare: Callable[[], None] | None) -> None:
    """In the new process."""
    from towline.gateway.process import main  # noqa: PLC0415 - long imported here, and by nobody who forks

    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = io.TextIOWrapper(io.BytesIO(settings))
    if prepare is not None:
        prepare()
    sys.exit(main())
