"""What Spark meets at ``load()``, before anything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

import pyspark_kafka_transactional
import pyspark_mqtt
import towline
from towline.errors import ConfigError, SetupError
from towline.schema import SPARK_SCHEMA
from towline.spark import session
from towline.spark.source import MqttDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def source(state_dir: str) -> MqttDataSource:
    return MqttDataSource({"broker": "mqtt://127.0.0.1:1", "subscribe": "a/#", "stateDir": state_dir})


def test_a_state_directory_that_keeps_nothing_is_refused_at_load(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in ("/proc/x", str(tmp_path / "file"), str(tmp_path / "file" / "below")):
        with pytest.raises(ConfigError, match=rf"^{wrong}: the state directory can't be used .*TL-C25"):
            source(wrong).schema()
    assert re.sub(" COMMENT '[^']*'", "", source(str(tmp_path / "new")).schema()) == SPARK_SCHEMA


@pytest.mark.parametrize("ours", ["4.1.0", "4.1.0.dev1", "4.0.1", "3.5.6"])
def test_an_older_pyspark_is_refused_where_it_is_met(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered, or found by Spark in the package beside: 4.1 let the query die with UnboundLocalError."""
    monkeypatch.setattr(session, "pyspark_version", lambda: ours)
    needs = f"PySpark is {ours}; Towline works with 4.2 and 4.3. Run: pip install .*TL-S20"
    with pytest.raises(SetupError, match=f"^towline.register: {needs}"):
        towline.register(cast("SparkSession", None))
    with pytest.raises(SetupError, match=rf'^format\("mqtt"\): {needs}'):
        pyspark_mqtt.DefaultSource({})
    with pytest.raises(SetupError, match=f"^kafka_transactional: {needs}"):
        pyspark_kafka_transactional.DefaultSource({})
