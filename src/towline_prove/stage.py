"""Display of runs in progress."""

from __future__ import annotations

from dataclasses import dataclass

import typer


@dataclass(slots=True)
class RunProgress:
    """Progress of a run; counts of messages since it began.

    Attributes:
        offered_count: Sent, or about to be sent.
        acked_count: Acknowledged to their publisher.
        journal_count: Durable at the gateway.
        uncommitted_count: Durable at the gateway and not in a committed batch.
        kafka_count: Distinct messages found in Kafka.
    """

    offered_count: int = 0
    acked_count: int = 0
    journal_count: int = 0
    uncommitted_count: int = 0
    kafka_count: int = 0


class RunDisplay:
    """Display of a run; prints a line for each event."""

    def step(self, title: str, text: str) -> None:
        """Show a finished step."""
        typer.echo(f"{title}: {text}")

    def fault(self, text: str) -> None:
        """Show a fault that is over."""
        typer.echo(f"  {text}")

    def show_progress(self, progress: RunProgress, total: int) -> None:
        """Show the progress of a run; called several times a second."""
