"""A row of doctor's table, and what the table as a whole says. Pure: no network, disk or clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

__all__ = [
    "EXIT_CODES",
    "HEADS",
    "DoctorQuestion",
    "Finding",
    "Standing",
    "as_json",
    "exit_code",
    "ordered",
    "rows",
    "summary",
]


class Standing(StrEnum):
    """How a promise stands; from the best to the worst."""

    HOLDS = "holds"
    #: It holds, up to a limit that is far enough away to be told and no more.
    LIMITED = "limited"
    #: It could not be measured (no right, no answer): nobody knows.
    UNKNOWN = "unknown"
    #: It holds until a limit that is near, or only as long as something goes well that need not.
    WARNS = "warns"
    #: It does not hold.
    BROKEN = "broken"


_ORDER: Final = {verdict: place for place, verdict in enumerate(Standing)}
_MARKS: Final = {
    Standing.HOLDS: "✓",
    Standing.LIMITED: "✓",
    Standing.UNKNOWN: "?",
    Standing.WARNS: "!",
    Standing.BROKEN: "✗",
}
#: Exit code of ``towline doctor`` by the worst row; 2 is for a mistake in the bridge file, as in every command.
EXIT_CODES: Final = {
    Standing.HOLDS: 0,
    Standing.LIMITED: 0,
    Standing.UNKNOWN: 3,
    Standing.WARNS: 3,
    Standing.BROKEN: 1,
}
#: Heads of the table.
HEADS: Final = ("promise", "holds until", "because", "what to do")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found about one promise.

    Attributes:
        code: Names the paragraph of docs/errors.md (``TL-D07``); the same for every verdict of one question.
        promise: Which promise, in two or three words: "broker restart", "outage of Kafka".
        verdict: How it stands.
        because: The measured or read fact, with its number and unit and the setting's name.
        until: When or where the promise ends: "1,000 messages, 5 s at 200 msg/s"; empty where nothing ends it.
        mend: What to do; empty where nothing is to be done.
        line: Name of the line it concerns; empty for all of the bridge.
    """

    code: str
    promise: str
    verdict: Standing
    because: str
    until: str = ""
    mend: str = ""
    line: str = ""

    def __post_init__(self) -> None:
        assert self.because, "a row without a fact proves nothing"
        assert self.mend or _ORDER[self.verdict] < _ORDER[Standing.WARNS], "a warning says what to do"


@dataclass(frozen=True)
class DoctorQuestion:
    """What rows of one code answer.

    Attributes:
        code: Of the rows.
        promise: Which they are about.
    """

    code: str
    promise: str

    def answer(self, verdict: Standing, because: str, until: str = "", mend: str = "", *, line: str = "") -> Finding:
        """A row; its parts as `Finding` has them."""
        return Finding(
            code=self.code, promise=self.promise, verdict=verdict, because=because, until=until, mend=mend, line=line
        )


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; of one verdict by code and line."""
    return sorted(findings, key=lambda one: (-_ORDER[one.verdict], one.code, one.line))


def exit_code(findings: Iterable[Finding]) -> int:
    """By the worst row; nothing found at all is not known.

    Returns:
        0 all holds, 1 a promise does not hold, 3 one has a near limit or is not known.
    """
    worst = max((_ORDER[one.verdict] for one in findings), default=_ORDER[Standing.UNKNOWN])
    return EXIT_CODES[list(Standing)[worst]]


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """The table as JSON values: ``findings`` in order, ``worst`` verdict and ``exit_code``."""
    rows = ordered(findings)
    return {
        "findings": [asdict(one) for one in rows],
        "worst": rows[0].verdict.value if rows else Standing.UNKNOWN.value,
        "exit_code": exit_code(rows),
    }


def rows(findings: Iterable[Finding]) -> list[tuple[str, str, str, str]]:
    """The table's cells in order, as `HEADS` names them; the promise has its mark, and its line where it has one."""
    return [
        (f"{_MARKS[one.verdict]} {one.promise}{f' ({one.line})' if one.line else ''}", *_cells(one))
        for one in ordered(findings)
    ]


def _cells(one: Finding) -> tuple[str, str, str]:
    code = f"   [{one.code}]" if one.mend else ""
    return one.until, one.because, f"{one.mend}{code}"


def summary(findings: Iterable[Finding]) -> str:
    """One line: how many rows of each verdict."""
    found = [one.verdict for one in findings]
    words = {
        Standing.BROKEN: "broken",
        Standing.WARNS: "near a limit",
        Standing.UNKNOWN: "not known",
        Standing.LIMITED: "with a limit",
        Standing.HOLDS: "kept",
    }
    told = [f"{found.count(verdict)} {word}" for verdict, word in words.items() if verdict in found]
    return ", ".join(told) or "nothing was examined"
