"""The transactional sink in the session of Spark."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from towline.spark.kafka_sink import KafkaTransactional


@pytest.fixture(scope="package")
def spark(spark: SparkSession) -> SparkSession:
    """With the format registered."""
    spark.dataSource.register(KafkaTransactional)
    return spark
