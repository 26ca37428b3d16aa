"""What goes next, against a model broker that accepts, refuses and puts off at random."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from towline.gateway.dispatch import Dispatch, Fate
from towline.journal.ranges import Ranges

QUOTA, NOT_AUTHORIZED = 0x97, 0x87


def dispatch(done: Ranges | None = None, *, most_open: int = 10, most_bytes: int = 1000) -> Dispatch:
    return Dispatch(done or Ranges(), most_open=most_open, most_bytes=most_bytes, most_waiting=20)


def test_a_window_and_its_bytes_are_kept_to() -> None:
    plan = dispatch(most_open=2, most_bytes=100)
    rooms = []
    for number, size in enumerate((1, 1, 200)):
        plan.hand_over(number, "a", size)
        rooms.append(plan.room)
        if number == 1:
            assert plan.answered(0, 0, 0.0) is Fate.DELIVERED
    assert rooms == [True, False, False]


def test_what_was_put_off_holds_back_its_topic_alone() -> None:
    plan = dispatch()
    plan.hand_over(0, "a", 1)
    assert plan.answered(0, QUOTA, 0.0) is Fate.LATER
    assert plan.admit(1, "a") is Fate.WAIT
    assert plan.admit(1, "a") is Fate.KNOWN
    assert plan.admit(2, "b") is Fate.GO
    assert plan.ready(0.5, 10) == []
    assert plan.ready(1.0, 10) == [0]
    plan.hand_over(0, "a", 1)
    assert plan.answered(0, 0, 1.0) is Fate.DELIVERED
    assert plan.ready(1.0, 10) == [1]
    plan.validate()


def test_the_pause_grows_to_a_minute() -> None:
    plan, now = dispatch(), 0.0
    pauses = []
    for _ in range(9):
        plan.hand_over(0, "a", 1)
        plan.answered(0, QUOTA, now)
        due = plan.due()
        assert due is not None
        pauses.append(due - now)
        now = due
        assert plan.ready(now, 10) == [0]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_refusal_lets_the_next_of_its_topic_go() -> None:
    plan = dispatch()
    plan.hand_over(0, "a", 1)
    plan.answered(0, QUOTA, 0.0)
    plan.admit(1, "a")
    assert plan.ready(1.0, 10) == [0]
    plan.hand_over(0, "a", 1)
    assert plan.answered(0, NOT_AUTHORIZED, 1.0) is Fate.REFUSED
    assert plan.ready(1.0, 10) == [1]


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
        for number in self.plan.ready(self.now, 100):
            if not self.plan.wait_again(number, self.topics[number]):
                self._go(number)
        while self.plan.room and self.cursor < len(self.topics):
            if self.plan.admit(self.cursor, self.topics[self.cursor]) is Fate.GO:
                self._go(self.cursor)
            self.cursor += 1

    def _go(self, number: int) -> None:
        self.plan.hand_over(number, self.topics[number], 1)
        self.at_broker.append(number)

    @precondition(lambda self: self.at_broker)
    @rule(reason=st.sampled_from([0, 0, 0, 0x10, QUOTA, NOT_AUTHORIZED]))
    def answer(self, reason: int) -> None:
        number = self.at_broker.pop(0)
        fate = self.plan.answered(number, reason, self.now)
        if fate is Fate.LATER:
            topic = self.topics[number]
            if any(self.topics[later] == topic for later in self.at_broker):
                self.overtaken.add(topic)
            return
        self.done.add(number)
        (self.accepted if fate is Fate.DELIVERED else self.refused).append(number)

    @rule(seconds=st.floats(0.1, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(left=st.integers(0, 6))
    def line_breaks(self, left: int) -> None:
        """The last of those handed over never left; the others stay the session's."""
        never = self.at_broker[left:]
        del self.at_broker[left:]
        self.plan.start_again(never)
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


Delivery.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestDelivery = Delivery.TestCase
