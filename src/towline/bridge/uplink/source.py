"""The source of a bridge's uplink: ``format("mqtt")`` with the slices of a batch, or its rows with their routes.

A line that asks nothing in SQL needs no rows in Spark: Spark plans the slices of the journal, and each passes it as one
row, the ticket by which the task that writes fetches it (`towline.bridge.uplink.sink`). Any other line gets the rows,
and beside them the number of each one's route and the wildcards and fields that its SQL may name.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from towline.bridge.routes import ROUTE, route_table
from towline.errors import one_line
from towline.gateway.access import Access
from towline.processes import ProcessMark
from towline.spark.link import GatewayPlace
from towline.spark.reader import MqttStreamReader
from towline.spark.source import MqttDataSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

    from towline.spark.readplan import ReadPlan
    from towline.spark.slices import Slice

__all__ = ["ROUTED", "SLICE", "SLICES", "RoutedSource", "Routing", "SliceSource", "rows_of_slice"]

#: Names of the formats.
SLICES, ROUTED = "towline_slices", "towline_routed"
#: The one column of slices.
SLICE: Final = "towline_slice"
_ROUTES, _VALUES = "routes", "values"


class SliceSource(MqttDataSource):
    """A row for each slice of a batch, with all that it takes to read it; its options are those of ``mqtt``."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return SLICES

    def schema(self) -> str:
        """The one column."""
        super().schema()
        return f"{SLICE} string"

    @one_line
    def streamReader(self, schema: StructType) -> SliceReader:  # noqa: ARG002, N802 - Spark's signature
        """Make the reader of a stream."""
        return SliceReader(self._plan)


class SliceReader(MqttStreamReader):
    """Plans as `MqttStreamReader`, and leaves the rows where they are."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a slice as it is.

        Raises:
            GatewayError: TL-G62.
        """
        part = self._begun(partition)
        if part.start < part.end:
            text = _to_json(part, self._plan.place)
            yield pa.RecordBatch.from_pydict({SLICE: pa.array([text], pa.string())})


def _to_json(part: Slice, only: GatewayPlace) -> str:
    """A slice as text: plain values, none of which is a secret but its ticket, which is worth this slice alone."""
    place = asdict((part.place or only).admitted(part.ticket, part.authority))
    range_ = [part.journal, part.start, part.end, part.incarnation]
    return json.dumps({"range": range_, "place": place}, default=str)


def rows_of_slice(text: str) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, in the task that writes them, the same ones each time [I4].

    Args:
        text: A value of the column `SLICE`.

    Raises:
        GatewayError: The journal is another one or does not have the range.
        GatewayUnreachable: No gateway answers for a minute.
    """
    said = json.loads(text)
    journal, start, end, incarnation = said["range"]
    place = said["place"]
    place["access"] = Access(**place["access"])
    place["owner"] = place["owner"] and ProcessMark(**place["owner"])
    return GatewayPlace(**place).rows(journal, start, end, incarnation)


class RoutedSource(MqttDataSource):
    """The rows of the ``mqtt`` source, the number of each one's route, and what its SQL names of them.

    Its own options are ``routes``, of `towline.bridge.routes.to_json`, and ``values``, of `Statements.values` as JSON.
    """

    def __init__(self, options: dict[str, str]) -> None:
        own = {name.lower(): value for name, value in options.items() if name.lower() in (_ROUTES, _VALUES)}
        super().__init__({name: value for name, value in options.items() if name.lower() not in own})
        self._routing = Routing(own[_ROUTES], json.loads(own[_VALUES]))

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return ROUTED

    def schema(self) -> str:
        """The columns of the ``mqtt`` source, and those of `Routing`."""
        more = "".join(f", `{name}` string" for name in self._routing.values)
        return f"{super().schema()}, {ROUTE} int{more}"

    @one_line
    def streamReader(self, schema: StructType) -> RoutedReader:  # noqa: ARG002, N802 - Spark's signature
        """Make the reader of a stream."""
        return RoutedReader(self._plan, self._routing)


class RoutedReader(MqttStreamReader):
    """Reads as `MqttStreamReader`, and matches in the worker."""

    def __init__(self, plan: ReadPlan, routing: Routing) -> None:
        super().__init__(plan)
        self._routing = routing

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a slice, the same ones each time [I4]."""
        return map(self._routing.added, super().read(partition))


@dataclass(frozen=True)
class Routing:
    """What the SQL of a line asks of a message beside its own columns.

    Attributes:
        routes: Of `towline.bridge.routes.to_json`.
        values: Column -> the wildcard or field of a message that it has as text.
    """

    routes: str
    values: Mapping[str, str]

    def added(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows with the number of their route in `ROUTE`, and the values."""
        table = route_table(self.routes)
        columns = [table.match(rows.column("topic")), *table.values(rows, list(self.values.values()))]
        names = [*rows.schema.names, ROUTE, *self.values]
        return pa.RecordBatch.from_arrays([*rows.columns, *columns], names=names)
