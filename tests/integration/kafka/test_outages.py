"""Kafka killed, paused and absent under a running stream: nothing is lost, and the line says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.helpers import wait_until
from tests.integration.kafka.reading import committed_count, numbers
from tests.integration.kafka.test_sink import (
    ROWS_A_BATCH,
    assert_all_committed,
    counting,
    line,
    options,
    running,
    to_kafka,
)
from towline_prove.devstack import Kafka

pytestmark = pytest.mark.faults


@pytest.mark.long  # kafka/test_delivery.py has a Kafka that is down, without Spark
@pytest.mark.parametrize("hurt", ["pause", "kill"])
def test_away_for_longer_than_the_delivery_timeout(
    spark: SparkSession, own_kafka: Kafka, tmp_path: Path, hurt: str
) -> None:
    """The query ends with one line; started again, it writes what was missing."""
    own_kafka.create_topics({"t": 3})
    given = options(own_kafka, "t", deliveryTimeout="3")
    with running(to_kafka(counting(spark), given, tmp_path / "checkpoint")) as query:
        wait_until(lambda: committed_count(own_kafka.bootstrap, "t") >= 2 * ROWS_A_BATCH, 60, "two batches")
        getattr(own_kafka, hurt)()
        wait_until(lambda: not query.isActive, 90, "the end of the query")
        error = query.exception()
    assert error is not None
    told = line(str(error))
    assert told.startswith(f"{own_kafka.bootstrap}: Kafka did not answer for ")
    assert "Kafka did not answer for 3 s" in told
    assert "written again when the query restarts" in told
    if hurt == "pause":
        own_kafka.resume()
    else:
        own_kafka.start()
    written = committed_count(own_kafka.bootstrap, "t")
    with running(to_kafka(counting(spark), given, tmp_path / "checkpoint")):
        wait_until(lambda: committed_count(own_kafka.bootstrap, "t") >= written + 3 * ROWS_A_BATCH, 60, "more batches")
    arrived = numbers(own_kafka.bootstrap, "t")
    assert_all_committed(arrived, tmp_path / "checkpoint")
