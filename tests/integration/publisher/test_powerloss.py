"""Power lost at any step of a Publisher's life: what `publish` has returned is on the disk until its receipt has come.

A real Publisher with receipts runs under strace against a real Mosquitto and a real gateway; the disk is rebuilt as a
power failure could leave it at each step (`tests.engines.powerloss`), and opened again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engines.powerloss import NOTHING, DiskModel, Survives, random_changes
from tests.engines.strace import SENDS, Call, read_record, record_command
from tests.integration.gateway.conftest import new_gateway
from tests.integration.publisher.test_receipts import Committer, broker, gateway, spark, write_key
from tests.unit.delivery.receipts.marks import KEYS
from towline import Publisher
from towline.errors import TowlineError
from towline.journal import Outbox
from towline.journal.outbox import PHASE_RELEASED
from towline.publisher.pending_receipts import PendingReceipts
from towline.schema import OUTBOX_SCHEMA
from towline_prove.devstack import Mosquitto

__all__ = ["broker", "gateway", "new_gateway", "spark"]

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ptrace")]

#: Two openings of one directory that get no receipt, then the receipts of all, then a third opening without any. A line
#: of ``told`` is written when the test may count on what it says: RETURNED a number, or FREE, from when on receipts
#: may have come for all numbers below. Small segments, so that some are left behind and removed.
LIFE = """
import os, sys
from towline import Publisher
from towline.journal import Limits
from towline.publisher import publisher as made

made.Limits = lambda **more: Limits(**{**more, "segment_bytes": 64 << 10})
broker, state, key, count = *sys.argv[1:4], int(sys.argv[4])
told = os.open(os.path.join(os.path.dirname(state), "told"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def tell(word):
    os.write(told, f"{word}\\n".encode())

def publish(publisher, numbers):
    for number in numbers:
        publisher.publish(f"t/{number % 3}", f"{number} ".encode() + bytes(3000), qos=1 + number % 2)
        tell(number)

def opened():
    return Publisher(broker, state_dir=state, receipts=True, receipt_key_file=key)

for life in range(2):
    publisher = opened()
    publish(publisher, range(life * count, (life + 1) * count))
    publisher.flush(60, end_to_end=False)
    publisher.close(0)
publisher = opened()
tell("FREE")
print("commit", flush=True)
assert publisher.flush(60) == 0
print("hold", flush=True)
sys.stdin.readline()
publish(publisher, range(2 * count, 3 * count))
publisher.flush(60, end_to_end=False)
publisher.close(0)
"""

#: Messages of one opening.
COUNT = 25
PUBLISH, PUBREL = 3, 6


class Sent(NamedTuple):
    """A packet of the way out that has a packet id with QoS 2."""

    kind: int
    packet_id: int
    number: int


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A Variable Byte Integer, and what follows it [MQTT5 section 1.5.5]."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def sent_in(data: bytes) -> Iterator[Sent]:
    """PUBLISH with QoS 2, and PUBREL, in what a connection was given; a send begins with a packet."""
    at = 0
    while at < len(data):
        head = data[at]
        length, at = _varint(data, at + 1)
        body, at = data[at : at + length], at + length
        if head >> 4 == PUBREL:
            yield Sent(PUBREL, int.from_bytes(body[:2]), -1)
        elif head >> 4 == PUBLISH and (head >> 1) & 3 == 2:
            topic = 2 + int.from_bytes(body[:2])
            properties, begins = _varint(body, topic + 2)
            payload = body[begins + properties :]
            yield Sent(PUBLISH, int.from_bytes(body[topic : topic + 2]), int(payload.split()[0]))


@dataclass
class Known:
    """What the application and the broker know at one moment of the life.

    Attributes:
        returned: Messages whose `publish` has returned and that can have no receipt.
        given: QoS 2 packet id → the message that the broker was given under it last.
        asked: Packet ids whose PUBREL was sent after that.
    """

    returned: set[int] = field(default_factory=set)
    given: dict[int, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)

    def tell(self, words: list[str]) -> None:
        for word in words:
            if word == "FREE":
                self.returned.clear()
            else:
                self.returned.add(int(word))

    def send(self, sent: Sent) -> None:
        if sent.kind == PUBREL:
            self.asked.add(sent.packet_id)
        else:
            self.given[sent.packet_id] = sent.number
            self.asked.discard(sent.packet_id)


def started(state: Path, known: Known, key: Path) -> list[str]:
    """The real Publisher on what the power failure left: it starts, and has what it has promised."""
    try:
        with closing(Publisher("mqtt://127.0.0.1:1", state_dir=state, receipts=True, receipt_key_file=key)) as again:
            awaiting = again.awaiting
            again.close(0)
    except TowlineError as error:
        return [f"it does not start: {error}"]
    return [] if awaiting >= len(known.returned) else [f"is lost: of {len(known.returned)} it has {awaiting}"]


def faults(state: Path, known: Known) -> list[str]:
    """What would be lost, or done wrongly, with this directory."""
    if not (state / "outbox").exists():
        return [f"{number} is lost" for number in known.returned]
    try:
        outbox = Outbox.open(state / "outbox", schema=OUTBOX_SCHEMA)
    except TowlineError as error:
        return [f"it does not start: {error}"]
    with closing(outbox):
        awaited = PendingReceipts(outbox, 30, KEYS)
        first = outbox.first_offset
        payloads = [value for batch in outbox.read(first, outbox.end) for value in batch.column("payload").to_pylist()]
        numbers = {first + index: int(payload.split()[0]) for index, payload in enumerate(payloads)}
        kept = {number for row, number in numbers.items() if awaited.is_pending(row)}
        unsent = {number for row, number in numbers.items() if row not in outbox.done_rows}
        found = [f"{number} is lost" for number in known.returned - kept]
        flights = outbox.in_flight
        rows = [flight.row_number for flight in flights.values()]
        found += [f"two packet ids for one of {rows}"] if len(rows) != len(set(rows)) else []
        for packet_id, number in known.given.items():
            flight = flights.get(packet_id)
            if (
                flight is None or numbers.get(flight.row_number) != number
            ):  # free, or another's: then this one must be done
                again = f"{number}, which the broker was given under id {packet_id}, would be sent under another one"
                found += [again] if number in unsent else []
            elif packet_id in known.asked and flight.phase != PHASE_RELEASED:
                found.append(f"{number} would be sent again after the PUBREL of id {packet_id}")
        return found


class Judge:
    """Goes through a record, and looks at the disk at what makes something durable, and at each word and send."""

    def __init__(self, root: Path, place: Path, key: Path) -> None:
        self.states = 0
        self.sent = 0
        self.found: list[str] = []
        self._disk = DiskModel.empty(root)
        self._told = str(root / "told")
        self._place = place
        self._key = key
        self._known = Known()
        self._connection = ""
        #: Calls that have returned, and are not on the disk of the model yet.
        self._waiting: list[Call] = []

    def follow(self, log: Path, root: Path) -> Judge:
        """Take in a whole record."""
        for call in read_record(log, root):
            if call.name in SENDS:
                self._send(call)
            else:
                self._waiting.append(call)
                self._change(call)
        return self

    def _send(self, call: Call) -> None:
        """What leaves has to be durable when the send begins."""
        data = b"".join(call.strings)
        if data[:1] == b"\x10" and b"MQTT" in data[:10]:
            self._connection = call.paths[0]
        packets = list(sent_in(data)) if call.paths[:1] == (self._connection,) else []
        for packet in packets:
            self._known.send(packet)
        self.sent += len(packets)
        if packets:
            self._apply(call.start_line)  # what ended while the send was under way came too late for it
            self._look(NOTHING, f"line {call.start_line}, a send")

    def _change(self, call: Call) -> None:
        if self._told in call.paths and call.name == "write":
            self._apply()
            self._known.tell(b"".join(call.strings).decode().split())
            self._look(NOTHING, f"line {call.start_line}, told")
        elif call.name in ("fdatasync", "fsync", "rename", "unlink"):
            self._apply()
            some = random_changes(self.states)
            self._look(some, f"line {call.start_line}, {call.name}", start=self.states % 5 == 0)

    def _apply(self, began: int | None = None) -> None:
        late = []
        for call in self._waiting:
            if began is None or call.end_line < began:
                self._disk.apply(call)
            else:
                late.append(call)
        self._waiting = late

    def _look(self, survives: Survives, when: str, *, start: bool = False) -> None:
        self.states += 1
        target = self._place / f"state-{self.states}"
        self._disk.restore(target, survives)
        wrong = started(target / "publisher", self._known, self._key) if start else []
        wrong += faults(target / "publisher", self._known)
        self.found += [f"{when}: {one}" for one in wrong]
        shutil.rmtree(target)


def lived(broker: Mosquitto, spark: Committer, directory: Path, key: Path) -> tuple[Path, Path]:
    """One whole life under strace: the disk's root and the record."""
    root, log = directory / "disk", directory / "strace"
    root.mkdir()
    spark.on.clear()
    command = [sys.executable, "-c", LIFE, broker.uri, str(root / "publisher"), str(key), str(COUNT)]
    traced = record_command(command, log)
    with subprocess.Popen(
        traced, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as life:
        assert life.stdin
        assert life.stdout
        assert life.stdout.readline() == "commit\n"
        spark.on.set()
        assert life.stdout.readline() == "hold\n"
        spark.on.clear()
        life.stdin.write("\n")
        life.stdin.close()
        assert life.wait(120) == 0
    assert DiskModel.empty(root).replay(log).differences() == []
    return root, log


def test_what_publish_has_returned_survives_a_power_failure(
    broker: Mosquitto, spark: Committer, tmp_path: Path
) -> None:
    key = write_key(tmp_path)
    root, log = lived(broker, spark, tmp_path, key)
    judge = Judge(root, tmp_path, key).follow(log, root)
    assert judge.found == []
    assert judge.states > 6 * COUNT
    assert judge.sent >= 3 * COUNT // 2
