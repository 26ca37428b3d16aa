"""One line out of Spark's failures; the texts are Spark 4.3's own, shortened.

Those in files are of PySpark 4.3.0, taken from queries that were made to fail so (a UDF that raises or ends its
process, a Python that is none, an executor that is killed); places of the machine are changed, and of each trace two
frames are left.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.bridge.runtime.failures import failure_reason
from towline.errors import KafkaError

#: What follows the exception of a query that ended: its plan names what the line's SQL could raise.
PLAN = """
=== Streaming Query ===
Identifier: [id = 1980f8e1, runId = 9d8ba282]
Current Available Offsets: {PythonMicroBatchStreamWithAdmissionControl@34234b29: {"o": 1}}

Current State: ACTIVE
Thread State: RUNNABLE

Logical Plan:
WriteToMicroBatchDataSource noop-table
+- ~Project [if ((a#0 = 1)) cast(raise_error(USER_RAISED_EXCEPTION, map(errorMessage, concat(line "x": topic ,
cast(a#0 as string),  that is not legal. Give.   [TL-B02])), NullType) as int) else a#0 AS z#1]
+- raise line "x": a topic that is not legal.   [TL-B02]
"""
#: How Spark's Kafka source says that it misses records: taken once from queries on a real Kafka 4.3.1 with
#: failOnDataLoss=true; the connector is spark-sql-kafka-0-10_2.13 4.2.0. No error class stands in any of them.
_HEAD = (
    "Some data may have been lost because they are not available in Kafka any more;\n"
    "either the data was aged out by Kafka or the topic may have been deleted before all the data in the\n"
    "topic was processed.\n"
    "If you don't want your streaming query to fail on such cases, set the source option failOnDataLoss to false.\n"
    "Reason: "
)
#: Retention has overtaken a stopped query (DeleteRecords), within a batch that was begun and before one; a partition
#: was added, and lost its first records before it was seen.
DATA_LOSS = (
    _HEAD + "Could not read records in offset [5, 15) for topic partition a-0\n"
    "with consumer group spark-kafka-source-55d7225d-2ef5-471d-b32a-5a55d91f31ff--419473941-executor.",
    _HEAD + "Added partition y-1 starts from 3 instead of 0.",
)
#: A topic of a pattern was deleted; one that had come since the last batch was; a topic was made anew and is shorter.
TOPICS_GONE = (
    _HEAD + "Partitions Set(p.two-0) have been deleted.",
    _HEAD + "Cannot find initial offsets for partitions Set(x.two-0). They may have been deleted.",
    _HEAD
    + "Partition h-0 offset was changed from 9 to 3.\nThis could be either 1) a user error that the start offset is "
    "set beyond available offset when starting query, or 2) the kafka topic-partition is deleted and re-created.",
)


class AnalysisException(Exception):
    """PySpark's, as far as its name counts."""


OWN_TRACE = """[STREAM_FAILED] Query [id = 1] terminated: Job aborted
  File x
towline.errors.KafkaError: k1:9092: no server answered. Trying again.   [TL-K01]
	at org.apache"""


@pytest.mark.parametrize(
    ("error", "code", "text", "permanent"),
    [
        (OWN_TRACE, "TL-K01", "k1:9092: no server answered. Trying again.   [TL-K01]", False),
        (KafkaError("TL-K01", "k", "gone"), "TL-K01", "k: gone.   [TL-K01]", False),
        ("x: y. z   [TL-C44]", "TL-C44", "x: y. z   [TL-C44]", True),
        (RuntimeError(""), "TL-B01", "l: the query failed: RuntimeError. See", False),
        ("java.io.EOFException\n\tat java.base/x", "TL-B01", "l: the query failed: java.io.EOFException. See", False),
        (
            "An error occurred while calling o1.start.\n: java.lang.X: y\n\tat z" + PLAN,
            "TL-B01",
            "l: the query failed: java.lang.X: y. See",
            False,
        ),
    ],
)
def test_a_failure_has_one_line_with_its_code_and_never_the_plan(
    error: BaseException | str, code: str, text: str, *, permanent: bool
) -> None:
    failure = failure_reason(error, "l")
    assert (failure.code, failure.permanent) == (code, permanent)
    assert failure.text.startswith(text)
    assert "\n" not in failure.text


@pytest.mark.parametrize("before", ["", "Job aborted: Lost task 0.0: org.apache.spark.SparkRuntimeException: "])
def test_what_the_sql_of_a_line_raises_is_the_reason(before: str) -> None:
    said = 'line "x": topic [USER_RAISED_EXCEPTION] y [TL-C01] is not legal. Give one.   [TL-B02]'
    why = failure_reason(RuntimeError(f"{before}[USER_RAISED_EXCEPTION] {said} SQLSTATE: P0001{PLAN}"), "x")
    assert (why.code, why.text, why.permanent) == ("TL-B02", said, False)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[UNRESOLVED_ROUTINE] Cannot resolve routine `lenght` on search path. SQLSTATE: 42883; line 1", "TL-C74"),
        ("[PARSE_SYNTAX_ERROR] Syntax error at or near end of input. SQLSTATE: 42601 (line 1, pos 3)", "TL-C74"),
        ('[DATATYPE_MISMATCH.X] Cannot resolve "(a + array(1))" types. SQLSTATE: 42K09; line 1', "TL-C74"),
        ("[TABLE_OR_VIEW_NOT_FOUND] The table or view `t` cannot be found. SQLSTATE: 42P01; line 1 pos 20", "TL-C74"),
        ("[INVALID_WHERE_CONDITION] The WHERE condition is invalid: sum(a). SQLSTATE: 42903; line 1", "TL-C74"),
        ('[UNSUPPORTED_DATATYPE] Unsupported data type "NOSUCH". SQLSTATE: 0A000', "TL-C74"),
        ("[PYTHON_DATA_SOURCE_ERROR] Failed to create data source mqtt: BlockingIOError SQLSTATE: 38000", "TL-B01"),
        ("[PATH_NOT_FOUND] Path does not exist: file:/ck. SQLSTATE: 42K03", "TL-B01"),
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: mqtt. SQLSTATE: 42K02", "TL-B01"),
        ("[STATE_STORE_INVALID_PROVIDER] The given State Store Provider x. SQLSTATE: 42K06", "TL-B01"),
        ("[PYTHON_DATA_SOURCE_ERROR] OSError: [Errno 28] No space left on device SQLSTATE: 38000", "TL-B56"),
        ("java.io.IOException: No space left on device" + PLAN, "TL-B56"),
        ("[Errno 122] Disk quota exceeded: '/x'", "TL-B56"),
    ],
)
def test_only_what_the_sql_of_a_line_causes_is_final(text: str, code: str) -> None:
    """What the machine causes is tried again: a full disk behind it was "correct the SQL"."""
    why = failure_reason(AnalysisException(text), 'line "x"')
    assert (why.code, why.permanent) == (code, code == "TL-C74")


TEXTS = Path(__file__).parent / "spark_4_3_0"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("python_exception", "PYTHON_EXCEPTION RuntimeError: first line second: the reason"),
        ("key_error", "PYTHON_EXCEPTION KeyError: 'zz'"),
        ("latest_offset", "PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR OSError: [Errno 5] the disk of the reader"),
        ("data_source", "PYTHON_DATA_SOURCE_ERROR ImportError: libfoo.so: cannot open shared object file"),
        (
            "two_exceptions",
            "PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR AttributeError: 'S' object has no attribute 'stop'",
        ),
        (
            "no_program",
            'java.io.IOException: Cannot run program "/nonexistent/python": error=2, No such file or directory',
        ),
        ("not_a_python", "/bin/ls: cannot access 'pyspark.daemon': No such file or directory /bin/ls: cannot access"),
        ("load_not_a_python", "/bin/ls: cannot access 'pyspark.daemon': No such file or directory /bin/ls: cannot"),
        ("connect_back", "Python worker failed to connect back"),
        ("crashed", "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)."),
        (
            "executor_lost",
            "ExecutorLostFailure (executor 0 exited caused by one of the running tasks) Reason: Command exited",
        ),
    ],
)
def test_the_cause_is_told_wherever_it_stands(name: str, words: str) -> None:
    """It was "org.apache.spark.SparkException:." and "Traceback (most recent call last):." before."""
    why = failure_reason((TEXTS / f"{name}.txt").read_text(), 'line "x"')
    assert why.code == "TL-B01"
    assert why.text.startswith(f'line "x": the query failed: {words}')
    assert "\n" not in why.text


@pytest.mark.parametrize(
    ("text", "permanent", "tells"),
    [
        *((text, True, 'set on_data_loss = "go_on"') for text in DATA_LOSS),
        *((text, False, "The retry checks for unread records of it") for text in TOPICS_GONE),
    ],
)
def test_what_kafka_has_deleted_is_told_with_topic_and_offsets(text: str, permanent: bool, tells: str) -> None:
    """As Spark 4.3 says it; the topic, partition and offsets are in its reason."""
    why = failure_reason(RuntimeError(text + PLAN), 'line "commands"')
    assert (why.code, why.permanent) == ("TL-B06", permanent)
    assert text.partition("Reason: ")[2].split("\n")[0].rstrip(".") in why.text
    assert tells in why.text
    assert "spark-kafka-source" not in why.text
