from __future__ import annotations

import subprocess
import sys

import pytest

#: What Spark's daemon does: a task, a search for cycles, the next task.
TASKS = """
import gc, sys, types
sys.modules["__main__"].__spec__ = types.SimpleNamespace(name="{module}")
from towline.spark.tasks import freeze_gc

class Thrown:
    def __del__(self):
        print("found")

for _ in range(2):
    freeze_gc()
    print(gc.get_freeze_count() > 1000)
    thrown = Thrown()
    thrown.itself = thrown
    del thrown
    gc.collect()
"""


@pytest.mark.parametrize(("module", "settled"), [("pyspark.daemon", True), ("somebodys.program", False)])
def test_what_is_loaded_is_not_searched_again_and_what_a_task_makes_is(module: str, settled: bool) -> None:
    command = [sys.executable, "-c", TASKS.format(module=module)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert said == [str(settled), "found"] * 2
