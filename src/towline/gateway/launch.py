"""Finds or starts the gateway of a state directory.

Safe in Spark's forked workers, as `towline.gateway.client` is: no gRPC and no pydantic before a call.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
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
from towline.timing import poll_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from towline.gateway.settings import GatewaySettings
    from towline.processes import ProcessIdentity

#: Longest time for a new gateway to listen, in seconds: recovery of a large journal and the start of Python.
START_TIMEOUT_S = 20.0

#: Timeout for the status of a running gateway, in seconds.
_STATUS_TIMEOUT_S = 5.0
#: Longest wait for a replaced gateway to end, in seconds; then it is killed: what it acknowledged is on disk [I2].
_END_TIMEOUT_S = 8.0
#: Pause between two checks for the gateway's endpoint, in seconds.
_POLL_S = 0.02
_RETRIED = "It is retried; check that process if this repeats."
#: Pause before the next attempt to start a gateway whose journal is locked, in seconds.
_RETRY_S = 0.3
#: Gateways started by this process, kept to reap them; it never stops them.
_children: list[subprocess.Popen[bytes]] = []


def find_running(state_dir: Path) -> GatewayClient | None:
    """Return a client of the running gateway, once it has answered; None if none runs. Raises as `read_state_file`."""
    endpoint = GatewayEndpoint.read(state_dir)
    if endpoint is None or endpoint.process.has_ended():
        return None
    client = GatewayClient(endpoint.location)
    with contextlib.suppress(GatewayError):
        if client.status(timeout_s=_STATUS_TIMEOUT_S)["journal"] == endpoint.journal:
            return client
    client.close()
    return None


def ensure_running(
    settings: GatewaySettings, *, owner_pid: int, log: Path | None = None, replace: bool = False
) -> GatewayClient:
    """Connect to the running gateway of ``settings.state_dir``, or start one.

    The started gateway outlives this process and ends with ``owner_pid``; with ``detached`` in its settings it runs
    until `towline gateway --stop`. Concurrent callers get the same gateway. A gateway of the same owner with other
    settings and without readers is replaced; any other one raises an error. With `replace` the owner's is replaced in
    any case, also one that hangs: nobody may read from it. The new process loads before the former one ends, so that a
    line is without gateway for a moment only. Output goes to `log`, by default ``gateway.log`` in the state directory.

    Raises:
        ConfigError: TL-C25 if the state directory can't be used, TL-J23 if it is another user's, TL-C27 if a gateway
            with other settings runs.
        GatewayUnreachable: TL-G02 if the gateway does not listen within `START_TIMEOUT_S` seconds.
        TowlineError: The error that stopped the gateway from starting.
    """
    state_dir = settings.state_dir.absolute()
    deadline = time.monotonic() + START_TIMEOUT_S
    with _start_lock(state_dir, deadline):
        endpoint = GatewayEndpoint.read(state_dir) if replace else None
        previous = endpoint.process if endpoint is not None and endpoint.owner_pid == owner_pid else None
        if previous is None and (client := find_running(state_dir)):
            if (previous := _replaceable_gateway(client, settings, owner_pid)) is None:
                return client
            client.close()
        (state_dir / ERROR_FILE).unlink(missing_ok=True)
        owner = None if settings.detached else owner_pid
        settings = settings.model_copy(update={"state_dir": state_dir, "owner_pid": owner})
        log = log or state_dir / LOG_FILE
        return _start_until_running(state_dir, settings.model_dump_json().encode(), log, deadline, previous)


def stop_running(state_dir: Path) -> None:
    """Stop the gateway that runs in a state directory on this machine, so that another can take over its journal.

    Raises:
        ConfigError: TL-C25 if the state directory can't be used.
        GatewayError: TL-G02, it did not end within `START_TIMEOUT_S` seconds.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    with _start_lock(state_dir.absolute(), deadline):
        endpoint = GatewayEndpoint.read(state_dir)
        if endpoint is not None and not _terminate(endpoint.process, deadline - time.monotonic()):
            raise _start_timeout(f"pid {endpoint.pid}", "the previous gateway has been ending", _RETRIED)


def prepare_state_dir(state_dir: Path) -> None:
    """Create a state directory if it is missing; raises ConfigError, TL-C25, if it can't be used."""
    os.close(open_state_lock(state_dir))


def open_state_lock(state_dir: Path, name: str = "starting.lock") -> int:
    """Open a lock file of a state directory, which is created if missing; raises as `prepare_state_dir`."""
    check_owner(state_dir)
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return files.open_lock(state_dir / name)
    except OSError as error:
        problem = f"the state directory can't be used ({error.strerror})"
        remedy = "Give a directory on a local disk that this user may write."
        raise ConfigError("TL-C25", str(state_dir), problem, remedy) from error


@contextlib.contextmanager
def _start_lock(state_dir: Path, deadline: float) -> Iterator[None]:
    """Create the state directory and hold its start lock."""
    lock_fd = open_state_lock(state_dir)
    try:
        if not poll_until(lambda: files.try_lock(lock_fd), deadline - time.monotonic()):
            raise _start_timeout(str(state_dir), "another process has been starting the gateway", _RETRIED)
        yield
    finally:
        os.close(lock_fd)


def _start_timeout(location: str, problem: str, remedy: str) -> GatewayUnreachable:
    return GatewayUnreachable("TL-G02", location, f"{problem} for {START_TIMEOUT_S:.0f} s", remedy)


def _replaceable_gateway(client: GatewayClient, settings: GatewaySettings, owner_pid: int) -> ProcessIdentity | None:
    """Return the running gateway if it has other settings and may be replaced; None if it has these; or TL-C27."""
    endpoint = GatewayEndpoint.read(settings.state_dir)
    if endpoint is None or endpoint.settings in ("", settings.digest()):
        return None
    if endpoint.owner_pid == owner_pid and not client.status()["readers"]:
        return endpoint.process
    client.close()
    problem = (
        f'the gateway "{endpoint.name}" (pid {endpoint.pid}, since {endpoint.since}) runs here with other settings '
        "(broker, subscriptions, guarantee, limits ...)"
    )
    remedy = f"Stop its queries, then process {endpoint.pid}, to start it with these settings, or set another stateDir."
    raise ConfigError("TL-C27", str(settings.state_dir), problem, remedy)


def _terminate(process: ProcessIdentity, timeout_s: float) -> bool:
    """End a process of this machine; return False if it still runs after the timeout."""
    if process.is_running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
            return poll_until(process.has_ended, timeout_s)
    return True


def _spawn(settings: bytes, log: Path, deadline: float, previous: ProcessIdentity | None) -> subprocess.Popen[bytes]:
    """Start a gateway process; end the previous one when the new one has loaded its modules."""
    _children[:] = [child for child in _children if child.poll() is None]
    ours, theirs = socket.socketpair()
    with ours:
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "towline.gateway"],
                stdin=theirs.fileno(),
                stdout=log_fd,
                stderr=log_fd,
                start_new_session=True,  # a Ctrl-C at the driver's terminal is not for the gateway
            )
        finally:
            os.close(log_fd)
            theirs.close()
        _children.append(child)
        ours.settimeout(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(OSError):  # a process that has ended has written its error
            ours.recv(1)
        if previous is not None and not _terminate(previous, _END_TIMEOUT_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(previous.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            ours.sendall(settings)
    return child


def _start_until_running(
    state_dir: Path, settings: bytes, log: Path, deadline: float, previous: ProcessIdentity | None
) -> GatewayClient:
    """Start gateways until one answers: the previous one may still be ending, or another caller was quicker."""
    start_error: TowlineError | None = None
    child = _spawn(settings, log, deadline, previous)
    while True:
        has_exited = child.poll() is not None
        if client := find_running(state_dir):
            return client
        if has_exited and not isinstance(start_error := _start_error(state_dir, child, log), JournalLocked):
            raise start_error
        if time.monotonic() >= deadline:
            # The error of the locked journal says more than the timeout.
            timeout = _start_timeout(str(state_dir), f"the gateway (pid {child.pid}) has been starting", f"See {log}.")
            raise start_error or timeout
        time.sleep(_RETRY_S if has_exited else _POLL_S)
        if has_exited:
            child = _spawn(settings, log, deadline, None)


def _start_error(state_dir: Path, child: subprocess.Popen[bytes], log: Path) -> TowlineError:
    try:
        return error_from(json.loads((state_dir / ERROR_FILE).read_text()))
    except (OSError, ValueError, AttributeError):
        problem = f"the gateway ended with code {child.returncode} before it listened"
        return GatewayError("TL-G02", str(state_dir), problem, f"See {log}.")
