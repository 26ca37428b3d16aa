"""Room, syncs, clock, memory, Java and PySpark: what is made of the figures, and how they are read."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.planting import bridge_case
from tests.unit.doctor.recorded import BROKEN, HOLDS, LIMITED, UNKNOWN, WARNS, rows
from towline.doctor import machine
from towline.doctor.inputs import LineLoad
from towline.doctor.machine import (
    CHECKS,
    FileSystem,
    MachineProbe,
    StateDir,
    host_memory,
)
from towline.doctor.table import Finding, Verdict
from towline.spark import session
from towline.text import duration_text

HERE = Path("/var/lib/towline")
LOAD = LineLoad(2_000, 400_000, "--rate")
#: A file system that nothing is wrong with; changed by keywords.
SOUND: dict[str, Any] = {
    "existing_dir": HERE,
    "mount_point": "/var",
    "free_bytes": 30 * 10**9,
    "free_inodes": 10**6,
    "mode": 0o700,
}


def seen(
    tmp_path: Path,
    place: Sequence[tuple[StateDir, FileSystem]],
    change: Callable[[str], str] = str,
    **facts: Any,
) -> dict[str, Finding]:
    """The rows of a machine with one file system."""
    one = MachineProbe(bridge_case(tmp_path, "b", "k:9092", change))
    sound = {"file_systems": [place], "memory": (64 << 30, 60 << 30), "clock_synchronised": True}
    vars(one).update({**sound, **facts})
    return rows([check for check in CHECKS if check.code != "TL-D42"], one)


def on(**changes: Any) -> list[tuple[StateDir, FileSystem]]:
    return [(StateDir("up", HERE, min_free_bytes=512 << 20), FileSystem(**{**SOUND, **changes}))]


def room(tmp_path: Path, spot: StateDir, **changes: Any) -> Finding:
    return seen(tmp_path, [(spot, FileSystem(**{**SOUND, **changes}))])["TL-D43"]


def test_room_is_told_as_time(tmp_path: Path) -> None:
    found = room(tmp_path, StateDir("up", HERE, load=LOAD), free_bytes=29 * 10**9)
    told = duration_text(29e9 / StateDir("up", HERE, load=LOAD).growth_bytes_s)
    assert (found.verdict, f"Kafka is down for {told}:" in found.limit) == (LIMITED, True)
    assert "29 GB free on /var" in found.evidence
    acked = ('"exactly_once"', '"at_least_once"\nack_after = "kafka"')
    case = bridge_case(tmp_path, "b", "k:9092", lambda text: text.replace(*acked))
    spot = next(one for one in machine._state_dirs(case) if one.line == "up")
    held = room(tmp_path, replace(spot, load=LOAD), free_bytes=10**9)
    assert held.limit == "Kafka is down: intake stops, and the broker has to queue (TL-D05)"


@given(
    st.integers(0, 10**13),
    st.integers(0, 10**10),
    st.floats(0.01, 1e6),
    st.floats(0, 1e5),
    st.one_of(st.none(), st.integers(1 << 20, 10**12)),
)
def test_room_warns_exactly_when_it_is_over_within_the_hour(
    free: int, least: int, rate: float, size: float, most: int | None
) -> None:
    spot = StateDir("up", HERE, max_bytes=most, min_free_bytes=least, load=LineLoad(rate, rate * size, "--rate"))
    found = machine._room_finding([spot], FileSystem(existing_dir=HERE, free_bytes=free))
    usable = free - least
    seconds = min(usable, most if most is not None else usable) / spot.growth_bytes_s
    assert found.verdict is (BROKEN if usable <= 0 else WARNS if seconds < 3600 else LIMITED)


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(0.0000049, WARNS), (0.00002, HOLDS), (0.002, HOLDS), (0.09, HOLDS), (0.1, WARNS)]
)
def test_how_long_a_sync_takes(seconds: float, verdict: Verdict) -> None:
    assert machine._sync_finding([seconds] * 100, "ext4").verdict is verdict


def test_a_disk_that_fails_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_place: Path) -> list[float]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(machine, "measure_syncs", fails)
    found = rows(CHECKS, MachineProbe(bridge_case(tmp_path, "b", "k:9092", state=tmp_path)))["TL-D42"]
    assert (found.verdict, "input/output error" in found.evidence) == (BROKEN, True)


#: Code, verdict, and what is otherwise than on a sound machine: file system, state directory, servers, memory.
CASES: list[tuple[str, Verdict, dict[str, Any]]] = [
    ("TL-D44", HOLDS, {"fs_type": "ext4"}),
    ("TL-D44", BROKEN, {"fs_type": "tmpfs"}),
    ("TL-D44", WARNS, {"fs_type": "overlay"}),
    ("TL-D44", WARNS, {"fs_type": "nfs4"}),
    ("TL-D44", WARNS, {"fs_type": "fuse.sshfs"}),
    ("TL-D44", WARNS, {"fs_type": "vfat"}),
    ("TL-D44", UNKNOWN, {"fs_type": ""}),
    ("TL-D44", BROKEN, {"writable": False}),
    ("TL-D44", HOLDS, {"mode": 0o755}),
    ("TL-D44", WARNS, {"mode": 0o770}),
    ("TL-D43", WARNS, {"free_bytes": 10**8 + (512 << 20)}),  # no rate is known
    ("TL-D43", WARNS, {"max_bytes": 10**8}),
    ("TL-D43", WARNS, {"free_inodes": 5000}),
    ("TL-D43", BROKEN, {"free_inodes": 0}),
    ("TL-D43", LIMITED, {"free_inodes": None}),
    ("TL-D43", BROKEN, {"free_bytes": 0}),
    ("TL-D46", HOLDS, {}),
    ("TL-D46", WARNS, {"clock_synchronised": False}),
    ("TL-D46", UNKNOWN, {"clock_synchronised": None}),
    ("TL-D46", HOLDS, {"clock_synchronised": False, "servers": "127.0.0.1:9092,localhost:9093,[::1]:9094"}),
    ("TL-D46", WARNS, {"clock_synchronised": False, "servers": "127.0.0.1:9092,k:9092"}),
    ("TL-D47", WARNS, {"memory": (64 << 30, 1 << 30)}),
    ("TL-D47", WARNS, {"memory": (1 << 30, 1 << 30)}),
    ("TL-D47", WARNS, {"heap": "90g"}),
    ("TL-D47", WARNS, {"heap": "90000"}),  # a number alone is MiB
    ("TL-D47", HOLDS, {"heap": "900"}),
]


@pytest.mark.parametrize(("code", "verdict", "changes"), CASES)
def test_what_is_found(tmp_path: Path, code: str, verdict: Verdict, changes: dict[str, Any]) -> None:
    facts = dict(changes)
    heap, servers = facts.pop("heap", "1g"), facts.pop("servers", "k:9092")
    spot = StateDir("up", HERE, min_free_bytes=512 << 20, max_bytes=facts.pop("max_bytes", None))
    known = {name: facts.pop(name) for name in ("clock_synchronised", "memory") if name in facts}

    def change(text: str) -> str:
        text = text.replace('"local[2]"', f'"local[2]", conf = {{ "spark.driver.memory" = "{heap}" }}')
        return text.replace("SERVERS", servers)

    assert seen(tmp_path, [(spot, FileSystem(**{**SOUND, **facts}))], change, **known)[code].verdict is verdict


def test_memory_is_that_of_the_tightest_cgroup(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n")
    assert host_memory(tmp_path) == (1_024_000, 819_200)
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/towline.service\n")
    group = tmp_path / "sys/fs/cgroup/system.slice"
    for place, limit, used in ((group, "512000", "500000"), (group / "towline.service", "max", "0")):
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text(f"{used}\n")
    assert host_memory(tmp_path) == (512_000, 12_000)


@pytest.mark.parametrize(
    ("version", "verdict"), [("4.3.0", HOLDS), ("4.2.1", HOLDS), ("4.1.0", BROKEN), ("3.5.1", BROKEN), ("4.4.0", WARNS)]
)
def test_versions_of_pyspark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, verdict: Verdict) -> None:
    monkeypatch.setattr(session, "pyspark_version", lambda: version)
    monkeypatch.setattr(machine, "check_java", lambda **_asked: None)
    assert seen(tmp_path, on())["TL-D49"].verdict is verdict


def test_no_pyspark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    found = seen(tmp_path, on())["TL-D49"]
    assert (found.verdict, "PySpark is not installed" in found.evidence) == (BROKEN, True)
    assert found.remedy == 'Run: pip install "towline[spark]"'
