"""A foreachBatch sink that remembers its batches, and what a test does to a gateway and a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame

from tests.helpers import wait_until
from towline.gateway.endpoint import GatewayEndpoint


def end_gateway(state_dir: Path, number: signal.Signals = signal.SIGTERM) -> bool:
    """End the gateway that a source or sink has started, and wait for its end; return whether one ran."""
    endpoint = GatewayEndpoint.read(state_dir)
    if endpoint is None or endpoint.process.has_ended():
        return False
    os.kill(endpoint.pid, number)
    wait_until(endpoint.process.has_ended, 150, "the end of the gateway")
    return True


def forget_last_commit(checkpoint: Path) -> int:
    """Remove the newest batch from the commit log, so that Spark runs it again; its number."""
    newest = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdecimal())
    for name in (str(newest), f".{newest}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    return newest


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
