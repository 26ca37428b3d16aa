"""Delivery without Spark: rows and sinks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from towline.kafka.columns import COLUMN_TYPES, Columns
from towline.kafka.delivery import Delivery, ExactlyOnce, delivery_for
from towline.kafka.options import SinkSettings

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


def exactly_once(bootstrap: str, *columns: str, **options: str) -> ExactlyOnce:
    return ExactlyOnce(*sink_parts(bootstrap, *columns, **options))


def counted(start: int, stop: int, size: int = 1000) -> Iterator[Any]:
    """Arrow batches of the numbers from start to stop as values."""
    for low in range(start, stop, size):
        yield pa.record_batch({"value": pa.array([b"%d" % n for n in range(low, min(low + size, stop))])})


def account(found: list[int], expected: int) -> tuple[int, int]:
    """(lost, doubled) of the numbers from 0 to ``expected``."""
    times = Counter(found)
    assert set(times) <= set(range(expected)), "numbers nobody sent"
    return expected - len(times), sum(times.values()) - len(times)
