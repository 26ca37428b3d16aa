"""The shipped chaos harness: loads, faults, a referee that trusts nobody, and the account of each run.

Nothing here judges Towline with Towline's own code: publishers speak MQTT through the bare `mqtt5` codec, and what
reached Kafka is read back with a plain consumer (or kcat), never through the bridge, the gateway or the journal.
"""

from __future__ import annotations

from towline_prove.account import RunAccount
from towline_prove.history import Claims, HistoryWriter, read_history
from towline_prove.load import LoadPlan, LoadResult, run_load
from towline_prove.referee import Arrival, Verdict, judge

__all__ = [
    "Arrival",
    "Claims",
    "HistoryWriter",
    "LoadPlan",
    "LoadResult",
    "RunAccount",
    "Verdict",
    "judge",
    "read_history",
    "run_load",
]
