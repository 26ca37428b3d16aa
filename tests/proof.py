"""The part of pytest that makes a long test evidence: a line of JSON for each that ran (``make soak``)."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from towline_prove.evidence import append_record, revision, run_record


def pytest_addoption(parser: pytest.Parser) -> None:
    """Long tests are evidence: `--proof docs/proof/tests.jsonl` keeps a line for each that ran."""
    parser.addoption("--proof", type=Path, metavar="FILE", help="add a line of JSON to FILE for each long test")


def pytest_configure(config: pytest.Config) -> None:
    """The code that is put to the proof is that of the beginning, whatever is committed meanwhile."""
    if config.getoption("--proof") is not None:
        revision()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record a long test that ran to its end, with what it adds by `record_property`: a seed, counts."""
    report = yield
    file = item.config.getoption("--proof")
    if file is not None and report.when == "call" and not report.skipped and item.get_closest_marker("long"):
        details = {"test": item.nodeid, **dict(report.user_properties)}
        append_record(run_record("test", ok=report.passed, seconds=report.duration, details=details), file)
    return report
