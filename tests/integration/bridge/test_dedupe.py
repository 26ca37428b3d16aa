"""A line that drops repeats, on a real Spark and a real journal whose clock the test sets."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.helpers import wait_until
from tests.unit.bridge.test_config import changed, read
from tests.unit.spark.serving import Served, served
from towline.bridge import sql
from towline.bridge.driver import CONSUMER, facts, records, source
from towline.bridge.model import Line

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LONG = 150


class Carried:
    """A line's query into a list; `carry` is one run of it, a batch for each moment."""

    def __init__(self, spark: SparkSession, line: Line, server: Served) -> None:
        self._spark, self._line, self._server = spark, line, server
        self.values: list[int] = []
        self.observed: list[dict[str, int]] = []

    def _keep(self, frame: DataFrame, _: int) -> None:
        self.values += sorted(int(bytes(row.value)) for row in frame.collect())

    def carry(self, *moments: datetime) -> None:
        line, server = self._line, self._server
        frame = records(source(self._spark, line, "earliest"), line, "plant-7.telemetry").writeStream
        query = frame.foreachBatch(self._keep).option("checkpointLocation", str(line.checkpoint)).start()
        try:
            for at in moments:
                end = server.add(25, at=at)
                wait_until(
                    lambda: server.journal.consumers.get(CONSUMER) == end or not query.isActive,  # noqa: B023 - asked now
                    LONG,
                    f"the batch up to {end}",
                )
                assert query.isActive, query.exception()
            self.observed += [facts(json.loads(progress.json))["observed"] for progress in query.recentProgress]
        finally:
            query.stop()


def test_a_clock_that_was_ahead_for_one_batch_costs_none_of_the_next(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a checkpoint whose watermark the version before has driven ahead; and what that one knew is known."""
    text = changed('name = "telemetry"', 'name = "telemetry"\ndedupe = { key = "CAST(offset % 100 AS STRING)" }')
    (line,) = read(text, tmp_path).uplinks
    with served(line.gateway.state_dir, name="telemetry") as server:
        made = Carried(spark, line, server)
        with monkeypatch.context() as before:
            before.setattr(sql, "EVENT_TIME", "received_at")
            made.carry(NOW, NOW + timedelta(hours=1), NOW + timedelta(hours=1))
        assert made.values == list(range(75))
        made.carry(NOW + timedelta(seconds=1), NOW + timedelta(seconds=2), NOW + timedelta(hours=5), NOW)
    assert made.values[:100] == list(range(100)), "what is new goes on"
    assert made.values[100:] == list(range(100, 125)), "of what comes again only what the jump made forget"
    assert sum(one.get("late", 0) for one in made.observed) == 0
    assert sum(one.get("deduplicated", 0) for one in made.observed) == 50
