"""A line in a bottle: the real Session against the model broker, with all that may go wrong between and beside them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeAlias

from tests.unit.mqtt.model_broker import Dup, Habits, Message, ModelBroker
from towline.errors import JournalFull, Unreachable
from towline.mqtt import events
from towline.mqtt.codec import Decoder
from towline.mqtt.message import OutboundMessage
from towline.mqtt.session import Session, SessionState

Step: TypeAlias = tuple[Any, ...]
"""Name of a method of `World`, or of its broker, and its arguments."""

#: Rounds in which everything must come to rest when nothing goes wrong any more.
_PATIENCE: Final = 400
#: First byte of the packet.
_SUBSCRIBE: Final = 0x82


class Acks(Enum):
    """Which watermark drives PUBACK and PUBREC."""

    RECEIVED = "received"
    JOURNAL = "journal"
    KAFKA = "kafka"


@dataclass(frozen=True, slots=True)
class Plan:
    """What does not change during a life."""

    habits: Habits = field(default_factory=Habits)
    acks: Acks = Acks.JOURNAL
    receive_maximum: int = 4
    #: Two brokers that share no sessions; at least once then, and no publish with QoS 2.
    several: bool = False


class Crash(BaseException):  # nothing may catch it on its way
    """The process ends here."""


class Store:
    """What a journal keeps, each frame whole or not at all (tests/unit/journal has the files and their crashes)."""

    def __init__(self, boundary: Callable[[], None]) -> None:
        self._boundary = boundary
        self.no_room = False
        self.rows: list[int] = []
        self.held_ids: dict[int, events.UnreleasedMessage] = {}
        self.record: events.SessionRecord | None = None
        self.committed = 0

    def append(
        self, serials: list[int], held_ids: Mapping[int, events.UnreleasedMessage], released: Sequence[int]
    ) -> None:
        self._write()
        self.held_ids = {i: held for i, held in self.held_ids.items() if i not in released} | dict(held_ids)
        self.rows += serials
        self._boundary()

    def set_record(self, record: events.SessionRecord | None) -> None:
        self._write()
        self.record = record
        self._boundary()

    def _write(self) -> None:
        self._boundary()
        if self.no_room:
            raise JournalFull("TL-J01", "model", "no room", "Make some.")


class ModelDriver:
    """The client's process: carries out what the session decides, as `towline.gateway.pump` does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = world.store
        self._acks = world.plan.acks
        self.connected = False
        self.decoder = Decoder()
        self.waiting: deque[events.Deliver] = deque()
        self.reading = True
        self.session = self._new_session()

    def _new_session(self) -> Session:
        plan, store = self._world.plan, self._store
        config = events.SessionConfig(
            "line",
            "model",
            self._world.filters,
            receive_maximum=plan.receive_maximum,
            protocol=plan.habits.version,
            keep_alive_s=60,
        )
        session = Session(config, store.record, len(store.rows), store.held_ids)
        session.outbound.culprit_finder.is_droppable = lambda _token: False  # cuts have no regard for messages
        if self._acks is Acks.KAFKA:  # a repeat of what is stored and not committed has to wait too [I1]
            session.inbound.ack_watermark = store.committed
        return session

    def connect(self) -> None:
        self.decoder = Decoder(version=self._world.plan.habits.version)
        self.connected = self.reading = True
        self.handle(events.ConnectionOpened(f"server {self._world.broker.server}" if self._world.plan.several else ""))

    def read(self, data: bytes) -> None:
        self.handle(events.PacketsReceived(self.decoder.feed(data)))

    def line_broke(self) -> None:
        self.handle(events.ConnectionLost())
        self.connected = False

    def adjust_reading(self) -> None:
        ready = not self.waiting and not self.session.window_full
        if self.connected and ready != self.reading:
            self.reading = ready
            self.handle(events.ReadingToggled(ready))

    def handle(self, event: events.Event) -> None:
        session = self.session
        for action in session.handle(event, self._world.now):
            if self.session is not session:
                return  # what it decided is void: the journal could not be told
            self._perform(action)

    def _perform(self, action: events.Action) -> None:
        self._world.boundary()
        if isinstance(action, events.Send):
            self._send(action.data)
        elif isinstance(action, events.Deliver):
            self._deliver(action)
        elif isinstance(action, events.SaveSessionRecord):
            self._remember(action)
        elif isinstance(action, events.Close):
            assert isinstance(action.error, Unreachable | None), action.error
            assert not action.fatal
            self._drop()
        elif isinstance(action, events.Online):
            self._world.online()
        elif isinstance(action, events.PublishAcknowledged):
            self._world.acknowledged(action)
        self._world.boundary()

    def _send(self, data: bytes) -> None:
        if not self.connected:
            return
        if data[0] == _SUBSCRIBE and not self.session.session_resumed:
            stale = set(self._store.held_ids) - set(self.session.inbound.unreleased_messages)
            assert not stale, f"SUBSCRIBE in a new session leaves before the ids {stale} are free on disk [I3]"
        if self._world.line_up:
            self._world.to_broker += data
        else:
            self.line_broke()

    def _remember(self, action: events.SaveSessionRecord) -> None:
        try:
            self._store.set_record(action.record)
        except JournalFull:
            self.session = self._new_session()
            self._drop()
            self._world.forget_publishes()  # of what arrives with the end of the connection too

    def _drop(self) -> None:
        """Close the connection; what was written before leaves."""
        if self.connected:
            self.connected = False
            self._world.hang_up()

    def _deliver(self, action: events.Deliver) -> None:
        if self._acks is Acks.RECEIVED:
            self._settle(action.first_number + len(action.messages))
        self.waiting.append(action)
        self.store()

    def store(self) -> None:
        try:
            while self.waiting:
                delivery = self.waiting[0]
                serials = [int(packet.payload or b"") for packet in delivery.messages.packets]
                assert not serials or delivery.first_number == len(self._store.rows), "rows at another's place"
                self._store.append(serials, delivery.unreleased_messages, delivery.released_ids)
                self.waiting.popleft()
                for serial in serials:
                    self._world.stored(serial)
                if self._acks is Acks.JOURNAL:
                    self._settle(len(self._store.rows))
                self.handle(events.DeliveryStored(delivery.delivery_id))
        except JournalFull:
            assert self._store.no_room

    def settle_committed(self) -> None:
        if self._acks is Acks.KAFKA:
            self._settle(self._store.committed)

    def _settle(self, upto: int) -> None:
        if upto > self.session.inbound.ack_watermark:
            self.handle(events.AckWatermark(upto))


class World:
    """One life of a line, from the first connection to the last account."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 0.0
        self.broker = ModelBroker(plan.habits, self._accepted)
        self.filters: tuple[events.Filter, ...] = (events.Filter("t", qos=2),)
        #: Bytes on their way to the broker.
        self.to_broker = bytearray()
        #: Both ends hold the connection; the client learns that it is gone when it reads or writes.
        self.line_up = False
        #: Boundaries left until the process ends, negative for never.
        self._fuse = -1
        self.store = Store(self.boundary)
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
            raise Crash

    def stored(self, serial: int) -> None:
        """A row became durable."""
        message = self.broker.messages[serial]
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
            done = self.store.rows[: self.store.committed]
            assert message.serial in done, f"{message.serial} was acknowledged before its commit [I1]"

    def online(self) -> None:
        wanted = {f.pattern: f.qos for f in self.filters}
        found = self.broker.subscriptions
        if self.plan.several:  # what was given up while we were at the other server stays
            found = {pattern: found.get(pattern, -1) for pattern in wanted}
        assert found == wanted, f"online with {self.broker.subscriptions} instead of {wanted}"

    def acknowledged(self, action: events.PublishAcknowledged) -> None:
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
        self.cut(len(self.to_broker))

    # -- steps --

    def do(self, step: Step) -> None:
        """Carry out one step; a crash on the way is followed by a restart."""
        try:
            (getattr(self, step[0], None) or getattr(self.broker, step[0]))(*step[1:])
            self._driver.adjust_reading()
            self._driver.settle_committed()
        except Crash:
            self._restart()
        self.check()

    def offer(self, *qos: int) -> None:
        for level in qos:
            self.broker.offer(level)

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
        rows, repeats, copies = len(self.store.rows), driver.session.inbound.duplicates, self.broker.retry()
        self.read(1 << 20)
        assert (len(self.store.rows), driver.session.inbound.duplicates) == (rows, repeats + copies), (
            "repeats of QoS 1 [I3]"
        )

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

    def crash(self, arrives: int) -> None:
        """The process ends."""
        self.cut(arrives)
        self._restart()

    def arm(self, boundaries: int) -> None:
        """The process ends when so many boundaries have been passed."""
        self._fuse = boundaries

    def _restart(self) -> None:
        self._fuse = -1
        self.crashes += 1
        self._marks = (0, *self._marks[1:])
        self.hang_up()
        self.forget_publishes()
        self._driver = ModelDriver(self)
        for serial in self.store.rows[self._copies.total() :]:  # durable, and nobody was told
            self.stored(serial)

    def lose_session(self) -> None:
        """The broker restarts without its store."""
        self.cut(0)
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
        self.store.no_room = True

    def free_disk(self) -> None:
        self.store.no_room = False
        self._driver.store()

    def commit(self, share: float) -> None:
        """The consumer commits a share of what it has not committed [I5]."""
        if self.plan.acks is Acks.KAFKA:
            self.store.committed += round((len(self.store.rows) - self.store.committed) * share)

    def publish(self, *levels: int) -> None:
        for level in levels:
            qos = min(level, 1) if self.plan.several else level
            token = len(self._publishes)
            self._publishes.append(qos)
            self.open_publishes[token] = qos
            self._driver.handle(events.Publish(token, OutboundMessage("o", b"%d" % token, qos=qos)))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        deadline = self._driver.session.deadline()
        if deadline is not None and self.now >= deadline:
            self._driver.handle(events.Tick())

    def change_filters(self, more: bool) -> None:
        """Stop, and start again with another configuration."""
        self._driver.handle(events.Stop())
        self.filters = (events.Filter("t", qos=2), events.Filter("u", qos=1)) if more else (events.Filter("t", qos=2),)
        self._restart()

    # -- accounts --

    def check(self) -> None:
        driver = self._driver
        session, store = driver.session, self.store
        inbound, outbound = session.inbound, session.outbound
        assert set(session._pending_requests) == outbound.reserved_ids
        assert outbound.open_count <= outbound.window or session.server_limits is None
        numbers = [number for pending in inbound._pending for number in pending.message_numbers]
        assert (len(numbers), numbers) == (inbound.unacknowledged_count, sorted(numbers))
        assert session.record is None or session.record.subscriptions == session.subscriptions.known_options
        marks = (store.committed, len(store.rows), inbound.next_number)
        assert marks[0] <= marks[1] <= marks[2], f"committed, journaled, received: {marks} [I1]"
        assert marks[0] >= self._marks[0], "a watermark went back [I1]"
        assert marks[1] >= self._marks[1], "a watermark went back [I1]"
        self._marks = marks
        if self.plan.habits.version == 5 and not self.plan.habits.reuses_ids:  # there two messages may count as one
            assert inbound.window_overruns == 0, "the broker keeps to our Receive Maximum [MQTT-3.3.4-9]"
        if self.plan.acks is Acks.JOURNAL:
            assert inbound.ack_watermark <= len(store.rows)
        elif self.plan.acks is Acks.KAFKA:
            assert inbound.ack_watermark <= store.committed
        if not driver.waiting:
            assert marks[1] == marks[2], "a message that is neither stored nor waits"
            assert inbound.unreleased_messages == store.held_ids, "held ids differ [I3]"

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


def live(plan: Plan, steps: Sequence[Step]) -> None:
    """Lead one life to its end."""
    world = World(plan)
    for step in steps:
        world.do(step)
    world.finish()


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


#: Every step, as (weight, name, how its arguments are drawn).
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
    (1, "crash", ((0, 4, 9, 100),)),
    (2, "arm", (tuple(range(25)),)),
    (1, "lose_session", ()),
    (1, "restart_broker", ()),
    (2, "fail_over", ()),
    (1, "change_window", ((1, 2, 9),)),
    (1, "fill_disk", ()),
    (2, "free_disk", ()),
    (3, "commit", ((0.0, 0.3, 1.0),)),
    (3, "publish", ((0, 1, 2, 2),)),
    (2, "publish", ((1, 2), (2,), (1, 2), (2,))),
    (1, "wait", ((1.0, 20.0, 50.0),)),
    (1, "change_filters", ((False, True),)),
)
