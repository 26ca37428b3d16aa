"""Where runs are shown while they run."""

from __future__ import annotations

from dataclasses import dataclass

import typer


@dataclass(slots=True)
class Moment:
    """How far a run is; counts of messages since it began.

    Attributes:
        offered: Sent, or about to be.
        acknowledged: To their publisher.
        journaled: Durable at the gateway.
        waiting: Of these, not in a batch that is committed.
        in_kafka: Found there, each once.
    """

    offered: int = 0
    acknowledged: int = 0
    journaled: int = 0
    waiting: int = 0
    in_kafka: int = 0


class Stage:
    """Where runs are shown; this one has a line for each event."""

    def step(self, title: str, text: str) -> None:
        """Something was done."""
        typer.echo(f"{title}: {text}")

    def fault(self, text: str) -> None:
        """Something was hurt, and came back."""
        typer.echo(f"  {text}")

    def show(self, moment: Moment, total: int) -> None:
        """How far a run is, several times a second."""
