"""Finds the running gateway of a state directory, or starts one.

Safe in Spark's forked workers, as `towline.gateway.client` is: no gRPC and no pydantic before a call.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from towline import files
from towline.errors import ConfigError, GatewayError, GatewayUnreachable, JournalLocked, TowlineError
from towline.files import check_owner
from towline.gateway.client import GatewayClient
from towline.gateway.endpoint import ERROR_FILE, LOG_FILE, GatewayEndpoint, error_from
from towline.processes import ProcessMark
from towline.timing import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from towline.gateway.settings import GatewaySettings

#: Longest time for a new gateway to listen, in seconds: recovery of a large journal and the start of Python.
START_S = 20.0

#: Longest time for a living gateway to say that it lives, in seconds.
_GLANCE_S = 5.0
#: Pause before another look, in seconds.
_GLANCE_PAUSE_S = 0.02
#: Pause before another try to start a gateway whose journal is locked, in seconds.
_RETRY_S = 0.3
#: Gateways started here: kept so that they can be reaped, never to be ended from here.
_children: list[subprocess.Popen[bytes]] = []


def discover(state_dir: Path) -> GatewayClient | None:
    """The running gateway of a state directory, which has just answered; None without one. Raises as `text_of`."""
    endpoint = GatewayEndpoint.read(state_dir)
    if endpoint is None or endpoint.process.gone():
        return None
    client = GatewayClient(endpoint.location)
    with contextlib.suppress(GatewayError):
        if client.status(timeout_s=_GLANCE_S)["journal"] == endpoint.journal:
            return client
    client.close()
    return None


def ensure(settings: GatewaySettings, *, owner_pid: int, log: Path | None = None) -> GatewayClient:
    """Attach to the running gateway of ``settings.state_dir``, or start one.

    The started gateway outlives this process and ends with ``owner_pid``, or is ended by `towline gateway --stop` where
    its settings say ``detached``. Callers that come at the same moment get the same gateway. A gateway of the same
    owner that nobody reads and that has other settings is ended first and started again; any other one is refused.
    Its output goes to `log`, by default ``gateway.log`` in the state directory.

    Raises:
        ConfigError: TL-C25 when the state directory can't be used, TL-J23 when it is another user's, TL-C27 when a
            gateway with other settings runs.
        GatewayUnreachable: TL-G02 when the gateway does not listen within `START_S` seconds.
        TowlineError: Whatever kept the gateway from starting, in its own words.
    """
    state_dir = settings.state_dir.absolute()
    deadline = time.monotonic() + START_S
    with _alone(state_dir, deadline):
        running = discover(state_dir)
        if running and _fits(running, settings, owner_pid, deadline):
            return running
        (state_dir / ERROR_FILE).unlink(missing_ok=True)
        owner = None if settings.detached else owner_pid
        own = settings.model_copy(update={"state_dir": state_dir, "owner_pid": owner})
        return _launched(state_dir, own.model_dump_json().encode(), log or state_dir / LOG_FILE, deadline)


def end_running(state_dir: Path) -> None:
    """End the gateway of this machine that runs in a state directory, for another that goes on with its journal.

    Raises:
        ConfigError: TL-C25 when the state directory can't be used.
        GatewayError: TL-G02, it has been ending for `START_S` seconds.
    """
    deadline = time.monotonic() + START_S
    with _alone(state_dir.absolute(), deadline):
        endpoint = GatewayEndpoint.read(state_dir)
        if endpoint is not None and endpoint.process.runs_here():
            _end(endpoint.process, deadline)


def usable(state_dir: Path) -> None:
    """Make a state directory where there is none; raises ConfigError, TL-C25, when it can't be used."""
    os.close(state_lock(state_dir))


def state_lock(state_dir: Path, name: str = "starting.lock") -> int:
    """The open file of a state directory that one process at a time locks; raises as `usable`, which makes both."""
    check_owner(state_dir)
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return files.open_lock(state_dir / name)
    except OSError as error:
        what = f"the state directory can't be used ({error.strerror})"
        do = "Give a directory on a local disk that this user may write."
        raise ConfigError("TL-C25", str(state_dir), what, do) from error


@contextlib.contextmanager
def _alone(state_dir: Path, deadline: float) -> Iterator[None]:
    """Make the state directory and let one starter in at a time."""
    handle = state_lock(state_dir)
    try:
        _until(lambda: files.locked(handle), deadline, str(state_dir), "another process has been starting the gateway")
        yield
    finally:
        os.close(handle)


def _until(happened: Callable[[], bool], deadline: float, where: str, what: str) -> None:
    if not until(happened, deadline - time.monotonic()):
        raise _late(where, what, "It is tried again; look at that process if it stays.")


def _late(where: str, what: str, do: str) -> GatewayUnreachable:
    return GatewayUnreachable("TL-G02", where, f"{what} for {START_S:.0f} s", do)


def _fits(running: GatewayClient, settings: GatewaySettings, owner_pid: int, deadline: float) -> bool:
    """Whether the running gateway is what the settings ask for; an idle one of our own that is not is ended."""
    endpoint = GatewayEndpoint.read(settings.state_dir)
    if endpoint is None or endpoint.settings in ("", settings.digest()):
        return True
    readers = running.status()["readers"]
    running.close()
    if endpoint.owner_pid == owner_pid and not readers:
        _end(endpoint.process, deadline)
        return False
    what = (
        f'the gateway "{endpoint.name}" (pid {endpoint.pid}, since {endpoint.since}) runs here with other settings '
        "(broker, subscriptions, guarantee, limits ...)"
    )
    do = f"Stop its queries and then process {endpoint.pid} to start it with the new settings, or give this query a "
    raise ConfigError("TL-C27", str(settings.state_dir), what, do + "stateDir of its own.")


def _end(process: ProcessMark, deadline: float) -> None:
    if not process.gone():
        os.kill(process.pid, signal.SIGTERM)
    _until(process.gone, deadline, f"pid {process.pid}", "the gateway before has been ending")


def _start(settings: bytes, log: Path) -> subprocess.Popen[bytes]:
    _children[:] = [child for child in _children if child.poll() is None]
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "towline.gateway"],
            stdin=subprocess.PIPE,
            stdout=handle,
            stderr=handle,
            start_new_session=True,  # a Ctrl-C at the driver's terminal is not for the gateway
        )
    finally:
        os.close(handle)
    _children.append(child)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        pipe.write(settings)
    return child


def _launched(state_dir: Path, settings: bytes, log: Path, deadline: float) -> GatewayClient:
    """Start gateways until one answers: the one before may still be ending, or another starter was quicker."""
    locked: TowlineError | None = None
    child = _start(settings, log)
    while True:
        ended = child.poll() is not None
        if running := discover(state_dir):
            return running
        if ended and not isinstance(locked := _start_error(state_dir, child, log), JournalLocked):
            raise locked
        if time.monotonic() >= deadline:
            # Who holds the journal says more than that this try came too late.
            late = _late(str(state_dir), f"the gateway (pid {child.pid}) has been starting", f"See {log}.")
            raise locked or late
        time.sleep(_RETRY_S if ended else _GLANCE_PAUSE_S)
        if ended:
            child = _start(settings, log)


def _start_error(state_dir: Path, child: subprocess.Popen[bytes], log: Path) -> TowlineError:
    try:
        return error_from(json.loads((state_dir / ERROR_FILE).read_text()))
    except (OSError, ValueError, AttributeError):
        what = f"the gateway ended with code {child.returncode} before it listened"
        return GatewayError("TL-G02", str(state_dir), what, f"See {log}.")
