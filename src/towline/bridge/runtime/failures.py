"""Error messages of one line from Spark's failures.

A `TowlineError` raised in a Python worker reaches the driver as text between two stack traces; its own line is
extracted. Of Spark's own errors the error class and the first sentence remain. The query plan that follows an
exception is cut off: it contains every error message that the line *could* raise.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from towline.errors import TowlineError, is_permanent

#: The code is the last one of its line: a name from a device may contain another, which must not count [I13].
_TOWLINE_ERROR = re.compile(r"towline\.errors\.\w+: ([^\n]*\[(TL-[A-Z]\d+)\])")
#: Error of ``raise_error`` in the line's SQL: a whole line, unlike its text in the query plan.
_SQL_RAISED = re.compile(r"^(?:.*?\[USER_RAISED_EXCEPTION\] )?(.*\[(TL-[A-Z]\d+)\])(?: SQLSTATE: \w+)?$", re.MULTILINE)
_SPARK_ERROR = re.compile(r"\[([A-Z][A-Z0-9_.]+)\] ([^\n]+)")
_PLAN_HEADER = "\n=== Streaming Query ==="
#: Text before the exception: Java call, or query id.
_CALL = re.compile(r"^(?:An error occurred while calling \S+\n: |\[STREAM_FAILED\] .*? terminated with exception: )")
#: Causes below the first line of an error: output of a Python that does not start, last exception of a Python
#: traceback.
_CAUSE_PATTERNS = (
    re.compile(r"^Error from python worker:\n((?: +\S.*\n)+)", re.MULTILINE),
    re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*(?:\n\S.*)*)"),
)
#: Line without information: empty, Java stack frame, or exception without a message, whose cause follows.
_LINE_WITHOUT_TEXT = re.compile(r"(?:\tat .*|(?:[\w.$]+(?:Exception|Error):? *)*)")
#: Text before the exception of a task: executor, and number of attempts.
_TASK_PREFIX = re.compile(r"^Job aborted due to stage failure: .*?\(TID \d+\) \(.*?\): ")
_JAVA_PREFIX = re.compile(r"^(?:[\w.$]+(?:Exception|Error): )+")
#: SQLSTATE of errors in the line's SQL itself: syntax, names, types, arguments (Spark's error-conditions.json).
#: Other codes, of class 42 too, are about data sources, paths, state and Python: a retry may help.
_SQL_ERROR_STATE = re.compile(r"SQLSTATE: (?:42[67]|4280[34]|428[248]|429[0B]|42K0[1789A-Z]|42P[012]|0A000)")
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
#: Data loss in Spark's Kafka source (4.2 to 4.3), which has no error class for it.
_DATA_LOSS = re.compile(r"Some data may have been lost because they are not available(?s:.*?)\nReason: ([^\n]+)")
#: Data loss by a deleted or recreated topic: the retry compares topic ids and checkpoint.
_NO_TOPIC = re.compile(r"Partitions .* have been deleted|Cannot find initial offsets|Partition \S+ offset was changed")
_SQLSTATE = re.compile(r" ?SQLSTATE: \w{5}(?:; line \d+ pos \d+)?;?")
#: Longest shown text of an error of Spark; the log has all.
MAX_TEXT_CHARS = 300


class FailureReason(NamedTuple):
    """Failure: its code, one line of text with the code at the end, and whether a retry would fail in the same way."""

    code: str
    text: str
    permanent: bool


def failure_reason(error: BaseException | str, location: str, summary: str = "the query failed") -> FailureReason:
    """Return the code and text of a failure, and whether it is permanent.

    `location` and `summary` are for an error that is not a `TowlineError` (TL-B01).
    """
    if isinstance(error, TowlineError):
        return FailureReason(error.code, " ".join(str(error).split("\n")), _is_permanent(error.code))
    text = _CALL.sub("", str(error).partition(_PLAN_HEADER)[0])
    if error_match := _TOWLINE_ERROR.search(text) or _SQL_RAISED.search(text):
        line = _JAVA_PREFIX.sub("", error_match[1].strip())
        return FailureReason(error_match[2], line, _is_permanent(error_match[2]))
    class_name = "" if isinstance(error, str) else type(error).__name__
    code, problem, remedy, permanent = _foreign_failure(class_name, text, summary)
    return FailureReason(code, str(TowlineError(code, location, problem, remedy)), permanent)


def _is_permanent(code: str) -> bool:
    """Return True for configuration errors and for state that does not fit its line: a retry would fail too."""
    return code.startswith("TL-C") or is_permanent(code)


def _foreign_failure(class_name: str, text: str, summary: str) -> tuple[str, str, str, bool]:
    """Return code, problem, remedy and permanence of an error that is not a `TowlineError`."""
    error = _SPARK_ERROR.search(text)
    if _DISK_FULL.search(text):
        problem = f"{summary}: no space is left on the disk of Spark's checkpoint or temporary files"
        return "TL-B56", problem, "Free disk space; the query is retried, and nothing is lost.", False
    if (data_loss := _DATA_LOSS.search(text)) and _NO_TOPIC.match(data_loss[1]):  # deleted or recreated
        problem = f"Spark misses a Kafka topic that the line reads: {_shorten(data_loss[1])}"
        remedy = "The retry checks for unread records of it; the line continues if there are none."
        return "TL-B06", problem, remedy, False
    if data_loss:
        problem = f"Kafka no longer has records that the line had not read: {_shorten(data_loss[1])}"
        remedy = 'The line stops: set on_data_loss = "go_on" to continue with the remaining records, or reset it.'
        return "TL-B06", problem, remedy, True
    if class_name in {"AnalysisException", "ParseException"} and _SQL_ERROR_STATE.search(text):
        problem = f"Spark does not understand the line's SQL: {_shorten(error[2] if error else text.splitlines()[0])}"
        return "TL-C74", problem, "Correct it in the bridge file; the columns are those of the line's source.", True
    cause = next((matches[-1] for matches in (pattern.findall(text) for pattern in _CAUSE_PATTERNS) if matches), "")
    lines = _TASK_PREFIX.sub("", text).splitlines()
    first_line = next((line for line in lines if not _LINE_WITHOUT_TEXT.fullmatch(line)), (*lines, class_name)[0])
    detail = f"{error[1]} {cause or error[2]}" if error else cause or first_line
    return "TL-B01", f"{summary}: {_shorten(detail)}", "See the driver's log.", False


def _shorten(text: str) -> str:
    text = " ".join(_SQLSTATE.sub("", text).split()).rstrip(".")
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "..."
