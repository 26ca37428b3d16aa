"""The archives of classes that `make setup` makes are used: Java ignores one that does not fit without a word."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers import lacking

FROM_ARCHIVE = re.compile(r"source: shared objects file \(top\)")


@pytest.mark.spark
def test_spark_starts_from_its_archive(tmp_path: Path) -> None:
    """With the environment that `tests.conftest` has made by `start_quickly`."""
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    if "SharedArchiveFile" not in options:
        lacking("there is no archive of Spark's classes: make setup")
    options += f" -Xlog:class+load:file={tmp_path / 'loaded'}"
    command = [f"{os.environ['SPARK_HOME']}/bin/spark-submit", "--version"]
    environment = {**os.environ, "SPARK_SUBMIT_OPTS": options}
    subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120)
    assert len(FROM_ARCHIVE.findall((tmp_path / "loaded").read_text())) > 500
