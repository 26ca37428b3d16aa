"""How a limit is told."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.doctor.broker.words import NEAR_S, duration, verdict_of, within
from towline.doctor.case import LineLoad
from towline.doctor.findings import Standing

#: Seconds of each unit.
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0}


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "0 s"),
        (0.48, "0.4 s"),
        (5.0, "5 s"),
        (119.9, "119 s"),
        (1800.0, "30 min"),
        (7200.0, "2 h"),
        (97200.0, "27 h"),
        (604800.0, "7 days"),
        (1e12, "years"),
    ],
)
def test_a_duration(seconds: float, told: str) -> None:
    assert duration(seconds) == told


@given(st.floats(min_value=0, max_value=8e7))
def test_a_limit_is_never_told_larger_than_it_is(seconds: float) -> None:
    told = re.fullmatch(r"([0-9.]+) (\w+)", duration(seconds))
    assert told is not None
    unit = UNITS[told[2]]
    smallest = 0.1 if unit == 1.0 and seconds < 10 else 1.0
    assert seconds - unit * smallest <= float(told[1]) * unit + 1e-6
    assert float(told[1]) * unit <= seconds + 1e-6


@given(st.integers(1, 10**9), st.floats(min_value=0.01, max_value=1e6))
def test_a_queue_holds_until_its_messages_divided_by_the_rate(messages: int, rate: float) -> None:
    load = LineLoad(rate, rate * 100, "measured for 5 s")
    assert duration(messages / rate) in within(messages, load)
    assert f"{messages:,} message" in within(messages, load)


def test_near_is_what_nobody_may_have_seen_yet() -> None:
    assert verdict_of(None) is Standing.WARNS
    assert verdict_of(NEAR_S - 1) is Standing.WARNS
    assert verdict_of(NEAR_S) is Standing.LIMITED
