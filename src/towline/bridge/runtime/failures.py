"""One clear line out of Spark's failures.

A `TowlineError` raised in a Python worker reaches the driver as text in the middle of two stack traces; what a person
needs is that one line. Spark's own errors have a class in brackets and a first sentence worth keeping. What follows an
exception in Spark's text, the plan of the query, is no reason: it holds every message that a line *could* raise.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from towline.errors import TowlineError, stays

#: Said when `pyspark` found no JVM behind the process that it started.
NO_JVM = "Spark's JVM ended before it was ready"

#: The code is the last one of its line: what a device named may hold another, and must not choose what happens [I13].
_OURS = re.compile(r"towline\.errors\.\w+: ([^\n]*\[(TL-[A-Z]\d+)\])")
#: What the line's own SQL raises (``raise_error``): a whole line, unlike the plan that only names it.
_RAISED = re.compile(r"^(?:.*?\[USER_RAISED_EXCEPTION\] )?(.*\[(TL-[A-Z]\d+)\])(?: SQLSTATE: \w+)?$", re.MULTILINE)
_SPARK = re.compile(r"\[([A-Z][A-Z0-9_.]+)\] ([^\n]+)")
_PLAN = "\n=== Streaming Query ==="
#: Around the exception that counts: whose call it was, and of which query.
_AROUND = re.compile(r"^(?:An error occurred while calling \S+\n: |\[STREAM_FAILED\] .*? terminated with exception: )")
#: Where the cause of a foreign error stands below its first line: what a Python that does not start says, the last
#: exception of a Python traceback, why Spark gave an executor up.
_CAUSES = (
    re.compile(r"^Error from python worker:\n((?: +\S.*\n)+)", re.MULTILINE),
    re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*(?:\n\S.*)*)"),
    re.compile(r"\bReason: (.+)"),
)
#: A line that says nothing: empty, a place in Java's code, or an exception without words, whose cause comes later.
_SILENT = re.compile(r"(?:\tat .*|(?:[\w.$]+(?:Exception|Error):? *)*)")
#: Around the exception of a task: where it ran, and how often it was tried.
_TASK = re.compile(r"^Job aborted due to stage failure: .*?\(TID \d+\) \(.*?\): ")
_JAVA_PREFIX = re.compile(r"^(?:[\w.$]+(?:Exception|Error): )+")
#: SQLSTATE of what is wrong in the line's SQL itself: syntax, names, types, arguments (Spark's error-conditions.json).
#: The others of class 42, and all other classes, are about data sources, paths, state and Python: another try may help.
_SQL = re.compile(r"SQLSTATE: (?:42[67]|4280[34]|428[248]|429[0B]|42K0[1789A-Z]|42P[012]|0A000)")
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
#: How Spark 4.3 says that the process of a source, or of a task, was killed.
_ENDED = re.compile(r"\(no cause message\)|Python worker exited unexpectedly|^java\.io\.EOFException")
#: How it says that a task, or the files of a shuffle, went with their executor (`DAGScheduler`, `TaskSetManager`).
_EXECUTOR_LOST = re.compile(r"\b(?:Metadata)?FetchFailed|ExecutorLostFailure")
#: How Spark's Kafka source (4.2 to 4.3) says that it misses records; no error class stands there.
_LOST = re.compile(r"Some data may have been lost because they are not available(?s:.*?)\nReason: ([^\n]+)")
#: What of that the topics' ids and the checkpoint say more about, at the next try (`look_at_topics`).
_TOPIC = re.compile(r"Partitions .* have been deleted|Cannot find initial offsets|Partition \S+ offset was changed")
_STATE = re.compile(r" ?SQLSTATE: \w{5}(?:; line \d+ pos \d+)?;?")
#: Text of a foreign error that is shown; the rest is in the log.
MAX_TEXT = 300


class FailureReason(NamedTuple):
    """Why something failed: a code, a line with it at the end, and whether another try would fail the same way."""

    code: str
    text: str
    permanent: bool


def reason(error: BaseException | str, where: str, failed: str = "the query failed") -> FailureReason:
    """Find what went wrong; a foreign error, TL-B01, is about `where`, and says what `failed`."""
    if isinstance(error, TowlineError):
        return FailureReason(error.code, " ".join(str(error).split("\n")), _is_permanent(error.code))
    text = _AROUND.sub("", str(error).partition(_PLAN)[0])
    if ours := _OURS.search(text) or _RAISED.search(text):
        line = _JAVA_PREFIX.sub("", ours[1].strip())
        return FailureReason(ours[2], line, _is_permanent(ours[2]))
    code, what, do, permanent = _foreign("" if isinstance(error, str) else type(error).__name__, text, failed)
    return FailureReason(code, str(TowlineError(code, where, what, do)), permanent)


def _is_permanent(code: str) -> bool:
    """Configuration stays wrong until somebody changes it, and so does what no longer belongs together."""
    return code.startswith("TL-C") or stays(code)


def _foreign(kind: str, text: str, failed: str) -> tuple[str, str, str, bool]:
    """Code, what happened and what to do of an error that is not ours, and whether another try would fail the same."""
    spark = _SPARK.search(text)
    if _FULL.search(text):
        what = f"{failed}: no space is left on the disk of Spark's checkpoint or temporary files"
        return "TL-B56", what, "Make room; it is tried again by itself, and nothing is lost.", False
    if (lost := _LOST.search(text)) and _TOPIC.match(lost[1]):  # one may be gone or made anew
        what = f"Spark misses a topic of Kafka's that the line reads: {_short(lost[1])}"
        do = "Whether records of it were unread is looked at; the line goes on by itself if none was."
        return "TL-B06", what, do, False
    if lost:
        what = f"Kafka no longer has records that the line had not read: {_short(lost[1])}"
        do = 'Nothing goes on unasked: set on_data_loss = "go_on" to go on with what is left, or begin again.'
        return "TL-B06", what, do, True
    if kind in {"AnalysisException", "ParseException"} and _SQL.search(text):
        what = f"Spark does not understand the line's SQL: {_short(spark[2] if spark else text.splitlines()[0])}"
        return "TL-C74", what, "Correct it in the bridge file; the columns are those of the line's source.", True
    cause = next((found[-1] for found in (one.findall(text) for one in _CAUSES) if found), "")
    first = next((line for line in _TASK.sub("", text).splitlines() if not _SILENT.fullmatch(line)), kind)
    words = f"{spark[1]} {cause or spark[2]}" if spark else cause or first
    if spark and spark[1] == "JAVA_GATEWAY_EXITED":
        words = NO_JVM
    elif _ENDED.search(text):
        words = "a Python process of Spark's has ended (it was killed, or there was no memory left)"
    elif _EXECUTOR_LOST.search(text):
        why = f" ({_short(cause)})" if cause else ""
        words = f"an executor was lost in the midst of a batch{why}, and its part is not run again by itself"
    return "TL-B01", f"{failed}: {_short(words)}", "The details are in the driver's log.", False


def _short(text: str) -> str:
    text = " ".join(_STATE.sub("", text).split()).rstrip(".")
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
