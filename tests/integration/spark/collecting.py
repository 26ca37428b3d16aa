"""A foreachBatch sink that remembers its batches, and what a test does to a gateway and a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tests.helpers import wait_until
from towline.gateway.endpoint import GatewayEndpoint
from towline.gateway.launch import find_running


def end_gateway(state_dir: Path, number: signal.Signals = signal.SIGTERM) -> bool:
    """End the gateway that a source or sink has started, and wait for its end; return whether one ran."""
    endpoint = GatewayEndpoint.read(state_dir)
    if endpoint is None or endpoint.process.has_ended():
        return False
    os.kill(endpoint.pid, number)
    wait_until(endpoint.process.has_ended, 150, "the end of the gateway")
    return True


@contextlib.contextmanager
def configured(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """With these settings while the block runs."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, former in reversed(before.items()):
            spark.conf.unset(name) if former is None else spark.conf.set(name, former)


def online(state_dir: Path) -> bool:
    """Whether a gateway runs there, and has its subscription."""
    client = find_running(state_dir)
    if client is None:
        return False
    with client:
        return bool(client.status()["state"] == "online")


def newest(log: Path) -> int:
    """The last batch in a log of a checkpoint."""
    return max(int(path.name) for path in log.iterdir() if path.name.isdecimal())


def forget_last_commit(checkpoint: Path) -> int:
    """As if the driver had died after the tasks of its last batch: Spark runs that batch again; its number."""
    batch = newest(checkpoint / "commits")
    later = range(batch + 1, newest(checkpoint / "offsets") + 1)
    for log, number in [("commits", batch), *(("offsets", n) for n in later)]:
        for name in (str(number), f".{number}.crc"):
            (checkpoint / log / name).unlink(missing_ok=True)
    return batch


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
