"""What an examiner is given: the bridge, the load, and what a person told beside the file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from towline.bridge.config.model import Bridge
from towline.doctor.findings import Finding

__all__ = ["Case", "Examiner", "LineLoad"]


@dataclass(frozen=True)
class LineLoad:
    """What comes in, for the limits that are told as times.

    Attributes:
        messages_s: Messages a second, > 0.
        bytes_s: Bytes of topics, payloads and properties a second, > 0.
        how: Where the figures are from: "measured for 5 s", "--rate".
    """

    messages_s: float
    bytes_s: float
    how: str


@dataclass(frozen=True)
class Case:
    """One examination.

    Attributes:
        bridge: As `towline.bridge.config.file.load` read it.
        rate: Messages a second of the whole bridge, as told with ``--rate``; None to measure it at the broker.
        seconds: How long the rate is measured, for each broker.
        mosquitto_conf: The broker's configuration file, where it can be read; None otherwise.
        patience: Seconds to wait for an answer of a server.
        probe_messages: Messages published to find out how many a broker keeps for a session that is away.
        loads: Load of each line by its name, once it is known; a line without traffic is missing.
        now: Time of day, seconds since 1970 UTC. Injected in tests.
        monotonic: Seconds that only grow. Injected in tests.
    """

    bridge: Bridge
    rate: float | None = None
    seconds: float = 5.0
    mosquitto_conf: Path | None = None
    patience: float = 10.0
    probe_messages: int = 1500
    loads: tuple[tuple[str, LineLoad], ...] = ()
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic

    def load_of(self, line: str) -> LineLoad | None:
        """Load of a line; None if it is not known."""
        return dict(self.loads).get(line)

    @property
    def total(self) -> LineLoad | None:
        """Load of all lines together; None if that of none is known."""
        if not self.loads:
            return None
        each = [load for _, load in self.loads]
        how = ", ".join(dict.fromkeys(load.how for load in each))
        return LineLoad(sum(load.messages_s for load in each), sum(load.bytes_s for load in each), how)

    def loaded(self, loads: dict[str, LineLoad]) -> Case:
        """The same with loads."""
        return replace(self, loads=tuple(sorted(loads.items())))


class Examiner(Protocol):
    """Looks at one thing and tells each row as soon as it is known.

    It raises nothing for what it looks at: a server that does not answer is a row too. A
    `towline.errors.TowlineError` that it raises all the same becomes a row of verdict ``unknown``.
    """

    def __call__(self, case: Case, /) -> Iterator[Finding]:
        """Rows, in any order."""
        ...
