"""Topics that would forget are refused, and what a lost broker would cost is said."""

from __future__ import annotations

import pyarrow as pa
import pytest

from towline.kafka.admin import TopicFacts
from towline.landing.records import to_records
from towline.landing.statelog import PIECE_BYTES, Label, pieces_of
from towline.landing.topics import problem_of, record_bytes, weaknesses
from towline.schema import ROW_SCHEMA

LEAST = 512 << 10
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
        (TopicFacts(2, max_bytes=LEAST - 1), f"max.message.bytes={LEAST - 1}"),
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


def test_whatever_a_device_sends_has_a_place_in_the_smallest_that_can() -> None:
    """[I13], [I15]: the worst topic that MQTT allows, and everything else as large as it gets, is a row."""
    least = TopicFacts(2, max_bytes=LEAST)
    assert problem_of("t", least, 2) is None
    long = "\x01" * 65535
    row = dict.fromkeys(("topic", "content_type", "response_topic"), long) | {
        "payload": b"x" * LEAST,
        "correlation_data": b"x" * 65535,
        "user_properties": [{"key": long, "value": long}] * 4,
        "gateway": "g" * 200,
        "offset": 2**62,
    }
    batch = pa.RecordBatch.from_pylist([row], ROW_SCHEMA)
    (record,), aside = to_records(batch, 2**62, record_bytes(least))
    assert (aside, record.value) == (1, None)
    assert record.size <= record_bytes(least)


def test_every_piece_of_state_has_a_place_there() -> None:
    label = Label("a" * 32, 2**62, 0, 1, 2**62, 2**62)
    pieces = list(pieces_of(bytes(3 * PIECE_BYTES + 1), label))
    assert len(pieces) == 4
    assert max(len(key) + len(value) for key, value in pieces) <= record_bytes(TopicFacts(2, max_bytes=LEAST))
