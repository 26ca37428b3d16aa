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


def test_a_sound_machine_has_no_complaint(tmp_path: Path) -> None:
    assert {one.verdict for one in seen(tmp_path, on()).values()} <= {HOLDS, LIMITED}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"fs_type": "ext4"}, HOLDS),
        ({"fs_type": "xfs", "mode": None}, HOLDS),
        ({"fs_type": "tmpfs"}, BROKEN),
        ({"fs_type": "overlay"}, WARNS),
        ({"fs_type": "nfs4"}, WARNS),
        ({"fs_type": "fuse.sshfs"}, WARNS),
        ({"fs_type": "vfat"}, WARNS),
        ({"fs_type": ""}, UNKNOWN),
        ({"read_only": True}, BROKEN),
        ({"fs_type": "tmpfs", "writable": False}, BROKEN),
        ({"mode": 0o755}, HOLDS),
        ({"mode": 0o770}, WARNS),
    ],
)
def test_where_a_state_directory_may_be(tmp_path: Path, changes: dict[str, Any], verdict: Verdict) -> None:
    assert seen(tmp_path, on(**changes))["TL-D44"].verdict is verdict


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
    ("spot", "changes", "verdict"),
    [
        (StateDir("up", HERE), {"free_bytes": 10**8}, WARNS),  # no rate is known
        (StateDir("up", HERE, max_bytes=10**8), {}, WARNS),
        (StateDir("up", HERE), {"free_inodes": 5000}, WARNS),
        (StateDir("up", HERE), {"free_inodes": 0}, BROKEN),
        (StateDir("up", HERE), {"free_inodes": None}, LIMITED),
        (StateDir("up", HERE, min_free_bytes=512 << 20), {"free_bytes": 0}, BROKEN),
    ],
)
def test_room_without_a_rate(tmp_path: Path, spot: StateDir, changes: dict[str, Any], verdict: Verdict) -> None:
    assert room(tmp_path, spot, **changes).verdict is verdict


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


@pytest.mark.parametrize(
    ("known", "servers", "verdict"),
    [
        (True, "k:9092", HOLDS),
        (False, "k:9092", WARNS),
        (None, "k:9092", UNKNOWN),
        (False, "127.0.0.1:9092,localhost:9093,[::1]:9094", HOLDS),
        (False, "127.0.0.1:9092,k:9092", WARNS),
    ],
)
def test_what_synchronises_the_clock(tmp_path: Path, known: bool | None, servers: str, verdict: Verdict) -> None:
    found = seen(tmp_path, on(), lambda text: text.replace("SERVERS", servers), clock_synchronised=known)
    assert found["TL-D46"].verdict is verdict


@pytest.mark.parametrize(
    ("total", "available", "heap", "verdict"),
    [
        (64 << 30, 60 << 30, "1g", HOLDS),
        (64 << 30, 1 << 30, "1g", WARNS),
        (1 << 30, 1 << 30, "1g", WARNS),
        (64 << 30, 60 << 30, "90g", WARNS),
        (64 << 30, 60 << 30, "90000", WARNS),  # a number alone is MiB
        (64 << 30, 60 << 30, "900", HOLDS),
    ],
)
def test_memory(tmp_path: Path, total: int, available: int, heap: str, verdict: Verdict) -> None:
    def change(text: str) -> str:
        return text.replace('"local[2]"', f'"local[2]", conf = {{ "spark.driver.memory" = "{heap}" }}')

    assert seen(tmp_path, on(), change, memory=(total, available))["TL-D47"].verdict is verdict


def written(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_memory_is_that_of_the_tightest_cgroup(tmp_path: Path) -> None:
    written(tmp_path, proc__meminfo="MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n")
    assert host_memory(tmp_path) == (1_024_000, 819_200)
    (tmp_path / "proc/self").mkdir()
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
