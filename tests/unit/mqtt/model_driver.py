"""The client's process in a bottle: what a driver and its owner do with a session's actions, on a real journal."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from tests.unit.mqtt.model_broker import Habits
from towline.errors import JournalFull, Unreachable
from towline.journal import Disk, Journal, Limits
from towline.journal.frames import Bytes
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


_PLENTY: Final = 1 << 40


class Crash(BaseException):  # nothing may catch it on its way
    """The process ends here."""


class VolatileDisk(Disk):
    """The real file system, of which a power failure leaves what was synced; waits for no device."""

    def __init__(self, boundary: Callable[[], None]) -> None:
        self.no_room = False
        #: After a crash nothing happens any more, however much the journal still tidies up.
        self.off = False
        self._boundary = boundary
        self._paths: dict[int, Path] = {}
        #: Bytes written and bytes synced of each file.
        self._written: dict[Path, int] = {}
        self._synced: dict[Path, int] = {}
        self._unsynced_names: set[Path] = set()

    def power_loss(self, keep: float) -> None:
        """Lose what was not synced, but for a share `keep` of its bytes that had reached the disk by themselves."""
        self.off = True
        for path, written in self._written.items():
            if path in self._unsynced_names:
                path.unlink(missing_ok=True)
            elif path.exists():
                synced = self._synced.get(path, 0)
                os.truncate(path, synced + int((written - synced) * keep))

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._paths[descriptor] = path
        self._written[path] = self._synced[path] = 0
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        self._boundary()
        if self.no_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = super().write(descriptor, buffers)
        self._written[self._paths[descriptor]] += count
        self._boundary()
        return count

    def sync_data(self, descriptor: int) -> None:
        self._boundary()
        path = self._paths[descriptor]
        self._synced[path] = self._written[path]

    def sync(self, descriptor: int) -> None:
        self.sync_data(descriptor)

    def sync_directory(self, directory: Path) -> None:  # noqa: ARG002  # the signature is the port's
        self._boundary()
        self._unsynced_names.clear()

    def truncate(self, descriptor: int, size: int) -> None:
        super().truncate(descriptor, size)
        path = self._paths[descriptor]
        self._written[path] = size
        self._synced[path] = min(size, self._synced[path])

    def rename(self, old: Path, new: Path) -> None:
        self._boundary()
        super().rename(old, new)
        self._written[new], self._synced[new] = self._written.pop(old), self._synced.pop(old)
        self._paths = {d: new if p == old else p for d, p in self._paths.items()}
        self._unsynced_names.add(new)

    def remove(self, path: Path) -> None:
        if not self.off:
            super().remove(path)

    def free(self, directory: Path) -> int:  # noqa: ARG002
        return _PLENTY

    def allocate(self, path: Path, size: int) -> None:  # noqa: ARG002
        path.touch()


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
