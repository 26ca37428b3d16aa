"""What the supervisors of a bridge's parts share: one thread for each, which starts its part, and starts it again."""

from __future__ import annotations

import os
import threading
import traceback
from abc import ABC, abstractmethod

from towline.backoff import Backoff
from towline.bridge.runtime.state import BridgeState
from towline.errors import GatewayError, TowlineError
from towline.text import cause


class ChildSupervisor(threading.Thread, ABC):
    """A thread that goes on whatever happens in it: what it supervises would end with it, and nobody would know.

    Args:
        name: Of the thread.
        state: Where it reports.
        stopping: Set when the bridge ends.
        longest_pause_s: Between two rounds that failed, in seconds.
    """

    #: What it starts, and whose that is, for messages.
    what = ""
    where = ""

    def __init__(self, name: str, state: BridgeState, stopping: threading.Event, longest_pause_s: float) -> None:
        super().__init__(name=name, daemon=True)
        #: What only a person can mend, and nothing is tried again after; or None.
        self.fatal: TowlineError | None = None
        self._state = state
        self._stopping = stopping
        self._pauses = Backoff(first=0.5, most=longest_pause_s)

    def run(self) -> None:
        """Do a round after the other until there is nothing left to do."""
        while self.wanted:
            try:
                self._round()
            except TowlineError as error:
                self._failed(error)
            except OSError as error:
                self._failed(no_start(self.where, self.what, error))
            except Exception as error:  # noqa: BLE001 - reported, and tried again
                self._failed(unforeseen(self.where, error))

    @property
    def wanted(self) -> bool:
        """Whether there is still something to do; a thread that has ended before is a fault."""
        return self.fatal is None and not self._stopping.is_set()

    @abstractmethod
    def _round(self) -> None:
        """Start what is supervised and stay with it until it ends."""

    @abstractmethod
    def _failed(self, error: TowlineError) -> None:
        """Report what ended a round, and wait."""


def no_start(where: str, what: str, error: OSError) -> GatewayError:
    """What a machine without room, processes or file handles says; that must not end the supervisor."""
    do = "It is tried again by itself: free disk, memory, processes or open files (ulimit)."
    return GatewayError("TL-B32", where, f"{what} can't be started ({error.strerror or error})", do)


def unforeseen(name: str, error: BaseException | None = None) -> GatewayError:
    """What ended one of these threads, or a round of it, though nothing should [TL-B55]."""
    if error is not None and os.environ.get("TOWLINE_DEBUG"):
        traceback.print_exception(error)
    why = "" if error is None else f" ({cause(error)})"
    do = "It is tried again. Please report it with the output of TOWLINE_DEBUG=1."
    return GatewayError("TL-B55", name, f"this part of the bridge ended in an unexpected way{why}", do)
