"""The ledger of publishers and the incarnations of their numbers: no double, nothing lost, watermarks that are true."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mqtt5 import QoS

from tests.unit.delivery.receipts.marks import CONTENT, KEYS, NOW, later, mark, opened, sent, store
from towline.delivery.receipts.ledger import MarkVerdict, ReceiptLedger
from towline.delivery.receipts.mark import MAX_EPOCH_GAP, MAX_NUMBER_GAP, Content, Mark
from towline.delivery.receipts.payload import IncarnationMap, ReceiptPayload, are_same_messages
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


@pytest.mark.parametrize(
    ("steps", "same"),
    [
        (((0, "a"), (5, "b")), True),
        (((0, "a"), (4, "b")), False),
        (((0, "a"), (6, "b")), False),
        (((0, "a"), (5, "c")), False),
        (((0, "a"), (5, "b"), (9, "c")), True),  # nobody asks about 9
        (((1, "a"), (5, "b")), False),  # what is below is not known any more
    ],
)
def test_a_directory_restored_from_a_copy_differs_from_its_original(
    steps: tuple[tuple[int, str], ...], same: bool
) -> None:
    assert are_same_messages(steps, [(0, 3), (4, 9)], lambda number: "aaaaabbbb"[number]) is same
    assert are_same_messages(steps, [(3, 3)], lambda number: "aaaaabbbb"[number])


class Gateway(RuleBasedStateMachine):
    """A publisher that repeats, reorders, gives up and begins anew; a gateway that crashes at every point."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Any] = {}
        #: what the journal holds: (epoch, number) of each row
        self.rows: list[tuple[int, int]] = []
        self.committed = 0
        self.ledger = ReceiptLedger({}, 0, max_ranges=3, keys=KEYS)
        #: received and not stored
        self.ahead: list[Mark] = []
        self.epoch, self.low = 1, 0
        self.given_up: set[tuple[int, int]] = set()
        self.announced: dict[int, int] = {}

    @rule(ahead=st.integers(0, 12), nonce=st.sampled_from(["", "", "a1"]))
    def publish(self, ahead: int, nonce: str) -> None:
        marked = Mark("p", self.epoch, self.low + ahead, self.low, nonce)
        here = (self.epoch, marked.number) in [*self.rows, *((m.epoch, m.number) for m in self.ahead)]
        verdict = self.ledger.record_mark(marked, NOW)
        assert verdict in ((MarkVerdict.REPEAT,) if here else (MarkVerdict.NEW, MarkVerdict.DEFERRED))
        if verdict is MarkVerdict.NEW:
            self.ahead.append(marked)

    @precondition(lambda self: self.ahead)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.ahead)))
        frame, self.ahead = self.ahead[:count], self.ahead[count:]
        notes = self.ledger.notes_for_frame(frame)
        if data.draw(st.booleans()):
            self._durable(notes)
            self.rows += [(m.epoch, m.number) for m in frame]
            self.ledger.frame_stored(frame, len(self.rows))
        else:
            self.ahead = frame + self.ahead  # the journal was full

    def _durable(self, notes: Any) -> None:
        for name, note in notes.items():
            if note is None:
                self.notes.pop(name, None)
            else:
                self.notes[name] = note

    @rule(more=st.integers(0, 5))
    def commit(self, more: int) -> None:
        self.committed = min(len(self.rows), self.committed + more)
        self.ledger.commit(self.committed)

    @rule()
    def tell(self) -> None:
        for receipt in self.ledger.receipts(5):
            self._durable(self.ledger.watermark_notes([receipt]))
            self.ledger.receipt_sent(receipt)
            self._judge(receipt)
        assert not self.ledger.has_due

    def _judge(self, receipt: ReceiptPayload) -> None:
        in_kafka, stored = set(self.rows[: self.committed]) | self.given_up, set(self.rows) | self.given_up
        epoch = receipt.epoch
        assert all((epoch, n) in in_kafka for n in range(receipt.watermark))
        assert all((epoch, n) in stored for start, end in receipt.journaled for n in range(start, end))
        assert receipt.watermark >= self.announced.get(epoch, 0)
        self.announced[epoch] = receipt.watermark
        if epoch == self.epoch:  # the publisher's low follows what it was told
            self.low = max(self.low, receipt.watermark)

    @rule(count=st.integers(1, 3))
    def give_up(self, count: int) -> None:
        self.given_up |= {(self.epoch, n) for n in range(self.low, self.low + count)}
        self.low += count

    @rule()
    def crash(self) -> None:
        self.ahead = []
        self.ledger = ReceiptLedger(self.notes, len(self.rows), max_ranges=3, keys=KEYS)
        self.ledger.commit(self.committed)

    @rule(data=st.data())
    def new_session(self, data: st.DataObject) -> None:
        self.ahead = self.ahead[: data.draw(st.integers(0, len(self.ahead)))]
        self.ledger.reset(self.ahead)

    @rule()
    def new_epoch(self) -> None:
        # What is received of the older epoch may be stored or lost, and comes again only under the new one.
        self.ahead = []
        self.ledger.reset([])
        self.epoch += 1
        self.low = 0
        assert self.ledger.record_mark(Mark("p", self.epoch, 0, 0), NOW) is MarkVerdict.NEW
        first = [Mark("p", self.epoch, 0, 0)]
        self._durable(self.ledger.notes_for_frame(first))
        self.rows.append((self.epoch, 0))
        self.ledger.frame_stored(first, len(self.rows))

    @rule()
    def expiry(self) -> None:
        assert self.ledger.expire_publishers(later(10)) == {}

    @invariant()
    def sound(self) -> None:
        self.ledger.validate()
        assert len(set(self.rows)) == len(self.rows)  # no double, ever

    def teardown(self) -> None:
        """Once everything is sent again and committed, the receipt says so."""
        top = max([n for e, n in self.rows if e == self.epoch], default=-1) + 1
        for number in range(self.low, top):
            self.publish(number - self.low, "")
        notes = self.ledger.notes_for_frame(self.ahead)
        self.rows += [(m.epoch, m.number) for m in self.ahead]
        self._durable(notes)
        self.ledger.frame_stored(self.ahead, len(self.rows))
        self.commit(1_000_000)
        self.tell()
        assert max(self.announced.get(self.epoch, 0), self.low) >= top


TestGateway = Gateway.TestCase
TestGateway.settings = settings(stateful_step_count=40, deadline=None)
