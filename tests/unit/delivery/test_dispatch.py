"""What goes next, against a model broker that accepts, refuses and puts off at random."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from towline.delivery.outbound import Dispatcher, Outcome
from towline.journal.ranges import Ranges

QUOTA, NOT_AUTHORIZED = 0x97, 0x87
MOST_OPEN, MOST_BYTES, MOST_WAITING = 6, 1000, 20


def dispatch(done: Ranges | None = None, most_open: int = MOST_OPEN) -> Dispatcher:
    return Dispatcher(done or Ranges(), max_in_flight=most_open, max_bytes=MOST_BYTES, max_waiting=MOST_WAITING)


class Delivery(RuleBasedStateMachine):
    """An outbox of numbered messages on a few topics, a session without loss, and a moody broker."""

    def __init__(self) -> None:
        super().__init__()
        self.done = Ranges()
        self.plan = dispatch(self.done)
        self.topics: list[str] = ["a"]
        self.cursor = 0
        self.now = 0.0
        #: of a batch that is not whole yet: may not be sent
        self.withheld: set[int] = set()
        #: handed over, in order, not answered
        self.at_broker: list[int] = []
        self.accepted: list[int] = []
        self.refused: list[int] = []
        #: put off or behind one, in the order of their numbers
        self.waiting: dict[str, list[int]] = {topic: [] for topic in "abc"}
        #: topics of which a message was put off or came late while later ones were on their way: those may overtake it
        self.overtaken: set[str] = set()

    @rule(topics=st.lists(st.sampled_from("abc"), min_size=1, max_size=6), late=st.sampled_from([False, False, True]))
    def arrive(self, topics: list[str], late: bool) -> None:
        if late:
            self.withheld |= set(range(len(self.topics), len(self.topics) + len(topics)))
            self.overtaken |= set(topics)
        self.topics += topics

    @precondition(lambda self: self.withheld)
    @rule()
    def batch_is_whole(self) -> None:
        self.cursor = min(self.cursor, *self.withheld)
        self.withheld.clear()

    @rule()
    def send(self) -> None:
        ready = self.plan.ready_numbers(self.now, 3)
        while not self.plan.is_full and (number := next(ready, None)) is not None:
            assert number in self.waiting[self.topics[number]]
            self._go(number)
        while self.plan.accepts_new and self.cursor < len(self.topics):
            number, self.cursor = self.cursor, self.cursor + 1
            if number in self.withheld:
                continue
            waiting = self.waiting[self.topics[number]]
            is_new = number not in self.done and number not in self.at_broker
            if self.plan.may_send(number, self.topics[number]):
                assert is_new
                assert {*waiting} <= {*self.at_broker}, "nothing new goes before what waited longer"
                self._go(number)
            elif is_new:
                assert waiting
                self.waiting[self.topics[number]] = sorted({*waiting, number})

    def _go(self, number: int) -> None:
        assert len(self.at_broker) < MOST_OPEN
        self.plan.add_in_flight(number, self.topics[number], 1 + number % 4 * 300)
        self.at_broker.append(number)

    @precondition(lambda self: self.at_broker)
    @rule(reason=st.sampled_from([0, 0, 0, 0x10, QUOTA, QUOTA, NOT_AUTHORIZED]))
    def answer(self, reason: int) -> None:
        number = self.at_broker.pop(0)
        topic = self.topics[number]
        outcome = self.plan.handle_answer(number, reason, self.now)
        if outcome is Outcome.POSTPONED:
            assert reason == QUOTA
            self.waiting[topic] = sorted({*self.waiting[topic], number})
            if any(self.topics[later] == topic for later in self.at_broker):
                self.overtaken.add(topic)
            return
        self.waiting[topic] = [other for other in self.waiting[topic] if other != number]
        self.done.add(number)
        assert outcome is (Outcome.REFUSED if reason == NOT_AUTHORIZED else Outcome.DELIVERED)
        (self.accepted if outcome is Outcome.DELIVERED else self.refused).append(number)

    @rule(seconds=st.floats(0.1, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(left=st.integers(0, 6))
    def line_breaks(self, left: int) -> None:
        """The last of those handed over never left; the others stay the session's."""
        never = self.at_broker[left:]
        del self.at_broker[left:]
        self.plan.reset(never)
        self.waiting = {topic: [] for topic in "abc"}
        self.cursor = self.done.watermark

    @invariant()
    def sound(self) -> None:
        self.plan.validate()
        assert sorted(self.accepted + self.refused) == sorted({*self.accepted, *self.refused})  # each once
        for topic in {*"abc"} - self.overtaken:
            order = [n for n in self.accepted if self.topics[n] == topic]
            assert order == sorted(order)
        waiting = {number for numbers in self.waiting.values() for number in numbers}
        assert min(self.plan.numbers(), default=None) == min(waiting | {*self.at_broker}, default=None)
        sizes = sum(1 + number % 4 * 300 for number in self.at_broker)
        is_full = len(self.at_broker) >= MOST_OPEN or sizes >= MOST_BYTES
        assert self.plan.is_full == is_full
        assert self.plan.accepts_new == (not is_full and self.plan.waiting_count < MOST_WAITING)
        assert not is_full or self.plan.next_ready_at() is None

    def teardown(self) -> None:
        """Left alone with a kind broker, everything is delivered or refused."""
        self.withheld and self.batch_is_whole()
        for _ in range(10 * len(self.topics) + 10):
            self.now += 100
            self.send()
            while self.at_broker:
                self.answer(0)
        assert self.done.watermark == len(self.topics)


Delivery.TestCase.settings = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestDelivery = Delivery.TestCase


def test_the_pause_grows_to_a_minute() -> None:
    plan, now = dispatch(), 0.0
    pauses = []
    for _ in range(9):
        plan.add_in_flight(0, "a", 1)
        plan.handle_answer(0, QUOTA, now)
        due = plan.next_ready_at()
        assert due is not None
        assert list(plan.ready_numbers(due - 0.1, 10)) == []
        pauses.append(due - now)
        now = due
        assert list(plan.ready_numbers(now, 10)) == [0]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_while_all_is_sent_that_may_be_nothing_is_due() -> None:
    plan = dispatch(most_open=2)
    for number in (0, 1):
        plan.add_in_flight(number, "a", 1)
    plan.handle_answer(0, QUOTA, 5.0)
    assert plan.next_ready_at() == 6.0
    plan.add_in_flight(2, "b", 1)
    assert plan.next_ready_at() is None, "after an answer"
    plan.handle_answer(2, 0, 5.0)
    assert list(plan.ready_numbers(6.0, 10)) == [0]
    plan.add_in_flight(0, "a", 1)
    plan.handle_answer(1, 0, 6.0)
    assert not plan.may_send(3, "a")
    assert plan.next_ready_at() is None, "the first is being tried again, and the next waits for its answer"


def test_what_is_ready_waits_again_behind_one_of_its_topic_that_was_postponed_meanwhile() -> None:
    plan = dispatch()
    for number in (0, 9):
        plan.add_in_flight(number, "a", 1)
    plan.handle_answer(0, QUOTA, 0.0)
    plan.may_send(1, "a")
    assert list(plan.ready_numbers(1.0, 10)) == [0]
    plan.add_in_flight(0, "a", 1)
    plan.handle_answer(0, 0, 1.0)
    assert plan.next_ready_at() == 0.0
    plan.handle_answer(9, QUOTA, 1.0)
    assert list(plan.ready_numbers(1.0, 10)) == []
    assert (plan.waiting_count, min(plan.numbers()), plan.next_ready_at()) == (2, 1, 2.0)
    assert list(plan.ready_numbers(2.0, 10)) == [1], "it is the first of them now"
