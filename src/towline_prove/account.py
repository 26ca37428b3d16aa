"""The account of a run: what was sent, what the gateway says it did, what an independent reader found, and the sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from towline_prove.referee import Verdict


@dataclass(frozen=True, slots=True)
class Watermarks:
    """What a gateway says of itself; counts of messages since its journal began [I1].

    Attributes:
        received: Taken from the broker.
        journaled: Durable on disk.
        committed: Carried by a batch in Spark's commit log.
    """

    received: int
    journaled: int
    committed: int

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Watermarks:
        """Take the three watermarks out of a gateway's status."""
        return cls(*(int(status[name]) for name in ("received", "journaled", "committed")))

    def since(self, before: Watermarks) -> Watermarks:
        """What was added since an earlier look."""
        return Watermarks(
            self.received - before.received, self.journaled - before.journaled, self.committed - before.committed
        )

    @property
    def waiting(self) -> int:
        """Durable and not committed yet."""
        return self.journaled - self.committed

    @property
    def ordered(self) -> bool:
        """Received >= journaled >= committed [I1]."""
        return self.received >= self.journaled >= self.committed >= 0


@dataclass(frozen=True, slots=True)
class RunAccount:
    """One run and whether it kept its promise.

    Attributes:
        verdict: What the referee found.
        guarantee: The promise it is held against.
        gateway: Watermarks of the gateway at the end; None where it could not be asked.
        notes: What happened on the way (faults), in order.
        of_line: The account of the bridge's line since its first message, as ``towline status --json`` has it; None
            where there is none.
        ordered: Whether order was promised; what a publisher sends again comes after what had got through.
    """

    verdict: Verdict
    guarantee: str = "at_least_once"
    gateway: Watermarks | None = None
    notes: list[str] = field(default_factory=list)
    of_line: Mapping[str, Any] | None = None
    ordered: bool = True

    def problems(self) -> list[str]:
        """Everything that breaks the promise or does not add up; empty for a good run."""
        problems = []
        if not self.verdict.ok(self.guarantee, ordered=self.ordered):
            problems.append(f"{self.guarantee} was not kept")
        if not self.verdict.adds_up():
            problems.append("the referee's own sum does not add up")
        if self.gateway is not None:
            problems += self._gateway_problems(self.gateway)
        if self.of_line is not None:
            problems += [f"the line's account: {one}" for one in self.of_line["disagreements"]]
            if unknown := self.of_line["not_witnessed"] + self.of_line["left_out"]:
                problems.append(f"the line's account does not know what became of {unknown:,} messages")
        return problems

    def _gateway_problems(self, gateway: Watermarks) -> list[str]:
        problems = []
        if not gateway.ordered:
            problems.append(f"watermarks out of order: {gateway}")
        gave_up = self.guarantee == "at_most_once" or self.verdict.lost
        if gateway.waiting == 0 and self.verdict.copies < gateway.journaled and not gave_up:
            problems.append(
                f"{gateway.journaled:,} journaled and committed, but only {self.verdict.copies:,} records found"
            )
        if gateway.journaled < self.verdict.delivered:
            problems.append(f"{self.verdict.delivered:,} delivered, but only {gateway.journaled:,} journaled")
        if not gateway.waiting and gateway.committed < self.verdict.acked - self.verdict.lost:
            problems.append(f"{self.verdict.acked:,} acknowledged to the senders, only {gateway.committed:,} committed")
        return problems

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems()

    def line(self) -> str:
        """The account in one line."""
        gateway = self.gateway
        text = ""
        if gateway is not None:
            text = f"   journaled {gateway.journaled:,}   committed {gateway.committed:,}   waiting {gateway.waiting:,}"
        return self.verdict.line() + text
