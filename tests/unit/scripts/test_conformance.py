"""The table of statements is complete, current, and knows every label that a test carries."""

from __future__ import annotations

from typing import Any

import pytest
from scripts import conformance

from tests.helpers import lacking

#: Statements that bind a client and have no test: none, and it stays so.
STILL_MISSING = {"5.0": 0, "3.1.1": 0}


@pytest.fixture(scope="module")
def versions() -> dict[str, Any]:
    if not conformance.VECTORS.is_dir():
        lacking(f"the client vectors are not at {conformance.VECTORS}")
    found: dict[str, Any] = conformance.collect()
    return found


def test_the_page_is_current(versions: dict[str, Any]) -> None:
    assert conformance.PAGE.read_text() == conformance.page(versions), "run scripts/conformance.py"


def test_every_label_in_a_test_is_a_statement_of_its_standard(versions: dict[str, Any]) -> None:
    assert {name: version.unknown for name, version in versions.items()} == {"5.0": {}, "3.1.1": {}}


def test_no_statement_loses_its_test(versions: dict[str, Any]) -> None:
    for name, version in versions.items():
        assert len(version.missing) <= STILL_MISSING[name], f"{name}: {' '.join(version.missing)}"
