"""Checks become rows, whatever they raise; and the table says the worst first and last, in 80 columns."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.doctor.table import (
    Check,
    Finding,
    ProbeSkipped,
    Verdict,
    as_json,
    exit_code,
    fact,
    report_lines,
    run_checks,
)
from towline.errors import Unreachable
from towline.text import duration_text, wrap_line

#: Seconds of each unit.
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0}


def finding(verdict: Verdict, code: str = "TL-D02", line: str = "", promise: str = "queue") -> Finding:
    return Finding(verdict, "measured", "", "do", line, promise, code=code)


def fails(error: Exception) -> Check[None]:
    def rule(_facts: None) -> Iterator[Finding]:
        yield Finding(Verdict.HOLDS, "so far")
        raise error

    return Check("TL-D05", "queue", rule)


@pytest.mark.parametrize(
    ("error", "told", "mend"),
    [
        (ProbeSkipped("it would do harm", "Do it."), "not probed: it would do harm", "Do it."),
        (Unreachable("TL-M05", "b", "\x1bcut", "Wait."), "check failed: b: \\x1bcut (TL-M05)", "Wait."),
        (KeyError("x"), "check failed: KeyError: 'x'", "Report this bug with this row; the other rows are valid."),
    ],
)
def test_a_check_that_raises_is_a_row_and_the_others_are_told(error: Exception, told: str, mend: str) -> None:
    after = Check[None]("TL-D03", "session", lambda _: [Finding(Verdict.HOLDS, "there")])
    found = list(run_checks([fails(error), after], None, "up"))
    assert [(one.code, one.verdict) for one in found] == [
        ("TL-D05", Verdict.HOLDS),
        ("TL-D05", Verdict.UNKNOWN),
        ("TL-D03", Verdict.HOLDS),
    ]
    assert (found[1].evidence, found[1].remedy, found[1].line) == (told, mend, "up")


class Facts:
    def __init__(self) -> None:
        self.asked = 0

    @fact
    def lost(self) -> int:
        self.asked += 1
        raise Unreachable("TL-M05", "b", "gone")


def test_a_fact_is_asked_for_once_also_where_it_fails() -> None:
    facts = Facts()
    for _ in range(2):
        with pytest.raises(Unreachable):
            _ = facts.lost
    assert facts.asked == 1


def test_the_worst_row_gives_the_exit_code_and_comes_first() -> None:
    found = [finding(verdict) for verdict in Verdict]
    said = as_json(found)
    assert [one["verdict"] for one in said["findings"]] == [*reversed(Verdict)]
    assert [exit_code([finding(verdict)]) for verdict in Verdict] == [0, 0, 3, 3, 1]
    assert (exit_code(found), said["worst"]) == (1, "broken")
    assert json.loads(json.dumps(said)) == said


def test_nothing_examined_is_not_a_promise_kept() -> None:
    assert (exit_code([]), as_json([])["worst"]) == (3, "unknown")
    assert list(report_lines([], [])) == ["", "nothing was examined"]


def test_the_screen_has_the_worst_as_headline_and_last_and_counts_what_is_kept() -> None:
    found = [finding(one, f"TL-D{number:02}", promise=one) for number, one in enumerate(Verdict)]
    text = list(report_lines(found, ["load of up: none"]))
    assert text[:2] == ["✗ broken: measured   [TL-D04]", "load of up: none"]
    titles = [line for line in text[2:] if line[:1] in set("✓?!✗")]
    assert titles == ["? unknown", "! warns", "✗ broken"]
    assert text[-1] == "1 broken, 1 near a limit, 1 unknown, 2 kept (-v)"
    verbose = list(report_lines(found, [], verbose=True))
    assert {"✓ holds", "✓ limited"} <= set(verbose)
    assert verbose[-1].endswith("2 kept")


def test_rows_of_one_reason_are_one_row_on_the_screen_and_each_its_own_for_a_script() -> None:
    found = [finding(Verdict.UNKNOWN, code, promise=code[-1]) for code in ("TL-D03", "TL-D05")]
    text = list(report_lines(found, []))
    assert "? 3, 5" in text
    assert not any("TL-D" in line for line in text)
    assert text[-1] == "2 unknown"
    assert len(as_json(found)["findings"]) == 2


@given(
    st.lists(st.lists(st.text("abcdefgh-", min_size=1, max_size=29), min_size=1, max_size=30), min_size=1, max_size=5),
    st.integers(60, 100),
)
def test_no_word_is_cut_and_no_line_is_longer_than_the_terminal(texts: list[list[str]], width: int) -> None:
    found = [
        Finding(Verdict.WARNS, " ".join(words), " ".join(words), " ".join(words), promise="p", code="TL-D02")
        for words in texts
    ]
    lines = [row for line in report_lines(found, []) for row in wrap_line(line, width)]
    assert max(map(len, lines)) <= width
    told = " ".join(lines).split()
    assert all(word in told for words in texts for word in words)


@given(st.floats(min_value=0, max_value=8e7))
def test_a_limit_is_never_told_larger_than_it_is(seconds: float) -> None:
    number, unit = duration_text(seconds).split(" ")
    value, size = float(number), UNITS[unit]
    smallest = 0.1 if value < 10 else 1.0
    assert seconds - size * smallest <= value * size + 1e-6
    assert value * size <= seconds + 1e-6
