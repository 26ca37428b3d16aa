"""A line in a bottle: the real Session and a real Journal against the model broker, with all that may go wrong."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

from tests.unit.mqtt.model_broker import Dup, Habits, Message, ModelBroker
from tests.unit.mqtt.model_driver import Acks, Crash, ModelDriver, Plan
from towline.mqtt.events import Filter, Publish, PublishAcknowledged, Stop, Tick
from towline.mqtt.message import OutboundMessage
from towline.mqtt.session import SessionState

__all__ = ["STEPS", "Acks", "Plan", "Step", "World", "draw_plan", "draw_steps", "live"]
Step: TypeAlias = tuple[Any, ...]
"""Name of a method of `World` and its arguments."""

_FAST: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108  # only its speed is wanted
#: Rounds in which everything must come to rest when nothing goes wrong any more.
_PATIENCE: Final = 400


class World:
    """One life of a line, from the first connection to the last account."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 0.0
        self.directory = Path(tempfile.mkdtemp(dir=_FAST))
        self.broker = ModelBroker(plan.habits, self._accepted)
        self.filters: tuple[Filter, ...] = (Filter("t", qos=2),)
        #: Bytes on their way to the broker.
        self.to_broker = bytearray()
        #: Both ends hold the connection; the client learns that it is gone when it reads or writes.
        self.line_up = False
        #: Boundaries left until the process ends, negative for never.
        self._fuse = -1
        #: Serial of each durable row.
        self.rows: list[int] = []
        #: The consumer has committed the rows below; the journal's own mark may fall behind in a power failure.
        self._committed = 0
        self._copies: Counter[int] = Counter()
        #: The latest first occurrence of each server's messages.
        self._last_first = [-1, -1]
        self._marks = (0, 0, 0)
        #: What the client published and was not told the end of: token → QoS.
        self.open_publishes: dict[int, int] = {}
        self._publishes: list[int] = []
        #: Tokens whose fate nobody can know: the sender's memory or the broker's session was lost meanwhile.
        self._excused: set[int] = set()
        self.crashes = 0
        self._driver = ModelDriver(self)

    # -- called by the two sides --

    def boundary(self) -> None:
        if self._fuse > 0:
            self._fuse -= 1
        elif self._fuse == 0:
            self._driver.disk.off = True
            raise Crash

    def stored(self, first: int, serials: list[int]) -> None:
        """Rows became durable."""
        assert first == len(self.rows), f"rows that call themselves {first} are at {len(self.rows)}"
        for serial in serials:
            self._row(serial)

    def _row(self, serial: int) -> None:
        message = self.broker.messages[serial]
        self.rows.append(serial)
        self._copies[serial] += 1
        if self._copies[serial] == 1:
            last = self._last_first[message.server]
            assert serial > last, f"{serial} came first after {last} [MQTT-4.6.0-5]"
            self._last_first[message.server] = serial
        else:
            doubled_at_will = message.qos == 1 or message.may_double
            assert doubled_at_will, f"QoS {message.qos} message {serial} is in the journal twice [MQTT-4.3.3-10]"

    def _accepted(self, message: Message) -> None:
        """The broker has an acknowledgement and may forget the message [MQTT-4.3.2-4, MQTT-4.3.3-8]."""
        if self.plan.acks is not Acks.RECEIVED:
            what = f"QoS {message.qos} message {message.serial} was acknowledged, but is not durable [I2]"
            assert self._copies[message.serial], what
        if self.plan.acks is Acks.KAFKA:
            done = self.rows[: self._committed]
            assert message.serial in done, f"{message.serial} was acknowledged before its commit [I1]"

    def online(self) -> None:
        wanted = {f.pattern: f.qos for f in self.filters}
        found = self.broker.subscriptions
        if self.plan.several:  # what was given up while we were at the other server stays
            found = {pattern: found.get(pattern, -1) for pattern in wanted}
        assert found == wanted, f"online with {self.broker.subscriptions} instead of {wanted}"

    def acknowledged(self, action: PublishAcknowledged) -> None:
        assert isinstance(action.token, int)
        qos = self.open_publishes.pop(action.token)
        assert not action.reason
        copies = self.broker.taken.count(action.token)
        if action.token not in self._excused and qos:
            assert copies == 1 or (qos == 1 and copies), f"publish {action.token} at QoS {qos}: {copies} copies"

    def forget_publishes(self) -> None:
        """The sender's memory is gone: an outbox is not part of the session."""
        self._excused |= self.open_publishes.keys()
        self.open_publishes.clear()
        self.broker.forget_publisher()

    def hang_up(self) -> None:
        """The client closes: what it wrote before arrives."""
        if self.line_up:
            self._to_broker(len(self.to_broker))
            self.broker.lost()
        self.line_up = False
        self.to_broker.clear()

    # -- steps --

    def do(self, step: Step) -> None:
        """Carry out one step; a crash on the way is followed by a restart."""
        try:
            getattr(self, step[0])(*step[1:])
            self._driver.adjust_reading()
            self._driver.settle_committed()
        except Crash:
            self._restart(1.0)
        self.check()

    def offer(self, *qos: int) -> None:
        for level in qos:
            self.broker.offer(level)

    def flow(self, limit: int) -> None:
        self.broker.flow(limit)

    def release(self, limit: int) -> None:
        self.broker.release(limit)

    def answer(self, limit: int) -> None:
        self.broker.answer(limit)

    def connect(self) -> None:
        # Not while rows wait: a session made anew would give their numbers to others.
        if not self._driver.connected and not self._driver.waiting:
            self.broker.connect()
            self.line_up = True
            self._driver.connect()

    def read(self, count: int) -> None:
        """The client reads what came, or learns that the line is gone."""
        driver = self._driver
        if not driver.connected:
            return
        if not self.line_up:
            driver.line_broke()
        elif driver.reading:
            data = self.broker.take(count)
            if data:
                driver.read(data)

    def retry(self) -> None:
        """The broker sends again what it has no PUBACK for; while we owe it, it is the same message [I3]."""
        self.exchange()
        driver = self._driver
        driver.adjust_reading()
        connection = self.broker.connection
        if self.plan.acks is not Acks.KAFKA or not (
            driver.connected and driver.reading and self.line_up and connection
        ):
            return
        rows, repeats, copies = len(self.rows), driver.session.inbound.duplicates, self.broker.retry()
        self.read(1 << 20)
        assert (len(self.rows), driver.session.inbound.duplicates) == (rows, repeats + copies), "repeats of QoS 1 [I3]"

    def carry(self, count: int) -> None:
        """The broker reads what came."""
        if self.line_up:
            self._to_broker(count)

    def _to_broker(self, count: int) -> None:
        data = bytes(self.to_broker[:count])
        del self.to_broker[:count]
        if self.broker.connection is not None:
            self.broker.receive(data)

    def exchange(self) -> None:
        """Everything that can move does, once."""
        self.carry(1 << 20)
        self.broker.answer(1 << 20)
        self.broker.release(1 << 20)
        self.broker.flow(1 << 20)
        self.read(1 << 20)
        self.carry(1 << 20)

    def cut(self, arrives: int) -> None:
        """The line breaks; the first bytes towards the broker arrive, the others and those towards us don't."""
        if self.line_up:
            self._to_broker(arrives)
            self.broker.lost()
            self.line_up = False
            self.to_broker.clear()

    def crash(self, arrives: int, keep: float) -> None:
        """Power failure: a share `keep` of what was not synced has reached the disk."""
        self.cut(arrives)
        self._restart(keep)

    def arm(self, boundaries: int) -> None:
        """The process ends when so many boundaries have been passed."""
        self._fuse = boundaries

    def _restart(self, keep: float) -> None:
        self._fuse = -1
        self.crashes += 1
        self._marks = (0, *self._marks[1:])
        self._driver.die(keep)
        self.hang_up()
        self.forget_publishes()
        self._driver = ModelDriver(self)
        journal = self._driver.journal
        self._committed = max(self._committed, journal.committed)
        found = [row for batch in journal.read(journal.first_offset, journal.end) for row in batch.to_pylist()]
        assert [row["offset"] for row in found] == list(range(journal.first_offset, journal.end)), (
            "a row at another's place"
        )
        serials = [int(row["payload"]) for row in found]
        known = self.rows[journal.first_offset :]
        assert serials[: len(known)] == known, "durable rows are gone after a crash"
        for serial in serials[len(known) :]:
            self._row(serial)

    def lose_session(self) -> None:
        """The broker restarts without its store."""
        self.line_up = False
        self.to_broker.clear()
        self.broker.lose_session()
        self._excused |= self.open_publishes.keys()

    def fail_over(self) -> None:
        """The server goes away, and the other one is there."""
        if self.plan.several:
            self.cut(0)
            self.broker.switch()
            self._excused |= self.open_publishes.keys()

    def restart_broker(self) -> None:
        """The broker restarts with its store; with the fault `republishes`, an older one."""
        self.cut(0)
        if self.plan.habits.republishes:
            self.broker.restore_before_release()

    def change_window(self, receive_maximum: int) -> None:
        """The broker comes back with another configuration."""
        self.cut(0)
        self.broker.receive_maximum = receive_maximum

    def fill_disk(self) -> None:
        self._driver.disk.no_room = True

    def free_disk(self) -> None:
        self._driver.disk.no_room = False
        self._driver.store()

    def commit(self, share: float) -> None:
        """The consumer commits a share of what it has not committed; segments below go away [I5]."""
        journal = self._driver.journal
        if self.plan.acks is Acks.KAFKA and not self._driver.disk.no_room:
            journal.commit("c", journal.committed + round((journal.end - journal.committed) * share))
            self._committed = max(self._committed, journal.committed)

    def publish(self, qos: int) -> None:
        qos = min(qos, 1) if self.plan.several else qos
        token = len(self._publishes)
        self._publishes.append(qos)
        self.open_publishes[token] = qos
        self._driver.handle(Publish(token, OutboundMessage("o", b"%d" % token, qos=qos)))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        deadline = self._driver.session.deadline()
        if deadline is not None and self.now >= deadline:
            self._driver.handle(Tick())

    def change_filters(self, more: bool) -> None:
        """Stop, and start again with another configuration."""
        self._driver.handle(Stop())
        self.filters = (Filter("t", qos=2), Filter("u", qos=1)) if more else (Filter("t", qos=2),)
        self._restart(1.0)

    # -- accounts --

    def check(self) -> None:
        driver = self._driver
        session, journal = driver.session, driver.journal
        session.validate()
        inbound = session.inbound
        marks = (journal.committed if self.plan.acks is Acks.KAFKA else 0, journal.end, inbound.next_number)
        assert journal.end == len(self.rows)
        assert marks[0] <= marks[1] <= marks[2], f"committed, journaled, received: {marks} [I1]"
        assert marks[0] >= self._marks[0], "a watermark went back [I1]"
        assert marks[1] >= self._marks[1], "a watermark went back [I1]"
        self._marks = marks
        if self.plan.habits.version == 5 and not self.plan.habits.reuses_ids:  # there two messages may count as one
            assert inbound.window_overruns == 0, "the broker keeps to our Receive Maximum [MQTT-3.3.4-9]"
        if self.plan.acks is Acks.JOURNAL:
            assert inbound.ack_watermark <= journal.end
        elif self.plan.acks is Acks.KAFKA:
            assert inbound.ack_watermark <= journal.committed
        if not driver.waiting:
            assert marks[1] == marks[2], "a message that is neither stored nor waits"
            held = {i: tuple(h) for i, h in inbound.unreleased_messages.items()}
            assert held == journal.held_ids, "held ids differ [I3]"

    def finish(self) -> None:
        """Nothing goes wrong any more: everything comes to rest, and the account is drawn up."""
        self._fuse = -1
        self.do(("free_disk",))
        self._come_to_rest()
        if self.plan.several:  # what waits at the other server comes when we are there
            self.do(("fail_over",))
            self._come_to_rest()
        self._account()

    def _come_to_rest(self) -> None:
        for _ in range(_PATIENCE):
            if not self._driver.connected:
                self.do(("connect",))
            self.do(("exchange",))
            self.do(("commit", 1.0))
            if self._at_rest():
                break
        else:
            raise AssertionError(f"no rest: {self._driver.session.state}, {self.broker.connection}")

    def _at_rest(self) -> bool:
        online = self._driver.connected and self._driver.session.state is SessionState.ONLINE
        return online and self.broker.idle and not self.open_publishes and not self.to_broker

    def _account(self) -> None:
        for message in self.broker.messages:
            copies = self._copies[message.serial]
            if message.promised and (self.plan.acks is not Acks.RECEIVED or not self.crashes):
                assert copies, f"QoS {message.qos} message {message.serial} is lost"
        for token, qos in enumerate(self._publishes):
            copies = self.broker.taken.count(token)
            if token not in self._excused:
                assert copies == 1 or (qos == 1 and copies) or not qos, f"publish {token} at QoS {qos}: {copies} copies"

    def close(self) -> None:
        """Give back what the life took from the machine."""
        try:
            self._driver.die(1.0)
        finally:
            shutil.rmtree(self.directory)


def live(plan: Plan, steps: Sequence[Step]) -> None:
    """Lead one life to its end."""
    world = World(plan)
    try:
        for step in steps:
            world.do(step)
        world.finish()
    finally:
        world.close()


def draw_plan(choose: Callable[[Sequence[Any]], Any]) -> Plan:
    """A plan, every part of it chosen from a sequence; faults of the broker in one life of four."""
    rarely = (False, False, False, True)
    habits = Habits(
        version=choose((5, 5, 4, 3)),
        dup=choose(tuple(Dup)),
        new_ids=choose(rarely),
        lowest_id=choose(rarely),
        both_again=choose(rarely),
        republishes=choose(rarely),
        reuses_ids=choose(rarely),
        receive_maximum=choose((1, 3, 8)),
        window_3=choose((1, 4, 20)),
    )
    return Plan(habits, choose(tuple(Acks)), choose((1, 3, 10)), choose(rarely))


#: Every step, as (weight, name, how its arguments are drawn); `tests.fuzz` and `test_machine` draw from this one list.
STEPS: Final[tuple[tuple[int, str, tuple[tuple[Any, ...], ...]], ...]] = (
    (4, "offer", ((0, 1, 2), (1, 2))),
    (2, "offer", ((2,), (2,), (2,), (2,), (2,))),
    (4, "flow", ((1, 2, 3, 9),)),
    (3, "release", ((1, 2, 9),)),
    (3, "answer", ((1, 2, 9),)),
    (5, "connect", ()),
    (6, "read", ((1, 2, 3, 5, 8, 13, 30, 100),)),
    (6, "carry", ((1, 2, 4, 5, 8, 40, 100),)),
    (8, "exchange", ()),
    (2, "retry", ()),
    (2, "cut", ((0, 1, 4, 6, 8, 100),)),
    (1, "crash", ((0, 4, 9, 100), (0.0, 0.5, 1.0))),
    (2, "arm", (tuple(range(25)),)),
    (1, "lose_session", ()),
    (1, "restart_broker", ()),
    (2, "fail_over", ()),
    (1, "change_window", ((1, 2, 9),)),
    (1, "fill_disk", ()),
    (2, "free_disk", ()),
    (3, "commit", ((0.0, 0.3, 1.0),)),
    (3, "publish", ((0, 1, 2, 2),)),
    (1, "wait", ((1.0, 20.0, 50.0),)),
    (1, "change_filters", ((False, True),)),
)


def draw_steps(random: Random, count: int) -> list[Step]:
    """Steps of one life, by their weights."""
    weights = [weight for weight, _, _ in STEPS]
    kinds = random.choices(STEPS, weights, k=count)
    return [(name, *(random.choice(domain) for domain in domains)) for _, name, domains in kinds]
