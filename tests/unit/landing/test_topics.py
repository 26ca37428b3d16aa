"""Topics that would forget are refused, and what a lost broker would cost is said."""

from __future__ import annotations

import pytest

from towline.kafka.admin import TopicFacts
from towline.landing.topics import problem_of, weaknesses

GOOD = TopicFacts(2, policy="delete", retention=(-1, -1), in_sync=2, replicas=3)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (None, "does not exist"),
        (TopicFacts(1), "1 partitions, 2 are needed"),
        (TopicFacts(2, policy="compact"), "cleanup.policy=compact"),
        (TopicFacts(2, policy="compact,delete"), "cleanup.policy=compact,delete"),
        (TopicFacts(2, policy="delete", retention=(1000, -1)), "retention.ms=1000"),
        (TopicFacts(2, policy="delete", retention=(-1, 9)), "retention.bytes=9"),
    ],
)
def test_what_can_not_hold_a_journal(facts: TopicFacts | None, said: str) -> None:
    problem = problem_of("towline.x.landing", facts, 2)
    assert problem is not None
    assert said in problem[0]
    assert "SERVERS" in problem[1]


def test_what_can() -> None:
    assert problem_of("t", GOOD, 2) is None
    assert problem_of("t", TopicFacts(2), 2) is None  # whose settings this user may not see
    assert list(weaknesses("t", GOOD)) == []


def test_what_breaks_the_promise_when_a_broker_is_lost() -> None:
    (one,) = weaknesses("t", TopicFacts(2, replicas=1, in_sync=1))
    assert "one copy" in one
    (two,) = weaknesses("t", TopicFacts(2, replicas=3, in_sync=1))
    assert "min.insync.replicas=1" in two
    (three,) = weaknesses("t", TopicFacts(2, replicas=3, in_sync=2, unclean=True))
    assert "unclean" in three
