"""What is wrong with several topics in one way is one row. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from towline.doctor.findings import DoctorQuestion, Finding, Standing

__all__ = ["Flaw", "days", "named", "rows_of", "sized"]

#: Topics that a row names; of more it says how many.
_NAMED: Final = 3


@dataclass(frozen=True)
class Flaw:
    """Something about a topic.

    Attributes:
        verdict: How the promise stands for it.
        fact: What was read, the same words for every topic that has it.
        until: When the promise ends.
        mend: What to do; ``TOPIC`` stands for a topic's name.
    """

    verdict: Standing
    fact: str
    until: str = ""
    mend: str = ""


def rows_of(
    question: DoctorQuestion, found: Iterable[tuple[str, Flaw]], well: Flaw | None = None, *, line: str = ""
) -> Iterator[Finding]:
    """A row for each flaw with the topics that have it; where there is none, one that says that all is well.

    Args:
        question: What the rows answer.
        found: Topics and their flaws.
        well: What is told where nothing is found; None for nothing.
        line: Of which line; empty for the bridge.
    """
    topics: dict[Flaw, list[str]] = {}
    for name, flaw in found:
        topics.setdefault(flaw, []).append(name)
    for flaw, names in topics.items():
        mend = flaw.mend.replace("TOPIC", names[0])
        yield question.answer(flaw.verdict, f"{named(names)}: {flaw.fact}", flaw.until, mend, line=line)
    if not topics and well is not None:
        yield question.answer(well.verdict, well.fact, well.until, well.mend, line=line)


def named(names: Iterable[str]) -> str:
    """``a, b, c and 4 more``."""
    each = sorted(set(names))
    more = len(each) - _NAMED
    shown = ", ".join(each[:_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown


def days(milliseconds: float) -> str:
    """A span of time in the unit that suits it: ``7 days``, ``1.5 h``, ``60 s``."""
    seconds = milliseconds / 1000
    for unit, size, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < most * size:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds / 86400)} days"


def sized(count: float) -> str:
    """Bytes in the unit that suits them: ``1.0 MB``, ``29 GB``."""
    for unit, size in (("B", 1), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if abs(count) < 1000 * size:
            return f"{_short(count / size)} {unit}"
    return f"{_short(count / 1e12)} TB"


def _short(value: float) -> str:
    """Two digits where there are no more."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
