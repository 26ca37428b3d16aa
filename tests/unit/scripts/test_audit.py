"""What the dependency audit makes of pip-audit's report, as pip-audit 2.10 writes it."""

from __future__ import annotations

import json
from typing import Any

from packaging.version import Version
from pip_audit._format import JsonFormat
from pip_audit._service.interface import (
    Dependency,
    ResolvedDependency,
    SkippedDependency,
    VulnerabilityID,
    VulnerabilityResult,
)
from scripts.audit import judge


def report(*vulnerable: str, skipped: int = 0) -> dict[str, Any]:
    """Of one package that the index knows, and of those that it does not."""
    hole = VulnerabilityResult(VulnerabilityID("PYSEC-2026-1"), "d", [Version("1.1")], set())
    found: dict[Dependency, list[VulnerabilityResult]] = {
        ResolvedDependency(name, Version("1.0")): [hole] for name in vulnerable
    }
    for number in range(skipped):
        found[SkippedDependency(f"s{number}", "Dependency not found on PyPI and could not be audited: s")] = []
    found[SkippedDependency("towline", "distribution marked as editable")] = []
    said: dict[str, Any] = json.loads(JsonFormat(output_desc=False, output_aliases=False).format(found, []))
    return said


def test_a_vulnerability_fails_and_says_where_it_is_mended() -> None:
    assert judge(report("x")) == (1, ["audit: x 1.0: PYSEC-2026-1, mended in 1.1"])


def test_an_index_without_such_data_fails_nobody_and_is_no_tick() -> None:
    code, (line,) = judge(report(skipped=3))
    assert code == 0
    assert line == "audit: not asked: the index here has no vulnerability data (3 packages)"


def test_none_known_says_how_many_were_asked() -> None:
    said = report("x", skipped=1)
    said["dependencies"][0]["vulns"] = []
    assert judge(said) == (0, ["audit: 2 packages, no known vulnerability, 1 of them not known to the index"])
