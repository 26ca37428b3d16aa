"""The table: the worst first, and what a shell is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.doctor.findings import EXIT_CODES, Finding, Standing, as_json, exit_code, ordered, rows, summary


def finding(verdict: Standing, code: str = "TL-D02", line: str = "") -> Finding:
    return Finding(code=code, promise="queue", verdict=verdict, because="measured", mend="do", line=line)


def test_the_worst_row_gives_the_exit_code_and_comes_first() -> None:
    found = [finding(verdict) for verdict in Standing]
    assert [one.verdict for one in ordered(found)] == [*reversed(Standing)]
    assert [exit_code([finding(verdict)]) for verdict in Standing] == [0, 0, 3, 3, 1]
    assert exit_code(found) == 1
    assert as_json(found)["worst"] == "broken"


def test_nothing_examined_is_not_a_promise_kept() -> None:
    assert (exit_code([]), as_json([])["worst"], summary([])) == (3, "unknown", "nothing was examined")


@given(st.lists(st.sampled_from(list(Standing))))
def test_no_row_is_left_out(verdicts: list[Standing]) -> None:
    found = [finding(verdict) for verdict in verdicts]
    assert len(rows(found)) == len(verdicts)
    assert exit_code(found) in EXIT_CODES.values()
    assert sum(int(part.split()[0]) for part in summary(found).split(", ") if verdicts) == len(verdicts)


def test_a_warning_without_a_remedy_is_refused() -> None:
    with pytest.raises(AssertionError):
        Finding(code="TL-D02", promise="queue", verdict=Standing.WARNS, because="measured")
    with pytest.raises(AssertionError):
        Finding(code="TL-D02", promise="queue", verdict=Standing.HOLDS, because="")


def test_a_row_names_its_line_and_its_page() -> None:
    [cells] = rows([finding(Standing.BROKEN, line="telemetry")])
    assert cells == ("✗ queue (telemetry)", "", "measured", "do   [TL-D02]")
