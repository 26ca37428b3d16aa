"""Removal of a line and its state, without loss: `towline retire`.

    the gateway drains (`towline.gateway.sessions`), with the settings that the line was last started with
    uplink: Spark writes the waiting messages to Kafka, from the line's checkpoint; downlink: the outbox is sent
    nothing waits, and no broker has a session of the line
    the directory is removed in one step

After a kill between two steps the same command continues.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Final

from towline.bridge.config.model import AnyLine, Bridge, Downlink
from towline.bridge.lines import identity
from towline.bridge.runtime.screen import Screen
from towline.bridge.runtime.session import SCRATCH_DIR
from towline.bridge.runtime.state import BRIDGE_FILE
from towline.bridge.runtime.supervisor import Supervisor, lock_state_directory
from towline.errors import ConfigError, GatewayError
from towline.gateway.identity import read_client_sessions, record_session_end
from towline.gateway.launch import stop_running
from towline.gateway.process import run
from towline.gateway.sessions import check_drainable, end_session
from towline.journal.outbox import count_waiting_rows
from towline.text import count_text

#: Seconds until the session of a downlink counts as empty: it has no subscription.
_DOWN_IDLE_S: Final = 1.0


def retire(bridge: Bridge, name: str, screen: Screen, *, idle_s: float = 30.0, discard: bool = False) -> str:
    """Deliver the waiting messages of a line of this or a former file, end its session and remove its directory.

    No bridge may run meanwhile. A session without a message for `idle_s` seconds counts as empty. With `discard` the
    waiting messages and those of the session are dropped instead.

    Raises:
        ConfigError: TL-B10, a bridge runs; TL-B38, TL-G57, the line can't be drained; TL-C73, there is no such line.
        GatewayError: TL-B39, messages still wait; nothing was removed.
        TowlineError: The gateway or the query can't run.
    """
    directory, line = bridge.state_dir / name, identity.current_or_former_line(bridge, name)
    with lock_state_directory(bridge):
        if not discard:
            _check_drainable(line)
            idle_s = min(idle_s, _DOWN_IDLE_S) if isinstance(line, Downlink) else idle_s
            drain_settings = line.gateway.model_copy(update={"drain_s": idle_s})
            _deliver_waiting(bridge, line.model_copy(update={"gateway": drain_settings}), screen)
        dropped_count = sum(count_waiting_rows(directory / journal) for journal in identity.JOURNAL_DIRECTORIES)
        for settings in line.all_gateways or (line.gateway,):
            for client in read_client_sessions(settings.state_dir):  # after a drain all sessions have ended
                if client.ended is None:
                    stop_running(settings.state_dir)
                    end_session(settings, client.client_id)
                    record_session_end(settings.state_dir, client.client_id, "discarded")
        (bridge.state_dir / SCRATCH_DIR).mkdir(mode=0o700, exist_ok=True)
        # One rename: a partly removed journal would count as damaged.
        removed_directory = directory.rename(bridge.state_dir / SCRATCH_DIR / f"{name}.{os.getpid()}")
        shutil.rmtree(removed_directory, ignore_errors=True)
    summary = f"{count_text(dropped_count)} dropped" if dropped_count else "nothing waits"
    text = f'line "{name}" is retired: {summary}, no session is left at its broker, and {directory} is gone'
    return f"{text}. Remove it from {bridge.file} too." if line in bridge.lines else text


def _check_drainable(line: AnyLine) -> None:
    settings, location = line.gateway, f'line "{line.name}"'
    if line.all_gateways != (settings,):
        remedy = "Add it to the file again, and drain each gateway (towline gateway --drain); then retire --discard."
        raise ConfigError("TL-B38", location, "its gateways are on other machines", remedy)
    check_drainable(settings)
    sessions = identity.open_sessions(settings.state_dir, identity.configured_client_ids(line))
    if client_ids := ", ".join(f'"{session["client_id"]}"' for session in sessions):
        remedy = "Drain it with that client_id first; or drop all waiting messages: --discard."
        raise ConfigError("TL-B38", location, f"the session {client_ids} of a former client id is not ended", remedy)


def _deliver_waiting(bridge: Bridge, line: AnyLine, screen: Screen) -> None:
    directory, location, is_drained = line.gateway.state_dir, f'line "{line.name}"', False
    stop_running(directory)
    if isinstance(line, Downlink):
        is_drained = run(line.gateway) == 0
    else:  # a bridge of this line alone, with its files in the line's own directory
        with contextlib.suppress(FileNotFoundError):  # with the last account
            shutil.copy(bridge.state_dir / BRIDGE_FILE, directory / BRIDGE_FILE)
        try:
            Supervisor(bridge.model_copy(update={"lines": (line,), "state_dir": directory}), screen).run()
        except GatewayError as error:
            if error.code != "TL-G55":
                raise
            is_drained = True
    if refused_count := count_waiting_rows(directory / "refused"):
        remedy = f"Resend them, or drop them (towline refused show {directory}); then retire the line again."
        problem = f"its broker has refused {count_text(refused_count)}, which are kept"
        raise GatewayError("TL-B39", location, problem, remedy)
    waiting_count = sum(count_waiting_rows(directory / journal) for journal in identity.JOURNAL_DIRECTORIES)
    if not is_drained or waiting_count:
        problem = f"its session is not ended yet, and {count_text(waiting_count)} wait; nothing was removed"
        raise GatewayError("TL-B39", location, problem, "Repeat the command: it continues from here.")
