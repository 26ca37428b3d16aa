"""Power lost, a kill or a failed sync at any moment of a gateway's intake: what was acknowledged is there, once."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto
from tests.engines.powerloss import EVERYTHING, NOTHING, DiskModel, Survives, random_changes
from tests.engines.strace import (
    SENDS,
    Call,
    Injection,
    inject_command,
    read_record,
    record_command,
    was_injected,
)
from towline.errors import JournalError
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee
from towline.journal import Journal, Limits
from towline.mqtt.events import Filter
from towline.schema import ROW_SCHEMA
from towline_prove.devstack import Mosquitto
from towline_prove.history import decode_message, read_history
from towline_prove.load import LoadPlan, run_load
from towline_prove.referee import Arrival, judge_arrivals
from towline_prove.subject import GatewayRun

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ptrace")]

MESSAGES = 60
PUBACK, PUBREC, PUBCOMP = 4, 5, 7
#: Calls after each of which the disk may be another one.
CHANGES = {"writev", "fdatasync", "fsync", "rename", "unlink"}


def packet_types(data: bytes) -> Iterator[int]:
    """The types of MQTT control packets in a piece of a connection that begins with one."""
    at = 0
    while at < len(data):
        kind, length, shift, at = data[at] >> 4, 0, 0, at + 1
        while True:
            byte, at = data[at], at + 1
            length |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        yield kind
        at += length


class Judge:
    """Follows a record and looks at the disks that a power failure, or a kill, could leave at each of its moments."""

    def __init__(self, root: Path, place: Path) -> None:
        self.disk, self.place = DiskModel.empty(root), place
        self.sent, self.connection = Counter[int](), ""
        self.waiting: list[Call] = []
        self.looks, self.wrong = 0, list[str]()

    def follow(self, log: Path) -> None:
        for call in read_record(log, self.disk.root):
            if call.name not in SENDS:
                self.waiting.append(call)
                if call.name in CHANGES:
                    self.apply(call.end_line + 1)
                    for survives in (EVERYTHING, random_changes(self.looks), random_changes(self.looks, 0.9)):
                        self.look(survives, call)
                continue
            data = b"".join(call.strings)
            if data[:1] == b"\x10" and b"MQTT" in data[:10]:
                self.connection = call.paths[0]
            if call.paths[:1] == (self.connection,):
                self.sent.update(packet_types(data))
                self.apply(call.start_line)  # what ended while the send was under way came too late for it
                self.look(NOTHING, call)

    def apply(self, before_line: int) -> None:
        for call in [call for call in self.waiting if call.end_line < before_line]:
            self.disk.apply(call)
            self.waiting.remove(call)

    def look(self, survives: Survives, call: Call) -> None:
        """[I2] [I3] A message is durable before its PUBACK or PUBREC, a release before its PUBCOMP."""
        self.looks += 1
        target = self.place / "look"
        self.disk.restore(target, survives)
        inbox, sent, rows, held = target / "towline" / "gateway" / "inbox", self.sent, list[object](), 0
        try:
            if inbox.exists():
                with Journal.open(inbox, schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0)) as journal:
                    held = len(journal.held_ids)
                    for batch in journal.read(journal.first_offset, journal.end):
                        rows += map(decode_message, batch.column("payload").to_pylist())
        except JournalError as error:
            self.wrong.append(str(error))
        shutil.rmtree(target)
        kept = sent[PUBACK] + sent[PUBREC] <= len(rows) and sent[PUBCOMP] <= len(rows) - held
        if not kept or len(rows) != len(set(rows) - {None}):
            self.wrong.append(f"line {call.start_line}, {call.name}: {len(rows)} rows, {held} held, {dict(sent)}")


def gateway_at(broker: Mosquitto, state_dir: Path, qos: int) -> GatewaySettings:
    return GatewaySettings(
        name="gw", state_dir=state_dir, brokers=(broker.uri,),  # type: ignore[arg-type]
        subscriptions=(Filter("gw/#", qos=qos),),
        guarantee=Guarantee.EXACTLY_ONCE if qos == 2 else Guarantee.AT_LEAST_ONCE,
    ).model_copy(update={"journal": Limits(segment_bytes=64 << 10)})  # fmt: skip


def publish(broker: Mosquitto, claims: Path, qos: int) -> None:
    plan = LoadPlan(
        port=broker.port, run=claims.name, publishers=2, devices=4, messages=MESSAGES, rate=MESSAGES * 20, size=1500,
        topic="gw/{device}", qos=qos, seconds=60,
    )  # fmt: skip
    run_load(plan, claims)


def judged(new_mosquitto: NewMosquitto, directory: Path, qos: int, *, unsynced: bool = False) -> Judge:
    """Take in some messages under strace, and look at every moment of it."""
    broker, root, log = new_mosquitto(max_queued_messages="0"), directory / "disk", directory / "strace"
    root.mkdir()
    with GatewayRun(gateway_at(broker, root / "towline" / "gateway", qos), log=directory / "gateway.log") as run:
        run.start(lambda command: record_command(command, log, fake_syncs=unsynced)).wait_online()
        publish(broker, directory / "claims", qos)
        assert run.wait_journaled(MESSAGES, 20)
        assert run.stop(15) == 0
    judge = Judge(root, directory)
    judge.follow(log)
    judge.apply(1 << 60)
    assert judge.disk.differences() == [], "the record does not tell all of it"
    return judge


@pytest.mark.parametrize("qos", [1, 2])
def test_every_disk_that_a_power_failure_can_leave_has_what_was_acknowledged(
    new_mosquitto: NewMosquitto, tmp_path: Path, qos: int
) -> None:
    judge = judged(new_mosquitto, tmp_path, qos)
    assert judge.wrong == []
    assert (judge.sent[PUBACK if qos == 1 else PUBREC], judge.sent[PUBCOMP]) == (MESSAGES, MESSAGES * (qos == 2))
    assert judge.looks > 30, "one large gulp proves little about the order"


@pytest.mark.long  # of the instrument
@pytest.mark.parametrize("qos", [1, 2])
def test_the_proof_finds_a_gateway_that_does_not_sync(new_mosquitto: NewMosquitto, tmp_path: Path, qos: int) -> None:
    assert judged(new_mosquitto, tmp_path, qos, unsynced=True).wrong


@pytest.mark.parametrize("call", ["fdatasync", "writev"])
def test_a_disk_that_fails_ends_the_gateway_and_loses_nothing(
    new_mosquitto: NewMosquitto, tmp_path: Path, call: str
) -> None:
    """[I6] [MQTT-4.8.0-2 of 3.1.1]: in the midst of its intake; the next one has all that was acknowledged, once."""
    broker, log = new_mosquitto(max_queued_messages="0"), tmp_path / "strace"
    settings = gateway_at(broker, tmp_path / "gateway", 2)
    with GatewayRun(settings, log=tmp_path / "gateway.log") as run:
        injection = Injection(call, "8", "EIO")
        run.start(lambda command: inject_command(command, injection, log)).wait_online()
        publish(broker, tmp_path / "claims", 2)
        assert run.wait(20) not in {0, None}
        assert was_injected(log)
    with GatewayRun(settings, log=tmp_path / "gateway.log") as run:
        run.start().wait_online()
        assert run.wait_journaled(MESSAGES, 20)
        assert run.stop(15) == 0
    with Journal.open(settings.inbox_dir, schema=ROW_SCHEMA) as journal:
        payloads = [p for batch in journal.read(0, journal.end) for p in batch.column("payload").to_pylist()]
    verdict = judge_arrivals(
        read_history(tmp_path / "claims"), [Arrival(0, n, None, p) for n, p in enumerate(payloads)]
    )
    assert verdict.ok("exactly_once"), verdict.summary_line()
    assert verdict.delivered == MESSAGES
