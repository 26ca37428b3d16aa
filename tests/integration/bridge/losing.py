"""A query of which a shuffle loses its files in the midst of a batch, as with the executor that wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from tests.helpers import wait_until


def numbers(spark: SparkSession, rows: int) -> DataFrame:
    """A stream with the numbers of each batch's rows, in two parts."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2)
    return source.load().selectExpr(f"value % {rows} AS n", "timestamp")


def progress_of_a_lost_shuffle(rows: DataFrame, place: Path) -> dict[str, Any]:
    """What Spark says of the first batch, whose tasks before the shuffle were run twice.

    Args:
        rows: Of a session with two cores, behind a shuffle into three parts: the last is fetched after the first.
        place: A directory for the checkpoint.
    """
    read = rows.where(_loses(str(place / "lost")))
    query = read.writeStream.format("noop").option("checkpointLocation", str(place / "checkpoint")).start()
    wait_until(lambda: bool(query.recentProgress) or not query.isActive, 60)
    query.stop()
    if error := query.exception():
        raise error
    told: dict[str, Any] = json.loads(query.recentProgress[0].json)
    return told


def _loses(flag: str) -> Column:
    def loses(_: int) -> bool:
        import glob  # noqa: PLC0415 - in a worker
        import os  # noqa: PLC0415
        import time  # noqa: PLC0415

        try:
            open(flag, "x").close()  # noqa: PTH123
        except FileExistsError:
            while not os.path.exists(f"{flag}.done"):  # noqa: PTH110 - the other worker is at it
                time.sleep(0.01)
            return True
        for place in os.environ["SPARK_LOCAL_DIRS"].split(","):  # Spark's own, for its workers
            for file in glob.glob(f"{place}/*/shuffle_*"):  # noqa: PTH207
                os.unlink(file)  # noqa: PTH108
        open(f"{flag}.done", "x").close()  # noqa: PTH123
        return True

    lost = F.udf(loses, "boolean", useArrow=False).asNondeterministic()  # else it would move before the shuffle
    return lost(F.lit(1))
