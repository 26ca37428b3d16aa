"""The driver process, ``python -m towline.bridge.runtime.driver``: one Spark session, one query a line.

It reads the bridge as JSON from the first line of standard input, from the second what was counted of each line, then
commands: ``go`` starts the queries, ``stop`` ends them after their batch. End of input means that the supervisor has
died: the same as ``stop``. It reports JSON lines on standard output: ``ready``, ``counted``, ``started``, ``progress``,
``failed``, ``stopped``; all else goes to standard error, which the supervisor keeps in a file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TextIO

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

import towline
from towline.bridge.config import sqlcheck
from towline.bridge.config.model import AnyLine, Bridge, DownLine, Line
from towline.bridge.downlink import query as downlink
from towline.bridge.runtime.backoff import Backoff
from towline.bridge.runtime.downaccount import DownCounts
from towline.bridge.runtime.failures import reason
from towline.bridge.runtime.identity import Identity
from towline.bridge.runtime.javaclient import java_client
from towline.bridge.runtime.recount import letters_told, up_to_now
from towline.bridge.runtime.recovery import examine, gather, starting
from towline.bridge.runtime.surroundings import short_sockets
from towline.bridge.uplink.sql import Letters, Repeats, apply
from towline.checkpoint import Checkpoint
from towline.guarantee import Guarantee, policy
from towline.kafka.options import SinkSettings
from towline.kafka.resetting import set_markers
from towline.logfile import LogStream
from towline.text import printable_lines

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = [
    "CONSUMER",
    "COUNTER",
    "KEPT_COUNTER",
    "Driver",
    "Reports",
    "facts",
    "main",
    "session",
    "source",
    "start_query",
]

#: Names of the observed metrics in a query's progress: of all rows, and of those that go on to Kafka.
COUNTER = "towline"
KEPT_COUNTER = "towline.kept"
#: Name under which the bridge reads a gateway.
CONSUMER = "bridge"
#: Longest wait for a batch to end after ``stop``, in seconds; what it wrote comes again after the next start.
STOP_S = 60.0
#: Longest pause, in seconds, before another try after a failure that ends all at once: a disk that has room again.
_SOON: Final = {"TL-B56": 2.0}
#: What a process that lost its JVM ends with.
EXIT_JVM_GONE = 3
_PROCESSING = "Processing new data"
#: More than the listener can be behind.
_LAST_BATCHES = 10


class Reports:
    """Writes JSON lines, one at a time, from any thread.

    Args:
        stream: Where they go.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def say(self, kind: str, **facts: Any) -> None:
        """Report; a supervisor that is gone is noticed at standard input, not here."""
        line = json.dumps({"kind": kind, "at": time.time(), **facts})
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()


#: For a line that drops repeats. One partition, because rows of a device must not be spread over several and come back
#: in another order; and no batch of its own to clear old keys, which the next batch clears as well.
_STATEFUL = {"spark.sql.shuffle.partitions": "1", "spark.sql.streaming.noDataMicroBatches.enabled": "false"}


#: A master that is one process, for which Spark makes the secret of spark.authenticate by itself
#: (`SecurityManager.initializeAuth`). Without one, another user of the machine could read blocks of messages at its
#: ports, and hand the driver Java objects to deserialize.
_ALONE = re.compile(r"local(\[.*\])?")
_LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}


def session(bridge: Bridge, judge: Callable[[Any], None] | None = None) -> SparkSession:
    """The Spark session of a bridge, both formats registered; what this process makes from now on is its user's alone.

    Args:
        bridge: What the file says.
        judge: Looks at Spark's JVM as soon as it runs, seconds before there is a session.

    ``spark.sql.ansi.enabled`` is off: under ANSI rules one payload that does not cast in a ``where`` would raise, fail
    its batch for ever and stop the line; without them it is null, and the message counts as filtered.
    """
    if bridge.downlinks:
        java_client(bridge.kafka.client())  # its secrets, in the environment the JVM inherits
    # Blocks, artifacts and the sockets of Python workers, in /tmp, hold messages: the JVM and its workers inherit this.
    os.umask(0o077)
    here = bridge.spark.master.startswith("local")
    if here:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # the web page would listen on every address
    conf: dict[str, bool | float | int | str | None] = {
        **towline.spark_conf(),
        **(_LOOPBACK if here else {}),
        **({"spark.authenticate": "true"} if _ALONE.fullmatch(bridge.spark.master) else {}),
        **short_sockets(os.environ.get("SPARK_LOCAL_DIRS")),
        "spark.ui.enabled": str(bridge.spark.ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        **sqlcheck.SESSION_SQL,
        "spark.sql.warehouse.dir": str(bridge.state_dir / "spark-warehouse"),
        **(_STATEFUL if any(line.within for line in bridge.uplinks) else {}),
        **({"spark.jars": ",".join(map(str, bridge.spark.kafka_jars))} if bridge.spark.kafka_jars else {}),
        **{
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in bridge.spark.conf.items()
        },
    }
    builder = SparkSession.builder.master(bridge.spark.master).appName(f"towline {bridge.name}")
    if judge is not None:
        known = SparkConf().setMaster(bridge.spark.master).setAll([(name, str(value)) for name, value in conf.items()])
        SparkContext._ensure_initialized(conf=known)  # noqa: SLF001 - as the builder does it
        judge(SparkContext._jvm)  # noqa: SLF001 - there is no public way
    made = builder.config(map=conf).getOrCreate()
    towline.register(made)
    return made


def start_query(spark: SparkSession, bridge: Bridge, line: Line | DownLine) -> StreamingQuery:
    """Start the query of a line: gateway → routes → Kafka, or Kafka → mapping → gateway.

    Raises:
        TowlineError: TL-B22 to TL-B27, checkpoint and journal do not belong together; others in Spark's wrapping,
            `failures.reason` finds them.
        pyspark.errors.AnalysisException: For a ``where`` that is no SQL over the source's columns.
    """
    for told in Checkpoint(str(line.checkpoint)).mend():
        sys.stderr.write(f"--- line {line.name}\n{told}\n")
    if isinstance(line, Line):
        query = _start_uplink(spark, bridge, line)
    else:
        query = downlink.start(spark, bridge, line, (COUNTER, KEPT_COUNTER), _parts(line))
    try:
        Checkpoint(str(line.checkpoint)).sync()  # else a power failure could leave an identity without its checkpoint
    except BaseException:
        query.stop()
        raise
    return query


def _start_uplink(spark: SparkSession, bridge: Bridge, line: Line) -> StreamingQuery:
    identity = Identity.read(line.gateway.state_dir) or Identity.new(bridge.name, line.name)
    seen = gather(line, CONSUMER, identity)
    identity = examine(line, bridge.file, identity, seen, lambda fresh, batch: _mark(bridge, line, fresh, batch))
    writer = (
        records(source(spark, line, starting(line, identity, seen)), line, identity.sink)
        .writeStream.format("kafka_transactional")
        .queryName(line.name)
        .option("guarantee", line.guarantee.value)
        .option("checkpointLocation", str(line.checkpoint))
        .options(**_sink(bridge, line, identity))
    )
    query = writer.trigger(processingTime=f"{line.trigger_interval_s:g} seconds").start()
    identity.started(query, line)
    return query


def _sink(bridge: Bridge, line: Line, identity: Identity) -> dict[str, str]:
    return {f"kafka.{name}": value for name, value in bridge.kafka.client().items()} | sink_options(line, identity)


def _mark(bridge: Bridge, line: Line, identity: Identity, batch: int) -> None:
    """Make a batch the last one that the line's sink has written.

    Raises:
        KafkaError: As `towline.kafka.resetting.set_markers`.
    """
    set_markers(SinkSettings.parse(_sink(bridge, line, identity)), identity.sink, batch)


def source(spark: SparkSession, line: Line, begin: str) -> DataFrame:
    """The rows that the line's gateway gives.

    Args:
        spark: The session.
        line: Which line.
        begin: Where a query without a checkpoint begins, as the source's option ``startingOffset``.
    """
    return (
        spark.readStream.format("mqtt")
        .option("gateway", str(line.gateway.state_dir))
        .option("consumer", CONSUMER)
        .option("guarantee", line.guarantee.value)
        .option("maxMessagesPerTrigger", line.max_messages_per_trigger)
        .option("maxBytesPerTrigger", line.max_bytes_per_trigger)
        .option("startingOffset", begin)
        .option("checkpointLocation", str(line.checkpoint))
        .option("eventTime", str(line.within is not None).lower())
        .load()
    )


def records(rows: DataFrame, line: Line, sink: str) -> DataFrame:
    """The records of a line: mapped, repeats dropped, in as many parts as it has writers.

    Args:
        rows: As the gateway gives them.
        line: Whose routes.
        sink: Signs the dead letters: two bridges with one dead-letter topic may have lines of one name.
    """
    strict = line.guarantee is Guarantee.EXACTLY_ONCE
    return apply(
        rows,
        line.routes,
        COUNTER,
        letters=Letters(line.dead_letter_topic, sink) if line.dead_letter_topic else None,
        repeats=Repeats(line.within, strict) if line.within else None,
        kept=KEPT_COUNTER,
        parallelism=line.parallelism,
    )


def sink_options(line: Line, identity: Identity) -> dict[str, str]:
    """What the sink is told beside its client's settings."""
    made = {"sinkId": identity.sink, **_parts(line)}
    if line.dead_letter_topic and policy(line.guarantee).serves_again:  # at_most_once gives up what Kafka refuses
        made["deadLetterTopic"] = line.dead_letter_topic
    return made


def _parts(line: AnyLine) -> dict[str, str]:
    """How many transactions a batch is."""
    return {"parallelism": str(line.parallelism)} if policy(line.guarantee).transactions else {}


class _Listener(StreamingQueryListener):
    """Hands each batch's progress on."""

    def __init__(self, on_batch: Callable[[str, dict[str, Any]], None]) -> None:
        self._on_batch = on_batch

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Nothing to do."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """A batch is in the commit log."""
        # The objects beside the JSON turn an absent start offset into the text "None" (PySpark 4.3, SourceProgress).
        progress = json.loads(event.progress.json)
        self._on_batch(progress.get("name") or "", facts(progress))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """Nothing to do."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Seen by the runner, with the reason."""


def facts(progress: Mapping[str, Any]) -> dict[str, Any]:
    """What the account needs of a query's progress: batch, rows, journal, offsets, durations, observed counts."""
    source: Mapping[str, Any] = next(iter(progress.get("sources") or []), {})
    begin, end = _entry(source.get("startOffset")), _entry(source.get("endOffset"))
    return {
        "batch": progress["batchId"],
        "rows": progress.get("numInputRows", 0),
        "journal": end.get("journal", ""),
        **downlink.facts(progress),
        "start": begin.get("offset"),
        "end": end.get("offset"),
        "millis": progress.get("durationMs", {}),
        "observed": _observed(progress),
    }


def _observed(progress: Mapping[str, Any]) -> dict[str, int]:
    """What was counted on the way, repeats among it: rows that were to go on and did not come out."""
    metrics = progress.get("observedMetrics") or {}
    seen = {
        name: int(value or 0) for part in (COUNTER, KEPT_COUNTER) for name, value in (metrics.get(part) or {}).items()
    }
    if "kept" in seen and "unrouted" in seen:  # an uplink's
        late = sum(int(one.get("numRowsDroppedByWatermark") or 0) for one in progress.get("stateOperators") or [])
        gone = seen["rows"] - seen.get("filtered", 0) - seen.get("unrouted", 0) - seen.pop("kept")
        seen |= {"deduplicated": max(0, gone - late), "late": late}
    return seen


def _entry(place: Any) -> dict[str, Any]:
    """The one gateway's part of a source offset (`towline.spark.offsets`)."""
    gateways = place.get("gateways", {}) if isinstance(place, dict) else {}
    return next(iter(gateways.values()), {})


class _Runner:
    """Keeps the query of one line running; a step at a time, on the main thread.

    The main thread it is, because Spark looks for a sink's Python data source in the session that is active *on the
    calling thread*, and PySpark makes it active on the thread that made the session only.
    """

    def __init__(self, driver: Driver, line: Line | DownLine) -> None:
        self.line = line
        self._driver = driver
        self._backoff = Backoff()
        self._query: StreamingQuery | None = None
        self._again_at = 0.0
        #: Set by each batch; cleared to wait for the next.
        self._batch_done = threading.Event()
        #: Whether it stopped because another try would fail the same way.
        self.given_up = False
        #: What was counted before this process; None when there is no more to count again.
        self._counts: DownCounts | None = driver.counts.get(line.name, DownCounts())

    def step(self) -> None:
        """Start the query if it is time; notice that it has ended."""
        try:
            if self._query is None and not self.given_up and time.monotonic() >= self._again_at:
                self._count_again()
                self._query = start_query(self._driver.spark, self._driver.bridge, self.line)
                self._driver.reports.say("started", line=self.line.name)
            elif self._query is not None and not self._query.isActive:
                self._catch_up(self._query)
                ended, self._query = self._query.exception(), None
                if ended is not None:
                    self._failed(ended)
        except Exception as error:  # noqa: BLE001 - whatever ended the query is told, and the line tries again
            self._failed(error)

    def _count_again(self) -> None:
        """Report what was committed and not told, because a process was killed in between; once is enough."""
        counts, self._counts = self._counts, None
        if counts is None:
            return
        try:
            told = (
                up_to_now(self.line)
                if isinstance(self.line, Line)
                else downlink.recount(self._driver.spark, self._driver.bridge, self.line, counts)
            )
            for known in told:
                self._driver.reports.say("counted", line=self.line.name, **known)
        except Exception as error:  # noqa: BLE001 - a batch that stays uncounted stops nothing
            sys.stderr.write(f"--- line {self.line.name}: not counted again\n{printable_lines(str(error))}\n")

    def tell(self, known: Mapping[str, Any]) -> None:
        """Report a committed batch.

        A trigger that found nothing is reported by Spark too, with the number of the next batch: it added none.
        """
        if "addBatch" not in known["millis"]:
            return
        gives_up = not policy(self.line.guarantee).serves_again
        self._driver.reports.say("progress", line=self.line.name, gives_up=gives_up, **letters_told(self.line, known))

    def progressed(self, known: Mapping[str, Any]) -> None:
        """A batch was committed: the next failure is a new one. Called on the listener's thread."""
        self.tell(known)
        self._backoff.reset()
        self._batch_done.set()

    def finish(self, deadline: float) -> None:
        """Stop between two batches: when nothing is being written, or just after a batch was committed."""
        query = self._query
        if query is not None:
            self._batch_done.clear()
            while query.isActive and time.monotonic() < deadline:
                if query.status["message"] != _PROCESSING or self._batch_done.wait(0.005):
                    break
            query.stop()
            self._catch_up(query)
        self._driver.reports.say("stopped", line=self.line.name)

    def _catch_up(self, query: StreamingQuery) -> None:
        """Report the last batches once more: the listener's thread may not have come to them; repeats do no harm."""
        for progress in query.recentProgress[-_LAST_BATCHES:]:
            told = getattr(progress, "json", None)
            known = json.loads(told) if isinstance(told, str) else dict(progress)
            self.tell(facts(known))

    def _failed(self, error: Exception) -> None:
        if self._driver.stopping.is_set() or self._driver.jvm_gone():
            return
        sys.stderr.write(f"--- line {self.line.name}\n{printable_lines(str(error).expandtabs(4))}\n")
        why = reason(error, f'line "{self.line.name}"')
        self.given_up = why.permanent
        pause = None if why.permanent else min(self._backoff.next(), _SOON.get(why.code, math.inf))
        self._again_at = time.monotonic() + (pause or 0.0)
        self._driver.reports.say("failed", line=self.line.name, code=why.code, text=why.text, again_in=pause)


class Driver:
    """The session and its runners.

    Args:
        bridge: What to run.
        reports: Where to tell.
        counts: What was counted before, by line; of lines from Kafka.
    """

    def __init__(self, bridge: Bridge, reports: Reports, counts: Mapping[str, DownCounts]) -> None:
        self.bridge = bridge
        self.reports = reports
        self.counts = counts
        self.stopping = threading.Event()
        self._go = threading.Event()
        began = time.monotonic()
        self._runners = {line.name: _Runner(self, line) for line in bridge.lines}
        self.spark = session(bridge, self._judge if sqlcheck.said(bridge) else None)
        reports.say("ready", seconds=time.monotonic() - began, spark=self.spark.version, pid=os.getpid())

    def _judge(self, jvm: Any) -> None:
        """Give up the lines whose SQL is wrong, in the words of ``towline check``."""
        for name, mistakes in sqlcheck.judge(self.bridge, jvm)[0].items():
            self._runners[name].given_up = True
            for error in mistakes.found():
                self.reports.say("failed", line=name, code=error.code, text=str(error), again_in=None)

    def run(self, commands: TextIO) -> int:
        """Serve until stopped; the exit code."""
        threading.Thread(target=self._listen, args=(commands,), name="commands", daemon=True).start()
        threading.Thread(target=self._watch_jvm, name="jvm", daemon=True).start()
        while not self._go.wait(0.2):
            if self.stopping.is_set():
                return 0
        self.spark.streams.addListener(_Listener(self._on_batch))
        runners = list(self._runners.values())
        while not self.stopping.is_set() and not all(runner.given_up for runner in runners):
            for runner in runners:
                runner.step()
            self.stopping.wait(0.2)
        deadline = time.monotonic() + STOP_S
        with contextlib.suppress(Exception):  # a JVM that no longer answers has no batch to finish
            for runner in runners:
                runner.finish(deadline)
            self.spark.stop()
        return 0 if self.stopping.is_set() else 2

    def jvm_gone(self) -> bool:
        """Whether the JVM has ended; a moment's patience tells a lost JVM from a lost call."""
        process = self._jvm()
        deadline = time.monotonic() + 0.5
        while process is not None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            if self._alive():
                return False
        return process is not None and process.poll() is not None

    def _jvm(self) -> Any:
        gateway = getattr(self.spark.sparkContext, "_gateway", None)
        return getattr(gateway, "proc", None)

    def _alive(self) -> bool:
        try:
            return bool(self.spark.sparkContext.applicationId)
        except Exception:  # noqa: BLE001 - any failure means the same
            return False

    def _watch_jvm(self) -> None:
        """A driver without its JVM is of no use: end, so that the supervisor starts another."""
        process = self._jvm()
        if process is not None:
            process.wait()
            if not self.stopping.is_set():
                self.reports.say("jvm", text="Spark's JVM has ended")
            os._exit(0 if self.stopping.is_set() else EXIT_JVM_GONE)

    def _on_batch(self, name: str, facts: dict[str, Any]) -> None:
        if runner := self._runners.get(name):
            runner.progressed(facts)

    def _listen(self, commands: TextIO) -> None:
        for command in commands:
            if command.strip() == "go":
                self._go.set()
            elif command.strip() == "stop":
                break
        self.stopping.set()


def main() -> int:
    """Read the bridge, run it, return the exit code: 0 as asked, 2 when no line could go on."""
    # Spark's JVM and workers inherit standard output and may write to it: the reports keep a descriptor of their own.
    reports = Reports(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    sys.stderr = LogStream(sys.stderr)  # a full disk under the log must not end the driver
    bridge = Bridge.model_validate_json(sys.stdin.readline())
    counts = {name: DownCounts.from_json(told) for name, told in json.loads(sys.stdin.readline()).items()}
    downlink.find_modules(bridge.file)
    try:
        driver = Driver(bridge, reports, counts)
    except Exception as error:
        reports.say("jvm", text=reason(error, "spark", "the session did not start").text.removeprefix("spark: "))
        raise
    signal.signal(signal.SIGTERM, lambda *_: driver.stopping.set())
    return driver.run(sys.stdin)


if __name__ == "__main__":
    sys.exit(main())
