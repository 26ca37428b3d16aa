"""What Spark meets at ``load()``, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.errors import ConfigError
from towline.schema import SPARK_SCHEMA
from towline.spark.source import MqttDataSource


def source(state_dir: str) -> MqttDataSource:
    return MqttDataSource({"broker": "mqtt://127.0.0.1:1", "subscribe": "a/#", "stateDir": state_dir})


def test_a_state_directory_that_keeps_nothing_is_refused_at_load(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in ("/proc/x", str(tmp_path / "file"), str(tmp_path / "file" / "below")):
        with pytest.raises(ConfigError, match=rf"^{wrong}: the state directory can't be used .*TL-C25"):
            source(wrong).schema()
    assert source(str(tmp_path / "new")).schema() == SPARK_SCHEMA
