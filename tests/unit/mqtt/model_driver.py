"""The client's process in a bottle: what a driver and its owner do with a session's actions, on a real journal."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from tests.unit.mqtt.model_broker import Habits
from tests.unit.mqtt.model_disk import VolatileDisk
from towline.errors import JournalFull, Unreachable
from towline.journal import Journal, Limits
from towline.mqtt.codec import Decoder
from towline.mqtt.events import (
    AckWatermark,
    Action,
    Close,
    ConnectionLost,
    ConnectionOpened,
    Deliver,
    DeliveryStored,
    Event,
    Online,
    PacketsReceived,
    PublishAcknowledged,
    ReadingToggled,
    SaveSessionRecord,
    Send,
    SessionConfig,
    SessionRecord,
    UnreleasedMessage,
)
from towline.mqtt.session import Session

if TYPE_CHECKING:
    from tests.unit.mqtt.model_world import World

__all__ = ["Acks", "ModelDriver", "Plan"]


_SCHEMA: Final = pa.schema([("offset", pa.int64()), ("payload", pa.binary())])
#: Small, so that a life sees several segments, and so their snapshots.
_LIMITS: Final = Limits(min_free_bytes=0, segment_bytes=1600)
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


class ModelDriver:
    """The client's process: carries out what the session decides, as `towline.gateway.pump` does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._boundary = world.boundary
        self._acks = world.plan.acks
        self.disk = VolatileDisk(world.boundary)
        self.journal = Journal.open(world.directory, schema=_SCHEMA, limits=_LIMITS, disk=self.disk)
        self.connected = False
        self.decoder = Decoder()
        self.waiting: deque[Deliver] = deque()
        self.reading = True
        self.session = self._new_session()

    def _new_session(self) -> Session:
        plan, stored = self._world.plan, self.journal.session
        record = SessionRecord(**stored) if stored else None  # type: ignore[arg-type]
        config = SessionConfig(
            "line",
            "model",
            self._world.filters,
            receive_maximum=plan.receive_maximum,
            protocol=plan.habits.version,
            keep_alive_s=60,
        )
        held = {packet_id: UnreleasedMessage(*entry) for packet_id, entry in self.journal.held_ids.items()}
        session = Session(config, record, self.journal.end, held)
        session.outbound.culprit_finder.is_droppable = lambda _token: (
            False
        )  # connections end without regard to messages
        if self._acks is Acks.KAFKA:  # a repeat of what is stored and not committed has to wait too [I1]
            session.inbound.ack_watermark = self.journal.committed
        return session

    def connect(self) -> None:
        self.decoder = Decoder(version=self._world.plan.habits.version)
        self.connected = self.reading = True
        self.handle(ConnectionOpened(f"server {self._world.broker.server}" if self._world.plan.several else ""))

    def read(self, data: bytes) -> None:
        self.handle(PacketsReceived(self.decoder.feed(data)))

    def line_broke(self) -> None:
        self.handle(ConnectionLost())
        self.connected = False

    def adjust_reading(self) -> None:
        ready = not self.waiting and not self.session.window_full
        if self.connected and ready != self.reading:
            self.reading = ready
            self.handle(ReadingToggled(ready))

    def handle(self, event: Event) -> None:
        session = self.session
        for action in session.handle(event, self._world.now):
            if self.session is not session:
                return  # what it decided is void: the journal could not be told
            self._perform(action)

    def _perform(self, action: Action) -> None:
        self._boundary()
        if isinstance(action, Send):
            self._send(action.data)
        elif isinstance(action, Deliver):
            self._deliver(action)
        elif isinstance(action, SaveSessionRecord):
            self._remember(action)
        elif isinstance(action, Close):
            assert isinstance(action.error, Unreachable | None), action.error
            assert not action.fatal
            self._drop()
        elif isinstance(action, Online):
            self._world.online()
        elif isinstance(action, PublishAcknowledged):
            self._world.acknowledged(action)
        self._boundary()

    def _send(self, data: bytes) -> None:
        if not self.connected:
            return
        if data[0] == _SUBSCRIBE and not self.session.session_resumed:
            stale = set(self.journal.held_ids) - set(self.session.inbound.unreleased_messages)
            assert not stale, f"SUBSCRIBE in a new session leaves before the ids {stale} are free on disk [I3]"
        if self._world.line_up:
            self._world.to_broker += data
        else:
            self.line_broke()

    def _remember(self, action: SaveSessionRecord) -> None:
        try:
            self.journal.set_session(asdict(action.record) if action.record else {})
        except JournalFull:
            self.session = self._new_session()
            self._drop()
            self._world.forget_publishes()  # of what arrives with the end of the connection too

    def _drop(self) -> None:
        """Close the connection; what was written before leaves."""
        if self.connected:
            self.connected = False
            self._world.hang_up()

    def _deliver(self, action: Deliver) -> None:
        if self._acks is Acks.RECEIVED:
            self._settle(action.first_number + len(action.messages))
        self.waiting.append(action)
        self.store()

    def store(self) -> None:
        try:
            while self.waiting:
                delivery = self.waiting[0]
                payloads = [packet.payload or b"" for packet in delivery.messages.packets]
                offsets = range(delivery.first_number, delivery.first_number + len(payloads))
                rows = pa.record_batch([pa.array(offsets, pa.int64()), pa.array(payloads, pa.binary())], schema=_SCHEMA)
                end = self.journal.append(
                    rows, held_ids=delivery.unreleased_messages, released_ids=delivery.released_ids
                )
                self.waiting.popleft()
                self._world.stored(delivery.first_number, [int(payload) for payload in payloads])
                if self._acks is Acks.JOURNAL:
                    self._settle(end)
                self.handle(DeliveryStored(delivery.delivery_id))
        except JournalFull:
            assert self.disk.no_room

    def settle_committed(self) -> None:
        if self._acks is Acks.KAFKA:
            self._settle(self.journal.committed)

    def _settle(self, upto: int) -> None:
        if upto > self.session.inbound.ack_watermark:
            self.handle(AckWatermark(upto))

    def die(self, keep: float) -> None:
        self.disk.power_loss(keep)
        self.journal._active.close()
        self.journal._lock.release()
