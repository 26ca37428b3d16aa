"""Display of a run in progress, and its record: one line of JSON in ``docs/proof``, written after the run.

A line has the program, version, duration and result. It has no name of a machine or a directory.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

_REPOSITORY = Path(__file__).resolve().parents[2]


def run_record(program: str, *, ok: bool, seconds: float, details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a run that has just ended.

    `program` is a command of `towline_prove`, or ``test``; `details` has parameters (with the seed) and counts.
    """
    return {
        "program": program,
        "day": datetime.now(UTC).date().isoformat(),
        "ok": ok,
        "version": version("towline"),
        "revision": revision(),
        "seconds": round(seconds, 1),
        **details,
    }


def append_record(record: Mapping[str, Any], file: Path) -> None:
    """Append a record to a file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


@cache
def revision() -> str:
    """Return the commit of the code at the first call: call it before a run begins.

    A ``+`` follows if files other than the records are modified; outside a checkout it is empty.
    """
    commit = _git("rev-parse", "--short=10", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs/proof")
    return f"{commit}+" if changes else commit


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", "-C", str(_REPOSITORY), *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return ""
    return result.stdout.strip()


@dataclass(slots=True)
class RunProgress:
    """Progress of a run; counts of messages since it began.

    Attributes:
        offered_count: Sent, or about to be sent.
        uncommitted_count: Durable at the gateway and not in a committed batch.
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

    def show_bridge(self, file: Path) -> None:
        """Show where the bridge of the runs is, by its file."""

    def fault(self, text: str) -> None:
        """Show a fault that is over."""
        typer.echo(f"  {text}")

    def show_progress(self, progress: RunProgress, total: int) -> None:
        """Show the progress of a run; called several times a second."""
