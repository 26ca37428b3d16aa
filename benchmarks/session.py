"""What a message costs from bytes to acknowledgement, without sockets: decode, Session, rows, fdatasync, acks.

Everything a gateway does for a message but the system calls of its socket, in one process, for each protocol version
and QoS; beside it the same bytes decoded and acknowledged from memory. CPU time, not wall time: the disk's wait is
left out, its system calls are not.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt5 import ConnAckPacket, PublishPacket, PubRelPacket, QoS, SubAckPacket, SubAckReasonCode

from benchmarks.rig import machine
from towline.delivery.inbound import plain_run, to_rows
from towline.gateway.process import ALLOCATIONS_PER_COLLECTION
from towline.journal import Journal
from towline.mqtt.codec import LEVEL_5, Decoder, PublishRun, encode
from towline.mqtt.codec3 import LEVEL_311
from towline.mqtt.events import (
    AckWatermark,
    Action,
    ConnectionOpened,
    Deliver,
    DeliveryStored,
    Filter,
    PacketsReceived,
    Send,
    SessionConfig,
    UnreleasedMessage,
)
from towline.mqtt.session import Session
from towline.schema import ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Messages of a chunk, all of which are stored by one fdatasync.
CHUNK: Final = 5_000
#: As `towline.gateway.pump` reads: what has arrived while the last chunk was stored.
_PAYLOAD: Final = b"x" * 150
#: Messages per CPU-second to reach.
_AIMS: Final = {(5, 1): 500_000, (4, 1): 250_000, (5, 2): 250_000, (4, 2): 250_000}
_NAMES: Final = {LEVEL_5: "MQTT 5", LEVEL_311: "MQTT 3.1.1"}


class Case(NamedTuple):
    """A protocol level and a QoS."""

    level: int
    qos: int

    def __str__(self) -> str:
        return f"{_NAMES[self.level]}, QoS {self.qos}"


def run(count: int, rounds: int) -> None:
    """Measure every case and print messages per CPU-second; the best of the rounds."""
    with _collecting():
        _run(count, rounds)


@contextmanager
def _collecting() -> Iterator[None]:
    """Collect garbage as the gateway does."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS_PER_COLLECTION)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _run(count: int, rounds: int) -> None:
    print(f"codec, Session, rows and journal in one process, chunks of {CHUNK:,}, 150 B payloads\n  {machine()}\n")
    for case in (Case(LEVEL_5, 1), Case(LEVEL_311, 1), Case(LEVEL_5, 2), Case(LEVEL_311, 2)):
        chunks = _chunks(case)
        times = max(1, count // CHUNK)
        durable = min(_durable(case, chunks, times) for _ in range(rounds))
        memory = min(_memory(case, chunks, times) for _ in range(rounds))
        rate, aim = times * CHUNK / durable, _AIMS[case.level, case.qos]
        print(
            f"  {case!s:<18} {rate:>9,.0f} msg per CPU-second (aim {aim:,})   "
            f"{durable / times / CHUNK * 1e6:.2f} us a message   {memory / durable:.2f} of the speed from memory"
        )
    print()


def _chunks(case: Case) -> list[bytes]:
    """The bytes of a chunk of messages; with QoS 2 also those of its PUBRELs."""
    ids = range(1, CHUNK + 1)
    packets = [
        PublishPacket(f"telemetry/d{number % 50:02}/data", _PAYLOAD, qos=QoS(case.qos), packet_id=number)
        for number in ids
    ]
    messages = b"".join(encode(packet, case.level) for packet in packets)
    releases = b"".join(encode(PubRelPacket(number), case.level) for number in ids)
    return [messages, releases] if case.qos == 2 else [messages]


def _durable(case: Case, chunks: Sequence[bytes], times: int) -> float:
    with (
        tempfile.TemporaryDirectory(dir=".") as directory,
        Journal.open(Path(directory) / "journal", schema=ROW_SCHEMA) as journal,
    ):
        line = _Line(case, journal)
        return _cpu(line.take, chunks, times)


def _memory(case: Case, chunks: Sequence[bytes], times: int) -> float:
    decoder = Decoder(version=case.level)

    def take(chunk: bytes) -> None:
        for item in decoder.feed(chunk):
            if isinstance(item, PublishRun):
                b"".join([b"\x40\x02" + (p.packet_id or 0).to_bytes(2) for p in item.packets])

    return _cpu(take, chunks, times)


def _cpu(take: Callable[[bytes], None], chunks: Sequence[bytes], times: int) -> float:
    """CPU seconds for so many rounds of the chunks, after one that counts for nothing."""
    before = 0.0
    for index in range(times + 1):
        if index == 1:
            before = time.process_time()
        for chunk in chunks:
            take(chunk)
    return time.process_time() - before


class _Line:
    """A session that is online, on a journal; does what the gateway's pump does with each action."""

    def __init__(self, case: Case, journal: Journal) -> None:
        self._journal = journal
        self._decoder = Decoder(version=case.level, plain_reader=plain_run)
        config = SessionConfig(
            "bench", "the benchmark", filters=(Filter("telemetry/#", case.qos),), protocol=case.level
        )
        self._session = Session(config)
        self._sent = 0
        self._handle(ConnectionOpened())
        if case.level == LEVEL_311:
            self.take(b"\x20\x02\x00\x00" + bytes((0x90, 3, 0, 1, case.qos)))  # CONNACK, SUBACK
        else:
            self.take(ConnAckPacket().write() + SubAckPacket(1, [SubAckReasonCode(case.qos)]).write())

    def take(self, data: bytes) -> None:
        """Bytes in, acknowledgements out; everything durable in between."""
        before = self._sent
        self._handle(PacketsReceived(self._decoder.feed(data)))
        assert len(data) < CHUNK or self._sent == before + 4 * CHUNK, "every packet of a chunk has its answer"

    def _handle(self, event: ConnectionOpened | PacketsReceived | AckWatermark | DeliveryStored) -> None:
        for action in self._session.handle(event, time.monotonic()):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        if isinstance(action, Send):
            self._sent += len(action.data)
        elif isinstance(action, Deliver):
            rows = to_rows(action.messages, action.first_number, time.time_ns() // 1000, "bench")
            held = {packet_id: _pair(entry) for packet_id, entry in action.unreleased_messages.items()}
            end = self._journal.append(rows, held_ids=held, released_ids=action.released_ids)
            self._handle(DeliveryStored(action.delivery_id))
            self._handle(AckWatermark(end))


def _pair(entry: UnreleasedMessage) -> tuple[int, int]:
    return entry.number, entry.digest
