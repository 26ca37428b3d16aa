"""Power lost at any step of a gateway's intake: the disk has what was synced, the broker what was not acknowledged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto
from tests.engines.crash import MIN_POINTS, CrashBench
from tests.engines.powerloss import NOTHING, DiskModel, Survives, random_changes
from tests.engines.strace import SENDS, Call, Injection, read_record, record_command
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee
from towline.journal import Journal, Limits
from towline.mqtt.events import Filter
from towline.schema import ROW_SCHEMA
from towline_prove.load import LoadPlan, run_load
from towline_prove.subject import GatewayRun

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ptrace")]

MESSAGES = 60
CONNECT, PUBACK, PUBREC, PUBCOMP = 1, 4, 5, 7


# -- the order: nothing is acknowledged that would not survive -------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """What the broker has been told when a send begins, and what the worst disk would hold then."""

    sent: Counter[int]
    rows: int
    held: int

    @property
    def kept(self) -> bool:
        """[I2] [I3] A message is durable before its PUBACK or PUBREC, a release before its PUBCOMP."""
        return self.sent[PUBACK] + self.sent[PUBREC] <= self.rows and self.sent[PUBCOMP] <= self.rows - self.held


def packets(data: bytes) -> Iterator[int]:
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


def moments(root: Path, log: Path, place: Path) -> Iterator[Moment]:
    """Every send to the broker in a record, with the disk as of its beginning."""
    disk, sent, connection, waiting = DiskModel.empty(root), Counter[int](), "", list[Call]()
    for number, call in enumerate(read_record(log, root)):
        if call.name not in SENDS:
            waiting.append(call)
            continue
        data = b"".join(call.strings)
        if data[:1] == b"\x10" and b"MQTT" in data[:10]:
            connection = call.paths[0]
        if call.paths[:1] == (connection,):
            sent.update(packets(data))
            for earlier in [earlier for earlier in waiting if earlier.end_line < call.start_line]:
                disk.apply(earlier)  # what ended while the send was under way came too late for it
                waiting.remove(earlier)
            yield Moment(sent.copy(), *durable(disk, place / str(number)))


def durable(disk: DiskModel, target: Path) -> tuple[int, int]:
    """How many rows, and packet ids not yet released, a gateway would find after a power failure."""
    disk.restore(target)
    inbox = target / "towline" / "gateway" / "inbox"
    if not inbox.exists():
        return 0, 0
    with Journal.open(inbox, schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0)) as journal:
        return journal.end, len(journal.held_ids)


def run_recorded(
    new_mosquitto: NewMosquitto, directory: Path, qos: int, *, unsynced: bool = False
) -> tuple[Path, Path]:
    """Take in some messages under strace; the disk's root and the record."""
    broker = new_mosquitto(max_queued_messages="0")
    root, log = directory / "disk", directory / "strace"
    root.mkdir()
    settings = GatewaySettings(
        name="gw",
        state_dir=root / "towline" / "gateway",
        brokers=(broker.uri,),  # type: ignore[arg-type] # the validator reads a URI
        subscriptions=(Filter("gw/#", qos=qos),),
        guarantee=Guarantee.EXACTLY_ONCE if qos == 2 else Guarantee.AT_LEAST_ONCE,
    ).model_copy(update={"journal": Limits(segment_bytes=64 << 10)})
    plan = LoadPlan(
        port=broker.port, run="gw", publishers=2, devices=4, messages=MESSAGES, rate=MESSAGES * 20, size=1500,
        topic="gw/{device}", qos=qos, seconds=30,
    )  # fmt: skip
    with GatewayRun(settings, log=directory / "gateway.log") as run:
        run.start(lambda command: record_command(command, log, fake_syncs=unsynced)).wait_online()
        run_load(plan, directory / "claims")
        assert run.wait_journaled(MESSAGES, 20)
        assert run.stop(15) == 0
    return root, log


@pytest.mark.parametrize("qos", [1, 2])
def test_no_acknowledgement_leaves_before_its_data_would_survive(
    new_mosquitto: NewMosquitto, tmp_path: Path, qos: int
) -> None:
    seen = list(moments(*run_recorded(new_mosquitto, tmp_path, qos), tmp_path))
    assert [moment for moment in seen if not moment.kept] == []
    sent, answer = seen[-1].sent, PUBACK if qos == 1 else PUBREC
    assert (sent[answer], sent[PUBCOMP]) == (MESSAGES, MESSAGES if qos == 2 else 0)
    assert len(seen) > 4, "one large gulp proves little about the order"


@pytest.mark.long  # of the instrument
@pytest.mark.parametrize("qos", [1, 2])
def test_the_proof_of_the_order_finds_a_gateway_that_does_not_sync(
    new_mosquitto: NewMosquitto, tmp_path: Path, qos: int
) -> None:
    seen = list(moments(*run_recorded(new_mosquitto, tmp_path, qos, unsynced=True), tmp_path))
    assert any(not moment.kept for moment in seen)


# -- the way back ----------------------------------------------------------------------------------------------------


def bench(
    new_mosquitto: NewMosquitto, directory: Path, qos: int, survives: Survives, *, unsynced: bool = False
) -> CrashBench:
    broker = new_mosquitto(max_queued_messages="0")
    return CrashBench(
        broker,
        directory / "points",
        messages=MESSAGES,
        chunks=6,
        qos=qos,
        surviving_changes=survives,
        fake_syncs=unsynced,
    )


@pytest.mark.parametrize(
    ("qos", "call", "when"),
    [
        pytest.param(1, "fdatasync", 5, marks=pytest.mark.long),  # written, not durable, not acknowledged
        pytest.param(1, "sendto", 6, marks=pytest.mark.long),  # durable, not acknowledged
        (2, "fdatasync", 6),
        (2, "sendto", 9),  # between PUBREC and PUBCOMP
    ],
)
def test_a_gateway_comes_back_from_a_power_failure(
    new_mosquitto: NewMosquitto, tmp_path: Path, qos: int, call: str, when: int
) -> None:
    point = bench(new_mosquitto, tmp_path, qos, NOTHING).run(Injection(call, str(when), "KILL"))
    assert point.was_injected
    assert point.ok, str(point)


@pytest.mark.long  # of the instrument
@pytest.mark.parametrize("qos", [1, 2])
def test_without_syncs_the_same_power_failure_loses(new_mosquitto: NewMosquitto, tmp_path: Path, qos: int) -> None:
    """The bench can find a loss: strace answers every sync with success and makes none."""
    point = bench(new_mosquitto, tmp_path, qos, NOTHING, unsynced=True).run(Injection("sendto", "7", "KILL"))
    assert point.was_injected
    assert not point.ok
    assert point.verdict.lost > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "survives", [NOTHING, random_changes(1), random_changes(2), random_changes(3, 0.8)], ids=["nothing", "1", "2", "3"]
)
@pytest.mark.parametrize("call", ["fdatasync", "sendto", "writev", "fsync", "rename"])
@pytest.mark.parametrize("qos", [1, 2])
def test_power_lost_at_every_call(
    new_mosquitto: NewMosquitto,
    tmp_path: Path,
    qos: int,
    call: str,
    survives: Survives,
    record_property: Callable[[str, object], None],
) -> None:
    points = list(bench(new_mosquitto, tmp_path, qos, survives).run_all(call, "KILL"))
    record_property("points", len(points) - 1)
    bad = [str(point) for point in points if not point.ok]
    assert not bad, "\n".join(bad)
    assert sum(point.was_injected for point in points) >= MIN_POINTS[call]
    assert not points[-1].was_injected, "the enumeration did not reach its end"
