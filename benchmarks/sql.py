"""What the SQL of a line costs: each operator compiled by itself, as in a bridge, or whole stages, as Spark has it."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from benchmarks.rig import machine
from towline.bridge.config.file import parse
from towline.bridge.lines.sql import RouteSql
from towline.bridge.routes import ROUTE
from towline.bridge.runtime.session import create_session
from towline.schema import SPARK_SCHEMA
from towline_prove import processes
from towline_prove.processes import Role

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILE: Final = """
name = "b"
state_dir = "state"
mqtt = { brokers = "mqtt://127.0.0.1" }
kafka = { bootstrap_servers = "127.0.0.1:9092" }
spark = { master = "local[2]" }
[[uplink]]
name = "mapped"
[[uplink.route]]
from = "telemetry/{tenant}/{device}"
topic = "data"
key = "{device}"
where = "get_json_object(CAST(payload AS STRING), '$.t') > 3"
[[uplink]]
name = "hono"
profile = "hono"
"""
_WAYS: Final = {"each operator": "false", "whole stages": "true"}
_SETTING: Final = "spark.sql.codegen.wholeStage"
#: Rows of a small batch.
_FEW: Final = 10


def run(count: int = 1_000_000, rounds: int = 5) -> None:
    """Both lines both ways, in turns.

    Args:
        count: Rows of the large batch.
        rounds: Batches of each kind and size; the first of each is not counted.
    """
    print(f"sql\n  {machine()}\n\n  CPU of Spark's JVM, median of {rounds}")
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as name:
        place = Path(name)
        bridge = parse(FILE, place / "bridge.toml", {})
        spark = create_session(bridge)
        try:
            batches = {size: _messages(spark, size, place / str(size)) for size in (_FEW, count)}
            for line in bridge.uplinks:
                spent: dict[tuple[str, int], list[float]] = defaultdict(list)
                for _ in range(rounds + 1):
                    for way, setting in _WAYS.items():
                        spark.conf.set(_SETTING, setting)
                        for size, messages in batches.items():
                            statements = RouteSql(line.routes)
                            routed = messages.withColumns({name: F.lit("d1") for name in statements.value_columns})
                            rows = statements.writer_frame(routed.withColumn(ROUTE, F.lit(0)))
                            spent[way, size].append(_cpu(rows))
                for way in _WAYS:
                    few, many = (statistics.median(spent[way, size][1:]) for size in (_FEW, count))
                    print(
                        f"  {line.name:<7} {way:<14} a batch of {_FEW}: {few * 1000:>5.0f} ms"
                        f"   a row of {count:,}: {many / count * 1e6:>5.2f} us",
                        flush=True,
                    )
        finally:
            spark.stop()
    print()


def _messages(spark: SparkSession, count: int, place: Path) -> DataFrame:
    """Telemetry of 100 devices, on disk, with the columns of ``format("mqtt")``."""
    number = (F.col("id") % 100).cast("string")
    known = {
        "topic": F.concat(F.lit("telemetry/t1/d"), number),
        "payload": F.concat(F.lit('{"t": '), number, F.lit(f', "pad": "{"x" * 120}"}}')),
        "qos": F.lit(1),
        "retain": F.lit(False),
        "duplicate": F.lit(False),
        "received_at": F.lit(time.time()),
        "gateway": F.lit("g"),
        "offset": F.col("id"),
    }
    columns = [
        known.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name)
        for field in spark.createDataFrame([], SPARK_SCHEMA).schema.fields
    ]
    spark.range(count).select(columns).coalesce(1).write.parquet(str(place))
    return spark.read.parquet(str(place))


def _cpu(rows: DataFrame) -> float:
    """Seconds of CPU that Spark takes for all the rows, which go nowhere."""
    before = _used()
    rows.write.format("noop").mode("append").save()
    return _used() - before


def _used() -> float:
    return processes.cpu_time_of(processes.pids_with_role(os.getpid(), Role.JVM)).own_s
