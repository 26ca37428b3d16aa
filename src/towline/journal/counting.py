"""Counters of a journal's ledger, from any thread, and which of their totals are not stored yet [I11]."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from towline.journal.state import JournalState

__all__ = ["Counters"]


class Counters:
    """The ledger of a state; its dict is replaced, never changed, so that readers need no lock.

    Args:
        state: Whose ledger.

    Attributes:
        lock: Guards the ledger alone; never held during a system call.
    """

    def __init__(self, state: JournalState) -> None:
        self._state = state
        self.lock = threading.Lock()
        #: counters whose totals are not stored yet
        self._unstored: set[str] = set()

    @property
    def waiting(self) -> bool:
        """Some totals are in memory only."""
        return bool(self._unstored)

    def add(self, increments: Mapping[str, int]) -> None:
        """Add to counters."""
        with self.lock:
            ledger = dict(self._state.ledger)
            for name, more in increments.items():
                ledger[name] = ledger.get(name, 0) + more
            self._state.ledger = ledger
            self._unstored.update(increments)

    def unstored(self) -> dict[str, int]:
        """The totals that the next frame has to bring."""
        with self.lock:
            return {name: self._state.ledger[name] for name in self._unstored}

    def stored(self, totals: Mapping[str, int]) -> None:
        """Forget what is stored now, unless it was counted on meanwhile."""
        with self.lock:
            ledger = self._state.ledger
            self._unstored -= {name for name, total in totals.items() if ledger[name] == total}
