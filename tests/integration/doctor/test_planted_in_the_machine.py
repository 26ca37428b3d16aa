"""Faults planted in this machine: file systems of their own, limits of the process, an environment without Java.

Injected are only a disk that is slow, or that answers without writing, and clocks.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.planting import bridge_case, complaints
from towline.doctor import clock, disk, host, memory
from towline.doctor.case import Case, LineLoad
from towline.doctor.findings import Finding, Standing
from towline.doctor.kafka.brokerclock import Skews
from towline.kafka import admin
from towline_prove.devstack import Kafka

BROKEN, WARNS, LIMITED = Standing.BROKEN, Standing.WARNS, Standing.LIMITED
_NOBODY = "127.0.0.1:9"


def may_mount() -> bool:
    """Whether this user may mount; a file system of one's own needs root."""
    return os.geteuid() == 0 and all(map(shutil.which, ("mount", "umount", "mkfs.ext4")))


needs_mount = pytest.mark.skipif(not may_mount(), reason="mounting needs root, mount and mkfs.ext4")


@contextmanager
def mounted(directory: Path, *options: str) -> Iterator[Path]:
    directory.mkdir()
    run = subprocess.run(["mount", *options, str(directory)], capture_output=True, text=True, timeout=60, check=False)
    if run.returncode:
        pytest.skip(f"mount {' '.join(options)}: {run.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True, timeout=60)


@contextmanager
def ext4(directory: Path, megabytes: int, *options: str, how: str = "loop") -> Iterator[Path]:
    """A real ext4 in a sparse file."""
    image = directory.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", *options, str(image)], check=True, timeout=60)
    with mounted(directory, "-o", how, str(image)) as place:
        yield place


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A sound place for a state directory, whatever this machine's temporary directory is on."""
    with ext4(tmp_path / "large", 4096) as place:
        yield place


def at(tmp_path: Path, state: Path, change: Callable[[str], str] = str) -> Case:
    return bridge_case(tmp_path, "b", _NOBODY, change, state)


def quick(_place: Path) -> host.Syncs:
    """A sound disk: how quick this machine's is, no test decides."""
    return host.Syncs((0.001,) * 100)


def told(found: list[Finding]) -> list[str]:
    return [f"{one.verdict} {one.code} {one.because}" for one in found]


def complained(found: list[Finding], expected: dict[str, Standing]) -> None:
    assert complaints(found) == expected, told(found)


@needs_mount
def test_a_sound_disk(large: Path, tmp_path: Path) -> None:
    found = [*disk.examine(at(tmp_path, large / "state"), quick)]
    complained(found, {})
    assert {one.code for one in found} == {"TL-D42", "TL-D43", "TL-D44", "TL-D45"}


def test_syncs_are_measured_where_the_journal_will_be(tmp_path: Path) -> None:
    place = host.file_system(tmp_path / "not" / "there").there
    measured = host.syncs(place)
    assert place == tmp_path
    assert measured.times == tuple(sorted(measured.times))
    assert 0 < measured.at(0.5) <= measured.at(0.99) <= measured.times[-1]
    assert not [*tmp_path.iterdir()]  # the probe is gone, and nothing was made


@needs_mount
def test_a_state_directory_in_memory(tmp_path: Path) -> None:
    with mounted(tmp_path / "memory", "-t", "tmpfs", "-o", "size=2g", "none") as place:
        complained([*disk.examine(at(tmp_path, place / "state"), quick)], {"TL-D44": BROKEN})


@needs_mount
def test_a_disk_that_can_only_be_read(tmp_path: Path) -> None:
    with ext4(tmp_path / "fixed", 4096, how="loop,ro") as place:
        complained([*disk.examine(at(tmp_path, place / "state"), quick)], {"TL-D44": BROKEN})


@needs_mount
def test_a_full_disk(tmp_path: Path) -> None:
    with ext4(tmp_path / "small", 64) as place:
        complained([*disk.examine(at(tmp_path, place / "state"), quick)], {"TL-D43": BROKEN})


@needs_mount
def test_a_disk_without_inodes(tmp_path: Path) -> None:
    with ext4(tmp_path / "few", 4096, "-N", "2000") as place:
        complained([*disk.examine(at(tmp_path, place / "state"), quick)], {"TL-D43": WARNS})


@needs_mount
def test_room_for_minutes_at_the_rate(large: Path, tmp_path: Path) -> None:
    case = at(tmp_path, large / "state")
    found = [*disk.examine(case.loaded({"up": LineLoad(500, 100_000, "--rate")}), quick)]
    complained(found, {})
    (row,) = (one for one in found if one.code == "TL-D43")
    assert "500 msg/s" in row.because
    assert "Kafka is away for" in row.until
    found = [*disk.examine(case.loaded({"up": LineLoad(20_000, 40_000_000, "--rate")}), quick)]
    complained(found, {"TL-D43": WARNS})


@needs_mount
def test_a_limit_of_the_journal_that_is_near(large: Path, tmp_path: Path) -> None:
    def change(text: str) -> str:
        return text.replace(
            'guarantee = "exactly_once"', 'guarantee = "exactly_once"\njournal = { max_bytes = 100_000_000 }'
        )

    complained([*disk.examine(at(tmp_path, large / "state", change), quick)], {"TL-D43": WARNS})


@needs_mount
def test_nothing_stays_free_for_the_checkpoint(large: Path, tmp_path: Path) -> None:
    def change(text: str) -> str:
        return text.replace(
            'guarantee = "exactly_once"', 'guarantee = "exactly_once"\njournal = { min_free_bytes = 0 }'
        )

    complained([*disk.examine(at(tmp_path, large / "state", change), quick)], {"TL-D45": WARNS})


@needs_mount
def test_a_state_directory_that_others_may_write(large: Path, tmp_path: Path) -> None:
    state = large / "state"
    (state / "up").mkdir(parents=True)
    (state / "up").chmod(0o777)
    complained([*disk.examine(at(tmp_path, state), quick)], {"TL-D44": WARNS})


@needs_mount
def test_a_slow_disk(large: Path, tmp_path: Path) -> None:
    now = [0.0]

    def slow(handle: int) -> None:
        os.fdatasync(handle)
        now[0] += 0.3

    def sync(place: Path) -> host.Syncs:
        return host.syncs(place, slow, lambda: now[0])

    found = [*disk.examine(at(tmp_path, large / "state"), sync)]
    complained(found, {"TL-D42": WARNS})
    assert now[0] < 3  # it is measured for two seconds
    assert any("0.3" in one.because or "300 ms" in one.because for one in found)


@needs_mount
def test_a_disk_that_makes_nothing_durable(large: Path, tmp_path: Path) -> None:
    now = [0.0]

    def nothing(_handle: int) -> None:
        now[0] += 1e-6

    def sync(place: Path) -> host.Syncs:
        return host.syncs(place, nothing, lambda: now[0])

    complained([*disk.examine(at(tmp_path, large / "state"), sync)], {"TL-D42": WARNS})


@needs_mount
def test_a_disk_that_fails(large: Path, tmp_path: Path) -> None:
    def fails(_handle: int) -> None:
        raise OSError(5, os.strerror(5))

    def sync(place: Path) -> host.Syncs:
        return host.syncs(place, fails)

    complained([*disk.examine(at(tmp_path, large / "state"), sync)], {"TL-D42": BROKEN})
    assert {path.name for path in large.iterdir()} == {"lost+found"}


def apart(case: Case, seconds: float) -> Case:
    """This machine's clock, so many seconds ahead."""
    return dataclasses.replace(case, now=lambda: time.time() + seconds)


@pytest.mark.kafka
@pytest.mark.parametrize(("ahead", "expected"), [(0, {}), (90, {"TL-D46": WARNS}), (7200, {"TL-D46": BROKEN})])
def test_a_clock_that_is_ahead_of_kafkas(
    kafka: Kafka, tmp_path: Path, ahead: float, expected: dict[str, Standing]
) -> None:
    name = f"clock-{ahead}"
    kafka.create_topics({f"{name}.records": 1})
    case = apart(bridge_case(tmp_path, name, kafka.bootstrap), ahead)
    complained([*clock.examine(case)], expected)
    admin.create_topics(kafka.bootstrap, {})  # a new look at the list
    assert not [one for one in admin.reachable(kafka.bootstrap).topics if one.startswith("towline-doctor")]


def test_a_clock_that_is_set_meanwhile(tmp_path: Path) -> None:
    case = bridge_case(tmp_path, "b", _NOBODY)
    steps = iter([0.0, 40.0])
    moved = dataclasses.replace(case, now=lambda: time.monotonic() + next(steps))
    found = [*clock.examine(moved, lambda _: Skews(why="not asked"), lambda: True)]
    complained(found, {"TL-D46": WARNS})
    assert "set by 40 s" in found[0].because


@pytest.mark.parametrize(
    ("synchronised", "local", "expected"),
    [
        (True, False, {}),
        (False, False, {"TL-D46": WARNS}),
        (False, True, {}),
        (None, False, {"TL-D46": Standing.UNKNOWN}),
    ],
)
def test_what_synchronises_the_clock(
    tmp_path: Path, synchronised: bool | None, local: bool, expected: dict[str, Standing]
) -> None:
    case = bridge_case(tmp_path, "b", _NOBODY)
    found = [*clock.examine(case, lambda _: Skews(why="no topic may be made", local=local), lambda: synchronised)]
    complained(found, expected)


def test_the_kernel_tells_of_the_clock() -> None:
    assert host.synchronised() in {True, False, None}


@pytest.fixture
def well() -> Iterator[None]:
    """Limits and Java of a sound machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_sound_machine(tmp_path: Path) -> None:
    found = [*memory.examine(bridge_case(tmp_path, "b", _NOBODY), opened=lambda: (65536, 65536), look=plenty)]
    complained(found, {})
    assert {one.code for one in found} == {"TL-D47", "TL-D48", "TL-D49"}


def plenty() -> host.HostMemory:
    """So that the tests' own machine may be small and busy."""
    return host.HostMemory(total=64 << 30, available=60 << 30)


def test_spark_asks_for_more_memory_than_there_is(tmp_path: Path) -> None:
    def change(text: str) -> str:
        return text.replace('master = "local[2]"', 'master = "local[2]", conf = { "spark.driver.memory" = "90000g" }')

    found = [*memory.examine(bridge_case(tmp_path, "b", _NOBODY, change), opened=lambda: (65536, 65536))]
    complained(found, {"TL-D47": WARNS})


@pytest.mark.usefixtures("well")
def test_few_files_may_be_open(tmp_path: Path) -> None:
    case = bridge_case(tmp_path, "b", _NOBODY)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    complained([*memory.examine(case, plenty)], {"TL-D48": WARNS})


def test_too_few_cores_for_the_load(tmp_path: Path) -> None:
    case = bridge_case(tmp_path, "b", _NOBODY).loaded({"up": LineLoad(1e7, 1e9, "--rate")})
    found = [*memory.examine(case, plenty, lambda: 2.0, lambda: (65536, 65536))]
    complained(found, {"TL-D48": WARNS})


def test_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARK_HOME", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    case = bridge_case(tmp_path, "b", _NOBODY)
    complained([*memory.examine(case, plenty, opened=lambda: (65536, 65536))], {"TL-D49": BROKEN})
