"""The account holds the gateway's words against the referee's."""

from __future__ import annotations

import pytest

from towline_prove.referee import RunAccount, RunVerdict, Watermarks


def verdict(**changes: int) -> RunVerdict:
    result = RunVerdict(attempted=100, acked=100, delivered=100, copies=100, device_partitions={"d0": {1}})
    for name, value in changes.items():
        setattr(result, name, value)
    return result


def test_a_good_run() -> None:
    account = RunAccount(verdict(copies=112, doubled=12), gateway=Watermarks(112, 112, 112))
    assert account.ok, account.problems()
    assert account.line().endswith("journaled 112   committed 112   waiting 0")


@pytest.mark.parametrize(
    ("watermarks", "problem"),
    [
        (Watermarks(100, 101, 100), "out of order"),
        (Watermarks(100, 90, 100), "out of order"),
        (Watermarks(90, 90, 90), "only 90 journaled"),
        (Watermarks(100, 100, 100), None),
        (Watermarks(101, 101, 101), "only 100 records"),
        (Watermarks(150, 150, 120), None),
    ],
)
def test_the_watermarks_must_agree(watermarks: Watermarks, problem: str | None) -> None:
    problems = RunAccount(verdict(), gateway=watermarks).problems()
    assert any(problem in line for line in problems) if problem else not problems


def test_at_most_once_may_give_up_what_was_journaled() -> None:
    """A batch that may be in Kafka is not written again; at QoS 0 nobody was told that it would arrive."""
    sent = verdict(acked=0, delivered=90, copies=90, missing=10)
    assert RunAccount(sent, "at_most_once", Watermarks(100, 100, 100)).ok
    assert not RunAccount(sent, "at_least_once", Watermarks(100, 100, 100)).ok


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"disagreements": ["journal says 1 committed"]}, "the line's account: journal says 1 committed"),
        ({"not_witnessed": 2, "left_out": 1}, "the line's account does not know what became of 3 messages"),
    ],
)
def test_the_lines_own_account_must_hold_and_know_everything(change: dict[str, object], problem: str | None) -> None:
    account = {"disagreements": [], "not_witnessed": 0, "left_out": 0, **change}
    assert RunAccount(verdict(), line_account=account).problems() == ([problem] if problem else [])


def test_a_broken_promise_is_named() -> None:
    account = RunAccount(verdict(delivered=99, copies=99, lost=1))
    assert account.problems() == ["at_least_once was not kept"]


def test_a_sum_that_does_not_add_up_is_named() -> None:
    assert "add up" in RunAccount(verdict(delivered=99, copies=99)).problems()[0]


def test_watermarks_are_taken_from_a_status() -> None:
    assert Watermarks.from_status({"received": 3, "journaled": 2, "committed": 1, "more": "x"}) == Watermarks(3, 2, 1)


def test_order_is_judged_where_it_is_promised() -> None:
    assert not RunAccount(verdict(late=1)).ok
    assert RunAccount(verdict(late=1), ordered=False).ok


def test_watermarks_of_a_part_are_a_difference() -> None:
    assert Watermarks(30, 20, 10).subtract(Watermarks(3, 2, 1)) == Watermarks(27, 18, 9)
    assert Watermarks(30, 20, 15).uncommitted == 5
