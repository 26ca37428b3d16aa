"""The record of a long run: one line of JSON beside the code (``docs/proof``), for a run that has happened.

A line says what ran, on which version, for how long and with what result. It holds no name of a machine or a directory.
"""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_TREE = Path(__file__).resolve().parents[2]


def evidence(program: str, *, ok: bool, seconds: float, details: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run that has just ended.

    Args:
        program: What ran: a command of `towline_prove`, or ``test``.
        ok: Whether every promise was kept.
        seconds: How long it took.
        details: What was asked for (with the seed, where chance decided something), and what was counted.
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


def write_evidence(record: Mapping[str, Any], file: Path) -> None:
    """Add a record to a file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


@cache
def revision() -> str:
    """The commit of the code when this was first asked: ask before a run begins.

    Behind it stands ``+`` where other files than the records differ; outside a checkout it is empty.
    """
    commit = _git("rev-parse", "--short=10", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs/proof")
    return f"{commit}+" if changes else commit


def _git(*words: str) -> str:
    try:
        answer = subprocess.run(
            ["git", "-C", str(_TREE), *words], capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return ""
    return answer.stdout.strip()
