"""Delivery without Spark: rows, sinks, and what a reader that is not ours finds."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from towline.kafka.admin import KafkaAdmin
from towline.kafka.columns import COLUMN_TYPES, Columns
from towline.kafka.delivery import BatchOrigin, Delivery, ExactlyOnce, delivery_for
from towline.kafka.options import SinkSettings
from towline_prove.devstack import Kafka

#: Id of the streaming query the tests pretend to be.
QUERY = "3b6f8a52-0000-4000-8000-000000000001"


def sink_parts(bootstrap: str, *columns: str, **options: str) -> tuple[SinkSettings, Columns]:
    """Settings and columns of a sink; ``__`` in an option stands for a dot."""
    given = {name.replace("__", "."): value for name, value in options.items()}
    settings = SinkSettings.parse({"kafka.bootstrap.servers": bootstrap, **given})
    types = {name: COLUMN_TYPES[name][0] for name in columns or ("value",)}
    return settings, Columns.bind(types, settings.topic, include_headers=True)


def delivery(bootstrap: str, *columns: str, **options: str) -> Delivery:
    """The delivery of any guarantee."""
    return delivery_for(*sink_parts(bootstrap, *columns, **options))


def exactly_once(
    bootstrap: str,
    *columns: str,
    kind: type[ExactlyOnce] = ExactlyOnce,
    origin: BatchOrigin | None = None,
    **options: str,
) -> ExactlyOnce:
    """A sink of exactly once, or of a class of its own."""
    return kind(*sink_parts(bootstrap, *columns, **options), origin or BatchOrigin())


def counted(start: int, stop: int, size: int = 1000) -> Iterator[Any]:
    """Arrow batches of the numbers from start to stop as values."""
    for low in range(start, stop, size):
        yield pa.record_batch({"value": pa.array([b"%d" % n for n in range(low, min(low + size, stop))])})


def committed(kafka: Kafka, topic: str, *, amid: bool = False) -> list[int]:
    """The numbers of a topic as kcat reads them with read_committed, in order; amid: a transaction is open."""
    if not amid:
        KafkaAdmin(kafka.bootstrap).wait_for_open_transactions(topic)
    answer = subprocess.run(
        [
            *("kcat", "-C", "-q", "-e", "-b", kafka.bootstrap, "-t", topic, "-o", "beginning"),
            *("-X", "isolation.level=read_committed", "-f", "%s\n"),
        ],
        capture_output=True,
        timeout=60,
        check=True,
        text=True,
    )
    return [int(line) for line in answer.stdout.split()]


def account(found: list[int], expected: int) -> tuple[int, int]:
    """(lost, doubled) of the numbers from 0 to ``expected``."""
    times = Counter(found)
    assert set(times) <= set(range(expected)), "numbers nobody sent"
    return expected - len(times), sum(times.values()) - len(times)
