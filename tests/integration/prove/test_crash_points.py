"""Every crash point of a gateway's intake: each sync, each write of the journal, each ack, killed or failed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.conftest import NewMosquitto
from tests.engines.crash import CrashBench
from tests.engines.strace import Injection

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600), pytest.mark.usefixtures("ptrace")]

#: Fewer points than these mean that the calls have other names now, and nothing was proved.
LEAST = {"fsync": 3, "fdatasync": 4, "writev": 5, "sendto": 4}


@pytest.fixture
def bench(new_mosquitto: NewMosquitto, tmp_path: Path) -> CrashBench:
    return CrashBench(new_mosquitto(max_queued_messages="0"), tmp_path / "points")


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("fdatasync", "KILL"),  # written, perhaps not durable
        ("sendto", "KILL"),  # durable, the broker does not know
        ("writev", "KILL"),  # before a frame is in the file
        ("fsync", "KILL"),  # new files and directories
        ("rename", "KILL"),
        ("fdatasync", "EIO"),
        ("fsync", "EIO"),
        ("writev", "EIO"),
        ("fdatasync", "ENOSPC"),
        ("writev", "ENOSPC"),
    ],
)
def test_every_crash_point_loses_nothing(bench: CrashBench, call: str, fault: Literal["KILL", "EIO", "ENOSPC"]) -> None:
    points = list(bench.every(call, fault))
    bad = [str(point) for point in points if not point.ok]
    assert not bad, "\n".join(bad)
    assert sum(point.fired for point in points) >= LEAST.get(call, 1)
    assert not points[-1].fired, "the enumeration did not reach its end"


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("fdatasync", "KILL"),  # before PUBREC and before PUBCOMP
        ("sendto", "KILL"),  # durable, PUBREC or PUBCOMP not sent
        ("writev", "KILL"),
        ("fdatasync", "EIO"),
    ],
)
def test_every_crash_point_of_qos_2_neither_loses_nor_doubles(
    new_mosquitto: NewMosquitto, tmp_path: Path, call: str, fault: Literal["KILL", "EIO", "ENOSPC"]
) -> None:
    """[I3]: message and packet id are durable in one step before PUBREC, the release before PUBCOMP."""
    bench = CrashBench(new_mosquitto(max_queued_messages="0"), tmp_path / "points", qos=2)
    points = list(bench.every(call, fault))
    bad = [str(point) for point in points if not point.ok]
    assert not bad, "\n".join(bad)
    assert sum(point.fired for point in points) >= LEAST[call]
    assert not points[-1].fired, "the enumeration did not reach its end"


def test_a_disk_that_stays_full_holds_the_line_back_and_loses_nothing(bench: CrashBench) -> None:
    """[I7] From the eighth write on nothing fits any more: no ack, no drop; with room again everything comes."""
    point = bench.run(Injection("writev", "8+", "ENOSPC"))
    assert point.fired
    assert point.ok, str(point)
