"""The referee must find what we plant, name it, and find nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline_prove.history import Claims, SenderClaim, encoder
from towline_prove.referee import Arrival, RunAccount, RunVerdict, Watermarks, judge_arrivals


def claims(attempted: int = 10, acked: int | None = None, resent: tuple[int, ...] = (), run: str = "r") -> Claims:
    history = Claims(run=run)
    history.add(SenderClaim.ATTEMPTED, 0, 0, attempted)
    history.add(SenderClaim.ACKED, 0, 0, attempted if acked is None else acked)
    for number in resent:
        history.add(SenderClaim.RESENT, 0, number, 1)
    return history


def arrivals(numbers: list[int], *, run: str = "r", partition: int = 0) -> list[Arrival]:
    encode = encoder(run, 0, 150)
    return [
        Arrival(partition, offset, f"d{n % 2}".encode(), encode(n, f"d{n % 2}", 1)) for offset, n in enumerate(numbers)
    ]


def kept(verdict: RunVerdict) -> set[str]:
    return {promise for promise in ("at_most_once", "at_least_once", "exactly_once") if verdict.ok(promise)}


ALL = {"at_most_once", "at_least_once", "exactly_once"}


@pytest.mark.parametrize(
    ("history", "arrived", "promises", "story"),
    [
        (claims(), arrivals([*range(10)]), ALL, ""),
        (claims(), arrivals([0, 1, 2, *range(4, 10)]), {"at_most_once"}, "2 (partition 0 offset 2) before, 4"),
        (claims(acked=5), arrivals([0, 1, 2, 3, 4, 6]), ALL, ""),  # nobody was told that the others would arrive
        (claims(), arrivals([0, 1, 2, 1, 2, *range(3, 10)]), {"at_least_once"}, "offset 1, again at 0 offset 3"),
        (claims(resent=(1,)), arrivals([0, 1, 1, *range(2, 10)]), ALL, "again"),
        (claims(), arrivals([0, 1, 4, 2, 3, *range(5, 10)]), set(), "after number 4 at partition 0 offset 2"),
        (claims(), [*arrivals([0, 1, 2, 3]), *arrivals([*range(4, 10)], partition=1)], set(), ""),  # two partitions
        (claims(), [*arrivals([*range(10)]), Arrival(0, 99, None, b"hello")], set(), "partition 0 offset 99"),
        (claims(attempted=5), arrivals([*range(6)]), set(), "offset 5"),  # a number that was never attempted
        (claims(), [*arrivals([3, 4], run="other"), *arrivals([*range(10)])], ALL, ""),
    ],
)
def test_a_planted_fault_breaks_its_promises_and_has_a_story(
    history: Claims, arrived: list[Arrival], promises: set[str], story: str
) -> None:
    """[MQTT-4.3.2-5]: to the broker a resend may be a new message."""
    verdict = judge_arrivals(history, arrived)
    assert (kept(verdict), verdict.adds_up()) == (promises, True)
    assert any(story in str(told) for told in verdict.stories) if story else not verdict.stories


def test_stories_are_bounded_but_counts_are_not() -> None:
    verdict = judge_arrivals(claims(attempted=5000), [])
    assert (verdict.lost, len(verdict.stories)) == (5000, 20)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=80))))
def test_counts_agree_with_multisets(case: tuple[int, list[int]]) -> None:
    attempted, numbers = case
    verdict = judge_arrivals(claims(attempted=attempted), arrivals(numbers))
    counted, firsts = Counter(numbers), list(dict.fromkeys(numbers))
    assert (verdict.lost, verdict.delivered) == (attempted - len(counted), len(counted))
    assert verdict.doubled == sum(counted.values()) - len(counted)
    assert verdict.late == sum(any(b % 2 == n % 2 and b > n for b in firsts[:i]) for i, n in enumerate(firsts))
    assert verdict.adds_up()


def test_verdicts_on_two_parts_of_one_topic_add_up() -> None:
    arrived = [*arrivals([*range(10)]), *arrivals([0, 1, 1, 2, 3], run="s"), *arrivals([5], run="stranger")]
    verdict = judge_arrivals([claims(), claims(run="s")], arrived)
    assert verdict.adds_up()
    assert (verdict.attempted, verdict.delivered, verdict.lost, verdict.doubled) == (20, 14, 6, 1)
    assert (verdict.foreign_records, verdict.late) == (1, 0), "each run counts from 0"


def account(**fields: int) -> RunVerdict:
    return replace(RunVerdict(attempted=100, acked=100, delivered=100, copies=100), **fields)  # type: ignore[arg-type]


LINE = {"disagreements": ["journal says 1 committed"], "not_witnessed": 2, "left_out": 1}
AT_MOST_ONCE = account(acked=0, delivered=90, copies=90, missing=10)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (RunAccount(account(copies=112, doubled=12), gateway=Watermarks(112, 112, 112)), ""),
        (RunAccount(account(), gateway=Watermarks(150, 150, 120)), ""),
        (RunAccount(account(), gateway=Watermarks(100, 101, 100)), "out of order"),
        (RunAccount(account(), gateway=Watermarks(100, 90, 100)), "out of order"),
        (RunAccount(account(), gateway=Watermarks(90, 90, 90)), "only 90 journaled"),
        (RunAccount(account(), gateway=Watermarks(101, 101, 101)), "only 100 records"),
        (RunAccount(AT_MOST_ONCE, "at_most_once", Watermarks(100, 100, 100)), ""),  # nobody was told
        (RunAccount(AT_MOST_ONCE, "at_least_once", Watermarks(100, 100, 100)), "only 90 records"),
        (RunAccount(account(), line_account=LINE), "the line's account: journal says 1 committed"),
        (RunAccount(account(), line_account=LINE), "does not know what became of 3 messages"),
        (RunAccount(account(delivered=99, copies=99, lost=1)), "at_least_once was not kept"),
        (RunAccount(account(delivered=99, copies=99)), "does not add up"),
        (RunAccount(account(late=1)), "at_least_once was not kept"),
        (RunAccount(account(late=1), ordered=False), ""),
    ],
)
def test_an_account_that_does_not_hold_says_why(found: RunAccount, problem: str) -> None:
    assert any(problem in line for line in found.problems()) if problem else found.ok
