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
    ExecutorReport,
    failure_reason,
    missing_error,
    missing_requirements,
)

ABLE = {"towline": "0.1.0", "pyarrow": "26.0.1", "confluent-kafka": "2.16.1", "crc32c": "2.9.post0"}
ASKED = {"towline": "0.1.0", **REQUIRED_VERSIONS}


def lacks(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | Exception]) -> list[str]:
    """What a task says where these distributions are."""

    def found(name: str) -> str:
        version = versions.get(name.replace("_", "-"), ModuleNotFoundError(name))
        if isinstance(version, Exception):
            raise version
        return version

    def version(name: str) -> str:
        return found(name) or _without_version(name)

    monkeypatch.setattr(importlib, "import_module", found)
    monkeypatch.setattr(importlib.metadata, "version", version)
    return missing_requirements(ASKED, (), ())[1]


def _without_version(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_one_that_has_all_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacks(monkeypatch, {**ABLE}) == []
    assert missing_error([ExecutorReport("0", "10.0.0.6:41000", "worker-1")]) is None


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"pyarrow": ModuleNotFoundError("pyarrow")}, ["pyarrow is missing"]),
        ({"pyarrow": "15.0.2"}, ["pyarrow 15.0.2 is older than 20"]),
        ({"confluent-kafka": "2.13.1"}, ["confluent-kafka 2.13.1 is older than 2.13.2"]),
        ({"confluent-kafka": "2.13.2"}, []),
        ({"confluent-kafka": "2.14.0rc1"}, []),
        ({"crc32c": ""}, []),  # there, without its version
        ({"towline": ModuleNotFoundError("towline")}, ["towline is missing"]),
        ({"towline": "0.2.0"}, ["towline is 0.2.0, the driver's is 0.1.0"]),
        ({"towline": ""}, ["towline is of an unknown version, the driver's is 0.1.0"]),
    ],
)
def test_each_thing_that_can_be_missing(
    versions: dict[str, str | Exception], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lacks(monkeypatch, {**ABLE, **versions}) == words


def test_what_is_there_and_does_not_load_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = ImportError("libstdc++.so.6: version `GLIBCXX_3.4.30' not found")
    words = lacks(monkeypatch, {**ABLE, "pyarrow": fault})
    assert words == [f"pyarrow can't be loaded (ImportError: {fault})"]


OTHER_PYTHON = (
    "PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: "
    "3.11, PySpark cannot run with different minor versions."
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OTHER_PYTHON,
            "its Python is 3.10, the driver's is 3.11",
        ),
        (
            'java.io.IOException: Cannot run program "/opt/py/bin/python": error=2, No such file or directory',
            "it has no /opt/py/bin/python, the Python of the driver's PYSPARK_PYTHON",
        ),
        ("Error from python worker:\n  No module named 'pyspark'", "its Python has no pyspark"),
        ("\n  Something else\n  at a.b.C", "its Python gave no answer (Something else)"),
        ("", "its Python gave no answer (no reason given)"),
    ],
)
def test_a_python_that_does_not_answer_is_told_by_what_spark_says(error: str, words: str) -> None:
    assert failure_reason(error) == words


def test_all_executors_are_one_line() -> None:
    told = missing_error(
        [
            ExecutorReport(
                "0", "10.0.0.6:1", "worker-1", ["confluent-kafka is missing", "pyarrow 15 is older than 20"]
            ),
            ExecutorReport("1", "10.0.0.7:1", missing=["its Python is 3.10, the driver's is 3.11"]),
        ]
    )
    assert told is not None
    assert str(told) == (
        "executor 0 on worker-1 (10.0.0.6): confluent-kafka is missing, pyarrow 15 is older than 20; "
        "executor 1 on 10.0.0.7: its Python is 3.10, the driver's is 3.11. "
        "Install the driver's packages there, or ship them (docs/spark.md#spark-cluster).   [TL-S31]"
    )


def test_of_many_executors_a_few_are_named() -> None:
    told = missing_error([ExecutorReport(str(n), f"10.0.0.{n}:1", missing=["towline is missing"]) for n in range(1, 8)])
    assert told is not None
    assert told.problem.endswith("executor 3 on 10.0.0.3: towline is missing; and 4 more executors")


def test_what_executors_need_is_what_the_package_needs() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    asked = dict(re.split(r">=|,", one)[:2] for one in project["project"]["dependencies"])
    assert {name: asked[name] for name in REQUIRED_VERSIONS} == dict(REQUIRED_VERSIONS)


def test_a_task_tells_what_is_there(tmp_path: Path) -> None:
    mark, absent = tmp_path / "mark", str(tmp_path / "none" / "absent")
    mark.touch()
    needed = {"pyarrow": "2", "confluent-kafka": "2.13", "no-such": "1"}
    host, lacks, unshared = missing_requirements(needed, (str(mark), absent), (str(mark), absent))
    assert host == socket.gethostname()
    assert lacks == ["no-such is missing", f"the file {absent} can't be read"]
    assert unshared == [str(tmp_path / "none")]


def test_what_a_task_can_only_read_is_not_shared_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Path(sys.executable).resolve()  # a program that runs can't be written, not even by root (ETXTBSY)
    monkeypatch.setenv("HOME", str(there.parent))
    assert missing_requirements({}, (str(there),), (f"~/{there.name}",))[1:] == ([], [str(there.parent)])


def test_the_question_travels_as_code_to_a_python_without_towline(tmp_path: Path) -> None:
    cloudpickle.register_pickle_by_value(executors)  # type: ignore[no-untyped-call]
    try:
        text = cloudpickle.dumps(partial(missing_requirements, {"towline": "0.1.0"}, (), ()))  # type: ignore[no-untyped-call]
    finally:
        cloudpickle.unregister_pickle_by_value(executors)  # type: ignore[no-untyped-call]
    (tmp_path / "question").write_bytes(text)
    program = f"import pickle; print(pickle.load(open({str(tmp_path / 'question')!r}, 'rb'))()[1:])"
    place = Path(cloudpickle.__file__).parents[2]  # PySpark's alone
    found = f"import sys; sys.path.append({str(place)!r}); sys.modules['towline'] = None; {program}"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "(['towline is missing'], [])"
