"""The gateway's side of the process that faces the network: starts it, hears it, and starts it again."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

import structlog

from towline.backoff import Backoff
from towline.errors import GatewayError
from towline.gateway.endpoint import error_from
from towline.threads import guarded_thread

if TYPE_CHECKING:
    from towline.errors import TowlineError
    from towline.gateway.settings import GatewaySettings

__all__ = ["NetworkFront"]

#: Longest time for it to listen, in seconds: the start of Python, and a port that is not free yet.
_START_S: Final = 30.0
#: Longest time for it to end calls that run, in seconds.
_END_S: Final = 5.0


class NetworkFront:
    """Keeps `towline.gateway.front` running.

    Args:
        settings: Of the gateway; it listens.
        gateway: Location of its unix socket.
        most_bytes: What it may have in memory; default a quarter of the machine's, 2 GB at least.

    Raises:
        TowlineError: What kept it from listening, such as TL-G45 for an address that is taken.
    """

    def __init__(self, settings: GatewaySettings, gateway: str, *, most_bytes: int | None = None) -> None:
        assert settings.listen is not None
        self._log = structlog.get_logger("towline.gateway").bind(line=settings.name)
        self._where = settings.listen.location
        self._told: dict[str, Any] = {
            "name": settings.name,
            "state_dir": str(settings.state_dir),
            "gateway": gateway,
            "most_bytes": most_bytes,
            "listen": settings.listen.model_dump(mode="json"),
        }
        self._status: dict[str, Any] = {}
        self._failure: TowlineError | None = None
        self._heard = threading.Event()
        self._closing = threading.Event()
        self._pauses = Backoff(first=0.1, most=10.0)
        self._process = self._start()
        self._thread = guarded_thread(self._keep, "network", again_s=1.0)
        self._thread.start()
        self._heard.wait(_START_S)
        if problem := self._problem():
            self.close()
            raise problem

    def _problem(self) -> TowlineError | None:
        """Why it does not listen; None if it does."""
        if self._status:
            return None
        late = GatewayError("TL-G45", self._where, "nothing listens yet", "See the gateway's log.")
        return self._failure or late

    @property
    def location(self) -> str:
        """Where it listens."""
        return str(self._status["location"])

    def status(self) -> dict[str, Any]:
        """What it said last; ``running`` tells whether it is there."""
        return {**self._status, "running": self._process.poll() is None}

    def close(self) -> None:
        """Let it end; calls that hang are not waited for."""
        self._closing.set()
        self._end(self._process)
        self._thread.join(_END_S)

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "towline.gateway.front"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # gRPC has a line on standard error for each handshake that fails: strangers would fill the disk.
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(self._told) + "\n")
            process.stdin.flush()
        return process

    def _keep(self) -> None:
        """Hear it until it ends, and start another; only the first one has to come up."""
        while True:
            refused_before = int(self._status.get("refused", 0))
            self._hear(self._process, refused_before)
            code = self._process.wait()
            _shut(self._process)
            self._heard.set()
            if self._closing.is_set() or not self._status:
                return
            why = self._failure.what if self._failure else "it was killed"
            self._log.warning("the network's process ended", code="TL-G49", exit=code, reason=why)
            if self._closing.wait(self._pauses.next()):
                return
            self._failure = None
            self._process = self._start()

    def _hear(self, process: subprocess.Popen[str], refused_before: int) -> None:
        assert process.stdout is not None
        if process.stdout.closed:
            return  # another could not be started
        with process.stdout as lines:
            for line in lines:
                words = json.loads(line)
                if "error" in words:
                    self._failure = error_from(words["error"])
                    return
                words["refused"] += refused_before
                self._status = words
                self._pauses.reset()
                # Another one listens on the same port, whichever was free at first.
                self._told["listen"]["address"] = words["location"].partition("://")[2]
                self._heard.set()

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        _shut(process)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _shut(process: subprocess.Popen[str]) -> None:
    """Close its standard input, which ends it."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
