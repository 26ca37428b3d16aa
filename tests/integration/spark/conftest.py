"""One real Spark for all tests of this directory; it finds ``format("mqtt")`` by itself, nobody registers it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import towline
from tests.helpers import lacking
from tests.unit.gateway.serving import Served, served
from towline.errors import SetupError
from towline.spark.java import find_java


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that asks for the session starts a real Spark."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")


@pytest.fixture(scope="package")  # a process has one SparkContext, and the next room has other settings
def spark() -> Iterator[SparkSession]:
    try:
        find_java()
    except SetupError as error:
        lacking(str(error))
    settings: dict[str, bool | float | int | str | None] = {
        **towline.spark_conf(),
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "FATAL",
    }
    session = SparkSession.builder.master("local[2]").appName("towline-tests").config(map=settings).getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "gateway") as running:
        yield running
