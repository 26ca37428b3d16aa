"""Writes batches exactly once in a process of its own, and dies or sleeps at a step of the last: python -m ... JSON.

The steps are calls of the client, wrapped here. Prints each batch it knows to be committed, or the error that ended it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.kafka.writing import QUERY, counted, exactly_once
from towline.errors import KafkaError
from towline.kafka import producers
from towline.kafka.delivery import Spool
from towline.kafka.markerstore import MarkerStore
from towline.sinks import Task
from towline_prove.devstack import Kafka

ROOT = Path(__file__).parents[3]
#: Step -> the call it belongs to, and whether it comes before or after it.
STEPS: dict[str, tuple[Any, str, str]] = {
    "before the rows are spooled": (Spool, "fill", "before"),
    "after the rows are spooled": (Spool, "fill", "after"),
    "before init": (producers.TransactionalProducer, "start", "before"),
    "after init": (producers.TransactionalProducer, "start", "after"),
    "after the marker is read": (MarkerStore, "read_marker", "after"),
    "after begin": (producers.TransactionalProducer, "begin", "after"),
    "in the middle of the records": (producers.KafkaProducer, "send", "middle"),
    "after the records, before the marker": (producers.TransactionalProducer, "write_marker", "before"),
    "after the marker, nothing flushed": (producers.TransactionalProducer, "write_marker", "after"),
    "all flushed, before the commit request": (producers.TransactionalProducer, "commit", "flushed"),
    "while the commit request is on its way": (producers.TransactionalProducer, "commit", "during"),
    "after the commit, before Spark knows": (producers.TransactionalProducer, "commit", "after"),
}


def arm(step: str, number: int) -> None:
    """Make the next call of a step the last; or fall asleep there as a paused machine does, and go on after SIGCONT."""
    owner, name, moment = STEPS[step]
    original: Callable[..., Any] = getattr(owner, name)

    def die() -> None:
        print("at the step", flush=True) if number == signal.SIGSTOP else None  # noqa: T201 - our answer
        os.kill(os.getpid(), number)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if moment == "before":
            die()
        if moment == "middle":
            next(args[0].records)
            for record in [next(args[0].records) for _ in range(args[0].size // 2)]:
                self._producer.produce(*record)
        if moment in {"middle", "flushed"}:
            self._producer.flush(10)
            die()
        if moment == "during":
            # A commit with no time to wait for the answer: the request leaves, then the process is gone.
            try:
                self._producer.commit_transaction(0.002)
            finally:
                die()
        setattr(owner, name, original)
        result = original(self, *args, **kwargs)
        if moment == "after":
            die()
        return result

    setattr(owner, name, wrapped)


def dying(kafka: Kafka, topic: str, batches: range, rows: int, step: str, number: int = signal.SIGKILL) -> list[str]:
    """The command that writes these batches."""
    told = [kafka.bootstrap, topic, batches.start, batches[-1], rows, step, number]
    return [sys.executable, "-m", __name__, json.dumps(told)]


def main(kafka: str, topic: str, first: int, last: int, rows: int, step: str, number: int) -> None:
    sink = exactly_once(kafka, topic=topic, sinkId=topic)
    for batch in range(first, last + 1):
        if batch == last and step:
            arm(step, number)
        try:
            done = sink.deliver(Task(0, batch=batch, query=QUERY), counted(batch * rows, (batch + 1) * rows))
        except KafkaError as error:
            print(error, flush=True)  # noqa: T201 - our answer
            sys.exit(1)
        print(batch, "skipped" if done.was_skipped else "written", done.rows, flush=True)  # noqa: T201 - our answer


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
