"""Writes batches exactly once in a process of its own, and dies or sleeps at a named step of one of them.

    python -m tests.integration.kafka.dying BOOTSTRAP TOPIC FIRST LAST ROWS STEP AT [SIGNAL [OPTION=VALUE ...]]

Batches FIRST to LAST of ROWS rows each; in batch AT the process sends itself SIGNAL (SIGKILL) at STEP. Nothing in the
product knows of it: the steps are calls of the client, and they are wrapped here. Prints each batch it knows to be
committed, and the line of the error that ended it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.integration.kafka.writing import QUERY, counted, exactly_once
from towline.errors import KafkaError
from towline.kafka import producers
from towline.kafka.delivery import Spool
from towline.kafka.markerstore import MarkerStore
from towline.sinks import Task

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


#: What happens at the step.
_signal = signal.SIGKILL


def die() -> None:
    """As the kernel's out-of-memory killer would; or fall asleep as a paused machine does, and go on after SIGCONT."""
    print("at the step", flush=True) if _signal != signal.SIGKILL else None  # noqa: T201 - our answer
    os.kill(os.getpid(), _signal)


def arm(step: str) -> None:
    """Make the next call of a step the last."""
    owner, name, moment = STEPS[step]
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if moment == "before":
            die()
        if moment == "middle":
            args[0].records.__next__()
            half = [next(args[0].records) for _ in range(args[0].size // 2)]
            for record in half:
                self._producer.produce(*record)
            self._producer.flush(10)
            die()
        if moment == "flushed":
            self._producer.flush(10)
            die()
            setattr(owner, name, original)
        if moment == "during":
            # A commit with no time to wait for the answer: the request leaves, then the process is gone.
            try:
                self._producer.commit_transaction(0.002)
            finally:
                die()
        result = original(self, *args, **kwargs)
        if moment == "after":
            setattr(owner, name, original)
            die()
        return result

    setattr(owner, name, wrapped)


def main(
    bootstrap: str, topic: str, first: int, last: int, rows: int, step: str, at: int, options: dict[str, Any]
) -> None:
    """Write, and die."""
    sink = exactly_once(bootstrap, topic=topic, sinkId=topic, **options)
    for batch in range(first, last + 1):
        if batch == at and step != "none":
            arm(step)
        try:
            done = sink.deliver(Task(0, batch=batch, query=QUERY), counted(batch * rows, (batch + 1) * rows))
        except KafkaError as error:
            print(error, flush=True)  # noqa: T201 - our answer
            raise SystemExit(1) from None
        print(batch, "skipped" if done.was_skipped else "written", done.rows, flush=True)  # noqa: T201 - our answer


if __name__ == "__main__":
    given = sys.argv[1:]
    if len(given) > 7:
        _signal = signal.Signals[given[7]]
    more: dict[str, Any] = dict(pair.split("=", 1) for pair in given[8:])
    main(given[0], given[1], int(given[2]), int(given[3]), int(given[4]), given[5], int(given[6]), more)
