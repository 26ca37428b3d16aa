"""A consumer of Kafka that knows nothing of Towline, and kills itself with -9 at the moment Kafka's page speaks of.

    python -m tests.integration.bridge.consuming BOOTSTRAP TOPIC GROUP ORDER OUTPUT [DIES]

ORDER says when the position is saved: `before` the messages are processed, `after`, or `with` them in the output. To
process a message is to add its value to OUTPUT. With DIES the process ends between the two, at the second batch;
without it the process ends when it has read everything.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition

__all__ = ["BATCH", "values"]

BATCH = 50


def values(output: Path) -> list[str]:
    """What was processed."""
    said: list[str] = _read(output)["values"]
    return said


def _read(output: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"values": [], "position": 0}
    return state


def _process(output: Path, batch: list[Any]) -> None:
    """Add a batch to the output, whole or not at all, and the position behind it."""
    state = {
        "values": values(output) + [message.value().decode() for message in batch],
        "position": batch[-1].offset() + 1,
    }
    draft = output.with_suffix(".draft")
    draft.write_text(json.dumps(state))
    draft.replace(output)


def _batch(consumer: Consumer) -> list[Any]:
    """The next messages; fewer than `BATCH` at the end."""
    batch: list[Any] = []
    while len(batch) < BATCH:
        message = consumer.poll(20)
        assert message is not None, "Kafka is silent"
        error = message.error()
        if error is None:
            batch.append(message)
        elif error.name() == "_PARTITION_EOF":
            break
    return batch


def main(bootstrap: str, topic: str, group: str, order: str, output: Path, *, dies: bool) -> None:
    """Read on from where the position says."""
    settings = {"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False}
    consumer = Consumer({**settings, "enable.partition.eof": True, "isolation.level": "read_committed"})
    place = TopicPartition(topic, 0)
    position = _read(output)["position"] if order == "with" else max(0, consumer.committed([place], 20)[0].offset or 0)
    consumer.assign([TopicPartition(topic, 0, position)])
    for number in count():
        batch = _batch(consumer)
        end = [TopicPartition(topic, 0, batch[-1].offset() + 1)]
        if order == "before":
            consumer.commit(offsets=end, asynchronous=False)
        else:
            _process(output, batch)
        if dies and number:
            os.kill(os.getpid(), signal.SIGKILL)
        if order == "before":
            _process(output, batch)
        elif order == "after":
            consumer.commit(offsets=end, asynchronous=False)
        if len(batch) < BATCH:
            return


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0], given[1], given[2], given[3], Path(given[4]), dies=len(given) > 5)
