"""`towline retire`: ends a line, of the file or not any more, when all that it holds is where it was to go.

    its gateway leaves the line (`towline.gateway.sessions`), by the settings that the line was started with last; for
    an uplink Spark carries to Kafka what waits, from the line's own checkpoint; what a downlink's outbox has is sent
    nothing waits, and no session of the line is left at a broker
    its directory is taken away, in one step

A kill between two steps leaves what the same command goes on with.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Final

from towline.bridge.config.model import AnyLine, Bridge, DownLine
from towline.bridge.lines.identity import JOURNALS, known_line, left_sessions, wanted_clients
from towline.bridge.runtime.screen import Screen
from towline.bridge.runtime.session import SCRATCH
from towline.bridge.runtime.state import BRIDGE_FILE
from towline.bridge.runtime.supervisor import Supervisor, alone
from towline.errors import ConfigError, GatewayError
from towline.gateway.identity import end_client, read_clients
from towline.gateway.launch import end_running
from towline.gateway.process import run
from towline.gateway.sessions import drainable, end_session
from towline.journal.outbox import waiting_in
from towline.text import counted

#: A downlink subscribes to nothing: seconds until its session counts as empty.
_DOWN_IDLE_S: Final = 1.0


def retire(bridge: Bridge, name: str, screen: Screen, *, idle_s: float = 30.0, discard: bool = False) -> str:
    """Carry on what a line of this file, or a former one, holds, end its session and remove its directory.

    No bridge may run meanwhile. A session without a message for `idle_s` seconds counts as empty; with `discard` what
    waits, and what it holds, is given up instead.

    Raises:
        ConfigError: TL-B10 a bridge runs; TL-B38, TL-G57 this can't be carried on; TL-C73 there is no such line.
        GatewayError: TL-B39, not all is carried on; nothing was removed.
        TowlineError: What keeps its gateway or its query from running.
    """
    place, line = bridge.state_dir / name, known_line(bridge, name)
    with alone(bridge):
        if not discard:
            _check(line)
            idle_s = min(idle_s, _DOWN_IDLE_S) if isinstance(line, DownLine) else idle_s
            leaving = line.gateway.model_copy(update={"drain_s": idle_s})
            _carry(bridge, line.model_copy(update={"gateway": leaving}), screen)
        given_up = sum(waiting_in(place / journal) for journal in JOURNALS)
        for settings in line.each_gateway or (line.gateway,):
            for one in read_clients(settings.state_dir):  # a drained gateway has left no session
                if one.ended is None:
                    end_running(settings.state_dir)
                    end_session(settings.connection, one.client_id, lambda: False)
                    end_client(settings.state_dir, one.client_id, "discarded")
        (bridge.state_dir / SCRATCH).mkdir(mode=0o700, exist_ok=True)
        # At once: a part of a journal would be a damaged one.
        away = place.rename(bridge.state_dir / SCRATCH / f"{name}.{os.getpid()}")
        shutil.rmtree(away, ignore_errors=True)
    what = f"{counted(given_up)} given up" if given_up else "nothing waits"
    told = f'line "{name}" is retired: {what}, no session is left at its broker, and {place} is gone'
    return f"{told}. Take it out of {bridge.file} too." if line in bridge.lines else told


def _check(line: AnyLine) -> None:
    """Refuse what would not be carried on as a whole."""
    settings, where = line.gateway, f'line "{line.name}"'
    if line.each_gateway != (settings,):
        do = "Put it back into the file, and drain each where it runs (towline gateway --drain); then retire --discard."
        raise ConfigError("TL-B38", where, "its gateways are on machines of their own", do)
    drainable(settings)
    known = left_sessions(settings.state_dir, wanted_clients(line))
    if left := ", ".join(f'"{one["client_id"]}"' for one in known):
        do = "Fetch it by that client_id first; or give up all that waits: --discard."
        raise ConfigError("TL-B38", where, f"the session {left} of a former client id is not ended", do)


def _carry(bridge: Bridge, line: AnyLine, screen: Screen) -> None:
    place, where, drained = line.gateway.state_dir, f'line "{line.name}"', False
    end_running(place)
    if isinstance(line, DownLine):
        drained = run(line.gateway) == 0
    else:  # a bridge of this line alone, with its files in the line's own directory
        with contextlib.suppress(FileNotFoundError):  # what was counted
            shutil.copy(bridge.state_dir / BRIDGE_FILE, place / BRIDGE_FILE)
        try:
            Supervisor(bridge.model_copy(update={"lines": (line,), "state_dir": place}), screen).run()
        except GatewayError as error:
            if error.code != "TL-G55":
                raise
            drained = True
    if refused := waiting_in(place / "refused"):
        do = f"Send them again, or drop them (towline refused show {place}); then retire the line again."
        raise GatewayError("TL-B39", where, f"its broker has refused {counted(refused)}, which are kept", do)
    waiting = sum(waiting_in(place / journal) for journal in JOURNALS)
    if not drained or waiting:
        what = f"it has not left its broker yet, and {counted(waiting)} wait; nothing was removed"
        raise GatewayError("TL-B39", where, what, "Run the same command again: it goes on there.")
