"""What goes next, against a model broker that accepts, refuses and puts off at random."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from towline.delivery.outbound import Dispatcher, Outcome
from towline.journal.ranges import Ranges

QUOTA, NOT_AUTHORIZED = 0x97, 0x87


def dispatch(done: Ranges | None = None, *, most_open: int = 10, most_bytes: int = 1000) -> Dispatcher:
    return Dispatcher(done or Ranges(), max_in_flight=most_open, max_bytes=most_bytes, max_waiting=20)


def test_a_window_and_its_bytes_are_kept_to() -> None:
    plan = dispatch(most_open=2, most_bytes=100)
    rooms = []
    for number, size in enumerate((1, 1, 200)):
        plan.add_in_flight(number, "a", size)
        rooms.append(plan.accepts_new)
        if number == 1:
            assert plan.handle_answer(0, 0, 0.0) is Outcome.DELIVERED
    assert rooms == [True, False, False]


def test_what_was_postponed_holds_back_its_topic_alone() -> None:
    plan = dispatch()
    plan.add_in_flight(0, "a", 1)
    assert plan.handle_answer(0, QUOTA, 0.0) is Outcome.POSTPONED
    assert not plan.may_send(1, "a")
    assert not plan.may_send(1, "a")
    assert plan.waiting_count == 2, "it waits once"
    assert plan.may_send(2, "b")
    assert list(plan.ready_numbers(0.5, 10)) == []
    assert list(plan.ready_numbers(1.0, 10)) == [0]
    plan.add_in_flight(0, "a", 1)
    assert plan.handle_answer(0, 0, 1.0) is Outcome.DELIVERED
    assert list(plan.ready_numbers(1.0, 10)) == [1]
    plan.validate()


def test_the_pause_grows_to_a_minute() -> None:
    plan, now = dispatch(), 0.0
    pauses = []
    for _ in range(9):
        plan.add_in_flight(0, "a", 1)
        plan.handle_answer(0, QUOTA, now)
        due = plan.next_ready_at()
        assert due is not None
        pauses.append(due - now)
        now = due
        assert list(plan.ready_numbers(now, 10)) == [0]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_nothing_new_goes_before_what_waited_longer() -> None:
    """More of a topic may become ready at once than one round hands over."""
    plan = dispatch()
    plan.add_in_flight(0, "a", 1)
    plan.handle_answer(0, QUOTA, 0.0)
    assert [plan.may_send(number, "a") for number in (1, 2, 3)] == [False] * 3
    assert list(plan.ready_numbers(1.0, 10)) == [0]
    plan.add_in_flight(0, "a", 1)
    plan.handle_answer(0, 0, 1.0)
    assert list(plan.ready_numbers(1.0, 2)) == [1, 2]
    assert not plan.may_send(4, "a")
    assert plan.next_ready_at() == 0.0
    assert list(plan.ready_numbers(1.0, 2)) == [3, 4]
    assert plan.may_send(5, "a")


def test_older_numbers_that_come_late_go_once_each() -> None:
    plan = dispatch()
    for number in (5, 6):
        plan.add_in_flight(number, "a", 1)
    plan.handle_answer(5, QUOTA, 0.0)
    assert list(plan.ready_numbers(1.0, 10)) == [5]
    plan.add_in_flight(5, "a", 1)
    assert [plan.may_send(number, "a") for number in (1, 2)] == [False] * 2  # their batch has become whole
    plan.handle_answer(6, QUOTA, 1.0)
    plan.validate()
    plan.handle_answer(5, 0, 1.5)
    plan.validate()
    sent = []
    for now in (100.0, 100.0, 100.0):
        for number in plan.ready_numbers(now, 10):
            plan.add_in_flight(number, "a", 1)
            sent.append(number)
        for number in list(plan.in_flight):
            plan.handle_answer(number, 0, now)
            plan.validate()
    assert sent == [1, 2, 6]


def test_the_oldest_is_the_smallest_that_is_in_flight_or_waits() -> None:
    plan = dispatch()
    oldest = [plan.oldest_number]
    for number in (4, 5, 7):
        plan.add_in_flight(number, "a", 1)
    plan.handle_answer(5, QUOTA, 0.0)
    plan.may_send(6, "a")
    oldest.append(plan.oldest_number)
    plan.handle_answer(4, 0, 0.0)
    oldest.append(plan.oldest_number)
    plan.remove_waiting(5, "a")
    oldest.append(plan.oldest_number)
    assert plan.waiting_count == 1
    assert list(plan.ready_numbers(1.0, 10)) == [6]
    assert [*oldest, plan.oldest_number] == [None, 4, 5, 6, 7]


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
    plan.validate()
    assert (plan.waiting_count, plan.oldest_number, plan.next_ready_at()) == (2, 1, 2.0)
    assert list(plan.ready_numbers(2.0, 10)) == [1], "it is the first of them now"


def test_so_many_wait_before_nothing_new_is_sent() -> None:
    plan = dispatch()
    plan.add_in_flight(0, "a", 1)
    plan.handle_answer(0, QUOTA, 0.0)
    rooms = [plan.accepts_new]
    for number in range(1, 20):
        plan.may_send(number, "a")
        rooms.append(plan.accepts_new)
    assert rooms == [True] * 19 + [False]
    assert not plan.is_full, "what waited may still go"


class Delivery(RuleBasedStateMachine):
    """An outbox of numbered messages on a few topics, a session without loss, and a moody broker."""

    def __init__(self) -> None:
        super().__init__()
        self.done = Ranges()
        self.plan = dispatch(self.done, most_open=6)
        self.topics: list[str] = []
        self.cursor = 0
        self.now = 0.0
        #: handed over, in order, not answered
        self.at_broker: list[int] = []
        self.accepted: list[int] = []
        self.refused: list[int] = []
        #: topics of which a message was put off while later ones were on their way: those may overtake it
        self.overtaken: set[str] = set()

    @initialize()
    def begin(self) -> None:
        self.topics = ["a"]

    @rule(topics=st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
    def arrive(self, topics: list[str]) -> None:
        self.topics += topics

    @rule()
    def send(self) -> None:
        for number in self.plan.ready_numbers(self.now, 3):
            self._go(number)
        while self.plan.accepts_new and self.cursor < len(self.topics):
            if self.plan.may_send(self.cursor, self.topics[self.cursor]):
                self._go(self.cursor)
            self.cursor += 1

    def _go(self, number: int) -> None:
        self.plan.add_in_flight(number, self.topics[number], 1)
        self.at_broker.append(number)

    @precondition(lambda self: self.at_broker)
    @rule(reason=st.sampled_from([0, 0, 0, 0x10, QUOTA, NOT_AUTHORIZED]))
    def answer(self, reason: int) -> None:
        number = self.at_broker.pop(0)
        outcome = self.plan.handle_answer(number, reason, self.now)
        if outcome is Outcome.POSTPONED:
            topic = self.topics[number]
            if any(self.topics[later] == topic for later in self.at_broker):
                self.overtaken.add(topic)
            return
        self.done.add(number)
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
        self.cursor = self.done.watermark

    @invariant()
    def sound(self) -> None:
        self.plan.validate()
        assert sorted(self.accepted + self.refused) == sorted({*self.accepted, *self.refused})  # each once
        for topic in {*"abc"} - self.overtaken:
            order = [n for n in self.accepted if self.topics[n] == topic]
            assert order == sorted(order)

    def teardown(self) -> None:
        """Left alone with a kind broker, everything is delivered or refused."""
        for _ in range(10 * len(self.topics) + 10):
            self.now += 100
            self.send()
            while self.at_broker:
                self.answer(0)
        assert self.done.watermark == len(self.topics)


Delivery.TestCase.settings = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestDelivery = Delivery.TestCase


def test_what_is_being_tried_again_is_not_handed_over_twice() -> None:
    plan = dispatch()
    plan.add_in_flight(5, "a", 1)
    plan.handle_answer(5, QUOTA, 0.0)
    assert list(plan.ready_numbers(1.0, 10)) == [5]
    plan.add_in_flight(5, "a", 1)
    assert [plan.may_send(number, "a") for number in (1, 2)] == [False] * 2
    for number in plan.ready_numbers(100.0, 10):
        plan.add_in_flight(number, "a", 1)
        plan.handle_answer(number, 0, 100.0)
    assert sorted(plan.in_flight) == [5]
    assert list(plan.ready_numbers(100.0, 10)) == []


def test_a_refusal_lets_the_next_of_its_topic_go() -> None:
    plan = dispatch()
    plan.add_in_flight(0, "a", 1)
    plan.handle_answer(0, QUOTA, 0.0)
    plan.may_send(1, "a")
    assert list(plan.ready_numbers(1.0, 10)) == [0]
    plan.add_in_flight(0, "a", 1)
    assert plan.handle_answer(0, NOT_AUTHORIZED, 1.0) is Outcome.REFUSED
    assert list(plan.ready_numbers(1.0, 10)) == [1]
