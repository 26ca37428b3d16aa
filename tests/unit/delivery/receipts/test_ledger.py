"""The ledger of publishers and the incarnations of their numbers: no double, nothing lost, watermarks that are true."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mqtt5 import QoS

from tests.unit.delivery.receipts.marks import CONTENT, KEYS, NOW, later, mark, opened, sent, store
from towline.delivery.receipts.ledger import MarkVerdict, ReceiptLedger
from towline.delivery.receipts.mark import MAX_EPOCH_GAP, MAX_NUMBER_GAP, Content, Mark
from towline.delivery.receipts.payload import IncarnationMap, are_same_messages
from towline.mqtt.truncated import TruncatedMessage


def test_a_question_is_answered_once_what_asked_is_stored() -> None:
    ledger = ReceiptLedger({}, 0, keys=KEYS)
    ledger.record_mark(mark(0), NOW)
    store(ledger, [mark(0)], 1)
    ledger.record_mark(mark(2, nonce="ab"), NOW)
    assert ledger.receipts(1) == []
    store(ledger, [mark(2, nonce="ab")], 2)
    (answer,) = ledger.receipts(1)
    assert (answer.watermark, answer.nonces, answer.journaled) == (0, "ab", ((0, 1), (2, 3)))
    ledger.receipt_sent(answer)
    ledger.record_mark(mark(2, nonce="cd"), NOW)
    assert ledger.receipts(1)[0].nonces == "cd"


def test_a_new_epoch_resets_the_numbers_and_an_old_one_passes() -> None:
    ledger = ReceiptLedger({}, 0, keys=KEYS)
    ledger.record_mark(mark(5), NOW)
    assert ledger.record_mark(mark(5, epoch=2), NOW) is MarkVerdict.NEW
    assert ledger.record_mark(mark(6, epoch=1, nonce="ab"), NOW) is MarkVerdict.UNKNOWN
    assert ledger.receipts(1)[0].epoch == 2  # it has to learn of it
    assert store(ledger, [mark(5), mark(5, epoch=2), mark(6)], 3) == {
        "publisher:p": [2, 0, [[5, 6]], 0, NOW, ((5, ""),)]
    }


def test_of_more_frames_than_are_told_apart_none_is_committed_too_early() -> None:
    ledger = ReceiptLedger({}, 0, keys=KEYS)
    for number in range(300):
        ledger.record_mark(mark(number), NOW)
        store(ledger, [mark(number)], number + 1)
        ledger.validate()
    told = []
    for upto in range(0, 301, 10):
        ledger.commit(upto)
        told.append(max((receipt.watermark for receipt in ledger.receipts(1)), default=0))
        assert told[-1] <= upto
    assert told[:20] == list(range(0, 200, 10))
    assert told[-1] == 300


def test_numbers_and_epochs_as_far_away_as_they_may_be() -> None:
    for far, verdict in ((0, MarkVerdict.NEW), (1, MarkVerdict.UNKNOWN)):
        ledger = ReceiptLedger({}, 0, keys=KEYS)
        ledger.record_mark(mark(0), NOW)
        assert ledger.record_mark(mark(1 + MAX_NUMBER_GAP + far), NOW) is verdict
        assert ledger.record_mark(mark(0, epoch=1 + MAX_EPOCH_GAP + far), NOW) is verdict
    ledger = ReceiptLedger({}, 0, max_publishers=1, max_ranges=2, keys=KEYS)
    verdicts = [ledger.record_mark(mark(number), NOW) for number in (2, 4, 6, 3, 6)]
    assert [verdict is MarkVerdict.NEW for verdict in verdicts] == [True, True, False, True, True]
    assert ledger.record_mark(Mark("q", 1, 0, 0), NOW) is MarkVerdict.UNKNOWN


def test_setting_the_clock_forgets_nobody() -> None:
    """Who was heard before NTP set the clock would be forgotten, and what it sends again be stored twice."""
    ledger = ReceiptLedger({}, 0, retention_s=100, keys=KEYS)
    ledger.record_mark(mark(0), later(0, boot=1))
    notes = store(ledger, [mark(0)], 1)
    assert ledger.expire_publishers(later(1000, boot=1)) == {}, "its message is on the way to Kafka"
    ledger.commit(1)
    for known in (ledger, ReceiptLedger(json.loads(json.dumps(notes)), 1, retention_s=100, keys=KEYS)):
        known.commit(1)
        assert known.expire_publishers(later(99, set_s=1e9, boot=1)) == {}
        assert known.expire_publishers(later(101, set_s=-1e9, boot=1)) == {"publisher:p": None}


def test_the_same_number_of_another_opening_is_another_message() -> None:
    ledger = ReceiptLedger({}, 0, keys=KEYS)
    first = [opened(number, "a") for number in range(4)]
    assert {ledger.record_mark(one, NOW) for one in first} == {MarkVerdict.NEW}
    notes = store(ledger, first, 4)
    ledger = ReceiptLedger(notes, 4, keys=KEYS)
    assert ledger.record_mark(opened(3, "a"), NOW) is MarkVerdict.REPEAT
    assert ledger.record_mark(opened(3, "b", low=3), NOW) is MarkVerdict.FOREIGN
    assert ledger.record_mark(opened(4, "b"), NOW) is MarkVerdict.NEW
    (receipt,) = ledger.receipts(1)
    assert (receipt.journaled, receipt.incarnations) == (((0, 4),), ((0, "a"), (4, "b")))
    assert ledger.counts["foreign"] == 1


def test_a_mark_is_verified_on_its_own_message_alone() -> None:
    ledger = ReceiptLedger({}, 0, keys=KEYS)
    own = mark(0).sign(KEYS, CONTENT)
    others = [
        CONTENT._replace(topic="u"),
        CONTENT._replace(payload=b"21.6"),
        CONTENT._replace(content_type=None),
        CONTENT._replace(payload_is_utf8=False),
        CONTENT._replace(response_topic="answer"),
        CONTENT._replace(correlation_data=b""),
        CONTENT._replace(user_properties=()),
        CONTENT._replace(user_properties=(("a", ""), ("1", ""))),
    ]
    packets = [sent(own, other) for other in others]
    marks = [own._replace(publisher="q"), own._replace(epoch=2), own._replace(number=1)]
    packets += map(sent, [*marks, own._replace(nonce="ab"), own._replace(incarnation="a1")])
    assert ledger.deduplicate(packets, [packet.topic for packet in packets], NOW) == (b"", [None] * len(packets))
    assert (ledger.counts["forged"], len(ledger)) == (len(packets), 0)
    assert ledger.deduplicate([sent(own)], ["t"], NOW) == (b"", [own])
    assert ledger.deduplicate([sent(own)], ["t"], NOW) == (b"\1", [None])
    ledger.deduplicate([sent(mark(1))], ["t"], NOW)
    assert (ledger.counts["forged"], len(ledger)) == (len(packets) + 1, 1), "without a code"


def left_of(marked: Mark) -> TruncatedMessage:
    """What is left of a message that was not taken in whole."""
    return TruncatedMessage("t", QoS(1), False, False, 1, None, marked.properties(), None)


def test_a_mark_on_what_is_left_of_a_message_counts_if_its_publisher_says_that_it_is_so_large() -> None:
    large = Content("t", bytes(3000))
    for content, largest, believed in (
        (large, 2048, True),
        (large, 64 << 20, False),  # somebody has added to it
        (CONTENT, 2048, False),
        (Content("t", b"", user_properties=(("a", ""),) * 1000), 64 << 20, True),
    ):
        own = mark(0).sign(KEYS, content)
        ledger = ReceiptLedger({}, 0, max_packet_bytes=largest, keys=KEYS)
        ledger.deduplicate([left_of(own)], ["t"], NOW)
        assert len(ledger) == believed
        ledger.deduplicate([left_of(own._replace(number=1))], ["t"], NOW)
        assert ledger.counts["forged"] == 2 - believed
        whole = sent(own, content)
        assert ledger.deduplicate([whole], ["t"], NOW).duplicate_flags == (b"\1" if believed else b"")
        assert not ledger.deduplicate([sent(own, content._replace(payload=bytes(2999)))], ["t"], NOW).duplicate_flags
        assert len(ledger) == 1


def test_incarnations_are_forgotten_below_low_and_bounded_above() -> None:
    incarnations = IncarnationMap()
    assert all(incarnations.record(number, f"{number:x}", is_newest=True, low=number) for number in range(100))
    assert len(incarnations.steps()) == 8
    assert (incarnations.incarnation_of(50), incarnations.incarnation_of(99)) == (None, "63")
    ledger = ReceiptLedger({}, 0, keys=KEYS)
    verdicts = [ledger.record_mark(opened(number, f"{number:x}"), NOW) for number in range(200)]
    assert verdicts.count(MarkVerdict.NEW) == 128
    assert verdicts.count(MarkVerdict.DEFERRED) == ledger.counts["deferred"] == 72


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from("abc"))))
@example([(1, "a"), (9, "a"), (4, "b"), (5, "a"), (2, "b"), (3, "a")])
@example([(2, "a"), (9, "a"), (5, "b"), (4, "b"), (3, "c")])
def test_incarnations_are_a_map_of_what_was_received(puts: list[tuple[int, str]]) -> None:
    incarnations, model = IncarnationMap(), dict[int, str]()
    for number, name in puts:
        assert incarnations.record(number, name, is_newest=number >= max(model, default=-1), low=0)
        model[number] = name
        assert {n: incarnations.incarnation_of(n) for n in model} == model
        names = [name for _, name in incarnations.steps()]
        assert all(one != next_one for one, next_one in pairwise(names)), (
            "a step for each change, there is room for few"
        )
        assert IncarnationMap(incarnations.steps()).steps() == incarnations.steps()


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=10),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), max_size=4),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10)), max_size=3),
)
def test_a_gateway_has_the_messages_of_a_publisher_if_each_number_is_of_the_same_incarnation(
    own: list[str], steps: list[tuple[int, str]], ranges: list[tuple[int, int]]
) -> None:
    own = sorted(own)  # the numbers of an incarnation have no others between them
    steps = sorted(dict(steps).items())
    ranges = [(start, min(end, len(own))) for start, end in ranges]
    numbers = [number for start, end in ranges for number in range(start, end)]
    incarnations = IncarnationMap(steps)
    expected = all(incarnations.incarnation_of(number) == own[number] for number in numbers)
    assert are_same_messages(steps, ranges, own.__getitem__) is expected


@pytest.mark.parametrize(
    ("steps", "same"),
    [
        (((0, "a"), (5, "b")), True),
        (((0, "a"), (4, "b")), False),
        (((0, "a"), (6, "b")), False),
        (((0, "a"), (5, "b"), (9, "c")), True),  # nobody asks about 9
        (((1, "a"), (5, "b")), False),  # what is below is not known any more
    ],
)
def test_a_directory_restored_from_a_copy_differs_from_its_original(
    steps: tuple[tuple[int, str], ...], same: bool
) -> None:
    assert are_same_messages(steps, [(0, 3), (4, 9)], lambda number: "aaaaabbbb"[number]) is same
    assert are_same_messages(steps, [(3, 3)], lambda number: "aaaaabbbb"[number])
