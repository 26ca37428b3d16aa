"""A foreachBatch sink that remembers what it got."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import DataFrame

__all__ = ["Collected"]


class Collected:
    """The batches of a foreachBatch sink, as Arrow tables by batch id; fails at the batches it is told to."""

    def __init__(self, *failing: int) -> None:
        self.tables: dict[int, pa.Table] = {}
        self._failing = set(failing)

    def __call__(self, frame: DataFrame, batch: int) -> None:
        self.tables[batch] = frame.orderBy("offset").toArrow()
        if batch in self._failing:
            raise RuntimeError("the sink fails")

    @property
    def offsets(self) -> list[int]:
        return [offset for _, table in sorted(self.tables.items()) for offset in table.column("offset").to_pylist()]

    @property
    def sizes(self) -> list[int]:
        return [table.num_rows for _, table in sorted(self.tables.items()) if table.num_rows]
