"""One clear line out of Spark's failures.

A `TowlineError` raised in a Python worker reaches the driver as text in the middle of two stack traces; what a person
needs is that one line. Spark's own errors have a class in brackets and a first sentence worth keeping.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from towline.bridge.recovery import PERMANENT
from towline.errors import TowlineError

__all__ = ["Reason", "reason"]

#: The code is the last one of its line: what a device named may hold another, and must not choose what happens [I13].
_OURS = re.compile(r"towline\.errors\.\w+: ([^\n]*\[(TL-[A-Z]\d+)\])")
_ANY = re.compile(r"([^\n]*\[(TL-[A-Z]\d+)\])")
_SPARK = re.compile(r"\[([A-Z][A-Z0-9_.]+)\] ([^\n]+)")
_JAVA_PREFIX = re.compile(r"^(?:[\w.$]+(?:Exception|Error): )+")
#: Checkpoint, journal and markers that do not fit each other fit no better at the next try.
_STAYS = (
    PERMANENT
    | {"TL-G04", "TL-G05", "TL-G06", "TL-G12", "TL-G26", "TL-J21"}
    | {f"TL-K{number}" for number in range(10, 19)}
)
#: Text of a foreign error that is shown; the rest is in the log.
MAX_TEXT = 300


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something failed.

    Attributes:
        code: ``TL-...``; ``TL-B01`` for errors that are not ours.
        text: One line, the code at its end.
        permanent: Whether another try would fail the same way.
    """

    code: str
    text: str
    permanent: bool


def reason(error: BaseException | str, where: str, failed: str = "the query failed") -> Reason:
    """Find what went wrong.

    Args:
        error: What was raised, or its text.
        where: Whom a foreign error is about, such as ``line "telemetry"``.
        failed: What did not work, for a foreign error.
    """
    if isinstance(error, TowlineError):
        return Reason(error.code, " ".join(str(error).split("\n")), _is_permanent(error.code))
    text = str(error)
    if found := _OURS.search(text) or _ANY.search(text):
        line = _JAVA_PREFIX.sub("", found[1].strip())
        return Reason(found[2], line, _is_permanent(found[2]))
    return _foreign(error, text, where, failed)


def _is_permanent(code: str) -> bool:
    """Configuration stays wrong until somebody changes it, and so does what no longer belongs together."""
    return code.startswith("TL-C") or code in _STAYS


def _foreign(error: BaseException | str, text: str, where: str, failed: str) -> Reason:
    kind = "" if isinstance(error, str) else type(error).__name__
    if kind in {"AnalysisException", "ParseException"}:
        found = _SPARK.search(text)
        said = found[2] if found else text.splitlines()[0]
        what = f"Spark does not understand the line's SQL: {_short(said)}"
        told = TowlineError(
            "TL-C74", where, what, "Correct it in the bridge file; the columns are those of the line's source."
        )
        return Reason(told.code, str(told), permanent=True)
    found = _SPARK.search(text)
    if found and found[1].startswith("KAFKA_DATA_LOSS"):
        what = f"Kafka no longer has records that the line had not read: {_short(found[2])}"
        do = 'Nothing goes on unasked: set on_data_loss = "go_on" to go on with what is left, or begin again.'
        return Reason("TL-B06", str(TowlineError("TL-B06", where, what, do)), permanent=True)
    said = f"{found[1]} {found[2]}" if found else next((line for line in text.splitlines() if line.strip()), kind)
    told = TowlineError("TL-B01", where, f"{failed}: {_short(said)}", "The details are in the driver's log.")
    return Reason(told.code, str(told), permanent=False)


def _short(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
