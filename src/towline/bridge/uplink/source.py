"""The source of a bridge's uplink: ``format("mqtt")`` with the slices of a batch, or its rows with their routes.

A line that asks nothing in SQL needs no rows in Spark: Spark plans the slices of the journal, and each passes it as one
row, the ticket by which the task that writes fetches it (`towline.bridge.uplink.sink`). Any other line gets the rows,
and beside them the number of each one's route and the wildcards and fields that its SQL may name.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from towline.bridge.routes import ROUTE, route_table
from towline.errors import one_line
from towline.gateway.access import Access
from towline.processes import ProcessMark
from towline.spark.link import GatewayPlace
from towline.spark.reader import MqttStreamReader
from towline.spark.source import MqttDataSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql.types import StructType

    from towline.spark.readplan import ReadPlan, Slice

__all__ = ["ROUTED", "SLICE", "SLICES", "RoutedSource", "Routing", "SliceSource", "parted", "slice_of"]

#: Names of the formats.
SLICES, ROUTED = "towline_slices", "towline_routed"
#: The one column of slices.
SLICE: Final = "towline_slice"
_ROUTES, _VALUES, _WRITERS = "routes", "values", "writers"


def parted(options: Mapping[str, str], *names: str) -> tuple[dict[str, str], dict[str, str]]:
    """The options of these names, by their names in lower case, and the others as they are."""
    own = {name.lower(): value for name, value in options.items() if name.lower() in names}
    return own, {name: value for name, value in options.items() if name.lower() not in names}


class SliceSource(MqttDataSource):
    """A row for each slice of a batch, with all that it takes to read it, for each of several writers.

    Its options are those of ``mqtt``, and ``writers``: how many tasks write a batch.
    """

    def __init__(self, options: dict[str, str]) -> None:
        own, rest = parted(options, _WRITERS)
        super().__init__(rest)
        self._writers = int(own[_WRITERS])

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
        return SliceReader(self._plan, self._writers)


@dataclass(frozen=True)
class WriterPartition(InputPartition):
    """All slices of a batch, for one of its writers."""

    slices: Sequence[InputPartition]
    writer: int
    writers: int


class SliceReader(MqttStreamReader):
    """Plans as `MqttStreamReader`, and leaves the rows where they are."""

    def __init__(self, plan: ReadPlan, writers: int) -> None:
        super().__init__(plan)
        self._writers = writers

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """A partition for each writer, each with all slices of the batch: a record's key tells whose it is."""
        slices = super().partitions(start, end)
        return [WriterPartition(slices, writer, self._writers) for writer in range(self._writers)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the slices as they are.

        Raises:
            GatewayError: TL-G62.
        """
        assert isinstance(partition, WriterPartition)
        parts = [part for one in partition.slices if (part := self._begun(one)).start < part.end]
        texts = [_to_json(part, partition) for part in parts]
        if texts:
            yield pa.RecordBatch.from_pydict({SLICE: pa.array(texts, pa.string())})


def _to_json(part: Slice, of: WriterPartition) -> str:
    """A slice as text: plain values, none of which is a secret but its ticket, which is worth this slice alone."""
    rows = [part.journal, part.start, part.end, part.incarnation]
    return json.dumps({"rows": rows, "place": asdict(part.admitted), "writer": [of.writer, of.writers]})


class WrittenSlice(NamedTuple):
    """A slice as the task that writes it gets it.

    Attributes:
        rows: Its rows, to be read once, the same ones each time [I4]. Raises GatewayError where the journal is another
            one or does not have them, GatewayUnreachable when no gateway answers for a minute.
        writer: Number of the writer.
        writers: How many there are.
    """

    rows: Iterator[pa.RecordBatch]
    writer: int
    writers: int


def slice_of(text: str) -> WrittenSlice:
    """Read a value of the column `SLICE`."""
    entry = json.loads(text)
    place = entry["place"]
    place["access"] = Access(**place["access"])
    place["owner"] = place["owner"] and ProcessMark(**place["owner"])
    return WrittenSlice(GatewayPlace(**place).rows(*entry["rows"]), *entry["writer"])


class RoutedSource(MqttDataSource):
    """The rows of the ``mqtt`` source, the number of each one's route, and what its SQL names of them.

    Its own options are ``routes``, of `towline.bridge.routes.to_json`, and ``values``, of `Statements.values` as JSON.
    """

    def __init__(self, options: dict[str, str]) -> None:
        own, rest = parted(options, _ROUTES, _VALUES)
        super().__init__(rest)
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
