"""What tests of the readers ask of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tests.helpers import wait_until
from tests.unit.gateway.serving import rows
from towline.spark.reader import MqttStreamReader

ALL = ReadAllAvailable()
Place = dict[str, Any]
NewReader = Callable[..., MqttStreamReader]


def offset(place: Place) -> int:
    return int(place["gateways"]["plant"]["offset"])


def ends(at: Place) -> dict[str, int]:
    return {name: place["offset"] for name, place in at["gateways"].items()}


def table(made: MqttStreamReader, start: Place, end: Place) -> pa.Table:
    batches = [batch for part in made.partitions(start, end) for batch in made.read(part)]
    return pa.Table.from_batches(batches, schema=rows(0, 0).schema)


def seen(stream: MqttStreamReader, start: Place, end: Place) -> list[tuple[str, int]]:
    """Gateway and offset of each row of a batch, in the order of its partitions."""
    got = table(stream, start, end)
    return list(zip(got["gateway"].to_pylist(), got["offset"].to_pylist(), strict=True))


def until(stream: MqttStreamReader, at: Place, wanted: Callable[[Place], bool], limit: Any = ALL) -> Place:
    """Go on, batch by batch, until a position is wanted."""
    places = [at]

    def there() -> bool:
        places.append(stream.latestOffset(places[-1], limit))
        return wanted(places[-1])

    wait_until(there)
    return places[-1]
