"""The source of a bridge's uplink: ``format("mqtt")``, with records in place of messages where these need no SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from towline.bridge.uplink.packing import Packer
from towline.errors import one_line
from towline.kafka.packed import PACKED
from towline.spark.reader import MqttStreamReader
from towline.spark.source import MqttDataSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

    from towline.spark.reader import ReadPlan

__all__ = ["FORMAT", "PackedSource"]

FORMAT: Final = "mqtt_packed"
_ROUTES: Final = "routes"
_SIGNED: Final = "signed"


class PackedSource(MqttDataSource):
    """Rows of the ``mqtt`` source, or many of them in one, as `towline.bridge.uplink.packing` says.

    Its own options are ``routes`` and ``signed``, the arguments of `Packer`.
    """

    def __init__(self, options: dict[str, str]) -> None:
        own = {name.lower(): value for name, value in options.items() if name.lower() in (_ROUTES, _SIGNED)}
        super().__init__({name: value for name, value in options.items() if name.lower() not in own})
        self._packer = Packer(own[_ROUTES], signed=own.get(_SIGNED) == "true")

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> str:
        """The columns of the ``mqtt`` source and one more."""
        return f"{super().schema()}, {PACKED} binary"

    @one_line
    def streamReader(self, schema: StructType) -> PackedReader:  # noqa: ARG002, N802 - Spark's signature
        """Make the reader of a stream."""
        return PackedReader(self._plan, self._packer)


class PackedReader(MqttStreamReader):
    """Reads as `MqttStreamReader`, and packs in the worker."""

    def __init__(self, plan: ReadPlan, packer: Packer) -> None:
        super().__init__(plan)
        self._packer = packer

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a slice, the same ones each time [I4]."""
        return self._packer.packed(super().read(partition))
