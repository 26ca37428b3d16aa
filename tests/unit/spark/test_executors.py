"""What an executor lacks, in one line; the asking itself needs a cluster and is tested on one."""

from __future__ import annotations

import importlib.metadata
import re
import socket
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
from pyspark import cloudpickle

from towline.spark import executors
from towline.spark.executors import (
    REQUIRED_VERSIONS,
    failure_reason,
    missing_error,
    missing_requirements,
)

ABLE = {"towline": "0.1.0", "pyarrow": "26.0.1", "confluent-kafka": "2.16.1", "crc32c": "2.9.post0"}
FAULT = ImportError("libstdc++.so.6: version `GLIBCXX_3.4.30' not found")


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({}, []),
        ({"pyarrow": ModuleNotFoundError("pyarrow")}, ["pyarrow is missing"]),
        ({"pyarrow": FAULT}, [f"pyarrow can't be loaded (ImportError: {FAULT})"]),
        ({"confluent-kafka": "2.13.1"}, ["confluent-kafka 2.13.1 is older than 2.13.2"]),
        ({"confluent-kafka": "2.14.0rc1"}, []),
        ({"crc32c": ""}, []),  # there, without its version
        ({"towline": "0.2.0"}, ["towline is 0.2.0, the driver's is 0.1.0"]),
        ({"towline": ""}, ["towline is of an unknown version, the driver's is 0.1.0"]),
    ],
)
def test_each_thing_that_can_be_missing(
    versions: dict[str, str | Exception], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> str:
        version = {**ABLE, **versions}[name.replace("_", "-")]
        if isinstance(version, Exception):
            raise version
        return version

    def version(name: str) -> str:
        if text := found(name):
            return text
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(executors, "import_module", found)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert missing_requirements({"towline": "0.1.0", **REQUIRED_VERSIONS}, (), ())[1] == words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11, PySpark",
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11, PySpark",
        ),
        (
            'java.io.IOException: Cannot run program "/opt/py/bin/python": error=2, No such file or directory',
            'Cannot run program "/opt/py/bin/python": error=2, No such file or directory',
        ),
        ("Error from python worker:\n  No module named 'pyspark'", "No module named 'pyspark'"),
        ("\n  Something else\n  at a.b.C", "Something else"),
        ("", "no reason given"),
    ],
)
def test_a_python_that_does_not_answer_is_told_by_what_spark_says(error: str, words: str) -> None:
    assert failure_reason(error) == f"its Python gave no answer ({words})"


def test_executors_are_one_line_and_of_many_a_few_are_named() -> None:
    lacking = [f"executor {n} on 10.0.0.{n}: crc32c is missing, it is 3.10" for n in range(1, 8)]
    assert str(missing_error(["executor 9 on worker-1 (10.0.0.6): towline is missing", *lacking])) == (
        "executor 9 on worker-1 (10.0.0.6): towline is missing; executor 1 on 10.0.0.1: crc32c is missing, it is 3.10; "
        "executor 2 on 10.0.0.2: crc32c is missing, it is 3.10; and 5 more executors. "
        "Install the driver's packages there, or ship them (docs/spark.md#spark-cluster).   [TL-S31]"
    )


def test_what_executors_need_is_what_the_package_needs() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    asked = dict(re.split(r">=|,", one)[:2] for one in project["project"]["dependencies"])
    assert {name: asked[name] for name in REQUIRED_VERSIONS} == dict(REQUIRED_VERSIONS)


def test_a_task_tells_what_is_there(tmp_path: Path) -> None:
    mark, absent = tmp_path / "mark", str(tmp_path / "none" / "absent")
    mark.touch()
    host, lacks = missing_requirements({"no-such": "1"}, (str(mark), absent), (str(mark), absent))
    assert host == socket.gethostname()
    assert lacks == [
        "no-such is missing",
        f"the file {absent} can't be read",
        f"it can't read and write {tmp_path / 'none'} as the driver does, for a line with dedupe",
    ]


def test_what_a_task_can_only_read_is_not_shared_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Path(sys.executable).resolve()  # a program that runs can't be written, not even by root (ETXTBSY)
    monkeypatch.setenv("HOME", str(there.parent))
    (lacks,) = missing_requirements({}, (str(there),), (f"~/{there.name}",))[1]
    assert f"can't read and write {there.parent} as" in lacks


def test_the_question_travels_as_code_to_a_python_without_towline(tmp_path: Path) -> None:
    cloudpickle.register_pickle_by_value(executors)  # type: ignore[no-untyped-call]
    try:
        code = cloudpickle.dumps(partial(missing_requirements, {"towline": "0.1.0"}, (), ()))  # type: ignore[no-untyped-call]
    finally:
        cloudpickle.unregister_pickle_by_value(executors)  # type: ignore[no-untyped-call]
    question, packages = tmp_path / "question", str(Path(cloudpickle.__file__).parents[2])
    question.write_bytes(code)
    program = (
        f"import pickle, sys; sys.path.append({packages!r}); sys.modules['towline'] = None; "
        f"print(pickle.load(open({str(question)!r}, 'rb'))()[1:])"
    )
    task = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert task.stdout.strip() == "(['towline is missing'],)"
