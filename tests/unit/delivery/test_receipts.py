"""The ledger of publishers: no double, nothing lost, a watermark that tells the truth; against a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mqtt5 import PublishPacket, QoS

from towline.delivery.receipts.keys import ReceiptKeys
from towline.delivery.receipts.ledger import Ledger, MarkVerdict
from towline.delivery.receipts.mark import Content, Mark, mark_of, unmarked
from towline.delivery.receipts.openings import Openings
from towline.delivery.receipts.payload import ReceiptPayload
from towline.errors import ConfigError
from towline.gateway.endpoint import write_private
from towline.mqtt.codec import Decoder, PublishRun

NOW = 1_000


def store(ledger: Ledger, marks: list[Mark], end: int) -> dict[str, Any]:
    change = ledger.storing(marks)
    ledger.stored(change, end)
    return dict(change.notes)


def mark(number: int, low: int = 0, epoch: int = 1, nonce: str = "") -> Mark:
    return Mark("p", epoch, number, low, nonce)


# -- the wire --


@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    st.integers(0, 10**10 - 1),
    st.integers(0, 10**17),
    st.integers(0, 10**17),
    st.from_regex(r"|[0-9a-f]{1,16}", fullmatch=True),
    st.from_regex(r"|[0-9a-f]{8}", fullmatch=True),
    st.from_regex(r"|[0-9a-f]{32}", fullmatch=True),
)
def test_a_mark_comes_back_as_it_was_written(
    publisher: str, epoch: int, low: int, more: int, nonce: str, opening: str, code: str
) -> None:
    made = Mark(publisher, epoch, low + more, low, nonce, opening, code)
    properties = [("a", "1"), *made.properties(), ("a", "2")]
    assert mark_of(properties) == made
    assert unmarked(properties) == [("a", "1"), ("a", "2")]


@pytest.mark.parametrize(
    "properties",
    [
        [],
        [("towline-id", "p")],
        [("towline-n", "1.2.0")],
        [("towline-id", "p/#"), ("towline-n", "1.2.0")],
        [("towline-id", "p\n"), ("towline-n", "1.2.0")],
        [("towline-id", "p"), ("towline-n", "1.2")],
        [("towline-id", "p"), ("towline-n", "1.2.3")],  # below its own low
        [("towline-id", "p"), ("towline-n", "1.-2.0")],
        [("towline-id", "p"), ("towline-n", "1.٢.0")],
        [("towline-id", "p"), ("towline-n", "1.2.0?ABC")],
        [("towline-id", "p"), ("towline-n", "1.2.0"), ("towline-auth", "x")],
        [("towline-id", "p"), ("towline-id", "p"), ("towline-n", "1.2.0")],  # each once, or which one counts?
        [("towline-id", "p"), ("towline-n", "1.2.0"), ("towline-n", "1.3.0")],
        [("towline-id", "p"), ("towline-n", "1.2.0"), ("towline-auth", "a."), ("towline-auth", "b.")],
    ],
)
def test_what_is_no_mark(properties: list[tuple[str, str]]) -> None:
    assert mark_of(properties) is None


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader_of_receipts(payload: bytes) -> None:
    ReceiptPayload.decode(payload)


def test_a_receipt_comes_back_as_it_was_written() -> None:
    told = ReceiptPayload("p", 3, 17, "plant", "ab", ((0, 20), (25, 26)), fresh=True, openings=((0, None), (7, "a1")))
    assert ReceiptPayload.decode(told.encode()) == told
    for wrong in (b'{"publisher": 1}', b"[]", b'{"publisher":"p","epoch":1,"watermark":-1}', b"\xff"):
        assert ReceiptPayload.decode(wrong) is None


# -- the ledger --


def test_a_repeat_is_dropped_before_and_after_it_is_stored() -> None:
    ledger = Ledger({}, 0)
    assert ledger.take(mark(0), NOW) is MarkVerdict.NEW
    assert ledger.take(mark(0), NOW) is MarkVerdict.REPEAT
    notes = store(ledger, [mark(0)], 1)
    again = Ledger(notes, 1)
    assert again.take(mark(0), NOW) is MarkVerdict.REPEAT
    assert again.take(mark(1), NOW) is MarkVerdict.NEW


def test_what_a_session_lost_before_it_was_stored_is_new() -> None:
    ledger = Ledger({}, 0)
    ledger.take(mark(0), NOW)
    ledger.take(mark(1), NOW)
    ledger.start_again([mark(0)])  # 0 waits for room in the journal, 1 is gone
    assert ledger.take(mark(0), NOW) is MarkVerdict.REPEAT
    assert ledger.take(mark(1), NOW) is MarkVerdict.NEW


def test_the_watermark_follows_the_commit_and_waits_for_holes() -> None:
    ledger = Ledger({}, 0, gateway="plant")
    store(ledger, [m for m in (mark(0), mark(1), mark(3)) if ledger.take(m, NOW) is MarkVerdict.NEW], 10)
    ledger.commit(9)
    assert ledger.receipts(10) == []
    ledger.commit(10)
    assert ledger.receipts(10) == [ReceiptPayload("p", 1, 2, "plant", openings=((0, ""),))]
    ledger.take(mark(2), NOW)
    store(ledger, [mark(2)], 11)
    ledger.commit(11)
    (receipt,) = ledger.receipts(10)
    assert receipt.watermark == 4
    assert ledger.receipts(10, busy=["p"]) == []
    ledger.told(receipt)
    assert not ledger.due


def test_what_the_publisher_gave_up_holds_nothing_back() -> None:
    ledger = Ledger({}, 0)
    ledger.take(mark(3), NOW)
    store(ledger, [mark(3)], 1)
    ledger.commit(1)
    assert ledger.receipts(1) == []
    assert ledger.take(mark(3, low=3), NOW) is MarkVerdict.REPEAT
    assert ledger.receipts(1)[0].watermark == 4


def test_a_question_is_answered_once_what_asked_is_stored() -> None:
    ledger = Ledger({}, 0)
    ledger.take(mark(0), NOW)
    store(ledger, [mark(0)], 1)
    ledger.take(mark(2, nonce="ab"), NOW)
    assert ledger.receipts(1) == []
    store(ledger, [mark(2, nonce="ab")], 2)
    (answer,) = ledger.receipts(1)
    assert (answer.watermark, answer.asked, answer.journaled) == (0, "ab", ((0, 1), (2, 3)))
    ledger.told(answer)
    ledger.take(mark(2, nonce="cd"), NOW)
    assert ledger.receipts(1)[0].asked == "cd"


def test_limits_are_kept_and_counted() -> None:
    ledger = Ledger({}, 0, most_publishers=1, most_ranges=2)
    assert [ledger.take(mark(n), NOW) for n in (2, 4, 6, 3)] == [
        MarkVerdict.NEW, MarkVerdict.NEW, MarkVerdict.DEFERRED, MarkVerdict.NEW,
    ]  # fmt: skip
    assert ledger.take(mark(6), NOW) is MarkVerdict.NEW  # there is room now
    assert ledger.take(Mark("q", 1, 0, 0), NOW) is MarkVerdict.UNKNOWN
    assert (ledger.deferred, ledger.unknown) == (1, 1)


def test_a_new_epoch_begins_anew_and_an_old_one_passes() -> None:
    ledger = Ledger({}, 0)
    ledger.take(mark(5), NOW)
    assert ledger.take(mark(5, epoch=2), NOW) is MarkVerdict.NEW
    assert ledger.take(mark(6, epoch=1, nonce="ab"), NOW) is MarkVerdict.UNKNOWN
    assert ledger.receipts(1)[0].epoch == 2  # it has to learn of it
    assert store(ledger, [mark(5), mark(5, epoch=2), mark(6)], 3) == {
        "publisher:p": [2, 0, [[5, 6]], 0, NOW, ((5, ""),)]
    }


def test_a_silent_publisher_is_forgotten_once_all_is_in_kafka() -> None:
    ledger = Ledger({}, 0, keep_s=100)
    ledger.take(mark(0), NOW)
    store(ledger, [mark(0)], 1)
    assert ledger.expire(NOW + 1000) == {}
    ledger.commit(1)
    assert ledger.expire(NOW + 100) == {}
    assert ledger.expire(NOW + 101) == {"publisher:p": None}
    assert ledger.take(mark(0), NOW) is MarkVerdict.NEW


# -- who may say what --

KEYS = ReceiptKeys([("", bytes(range(32)))])
CONTENT = Content("t", b"21.5", "text/plain", True, "answers", b"7", (("a", "1"),))


def sent(marked: Mark, content: Content = CONTENT) -> PublishPacket:
    return PublishPacket(
        content.topic,
        content.payload,
        qos=QoS.AT_LEAST_ONCE,
        packet_id=1,
        payload_format_indicator=int(content.payload_is_utf8),
        content_type=content.content_type,
        response_topic=content.response_topic,
        correlation_data=content.correlation_data,
        user_properties=[*content.pairs, *marked.properties()],
    )


def test_a_mark_is_believed_on_its_own_message_alone() -> None:
    ledger = Ledger({}, 0, keys=KEYS)
    own = mark(0).signed(KEYS, CONTENT)
    others = [
        CONTENT._replace(topic="u"),
        CONTENT._replace(payload=b"21.6"),
        CONTENT._replace(content_type=None),
        CONTENT._replace(payload_is_utf8=False),
        CONTENT._replace(response_topic="answer"),
        CONTENT._replace(correlation_data=b""),
        CONTENT._replace(pairs=()),
        CONTENT._replace(pairs=(("a", ""), ("1", ""))),
    ]
    packets = [sent(own, other) for other in others]
    marks = [own._replace(publisher="q"), own._replace(epoch=2), own._replace(number=1)]
    packets += map(sent, [*marks, own._replace(nonce="ab"), own._replace(opening="a1")])
    assert ledger.screen(packets, [packet.topic for packet in packets], NOW) == set()
    assert (ledger.forged, ledger.unsigned, len(ledger)) == (len(packets), 0, 0)
    assert ledger.marks(packets) == [None] * len(packets)
    assert ledger.screen([sent(own)], ["t"], NOW) == set()
    assert ledger.screen([sent(own)], ["t"], NOW) == {0}
    ledger.screen([sent(mark(1))], ["t"], NOW)
    assert (ledger.unsigned, len(ledger)) == (1, 1)


class Left(NamedTuple):
    """What is left of a message that was not taken in whole."""

    user_properties: list[tuple[str, str]]
    payload: None = None


def test_a_mark_on_what_is_left_of_a_message_counts_if_its_publisher_says_that_it_is_so_large() -> None:
    large = Content("t", bytes(3000))
    for content, largest, believed in (
        (large, 2048, True),
        (large, 64 << 20, False),  # somebody has added to it
        (CONTENT, 2048, False),
        (Content("t", b"", pairs=(("a", ""),) * 1000), 64 << 20, True),
    ):
        own = mark(0).signed(KEYS, content)
        ledger = Ledger({}, 0, keys=KEYS, largest=largest)
        ledger.screen([Left(own.properties())], ["t"], NOW)
        assert len(ledger) == believed
        ledger.screen([Left(own._replace(number=1).properties())], ["t"], NOW)
        assert ledger.forged == 2 - believed
        whole = sent(own, content)
        assert ledger.screen([whole], ["t"], NOW) == ({0} if believed else set())
        assert ledger.screen([sent(own, content._replace(payload=bytes(2999)))], ["t"], NOW) == set()
        assert len(ledger) == 1


@given(st.lists(st.tuples(st.text("ab", max_size=3), st.text("ab", max_size=3)), max_size=3), st.binary(max_size=9))
def test_no_two_messages_make_the_same_text(pairs: list[tuple[str, str]], payload: bytes) -> None:
    said = {b"".join(mark(0).said(Content("t", payload[at:], pairs=(*pairs, ("", "x" * at))))) for at in range(10)}
    assert len(said) == 10


def test_a_receipt_is_believed_as_it_was_written(tmp_path: Path) -> None:
    told = ReceiptPayload("p", 3, 17, "plant", openings=((0, "a1"),))
    payload = told.encode(KEYS)
    assert ReceiptPayload.decode(payload) == told
    assert ReceiptPayload.was_told_by(KEYS, "p", payload)
    newer = ReceiptKeys([("", bytes(32)), ("", bytes(range(32)))])  # while the key is being changed
    assert ReceiptPayload.was_told_by(newer, "p", payload)
    assert ReceiptPayload.was_told_by(KEYS, "p", told.encode(newer))
    file = tmp_path / "own"
    write_private(file, "\n".join(KEYS.derived("p")))
    assert ReceiptPayload.was_told_by(ReceiptKeys.read(file), "p", payload)
    assert not ReceiptKeys.read(file).speaks_for("q")
    assert not ReceiptPayload.was_told_by(KEYS, "q", payload)
    assert not ReceiptPayload.was_told_by(KEYS, "p", told.encode())
    assert not ReceiptPayload.was_told_by(KEYS, "p", payload.replace(b"17", b"18"))
    assert not ReceiptPayload.was_told_by(KEYS, "p", payload[:-1] + b',"watermark":99}')


@pytest.mark.parametrize(
    ("text", "mode"), [("0" * 64, 0o604), ("0" * 63, 0o600), ("", 0o600), ("x y", 0o600), ("\xff", 0o600)]
)
def test_a_file_of_keys_is_private_and_holds_keys(tmp_path: Path, text: str, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="TL-C85") as told:
        ReceiptKeys.read(file)
    assert "0" * 63 not in str(told.value)
    with pytest.raises(ConfigError, match="TL-C85"):
        ReceiptKeys.read(tmp_path / "none")


def test_jumps_out_of_all_reason_are_not_remembered() -> None:
    ledger = Ledger({}, 0)
    ledger.take(mark(0), NOW)
    assert ledger.take(mark(1 << 41, low=1 << 41), NOW) is MarkVerdict.UNKNOWN
    assert ledger.take(mark(0, epoch=1 << 21), NOW) is MarkVerdict.UNKNOWN
    assert ledger.take(mark(1), NOW) is MarkVerdict.NEW


def test_a_question_that_is_repeated_is_answered_once_and_hides_no_other() -> None:
    ledger = Ledger({}, 0)
    ledger.take(mark(0), NOW)
    store(ledger, [mark(0)], 1)
    for nonce in ("ab", "cd", "ab"):
        ledger.take(mark(0, nonce=nonce), NOW)
    (answer,) = ledger.receipts(1)
    assert answer.asked == "ab cd"
    ledger.told(answer)
    ledger.take(mark(0, nonce="ab"), NOW)
    assert not ledger.due


# -- copies --


def opened(number: int, opening: str, low: int = 0) -> Mark:
    return Mark("p", 1, number, low, "", opening)


def test_the_same_number_of_another_opening_is_another_message() -> None:
    ledger = Ledger({}, 0)
    first = [opened(number, "a") for number in range(4)]
    assert {ledger.take(one, NOW) for one in first} == {MarkVerdict.NEW}
    notes = store(ledger, first, 4)
    ledger = Ledger(notes, 4)
    assert ledger.take(opened(3, "a"), NOW) is MarkVerdict.REPEAT
    assert ledger.take(opened(3, "b", low=3), NOW) is MarkVerdict.FOREIGN
    assert ledger.take(opened(4, "b"), NOW) is MarkVerdict.NEW
    (receipt,) = ledger.receipts(1)
    assert (receipt.journaled, receipt.openings) == (((0, 4),), ((0, "a"), (4, "b")))
    assert ledger.foreign == 1


def test_what_the_version_before_noted_matches_every_opening() -> None:
    ledger = Ledger({"publisher:p": [1, 3, [], 0, NOW]}, 3)
    assert ledger.take(opened(2, "a"), NOW) is MarkVerdict.REPEAT
    assert ledger.take(opened(3, "a"), NOW) is MarkVerdict.NEW
    assert ledger.receipts(1)[0].openings == ((0, None), (3, "a"))


def test_openings_are_forgotten_below_low_and_bounded_above() -> None:
    made = Openings()
    assert all(made.put(number, f"{number:x}", newest=True, low=number) for number in range(100))
    assert len(made.steps()) == 8
    assert (made.of(50), made.of(99)) == (None, "63")
    ledger = Ledger({}, 0)
    verdicts = [ledger.take(opened(number, f"{number:x}"), NOW) for number in range(200)]
    assert verdicts.count(MarkVerdict.NEW) == 128
    assert verdicts.count(MarkVerdict.DEFERRED) == ledger.deferred == 72


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from("abc"))))
def test_openings_are_a_map_of_what_was_received(puts: list[tuple[int, str]]) -> None:
    made, model = Openings(), dict[int, str]()
    for number, name in puts:
        assert made.put(number, name, newest=number >= max(model, default=-1), low=0)
        model[number] = name
        assert {n: made.of(n) for n in model} == model
        assert Openings(made.steps()).steps() == made.steps()


class Gateway(RuleBasedStateMachine):
    """A publisher that repeats, reorders, gives up and begins anew; a gateway that crashes at every point."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Any] = {}
        #: what the journal holds: (epoch, number) of each row
        self.rows: list[tuple[int, int]] = []
        self.committed = 0
        self.ledger = Ledger({}, 0, most_ranges=3)
        #: received and not stored
        self.ahead: list[Mark] = []
        self.epoch, self.low = 1, 0
        self.given_up: set[tuple[int, int]] = set()
        self.told: dict[int, int] = {}

    @rule(ahead=st.integers(0, 12), nonce=st.sampled_from(["", "", "a1"]))
    def publish(self, ahead: int, nonce: str) -> None:
        marked = Mark("p", self.epoch, self.low + ahead, self.low, nonce)
        here = (self.epoch, marked.number) in [*self.rows, *((m.epoch, m.number) for m in self.ahead)]
        verdict = self.ledger.take(marked, NOW)
        assert verdict in ((MarkVerdict.REPEAT,) if here else (MarkVerdict.NEW, MarkVerdict.DEFERRED))
        if verdict is MarkVerdict.NEW:
            self.ahead.append(marked)

    @precondition(lambda self: self.ahead)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.ahead)))
        frame, self.ahead = self.ahead[:count], self.ahead[count:]
        change = self.ledger.storing(frame)
        if data.draw(st.booleans()):
            self._durable(change.notes)
            self.rows += [(m.epoch, m.number) for m in frame]
            self.ledger.stored(change, len(self.rows))
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
            self._durable(self.ledger.notes([receipt]))
            self.ledger.told(receipt)
            self._judge(receipt)
        assert not self.ledger.due

    def _judge(self, receipt: ReceiptPayload) -> None:
        in_kafka, stored = set(self.rows[: self.committed]) | self.given_up, set(self.rows) | self.given_up
        epoch = receipt.epoch
        assert all((epoch, n) in in_kafka for n in range(receipt.watermark))
        assert all((epoch, n) in stored for start, end in receipt.journaled for n in range(start, end))
        assert receipt.watermark >= self.told.get(epoch, 0)
        self.told[epoch] = receipt.watermark
        if epoch == self.epoch:  # the publisher's low follows what it was told
            self.low = max(self.low, receipt.watermark)

    @rule(count=st.integers(1, 3))
    def give_up(self, count: int) -> None:
        self.given_up |= {(self.epoch, n) for n in range(self.low, self.low + count)}
        self.low += count

    @rule()
    def crash(self) -> None:
        self.ahead = []
        self.ledger = Ledger(self.notes, len(self.rows), most_ranges=3)
        self.ledger.commit(self.committed)

    @rule(data=st.data())
    def new_session(self, data: st.DataObject) -> None:
        self.ahead = self.ahead[: data.draw(st.integers(0, len(self.ahead)))]
        self.ledger.start_again(self.ahead)

    @rule()
    def new_epoch(self) -> None:
        # What is received of the older epoch may be stored or lost, and comes again only under the new one.
        self.ahead = []
        self.ledger.start_again([])
        self.epoch += 1
        self.low = 0
        assert self.ledger.take(Mark("p", self.epoch, 0, 0), NOW) is MarkVerdict.NEW
        change = self.ledger.storing([Mark("p", self.epoch, 0, 0)])
        self._durable(change.notes)
        self.rows.append((self.epoch, 0))
        self.ledger.stored(change, len(self.rows))

    @rule()
    def expiry(self) -> None:
        assert self.ledger.expire(NOW + 10) == {}

    @invariant()
    def sound(self) -> None:
        self.ledger.validate()
        assert len(set(self.rows)) == len(self.rows)  # no double, ever

    def teardown(self) -> None:
        """Once everything is sent again and committed, the receipt says so."""
        top = max([n for e, n in self.rows if e == self.epoch], default=-1) + 1
        for number in range(self.low, top):
            self.publish(number - self.low, "")
        change = self.ledger.storing(self.ahead)
        self.rows += [(m.epoch, m.number) for m in self.ahead]
        self._durable(change.notes)
        self.ledger.stored(change, len(self.rows))
        self.commit(1_000_000)
        self.tell()
        assert max(self.told.get(self.epoch, 0), self.low) >= top


TestGateway = Gateway.TestCase
TestGateway.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_message_that_was_not_taken_in_whole_keeps_its_mark() -> None:
    """Or its publisher would never hear of it, and send it again for ever."""
    properties = [("k", "v"), *mark(5).properties(), ("towline-reason", "forged")]
    data = PublishPacket("t", bytes(5_000), qos=QoS(1), packet_id=1, user_properties=properties).write()
    (run,) = Decoder(1_024).feed(data)
    assert isinstance(run, PublishRun)
    (stub,) = run.packets
    assert mark_of(stub.user_properties) == mark(5)
    assert [pair for pair in stub.user_properties if pair[0] == "towline-reason"] == [
        ("towline-reason", "packet_too_large")
    ]
    ledger = Ledger({}, 0)
    assert not ledger.screen(run.packets, ["t"], NOW)
    (found,) = ledger.marks(run.packets)
    assert found is not None
    store(ledger, [found], 1)
    assert ledger.screen(run.packets, ["t"], NOW) == {0}, "a repeat"
