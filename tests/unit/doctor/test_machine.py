"""Room, syncs, memory and limits: what is made of the figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.doctor.case import LineLoad
from towline.doctor.disk import Spot, durable, kept_apart, room, sound
from towline.doctor.findings import Finding, Standing
from towline.doctor.host import FileSystem, HostMemory, Syncs, cores, file_system, host_memory, nearest
from towline.doctor.memory import Needed, computing, files, heap_bytes, memory
from towline.sizing import Load as Sized
from towline.sizing import journal_bytes_s, needs

BROKEN, WARNS, LIMITED, HOLDS = Standing.BROKEN, Standing.WARNS, Standing.LIMITED, Standing.HOLDS
HERE = Path("/var/lib/towline")
LOAD = LineLoad(2_000, 400_000, "--rate")


def system(
    kind: str = "ext4",
    free: int = 30 * 10**9,
    inodes: int | None = 10**6,
    mode: int | None = 0o700,
    *,
    read_only: bool = False,
    writable: bool = True,
    there: Path = HERE,
) -> FileSystem:
    return FileSystem(
        directory=HERE,
        there=there,
        device=1,
        kind=kind,
        mounted="/var",
        read_only=read_only,
        writable=writable,
        mode=mode,
        own=True,
        free=free,
        size=10**11,
        inodes=inodes,
    )


SPOT = Spot("up", HERE, min_free=512 << 20, window=1000, syncs=2)


def only(found: list[Finding]) -> Finding:
    (one,) = found
    return one


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (system(), HOLDS),
        (system("xfs", mode=None), HOLDS),
        (system("tmpfs"), BROKEN),
        (system("overlay"), WARNS),
        (system("nfs4"), WARNS),
        (system("fuse.sshfs"), WARNS),
        (system("vfat"), WARNS),
        (system(""), Standing.UNKNOWN),
        (system(read_only=True), BROKEN),
        (system("tmpfs", writable=False), BROKEN),
        (system(mode=0o755), HOLDS),
        (system(mode=0o770), WARNS),
    ],
)
def test_where_a_state_directory_may_be(seen: FileSystem, verdict: Standing) -> None:
    found = only([*sound([SPOT], [seen])])
    assert (found.code, found.verdict) == ("TL-D44", verdict)


def test_room_is_told_as_time() -> None:
    found = only([*room([Spot("up", HERE, load=LOAD)], system(free=29 * 10**9))])
    written = journal_bytes_s(2_000, 400_000)
    assert (found.code, found.verdict) == ("TL-D43", LIMITED)
    assert "29 GB free on /var" in found.because
    assert "2,000 msg/s" in found.because
    assert f"{29e9 / written / 3600:.1f} h" in found.until


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
    spot = Spot("up", HERE, max_bytes=most, min_free=least, load=LineLoad(rate, rate * size, "--rate"))
    found = only([*room([spot], system(free=free))])
    usable = free - least
    seconds = min(usable, most if most is not None else usable) / journal_bytes_s(rate, rate * size)
    expected = BROKEN if usable <= 0 else WARNS if seconds < 3600 else LIMITED
    assert found.verdict is expected


def test_room_of_lines_together_is_shared() -> None:
    one, two = Spot("a", HERE, load=LOAD), Spot("b", HERE, load=LOAD)
    for_one, for_two = (only([*room(some, system(free=10**11))]) for some in ([one], [one, two]))
    assert "4,000 msg/s" in for_two.because
    hours = [float(found.until.split(" for ")[1].split(" ")[0]) for found in (for_one, for_two)]
    assert hours[0] == pytest.approx(2 * hours[1], rel=0.1)


def test_room_without_a_rate_is_told_in_bytes() -> None:
    found = only([*room([SPOT], system())])
    assert (found.verdict, "29 GB wait" in found.until) == (LIMITED, True)
    assert only([*room([SPOT], system(free=(512 << 20) + 10**8))]).verdict is WARNS
    assert only([*room([SPOT], system(inodes=0))]).verdict is BROKEN
    assert only([*room([SPOT], system(inodes=None))]).verdict is LIMITED


def test_a_line_with_its_inbox_elsewhere_needs_room_for_its_checkpoint_only() -> None:
    spot = Spot("up", HERE, journal=False)
    assert only([*room([spot], system(free=10**8))]).verdict is HOLDS
    assert only([*room([spot], system(free=10**6))]).verdict is WARNS
    assert [*kept_apart([spot])] == []


def test_what_stays_free_is_the_checkpoints() -> None:
    assert only([*kept_apart([SPOT])]).verdict is HOLDS
    assert only([*kept_apart([SPOT, Spot("other", HERE)])]).verdict is WARNS


@pytest.mark.parametrize(
    ("each", "load", "verdict"),
    [
        (0.001, None, HOLDS),
        (0.02, None, LIMITED),
        (0.2, None, WARNS),
        (2e-6, None, WARNS),
        (0.02, LineLoad(2_000, 1.0, "--rate"), LIMITED),
        (0.02, LineLoad(20_000, 1.0, "--rate"), WARNS),  # 1,000 in 40 ms are 25,000 a second
    ],
)
def test_syncs_and_the_window(each: float, load: LineLoad | None, verdict: Standing) -> None:
    spot = Spot("up", HERE, window=1000, syncs=2, load=load)
    found = durable([spot], system(), Syncs((each,) * 100))
    assert (found.code, found.verdict) == ("TL-D42", verdict)
    assert ("25,000 msg/s" in found.until) == (each == 0.02)


def test_a_disk_that_can_not_be_written_says_why() -> None:
    found = durable([SPOT], system(), Syncs((), "Input/output error"))
    assert found.verdict is BROKEN
    assert "Input/output error" in found.because


@given(st.lists(st.floats(0, 10), min_size=1))
def test_a_share_of_the_syncs(times: list[float]) -> None:
    syncs = Syncs(tuple(sorted(times)))
    for share in (0.0, 0.5, 0.99, 1.0):
        assert sum(one <= syncs.at(share) for one in times) >= share * len(times)


@given(st.floats(1, 3e5), st.integers(0, 10_000))
def test_a_journal_grows_as_the_sizing_says(rate: float, size: int) -> None:
    """`towline size` and doctor are one arithmetic."""
    load = Sized(rate=rate, payload_bytes=size, topic_bytes=1)
    (count,) = (one.amount for one in needs(load) if one.what == "gateways")
    (told,) = (one.amount for one in needs(load) if one.what == "writes of a gateway")
    assert told * 1e6 == pytest.approx(journal_bytes_s(rate / count, rate / count * (size + 1)))


NEED = Needed(heap=1 << 30, spark=10**9, gateways=120 * 10**6)


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (HostMemory(total=16 << 30, available=8 << 30), HOLDS),
        (HostMemory(total=16 << 30, available=1 << 30), WARNS),
        (HostMemory(total=2 << 30, available=2 << 30, grouped=True), WARNS),
        (HostMemory(total=16 << 30, available=8 << 30, commit=1 << 30), WARNS),
        (HostMemory(total=16 << 30, available=8 << 30, commit=8 << 30), HOLDS),
    ],
)
def test_memory(seen: HostMemory, verdict: Standing) -> None:
    found = only([*memory(NEED, seen)])
    assert (found.code, found.verdict) == ("TL-D47", verdict)
    assert ("cgroup" in found.because) == seen.grouped


def test_memory_that_can_not_be_read_is_no_row() -> None:
    assert [*memory(NEED, HostMemory(total=0, available=0))] == []


@pytest.mark.parametrize(
    ("text", "size"), [("2g", 2 << 30), ("512m", 512 << 20), ("1024", 1 << 30), ("1GB", 1 << 30), (None, 1 << 30)]
)
def test_sparks_memory_as_spark_reads_it(text: str | None, size: int) -> None:
    assert heap_bytes(text) == size


def test_cores_and_files() -> None:
    assert [*computing(2, None)] == []
    assert [*computing(2, LOAD, cluster=True)] == []
    assert only([*computing(2, LOAD)]).verdict is HOLDS
    assert only([*computing(2, LineLoad(200_000, 1, "--rate"))]).verdict is WARNS
    assert files((1024, 4096), 2).verdict is HOLDS
    assert files((-1, -1), 2).verdict is HOLDS
    assert files((256, 4096), 2).verdict is WARNS
    assert files((1024, 1024), 50).verdict is WARNS


def machine(root: Path, **files_: str) -> Path:
    """A part of proc and sys; a slash of a path is written as two underscores, a dot as `DOT`."""
    for name, text in files_.items():
        file = root / name.replace("__", "/").replace("DOT", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


MEMINFO = "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\nCommitLimit: 9000000 kB\nCommitted_AS: 4000000 kB\n"


def test_a_cgroup_of_version_2_limits(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="0::/a/b\n",
        sys__fs__cgroup__memoryDOTmax="max\n",
        sys__fs__cgroup__a__memoryDOTmax=str(4 << 30),
        sys__fs__cgroup__a__memoryDOTcurrent=str(1 << 30),
        sys__fs__cgroup__a__b__memoryDOTmax="max\n",
        sys__fs__cgroup__cpuDOTmax="50000 100000\n",
    )
    assert host_memory(root) == HostMemory(total=4 << 30, available=3 << 30, grouped=True)
    assert cores(root) == 0.5


def test_a_cgroup_of_version_1_limits(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="5:cpu:/\n4:memory:/docker/x\n0::/\n",
        sys__fs__cgroup__memory__memoryDOTlimit_in_bytes=str(2 << 30),  # a container sees its own as the topmost
        sys__fs__cgroup__memory__memoryDOTusage_in_bytes=str(1 << 30),
        proc__sys__vm__overcommit_memory="2\n",
    )
    seen = host_memory(root)
    assert (seen.total, seen.available, seen.grouped) == (2 << 30, 1 << 30, True)
    assert seen.commit == 5_000_000 * 1024


def test_a_machine_without_limits(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="4:memory:/\n",
        sys__fs__cgroup__memory__memoryDOTlimit_in_bytes="9223372036854771712",
        proc__sys__vm__overcommit_memory="0\n",
    )
    assert host_memory(root) == HostMemory(total=16_000_000 * 1024, available=8_000_000 * 1024)
    assert host_memory(tmp_path / "nothing").total == 0


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    seen = file_system(wanted)
    assert nearest(wanted) == tmp_path
    assert (seen.there, seen.mode, seen.own) == (tmp_path, None, True)
    assert seen.kind
    assert seen.mounted
    assert not wanted.exists()
