"""The driver process, ``python -m towline.bridge.runtime.driver``: one Spark session, one query a line.

It reads the bridge as JSON from the first line of standard input, then commands: ``go`` starts the queries, ``stop``
ends them after their batch; ``{"hold": NAME}`` stops the query of a line after its batch, ``{"take": LINE}`` starts it
again as that line says; ``{"judge": [LINE], "of": ID}`` asks for mistakes in the SQL of lines. End of input means that
the supervisor has died: the same as ``stop``. It reports JSON lines on standard output: ``ready``, ``started``,
``noted``, ``progress``, ``failed``, ``held``, ``judged``; all else goes to standard error, which the supervisor keeps
in a file.
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
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Final, TextIO

from pydantic import ConfigDict, TypeAdapter
from pyspark.sql.streaming.query import StreamingQuery

from towline.bridge.config.model import Bridge, DownLine, Line
from towline.bridge.downlink.query import DownlinkQuery, find_modules
from towline.bridge.lines.query import LineQuery
from towline.bridge.runtime import sqlcheck
from towline.bridge.runtime.failures import reason
from towline.bridge.runtime.session import look_at_executors, look_at_master, session
from towline.bridge.runtime.supervisors import see_to
from towline.bridge.uplink.query import UplinkQuery
from towline.errors import KafkaError, SetupError, TowlineError
from towline.kafka.faults import SILENCE
from towline.logfile import LogStream
from towline.text import printable_lines
from towline.threads import guarded_thread
from towline.timing import Backoff

#: Longest wait for a batch to end after ``stop``, in seconds; what it wrote comes again after the next start.
STOP_S: Final = 10.0
#: The same after ``hold``: with Kafka away a batch does not end, and is finished after the next start of its query.
HOLD_S: Final = 10.0
#: Longest pause, in seconds, before another try after a failure that ends all at once: a disk that has room again.
_SOON: Final = {"TL-B56": 2.0}
_PROCESSING: Final = "Processing new data"
#: Longest time, in seconds, that a query counts as one that begins: a first batch may wait for a Kafka that is away.
_BEGINS_S: Final = 15.0
#: Seconds between two looks at what a query has committed.
_LOOK_S: Final = 1.0
#: So many seconds after a call that failed a JVM that was killed has ended.
_LOST_S: Final = 0.5
#: What a process that lost its JVM ends with.
EXIT_JVM_GONE: Final = 3


class Reports:
    """Writes JSON lines, one at a time, from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def say(self, kind: str, **values: Any) -> None:
        """Report; a supervisor that is gone is noticed at standard input, not here."""
        line = json.dumps({"kind": kind, "at": time.time(), **values})
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()


_LINE: Final[TypeAdapter[Line | DownLine]] = TypeAdapter(Line | DownLine, config=ConfigDict(hide_input_in_errors=True))


def query_of(bridge: Bridge, line: Line | DownLine) -> UplinkQuery | DownlinkQuery:
    """The query of a line, by its direction."""
    return UplinkQuery(bridge, line) if isinstance(line, Line) else DownlinkQuery(bridge, line)


class LineRunner:
    """Runs the query of one line; a step at a time, on the main thread.

    The main thread it is, because Spark looks for a sink's Python data source in the session that is active *on the
    calling thread*, and PySpark makes it active on the thread that made the session only.
    """

    def __init__(self, host: Driver, query: LineQuery[Any]) -> None:
        self._host = host
        #: Of the line as the file says it, and the one that was started last (`LineQuery.in_force`).
        self._wanted = self._current = query
        self._name = query.line.name
        self._pauses = Backoff()
        self._running: StreamingQuery | None = None
        #: When it is started, on `time.monotonic`; `math.inf` for not until `take` is called: it is held, or given up
        #: because another try would fail the same way.
        self.start_at = 0.0
        #: When the query was started last, and whether a batch was committed since then.
        self._started_at, self._begun = 0.0, False
        #: Whether the topics that the line names were there.
        self._has_topics = False
        #: What the last failure was, until a batch is committed.
        self._failure = ""
        #: The last progress of Spark's that was heard, as JSON, and when the next is looked for.
        self._heard, self._look_at = "", 0.0
        #: Query id and number of the last batch that was reported.
        self._reported = "", -1

    @property
    def begins(self) -> bool:
        """Whether the query was started a moment ago and has not committed a batch yet."""
        fresh = time.monotonic() < self._started_at + _BEGINS_S
        return self._running is not None and not self._begun and fresh

    @property
    def due(self) -> bool:
        """Whether the next `step` starts the query."""
        return self._running is None and time.monotonic() >= self.start_at

    def step(self) -> None:
        """Start the query if it is time; notice that it has ended."""
        try:
            if self.due:
                look_at_executors(self._host.spark, self._wanted.bridge)
                if not self._has_topics:
                    self._see_to_topics()
                self._started_at, self._begun = time.monotonic(), False
                self._current = self._wanted.in_force()
                self._running = self._current.start(self._host.spark)
                self._host.say("started", line=self._name, remarks=self._current.remarks)
            elif (query := self._running) is not None:
                active = query.isActive
                if not active or self.begins or time.monotonic() >= self._look_at:
                    self._hear(query)
                if not active:
                    self._running = None
                    if (error := query.exception()) is not None:
                        self._failed(error)
        except Exception as error:  # noqa: BLE001 - whatever ended the query is reported, and the line tries again
            self._failed(error)

    def _see_to_topics(self) -> None:
        """See that the topics which the line names are there; no answer is no reason: its query waits longer."""
        try:
            made = see_to(self._wanted.bridge, self._wanted.bridge.topics_of(self._wanted.line))
        except KafkaError as error:
            if error.code not in SILENCE:
                raise
            return
        self._has_topics = True
        if made:
            self._host.say("noted", text=made)

    def _hear(self, query: StreamingQuery) -> bool:
        """Take what a query says of the batches that it has committed since it was asked last; whether there are any.

        Spark keeps the last 500 (`settings_of`). PySpark's own list of them asks the JVM for each value of each,
        and a listener needs a server of callbacks: 50 ms of CPU a batch.
        """
        self._look_at = time.monotonic() + _LOOK_S
        recent, texts = query._jsq.recentProgress(), list[str]()  # noqa: SLF001 - see above
        for index in reversed(range(len(recent))):
            if (text := recent[index].json()) == self._heard:
                break
            texts.append(text)
        for text in reversed(texts):
            self._heard = text
            self.progressed(json.loads(text))
        return bool(texts)

    def progressed(self, progress: Mapping[str, Any]) -> None:
        """Report a batch that was committed, once: the next failure is a new one.

        A trigger without a batch is reported by Spark too, with the number of the next batch: it added none.
        """
        self._begun, self._failure = True, ""
        self._pauses.reset()
        millis, (query, batch) = progress.get("durationMs", {}), (progress.get("id", ""), progress["batchId"])
        if "addBatch" not in millis or (query == self._reported[0] and batch <= self._reported[1]):
            return
        self._reported = query, batch
        try:
            self._current.count_spark(progress)
        except Exception as error:  # noqa: BLE001 - numbers that are not counted stop nothing
            sys.stderr.write(f"--- line {self._name}: not counted\n{printable_lines(str(error))}\n")
        self._host.say("progress", line=self._name, query=query, batch=batch, millis=millis)

    def take(self, query: LineQuery[Any]) -> None:
        """Go on with another query of the line, at once, whatever became of the one before."""
        self._wanted, self.start_at = query, 0.0
        self._pauses.reset()

    def stop(self, deadline: float) -> None:
        """Stop between two batches, when nothing is being written or just after a commit, and stay so until `take`."""
        self.start_at = math.inf
        if (query := self._running) is not None:
            self._hear(query)
            while query.isActive and query.status["message"] == _PROCESSING and time.monotonic() < deadline:
                if self._hear(query):
                    break
                time.sleep(0.005)
            query.stop()
            self._hear(query)
            self._running = None

    def _failed(self, error: Exception) -> None:
        if self._host.ending():
            return
        sys.stderr.write(f"--- line {self._name}\n{printable_lines(str(error).expandtabs(4))}\n")
        why = reason(error, f'line "{self._name}"')
        # Kafka's topics were looked at in between, and that has changed nothing.
        permanent = why.permanent or (why.code == "TL-B06" and why.text == self._failure)
        self._failure = why.text
        pause = None if permanent else min(self._pauses.next(), _SOON.get(why.code, math.inf))
        self.start_at = math.inf if pause is None else time.monotonic() + pause
        self._host.say("failed", line=self._name, code=why.code, text=why.text, again_in=pause)


def step_all(runners: Sequence[LineRunner], at_once: int = os.cpu_count() or 1) -> None:
    """A step of each line; of those to be started no more than the machine can begin at once, the others wait a turn.

    Spark keeps a Python process of each kind for every query that was busy at the same moment, of 45 MB each, and the
    empty batches of idle lines keep them alive for ever: eight lines had 2.0 GB of them, and 1.4 since they begin so.
    """
    for runner in runners:
        if not runner.due or sum(one.begins for one in runners) < at_once:
            runner.step()


class Driver:
    """The session and its runners."""

    def __init__(self, bridge: Bridge, reports: Reports) -> None:
        self.bridge = bridge
        self.say = reports.say
        self.stopping = threading.Event()
        self._go = threading.Event()
        #: Commands about a line: they are carried out on the main thread, as all starts and stops.
        self._orders: SimpleQueue[dict[str, Any]] = SimpleQueue()
        began = time.monotonic()
        self._runners = {line.name: LineRunner(self, query_of(bridge, line)) for line in bridge.lines}
        look_at_master(bridge.spark.master)
        self.spark = session(bridge)
        for name, mistakes in sqlcheck.judge(bridge, self.spark).items():
            self._give_up(name, mistakes.found())
        try:  # one that comes later is looked at when a line starts again (`LineRunner.step`)
            look_at_executors(self.spark, self.bridge)
        except SetupError as error:
            for name in self._runners:
                self._give_up(name, [error])
        self.say("ready", seconds=time.monotonic() - began, spark=self.spark.version, pid=os.getpid())

    def _give_up(self, name: str, errors: Sequence[TowlineError]) -> None:
        """Leave a line be that nobody but a person can mend."""
        self._runners[name].start_at = math.inf
        for error in errors:
            self.say("failed", line=name, code=error.code, text=str(error), again_in=None)

    def run(self, commands: TextIO) -> int:
        """Serve until stopped; the exit code."""
        guarded_thread(self._listen, "commands", commands, ended=self._lost).start()
        while not self.stopping.is_set():
            if self._jvm.poll() is not None:  # without it a driver is of no use: the supervisor starts another
                self.say("jvm", text="Spark's JVM has ended")
                os._exit(EXIT_JVM_GONE)
            self._obey()
            if self._go.is_set():
                step_all(list(self._runners.values()))
            self.stopping.wait(0.2)
        deadline = time.monotonic() + STOP_S
        with contextlib.suppress(Exception):  # a JVM that no longer answers has no batch to finish
            for runner in self._runners.values():
                runner.stop(deadline)
            self.spark.stop()
        return 0

    def _obey(self) -> None:
        while not self._orders.empty():
            order = self._orders.get()
            if "hold" in order:
                if runner := self._runners.get(order["hold"]):  # else it was given up before this process
                    runner.stop(time.monotonic() + HOLD_S)
                self.say("held", line=order["hold"])
            elif "judge" in order:
                lines = tuple(_LINE.validate_python(one) for one in order["judge"])
                wrong = sqlcheck.judge(self.bridge.model_copy(update={"lines": lines}), self.spark)
                errors = [(one.code, one.where, one.what, one.do) for each in wrong.values() for one in each.found()]
                self.say("judged", of=order["of"], mistakes=errors)
            else:
                self._take(_LINE.validate_python(order["take"]))

    def _take(self, line: Line | DownLine) -> None:
        """Let a line be what it is from now on; one that was given up before this process begins again."""
        lines = {one.name: one for one in self.bridge.lines} | {line.name: line}
        self.bridge = self.bridge.model_copy(update={"lines": tuple(lines.values())})
        query = query_of(self.bridge, line)
        self._runners.setdefault(line.name, LineRunner(self, query)).take(query)

    def ending(self) -> bool:
        """Whether the driver stops, or the JVM has ended; a moment's patience tells a lost JVM from a lost call."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.stopping.is_set() or self._jvm.wait(_LOST_S) is not None
        return False

    @property
    def _jvm(self) -> subprocess.Popen[bytes]:
        return self.spark.sparkContext._gateway.proc  # type: ignore[union-attr,no-any-return]  # noqa: SLF001 - PySpark's

    def _lost(self, error: BaseException) -> None:
        """Without its commands a driver ends, and the supervisor starts another."""
        self.say("jvm", text=f"a thread of its driver ended ({type(error).__name__})")
        os._exit(EXIT_JVM_GONE)

    def _listen(self, commands: TextIO) -> None:
        for command in commands:
            if command.strip() == "go":
                self._go.set()
            elif command.strip() == "stop":
                break
            elif command.startswith("{"):
                self._orders.put(json.loads(command))
        self.stopping.set()


def main() -> int:
    """Read the bridge, run it until it is stopped, return the exit code."""
    # Spark's JVM and workers inherit standard output and may write to it: the reports keep a descriptor of their own.
    reports = Reports(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    sys.stderr = LogStream(sys.stderr)  # a full disk under the log must not end the driver
    bridge = Bridge.model_validate_json(sys.stdin.readline())
    find_modules(bridge.file)
    try:
        driver = Driver(bridge, reports)
    except Exception as error:
        reports.say("jvm", text=reason(error, "spark", "the session did not start").text.removeprefix("spark: "))
        raise
    signal.signal(signal.SIGTERM, lambda *_: driver.stopping.set())
    return driver.run(sys.stdin)


if __name__ == "__main__":
    sys.exit(main())
