"""A checkpoint written without a process for each file, in a Spark of its own: the class path is the JVM's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import lacking
from towline.spark import localfs

QUERY = """
import sys
from pyspark.sql import SparkSession
import towline
from towline.spark import localfs

conf = {**towline.spark_conf(), **localfs.session_settings(), "spark.ui.enabled": "false", "spark.log.level": "FATAL",
        "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
spark = SparkSession.builder.master("local[1]").config(map=conf).getOrCreate()
rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).option("numPartitions", 1).load()
query = rows.writeStream.format("noop").option("checkpointLocation", sys.argv[1]).trigger(availableNow=True).start()
query.awaitTermination(60)
path = spark._jvm.org.apache.hadoop.fs.Path("file:///")
print(path.getFileSystem(spark._jsc.hadoopConfiguration()).getClass().getSimpleName())
"""


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.faults
def test_checkpoints_are_written_without_a_process_for_each_file(tmp_path: Path) -> None:
    found = localfs.class_path_variables(os.environ)
    if not found:
        lacking("the jar of the file system: make setup fetches it")
    trace, checkpoint = tmp_path / "trace", tmp_path / "checkpoint"
    command = ["strace", "-f", "-qq", "-e", "trace=execve", "-o", str(trace), sys.executable, "-c", QUERY]
    done = subprocess.run(
        [*command, str(checkpoint)],
        env={**os.environ, **found},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.split()[-1:] == ["BareLocalFileSystem"], done.stderr
    assert "java" in trace.read_text()
    assert "chmod" not in trace.read_text()
    assert sorted(file.name for file in (checkpoint / "commits").iterdir() if "." not in file.name) == ["0"]
