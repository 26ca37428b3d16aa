"""The referee must find what we plant, name it, and find nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline_prove.history import Claims, SenderClaim, encoder
from towline_prove.referee import Arrival, RunAccount, RunVerdict, Watermarks, judge_arrivals


def claims(attempted: int = 10, acked: int | None = None, resent: tuple[int, ...] = ()) -> Claims:
    history = Claims(run="r")
    history.add(SenderClaim.ATTEMPTED, 0, 0, attempted)
    if acked is None or acked:
        history.add(SenderClaim.ACKED, 0, 0, attempted if acked is None else acked)
    for number in resent:
        history.add(SenderClaim.RESENT, 0, number, 1)
    return history


def arrivals(numbers: list[int], *, run: str = "r", partition: int = 0) -> list[Arrival]:
    encode = encoder(run, 0, 150)
    return [
        Arrival(partition, offset, f"d{n % 2}".encode(), encode(n, f"d{n % 2}", 1)) for offset, n in enumerate(numbers)
    ]


def check(history: Claims, arrived: list[Arrival]) -> RunVerdict:
    verdict = judge_arrivals(history, arrived)
    assert verdict.adds_up()
    return verdict


def test_a_perfect_run_keeps_every_promise() -> None:
    verdict = check(claims(), arrivals(list(range(10))))
    assert (verdict.attempted, verdict.acked, verdict.delivered) == (10, 10, 10)
    assert all(verdict.ok(promise) for promise in ("at_most_once", "at_least_once", "exactly_once"))
    assert not verdict.stories
    assert verdict.summary_line() == (
        "sent 10   acknowledged 10   delivered 10   lost 0   doubled 0   out of order 0 of 2 devices"
    )


def test_lost_is_acknowledged_and_absent() -> None:
    verdict = check(claims(), arrivals([0, 1, 2, 4, 5, 6, 7, 8, 9]))
    assert verdict.lost == 1
    assert not verdict.ok("at_least_once")
    assert verdict.ok("at_most_once")
    story = verdict.stories[0]
    assert (story.fault, story.publisher, story.number) == ("lost", 0, 3)
    assert "2 (partition 0 offset 2) before, 4 (partition 0 offset 3) after" in str(story)


def test_missing_without_an_acknowledgement_is_legal() -> None:
    verdict = check(claims(acked=5), arrivals([0, 1, 2, 3, 4, 6]))
    assert (verdict.lost, verdict.missing, verdict.recovered) == (0, 4 - 1 + 1, 1)
    assert verdict.ok("exactly_once")


def test_doubled_breaks_exactly_once_only() -> None:
    verdict = check(claims(), arrivals([0, 1, 2, 1, 2, *range(3, 10)]))
    assert verdict.doubled == 2
    assert verdict.ok("at_least_once")
    assert not verdict.ok("exactly_once")
    assert not verdict.ok("at_most_once")
    assert verdict.late == 0, "1,2,3,2,3,4 is a legal QoS 1 sequence"
    assert "first at partition 0 offset 1, again at 0 offset 3" in str(verdict.stories[0])


def test_copies_of_what_the_sender_sent_twice_are_the_senders() -> None:
    """[MQTT-4.3.2-5]: to the broker a resend may be a new message."""
    verdict = check(claims(resent=(1,)), arrivals([0, 1, 1, *range(2, 10)]))
    assert (verdict.doubled, verdict.resent_doubled) == (1, 1)
    assert verdict.ok("exactly_once")


def test_late_is_judged_per_device_on_first_copies() -> None:
    verdict = check(claims(), arrivals([0, 1, 4, 2, 3, *range(5, 10)]))
    assert verdict.late == 1
    assert verdict.late_devices == {"d0"}
    assert not verdict.ok("at_least_once")
    assert verdict.ok("at_least_once", ordered=False)
    assert "after number 4 at partition 0 offset 2" in str(verdict.stories[0])
    assert "out of order 1 of 2 devices" in verdict.summary_line()


def test_a_device_in_two_partitions_is_out_of_order() -> None:
    arrived = [*arrivals([0, 1, 2, 3, 4]), *arrivals([5, 6, 7, 8, 9], partition=1)]
    verdict = check(claims(), arrived)
    assert verdict.split_devices == 2
    assert not verdict.ok("at_least_once")


@pytest.mark.parametrize("value", [None, b"", b"hello", b'{"r":"r","p":0}'])
def test_what_nobody_sent_is_unexpected(value: bytes | None) -> None:
    verdict = check(claims(), [*arrivals(list(range(10))), Arrival(0, 99, None, value)])
    assert verdict.unexpected == 1
    assert not any(verdict.ok(promise) for promise in ("at_most_once", "at_least_once", "exactly_once"))
    assert "partition 0 offset 99" in str(verdict.stories[0])


def test_a_number_never_attempted_is_unexpected() -> None:
    verdict = check(claims(attempted=5), arrivals([0, 1, 2, 3, 4, 5]))
    assert verdict.unexpected == 1


def test_other_runs_are_left_out() -> None:
    verdict = check(claims(), [*arrivals([3, 4], run="other"), *arrivals(list(range(10)))])
    assert verdict.foreign_records == 2
    assert verdict.ok("exactly_once")


def test_a_refused_message_is_nobodys_claim() -> None:
    history = claims(acked=0)
    history.add(SenderClaim.REFUSED, 0, 0, 10)
    verdict = check(history, arrivals([]))
    assert (verdict.lost, verdict.missing, verdict.refused) == (0, 10, 10)


def test_stories_are_bounded_but_counts_are_not() -> None:
    verdict = check(claims(attempted=5000), [])
    assert verdict.lost == 5000
    assert len(verdict.stories) == 20


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=80))))
def test_counts_agree_with_multisets(case: tuple[int, list[int]]) -> None:
    attempted, numbers = case
    verdict = check(claims(attempted=attempted), arrivals(numbers))
    counted = Counter(numbers)
    assert verdict.lost == attempted - len(counted)
    assert verdict.doubled == sum(counted.values()) - len(counted)
    firsts = list(dict.fromkeys(numbers))
    late = sum(any(b % 2 == n % 2 and b > n for b in firsts[:i]) for i, n in enumerate(firsts))
    assert verdict.late == late


def test_verdicts_on_two_parts_of_one_topic_add_up() -> None:
    second = Claims(run="s")
    second.add(SenderClaim.ATTEMPTED, 0, 0, 10)
    second.add(SenderClaim.ACKED, 0, 0, 10)
    arrived = [*arrivals(list(range(10))), *arrivals([0, 1, 1, 2, 3], run="s"), *arrivals([5], run="stranger")]
    verdict = judge_arrivals([claims(), second], arrived)
    assert verdict.adds_up()
    assert (verdict.attempted, verdict.delivered, verdict.lost, verdict.doubled) == (20, 14, 6, 1)
    assert verdict.foreign_records == 1
    assert verdict.late == 0, "each run counts from 0"


# Accounts


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
