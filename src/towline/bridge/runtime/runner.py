"""Keeps the query of one line running: starts it, reports its batches, and starts it again after a failure."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from towline.backoff import Backoff
from towline.bridge.runtime.failures import reason
from towline.bridge.runtime.kafka_supervisor import see_to
from towline.bridge.runtime.session import look_at_executors
from towline.errors import KafkaError
from towline.kafka.faults import SILENCE
from towline.text import printable_lines

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from towline.bridge.lines.query import LineQuery

__all__ = ["Host", "LineRunner"]

#: Longest pause, in seconds, before another try after a failure that ends all at once: a disk that has room again.
_SOON: Final = {"TL-B56": 2.0}
_PROCESSING: Final = "Processing new data"
#: Longest time, in seconds, that a query counts as one that begins: a first batch may wait for a Kafka that is away.
_BEGINS_S: Final = 15.0
#: More than the listener can be behind.
_LAST_BATCHES: Final = 10


class Host(Protocol):
    """The driver, as far as a runner goes."""

    spark: SparkSession

    def say(self, kind: str, **values: Any) -> None:
        """Report."""

    def ending(self) -> bool:
        """Whether a failure says nothing: the driver stops, or Spark's JVM is gone."""


class LineRunner:
    """Runs the query of one line; a step at a time, on the main thread.

    The main thread it is, because Spark looks for a sink's Python data source in the session that is active *on the
    calling thread*, and PySpark makes it active on the thread that made the session only.

    Args:
        host: Has the session and takes the reports.
        query: Of the line.
    """

    def __init__(self, host: Host, query: LineQuery[Any]) -> None:
        self._host = host
        #: Of the line as the file says it, and the one that was started last (`LineQuery.in_force`).
        self._wanted = self._current = query
        self._name = query.line.name
        #: It is not started until `take` is called.
        self._held = False
        self._pauses = Backoff()
        self._running: StreamingQuery | None = None
        self._again_at = 0.0
        #: When the query was started last.
        self._started_at = 0.0
        #: Whether a batch was committed since then.
        self._begun = False
        #: Set by each batch; cleared to wait for the next.
        self._batch_done = threading.Event()
        #: Whether the topics that the line names were there.
        self._has_topics = False
        #: What the last failure was, until a batch is committed.
        self._failure = ""
        #: Whether it stopped because another try would fail the same way.
        self.given_up = False
        #: Held while a batch is reported: the listener's thread, and a stop, may come to it at once.
        self._reporting = threading.Lock()

    @property
    def begins(self) -> bool:
        """Whether the query was started a moment ago and has not committed a batch yet."""
        fresh = time.monotonic() < self._started_at + _BEGINS_S
        return self._running is not None and not self._begun and fresh

    @property
    def due(self) -> bool:
        """Whether the next `step` starts the query."""
        return self._running is None and not (self.given_up or self._held) and time.monotonic() >= self._again_at

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
            elif self._running is not None and not self._running.isActive:
                self._catch_up(self._running)
                error, self._running = self._running.exception(), None
                if error is not None:
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

    def progressed(self, progress: Mapping[str, Any]) -> None:
        """A batch was committed: the next failure is a new one. Called on the listener's thread."""
        self._report(progress)
        self._begun = True
        self._pauses.reset()
        self._failure = ""
        self._batch_done.set()

    def _report(self, progress: Mapping[str, Any]) -> None:
        """Report a committed batch.

        A trigger without a batch is reported by Spark too, with the number of the next batch: it added none.
        """
        millis = progress.get("durationMs", {})
        if "addBatch" not in millis:
            return
        with self._reporting:
            try:
                self._current.count_spark(progress)
            except Exception as error:  # noqa: BLE001 - numbers that are not counted stop nothing
                sys.stderr.write(f"--- line {self._name}: not counted\n{printable_lines(str(error))}\n")
        self._host.say(
            "progress", line=self._name, query=progress.get("id", ""), batch=progress["batchId"], millis=millis
        )

    def hold(self, deadline: float) -> None:
        """Stop between two batches, as `finish`, and stay so until `take`."""
        self._held = True
        self._stop(deadline)
        self._running = None
        self._host.say("held", line=self._name)

    def take(self, query: LineQuery[Any]) -> None:
        """Go on with another query of the line, at once, whatever became of the one before."""
        self._wanted, self._held, self.given_up = query, False, False
        self._again_at = 0.0
        self._pauses.reset()

    def finish(self, deadline: float) -> None:
        """Stop between two batches: when nothing is being written, or just after a batch was committed."""
        self._stop(deadline)
        self._host.say("stopped", line=self._name)

    def _stop(self, deadline: float) -> None:
        query = self._running
        if query is not None:
            self._batch_done.clear()
            while query.isActive and time.monotonic() < deadline:
                if query.status["message"] != _PROCESSING or self._batch_done.wait(0.005):
                    break
            query.stop()
            self._catch_up(query)

    def _catch_up(self, query: StreamingQuery) -> None:
        """Report the last batches once more: the listener's thread may not have come to them; repeats do no harm."""
        for progress in query.recentProgress[-_LAST_BATCHES:]:
            text = getattr(progress, "json", None)
            self._report(json.loads(text) if isinstance(text, str) else dict(progress))

    def _failed(self, error: Exception) -> None:
        if self._host.ending():
            return
        sys.stderr.write(f"--- line {self._name}\n{printable_lines(str(error).expandtabs(4))}\n")
        why = reason(error, f'line "{self._name}"')
        # Kafka's topics were looked at in between, and that has changed nothing.
        self.given_up = why.permanent or (why.code == "TL-B06" and why.text == self._failure)
        self._failure = why.text
        pause = None if self.given_up else min(self._pauses.next(), _SOON.get(why.code, math.inf))
        self._again_at = time.monotonic() + (pause or 0.0)
        self._host.say("failed", line=self._name, code=why.code, text=why.text, again_in=pause)
