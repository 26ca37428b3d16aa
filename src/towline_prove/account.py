"""Account of a run: messages sent, counts of the gateway, records found by an independent reader, and the sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from towline_prove.referee import Verdict


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Watermarks reported by a gateway; counts of messages since its journal began [I1].

    Attributes:
        received: Received from the broker.
        journaled: Durable on disk.
        committed: In a batch of Spark's commit log.
    """

    received: int
    journaled: int
    committed: int

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> Watermarks:
        """Return the three watermarks in a gateway's status."""
        return cls(*(int(status[name]) for name in ("received", "journaled", "committed")))

    def subtract(self, earlier: Watermarks) -> Watermarks:
        """Return the difference to earlier watermarks."""
        return Watermarks(
            self.received - earlier.received, self.journaled - earlier.journaled, self.committed - earlier.committed
        )

    @property
    def uncommitted(self) -> int:
        """Number of durable messages that are not committed yet."""
        return self.journaled - self.committed

    @property
    def is_ordered(self) -> bool:
        """True for received >= journaled >= committed [I1]."""
        return self.received >= self.journaled >= self.committed >= 0


@dataclass(frozen=True, slots=True)
class RunAccount:
    """Account of one run against its promise.

    Attributes:
        verdict: Verdict of the referee.
        guarantee: Promise to check.
        gateway: Watermarks of the gateway at the end; None if it did not answer.
        notes: Faults during the run, in order.
        line_account: Account of the bridge's line since its first message, as in ``towline status --json``; None if
            there is none.
        ordered: True if order was promised; a message that a publisher sends again comes after later ones.
    """

    verdict: Verdict
    guarantee: str = "at_least_once"
    gateway: Watermarks | None = None
    notes: list[str] = field(default_factory=list)
    line_account: Mapping[str, Any] | None = None
    ordered: bool = True

    def problems(self) -> list[str]:
        """Return all broken promises and inconsistent counts; empty for a good run."""
        problems = []
        if not self.verdict.ok(self.guarantee, ordered=self.ordered):
            problems.append(f"{self.guarantee} was not kept")
        if not self.verdict.adds_up():
            problems.append("the referee's own sum does not add up")
        if self.gateway is not None:
            problems += self._gateway_problems(self.gateway)
        if self.line_account is not None:
            problems += [f"the line's account: {disagreement}" for disagreement in self.line_account["disagreements"]]
            if unknown_count := self.line_account["not_witnessed"] + self.line_account["left_out"]:
                problems.append(f"the line's account does not know what became of {unknown_count:,} messages")
        return problems

    def _gateway_problems(self, gateway: Watermarks) -> list[str]:
        problems = []
        if not gateway.is_ordered:
            problems.append(f"watermarks out of order: {gateway}")
        losses_expected = self.guarantee == "at_most_once" or self.verdict.lost
        if gateway.uncommitted == 0 and self.verdict.copies < gateway.journaled and not losses_expected:
            problems.append(
                f"{gateway.journaled:,} journaled and committed, but only {self.verdict.copies:,} records found"
            )
        if gateway.journaled < self.verdict.delivered:
            problems.append(f"{self.verdict.delivered:,} delivered, but only {gateway.journaled:,} journaled")
        if not gateway.uncommitted and gateway.committed < self.verdict.acked - self.verdict.lost:
            problems.append(f"{self.verdict.acked:,} acknowledged to the senders, only {gateway.committed:,} committed")
        return problems

    @property
    def ok(self) -> bool:
        """True for a run without problems."""
        return not self.problems()

    def line(self) -> str:
        """Return the account in one line."""
        state = self.gateway
        text = ""
        if state is not None:
            text = f"   journaled {state.journaled:,}   committed {state.committed:,}   waiting {state.uncommitted:,}"
        return self.verdict.summary_line() + text
