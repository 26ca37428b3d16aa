"""Which PySpark is there, asked without importing it, and what the name of a master says of where tasks run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast
from zipfile import ZipFile

import pyspark
import pytest

import pyspark_kafka_transactional
import pyspark_mqtt
import towline
from towline.errors import ConfigError, SetupError
from towline.schema import SPARK_SCHEMA
from towline.spark import session
from towline.spark.session import (
    check_pyspark,
    generates_secret,
    is_cluster,
    pyspark_version,
    shares_files,
    uses_loopback_only,
)
from towline.spark.source import MqttDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_one_in_an_archive_as_workers_have_it_where_spark_home_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pyspark_version() == pyspark.__version__
    with ZipFile(tmp_path / "pyspark.zip", "w") as archive:
        archive.writestr("pyspark/__init__.py", "raise ImportError")
        archive.writestr("pyspark/version.py", '__version__: str = "4.2.1.dev0"\n')
    monkeypatch.syspath_prepend(str(tmp_path / "pyspark.zip"))
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    assert check_pyspark() == ("4.2.1.dev0", True)


@pytest.mark.parametrize(
    ("installed", "what"),
    [
        (None, "PySpark is not installed, which runs the lines of a bridge; gateways, Publisher and pub don't need it"),
        ("4.1.1", "PySpark is 4.1.1; Towline works with 4.2 and 4.3"),
        ("3.5", "PySpark is 3.5; Towline works with 4.2 and 4.3"),
    ],
)
def test_one_that_does_not_do(monkeypatch: pytest.MonkeyPatch, installed: str | None, what: str) -> None:
    """Registered, or found by Spark in the package beside: 4.1 let the query die with UnboundLocalError."""
    monkeypatch.setattr(session, "pyspark_version", lambda: installed)
    told = f': {re.escape(what)}. Run: pip install "towline[^"]*spark[^"]*"   .TL-S20'
    with pytest.raises(SetupError, match=f"^towline.register{told}"):
        towline.register(cast("SparkSession", None))
    with pytest.raises(SetupError, match=rf'^format\("mqtt"\){told}'):
        pyspark_mqtt.DefaultSource({})
    with pytest.raises(SetupError, match=f"^kafka_transactional{told}"):
        pyspark_kafka_transactional.DefaultSource({})


def test_a_state_directory_that_keeps_nothing_is_refused_at_load(tmp_path: Path) -> None:
    def schema(state_dir: str) -> str:
        return MqttDataSource({"broker": "mqtt://h", "subscribe": "a/#", "stateDir": state_dir}).schema()

    (tmp_path / "file").touch()
    for wrong in ("/proc/x", str(tmp_path / "file")):
        with pytest.raises(ConfigError, match=rf"^{wrong}: the state directory can't be used .*TL-C25"):
            schema(wrong)
    assert re.sub(" COMMENT '[^']*'", "", schema(str(tmp_path / "new"))) == SPARK_SCHEMA


@pytest.mark.parametrize(
    ("master", "cluster", "files", "here", "secret"),
    [
        ("local", False, True, True, True),
        ("local[4,3]", False, True, True, True),
        ("local-cluster[2,1,512]", True, True, True, False),
        ("spark://localhost:7077,127.0.0.1:7078", True, False, True, False),
        ("spark://[::1]:7077", True, False, True, False),
        ("spark://127.0.0.1:7077,m2:7077", True, False, False, False),
        ("spark://m1", True, False, False, False),
        ("yarn", True, False, False, True),
        ("k8s://https://api:443", True, False, False, False),
    ],
)
def test_each_kind_of_master(master: str, *, cluster: bool, files: bool, here: bool, secret: bool) -> None:
    said = (is_cluster(master), shares_files(master), uses_loopback_only(master), generates_secret(master))
    assert said == (cluster, files, here, secret)
