"""Spark driver process, ``python -m towline.bridge.runtime.driver``: one Spark session, one streaming query a line.

It reads the bridge as JSON from the first line of standard input, then commands:

    go                              start the queries
    stop                            end the queries after their batch, then the process; so does end of input
    {"hold": NAME}                  stop the query of a line after its batch
    {"take": LINE}                  start the query of a line again, with the settings of LINE
    {"judge": [LINE], "of": ID}     check the SQL of lines

It reports JSON lines on standard output: ``ready``, ``started``, ``noted``, ``progress``, ``failed``, ``held``,
``judged``. Everything else goes to standard error, which the supervisor writes to a log file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Final, TextIO

from pyspark.sql.streaming.query import StreamingQuery

from towline.bridge.config.model import Bridge, Downlink, Uplink
from towline.bridge.downlink.query import DownlinkQuery
from towline.bridge.lines.identity import LINE_ADAPTER
from towline.bridge.lines.query import LineQuery
from towline.bridge.runtime import sqlcheck
from towline.bridge.runtime.child_supervisors import ensure_topics
from towline.bridge.runtime.failures import failure_reason
from towline.bridge.runtime.session import check_master, check_new_executors, create_session
from towline.bridge.uplink.query import UplinkQuery
from towline.errors import KafkaError
from towline.kafka.faults import NO_ANSWER_CODES
from towline.logfile import LogStream
from towline.text import printable_lines
from towline.threads import guarded_thread
from towline.timing import Backoff

#: Longest wait for a batch to end after ``stop`` and ``hold``, in seconds: during a Kafka outage it does not end. An
#: interrupted batch is repeated after the query's next start.
BATCH_TIMEOUT_S: Final = 10.0
#: Longest retry pause by error code, in seconds, for a failure that may end at any moment: a full disk.
_MAX_PAUSE_S: Final = {"TL-B56": 2.0}
_PROCESSING_MESSAGE: Final = "Processing new data"
#: Longest time, in seconds, that a query counts as starting: its first batch may wait for an unavailable Kafka.
_START_WINDOW_S: Final = 15.0
#: Seconds between two polls of a query's progress.
_PROGRESS_POLL_S: Final = 1.0
#: Longest wait for the end of a killed JVM after a failed call, in seconds.
_JVM_EXIT_WAIT_S: Final = 0.5
#: Exit code after the loss of the JVM.
EXIT_JVM_GONE: Final = 3


def report_writer(stream: TextIO) -> Callable[..., None]:
    """Return the thread-safe writer of the driver's reports, one JSON line each: ``report(kind, **values)``."""
    lock = threading.Lock()

    def report(kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, "at": time.time(), **values})
        with lock, contextlib.suppress(BrokenPipeError, ValueError):  # the end of standard input stops the driver
            stream.write(line + "\n")
            stream.flush()

    return report


def create_query(bridge: Bridge, line: Uplink | Downlink) -> UplinkQuery | DownlinkQuery:
    """Return the streaming query of a line, by its direction."""
    return UplinkQuery(bridge, line) if isinstance(line, Uplink) else DownlinkQuery(bridge, line)


class LineRunner:
    """Runner of one line's query, one step at a time on the main thread.

    It has to be the main thread: Spark looks for a sink's Python data source in the session that is active *on the
    calling thread*, and PySpark activates the session only on the thread that created it.
    """

    def __init__(self, driver: Driver, query: LineQuery[Any]) -> None:
        self._driver = driver
        #: Query of the line's current settings, and the query that was started last (`LineQuery.query_to_start`).
        self._configured_query = self._started_query = query
        self._name = query.line.name
        self._backoff = Backoff()
        self._streaming_query: StreamingQuery | None = None
        #: Time of the next start, on `time.monotonic`; `math.inf` until `replace_query` is called: it is held, or
        #: failed permanently.
        self.start_at = 0.0
        #: Time of the last start, and whether a batch was committed since.
        self._started_at, self._has_committed = 0.0, False
        #: The topics of the line existed at the last check.
        self._has_topics = False
        #: Text of the last failure; reset by a committed batch.
        self._last_failure = ""
        #: Last progress record of Spark, as JSON, and time of the next poll.
        self._last_progress, self._next_poll = "", 0.0

    @property
    def is_starting(self) -> bool:
        """True while a started query has not committed a batch, for `_START_WINDOW_S` seconds at most."""
        in_window = time.monotonic() < self._started_at + _START_WINDOW_S
        return self._streaming_query is not None and not self._has_committed and in_window

    @property
    def is_start_due(self) -> bool:
        """True if the next `step` starts the query."""
        return self._streaming_query is None and time.monotonic() >= self.start_at

    def step(self) -> None:
        """Start the query if its time has come; report the failure of a query that ended."""
        try:
            if self.is_start_due:
                check_new_executors(self._driver.spark, self._configured_query.bridge)
                if not self._has_topics:
                    self._ensure_topics()
                self._started_at, self._has_committed = time.monotonic(), False
                self._started_query = self._configured_query.query_to_start()
                self._streaming_query = self._started_query.start(self._driver.spark)
                self._driver.report("started", line=self._name, remarks=self._started_query.remarks)
            elif (query := self._streaming_query) is not None:
                is_active = query.isActive
                if not is_active or self.is_starting or time.monotonic() >= self._next_poll:
                    self._poll_progress(query)
                if not is_active:
                    self._streaming_query = None
                    if (error := query.exception()) is not None:
                        self._report_failure(error)
        except Exception as error:  # noqa: BLE001 - any failure of a query is reported, and the line retried
            self._report_failure(error)

    def _ensure_topics(self) -> None:
        """Check that the topics of the line exist; without an answer of Kafka the query itself waits for it."""
        try:
            line, bridge = self._configured_query.line, self._configured_query.bridge
            created_text = ensure_topics(bridge, bridge.required_topics(line))
        except KafkaError as error:
            if error.code not in NO_ANSWER_CODES:
                raise
            return
        self._has_topics = True
        if created_text:
            self._driver.report("noted", text=created_text)

    def _poll_progress(self, query: StreamingQuery) -> bool:
        """Report the batches that the query has committed since the last poll; return True if there are any.

        Spark keeps the last 500 progress records (`session_settings`). They are read through the JVM object: PySpark's
        list of them asks the JVM for each value, and a listener needs a callback server, 50 ms of CPU a batch.
        """
        self._next_poll = time.monotonic() + _PROGRESS_POLL_S
        jvm_progress, new_texts = query._jsq.recentProgress(), list[str]()  # noqa: SLF001 - see above
        for index in reversed(range(len(jvm_progress))):
            if (text := jvm_progress[index].json()) == self._last_progress:
                break
            new_texts.append(text)
        for text in reversed(new_texts):
            self._last_progress = text
            self.report_progress(json.loads(text))
        return bool(new_texts)

    def report_progress(self, progress: Mapping[str, Any]) -> None:
        """Report a committed batch, and reset the retry pause.

        Spark also reports a trigger without a batch, with the number of the next batch and no ``addBatch``: it is
        skipped.
        """
        self._has_committed, self._last_failure = True, ""
        self._backoff.reset()
        durations = progress.get("durationMs", {})
        if "addBatch" not in durations:
            return
        try:
            self._started_query.count_spark(progress)
        except Exception as error:  # noqa: BLE001 - a failed count does not stop the query
            sys.stderr.write(f"--- line {self._name}: not counted\n{printable_lines(str(error))}\n")
        self._driver.report("progress", line=self._name, millis=durations)

    def replace_query(self, query: LineQuery[Any]) -> None:
        """Replace the query of the line and start it at the next step, also after a permanent failure."""
        self._configured_query, self.start_at = query, 0.0
        self._backoff.reset()

    def stop(self, deadline: float) -> None:
        """Stop the query between two batches, or at `deadline` (`time.monotonic`), until `replace_query` is called."""
        self.start_at = math.inf
        if (query := self._streaming_query) is not None:
            self._poll_progress(query)
            while query.isActive and query.status["message"] == _PROCESSING_MESSAGE and time.monotonic() < deadline:
                if self._poll_progress(query):
                    break
                time.sleep(0.005)
            query.stop()
            self._poll_progress(query)
            self._streaming_query = None

    def _report_failure(self, error: Exception) -> None:
        if self._driver.is_ending():
            return
        sys.stderr.write(f"--- line {self._name}\n{printable_lines(str(error).expandtabs(4))}\n")
        failure = failure_reason(error, f'line "{self._name}"')
        # The query checked the topics' ids before its restart, and still fails.
        is_permanent = failure.permanent or (failure.code == "TL-B06" and failure.text == self._last_failure)
        self._last_failure = failure.text
        pause = None if is_permanent else min(self._backoff.next_pause(), _MAX_PAUSE_S.get(failure.code, math.inf))
        self.start_at = math.inf if pause is None else time.monotonic() + pause
        self._driver.report("failed", line=self._name, code=failure.code, text=failure.text, again_in=pause)


def step_all(runners: Sequence[LineRunner], max_starting: int = os.cpu_count() or 1) -> None:
    """Run a step of each line; at most `max_starting` queries are in their first batch at once.

    Spark keeps a Python process of each kind for every query that was busy at the same time, of 45 MB each, and the
    empty batches of idle lines keep these processes alive. Eight lines had 2.0 GB of them; started in turn they have
    1.4.
    """
    for runner in runners:
        if not runner.is_start_due or sum(other.is_starting for other in runners) < max_starting:
            runner.step()


class Driver:
    """Spark session of a bridge and the runners of its lines."""

    def __init__(self, bridge: Bridge, report: Callable[..., None]) -> None:
        self.bridge = bridge
        self.report = report
        self.stopping = threading.Event()
        self._go_received = threading.Event()
        #: Commands about a line; the main thread runs them, as it does all starts and stops.
        self._commands: SimpleQueue[dict[str, Any]] = SimpleQueue()
        start_time = time.monotonic()
        self._runners = {line.name: LineRunner(self, create_query(bridge, line)) for line in bridge.lines}
        check_master(bridge.spark.master)
        self.spark = create_session(bridge)
        for name, errors in sqlcheck.check_sql(bridge, self.spark).items():
            self._runners[name].start_at = math.inf  # only a person can fix them
            for error in errors.errors():
                self.report("failed", line=name, code=error.code, text=str(error), again_in=None)
        self.report("ready", seconds=time.monotonic() - start_time, spark=self.spark.version, pid=os.getpid())

    def run(self, commands: TextIO) -> int:
        """Run the queries until `stop` or the end of input; return the exit code."""
        guarded_thread(self._read_commands, "commands", commands, on_fault=self._exit_on_thread_failure).start()
        while not self.stopping.is_set():
            if self._jvm_process.poll() is not None:  # the supervisor starts another driver
                self.report("jvm", text="Spark's JVM has ended")
                os._exit(EXIT_JVM_GONE)
            self._run_commands()
            if self._go_received.is_set():
                step_all(list(self._runners.values()))
            self.stopping.wait(0.2)
        deadline = time.monotonic() + BATCH_TIMEOUT_S
        with contextlib.suppress(Exception):  # a JVM that has ended has no batch to finish
            for runner in self._runners.values():
                runner.stop(deadline)
            self.spark.stop()
        return 0

    def _run_commands(self) -> None:
        while not self._commands.empty():
            command = self._commands.get()
            if "hold" in command:
                # None after a permanent failure before this process.
                if runner := self._runners.get(command["hold"]):
                    runner.stop(time.monotonic() + BATCH_TIMEOUT_S)
                self.report("held", line=command["hold"])
            elif "judge" in command:
                lines = tuple(LINE_ADAPTER.validate_python(fields) for fields in command["judge"])
                errors_by_line = sqlcheck.check_sql(self.bridge.model_copy(update={"lines": lines}), self.spark)
                errors = [error.args for line_errors in errors_by_line.values() for error in line_errors.errors()]
                self.report("judged", of=command["of"], errors=errors)
            else:
                self._replace_line(LINE_ADAPTER.validate_python(command["take"]))

    def _replace_line(self, line: Uplink | Downlink) -> None:
        """Replace the settings of a line and start its query, also if the query was stopped for good before."""
        lines = {other.name: other for other in self.bridge.lines} | {line.name: line}
        self.bridge = self.bridge.model_copy(update={"lines": tuple(lines.values())})
        query = create_query(self.bridge, line)
        self._runners.setdefault(line.name, LineRunner(self, query)).replace_query(query)

    def is_ending(self) -> bool:
        """Return True if the driver stops or its JVM has ended; a killed JVM gets `_JVM_EXIT_WAIT_S` seconds to end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.stopping.is_set() or self._jvm_process.wait(_JVM_EXIT_WAIT_S) is not None
        return False

    @property
    def _jvm_process(self) -> subprocess.Popen[bytes]:
        return self.spark.sparkContext._gateway.proc  # type: ignore[union-attr,no-any-return]  # noqa: SLF001 - PySpark's

    def _exit_on_thread_failure(self, error: BaseException) -> None:
        """End the process after a failure of the command thread; the supervisor starts another driver."""
        self.report("jvm", text=f"a thread of the driver ended ({type(error).__name__})")
        os._exit(EXIT_JVM_GONE)

    def _read_commands(self, commands: TextIO) -> None:
        for command in commands:
            if command.strip() == "go":
                self._go_received.set()
            elif command.strip() == "stop":
                break
            elif command.startswith("{"):
                self._commands.put(json.loads(command))
        self.stopping.set()


def main() -> int:
    """Read the bridge from standard input, run its queries until they are stopped, and return the exit code."""
    # Spark's JVM and workers inherit standard output and may write to it: reports use a duplicated descriptor.
    report = report_writer(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    sys.stderr = LogStream(sys.stderr)  # a full disk under the log must not end the driver
    bridge = Bridge.model_validate_json(sys.stdin.readline())
    try:
        driver = Driver(bridge, report)
    except Exception as error:
        failure = failure_reason(error, "spark", "the session did not start")
        report("jvm", text=failure.text.removeprefix("spark: "))
        raise
    signal.signal(signal.SIGTERM, lambda *_: driver.stopping.set())
    return driver.run(sys.stdin)


if __name__ == "__main__":
    sys.exit(main())
