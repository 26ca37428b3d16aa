"""Every crash point of a gateway's intake: each sync, each write of the journal, each ack, killed or failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from _pytest.mark import ParameterSet

from tests.conftest import NewMosquitto
from tests.engines.crash import MIN_POINTS, CrashBench
from tests.engines.strace import Injection
from towline_prove.devstack import Mosquitto

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ptrace")]


#: Messages and chunks: a larger run has more points of the same kinds, more chunks at the same places in the code.
SIZES = [pytest.param(12, 3, id="small"), pytest.param(60, 6, id="larger", marks=pytest.mark.long)]


class Case(NamedTuple):
    """One enumeration."""

    qos: int
    call: str
    fault: Literal["KILL", "EIO", "ENOSPC"]


#: In `make test` the model of power loss has these points (`test_powerloss`, unit/journal/test_crash_points.py), and
#: unit/journal/test_faults.py the failing calls; two others are real there.
OF_THE_MODEL = [
    Case(1, "sendto", "KILL"),  # durable, the broker does not know
    Case(1, "writev", "KILL"),  # before a frame is in the file
    Case(1, "rename", "KILL"),
    Case(1, "fdatasync", "KILL"),
    Case(1, "fsync", "KILL"),  # new files and directories
    Case(1, "fsync", "EIO"),
    Case(1, "writev", "EIO"),
    Case(1, "fdatasync", "ENOSPC"),  # [I6] The end of the process whatever failed it, as with EIO.
    Case(1, "writev", "ENOSPC"),
    Case(2, "writev", "KILL"),
    Case(2, "fdatasync", "KILL"),  # before PUBREC and before PUBCOMP
    Case(2, "fdatasync", "EIO"),
]

CASES: list[Case | ParameterSet] = [
    Case(1, "fdatasync", "EIO"),
    # [I3]: message and packet id are durable in one step before PUBREC, the release before PUBCOMP.
    Case(2, "sendto", "KILL"),  # durable, PUBREC or PUBCOMP not sent
    *(pytest.param(case, marks=pytest.mark.long) for case in OF_THE_MODEL),
]


def name(case: Case) -> str:
    return f"qos {case.qos} {case.call} {case.fault}"


@pytest.fixture
def broker(new_mosquitto: NewMosquitto) -> Mosquitto:
    return new_mosquitto(max_queued_messages="0")


@pytest.mark.parametrize(("messages", "chunks"), SIZES)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_no_crash_point_loses_anything(
    broker: Mosquitto,
    tmp_path: Path,
    case: Case,
    messages: int,
    chunks: int,
    record_property: Callable[[str, object], None],
) -> None:
    """At QoS 2 nothing may come twice either. [MQTT-4.8.0-2 of 3.1.1]: a disk that fails ends the connection."""
    bench = CrashBench(broker, tmp_path, qos=case.qos, messages=messages, chunks=chunks)
    points = list(bench.run_all(case.call, case.fault))
    record_property("points", len(points) - 1)
    bad = [str(point) for point in points if not point.ok]
    assert not bad, "\n".join(bad)
    assert sum(point.was_injected for point in points) >= MIN_POINTS[case.call]
    assert not points[-1].was_injected, "the enumeration did not reach its end"


@pytest.mark.long  # unit/journal/test_faults.py has the full disk, gateway/test_gateway.py the journal that is full
def test_a_disk_that_stays_full_holds_the_line_back_and_loses_nothing(broker: Mosquitto, tmp_path: Path) -> None:
    """[I7] From the eighth write on nothing fits any more: no ack, no drop; with room again everything comes."""
    point = CrashBench(broker, tmp_path).run(Injection("writev", "8+", "ENOSPC"), timeout_s=4)
    assert point.was_injected
    assert point.ok, str(point)
