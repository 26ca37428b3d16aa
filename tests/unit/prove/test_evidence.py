"""A record of a run: what, which version, with which result; and one for each long test, only where it ran."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from towline_prove.evidence import append_record, run_record

pytest_plugins = ["pytester"]

#: One test that passes, one that fails, one that is skipped, one that is not long.
TESTS = """
import pytest
pytestmark = pytest.mark.long
def test_good(record_property):
    record_property("seed", 7)
def test_bad():
    assert 0
@pytest.mark.skip
def test_skipped():
    pass
"""


def test_a_record_names_its_version_and_no_machine(tmp_path: Path) -> None:
    file = tmp_path / "proof" / "soak.jsonl"
    for ok in (True, False):
        append_record(run_record("soak", ok=ok, seconds=1.26, details={"seed": 3}), file)
    lines = file.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(record["program"], record["ok"], record["seconds"], record["seed"]) for record in records] == [
        ("soak", True, 1.3, 3),
        ("soak", False, 1.3, 3),
    ]
    assert all(record["version"] and record["revision"] and record["day"] for record in records)
    assert all(socket.gethostname() not in line and str(tmp_path) not in line for line in lines)


def test_a_long_test_that_ran_is_recorded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_some=TESTS)
    pytester.makeini("[pytest]\nmarkers = long: takes minutes")
    pytester.runpytest_inprocess("-q", "-p", "tests.proof", "--proof", "proof.jsonl").assert_outcomes(1, 1, 1)
    lines = (pytester.path / "proof.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(record["test"], record["ok"], record.get("seed")) for record in records] == [
        ("test_some.py::test_good", True, 7),
        ("test_some.py::test_bad", False, None),
    ]
