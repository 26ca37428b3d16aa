"""The checks of this machine: the disk under a bridge, its clock, memory, Java and PySpark.

Linux: statvfs(3), adjtimex(2), proc(5), cgroups of version 2. What another system lacks is told to be unknown [I19].
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from towline import files
from towline.bridge.config.model import Bridge, Line
from towline.bridge.config.tables import BATCH_BYTES
from towline.bridge.lines.identity import left_lines
from towline.bridge.runtime.session import check_java
from towline.doctor.case import PROBE, Case, LineLoad
from towline.doctor.table import BROKEN, HOLDS, LIMITED, UNKNOWN, WARNS, Answer, Check, Standing, fact, named, sized
from towline.errors import SetupError
from towline.guarantee import AckAfter
from towline.sizing import journal_bytes_s
from towline.spark.session import check_pyspark
from towline.text import span

#: File systems in memory: gone with the machine. Of a container: removed with it.
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_LAYERED: Final = frozenset({"overlay", "aufs"})
#: On another machine: a sync is an answer of that one, and locks are its own.
_REMOTE: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "virtiofs"}
)
#: With a journal or copy-on-write: what was synced survives a power failure, names too.
_LOCAL: Final = frozenset({"ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "nilfs2"})
#: What is written before each sync, how often, and no longer in all than.
_SYNC_BYTES, _SYNCS, _SYNC_S = 4096, 100, 2.0
#: No disk makes a block durable in less; a cache of a controller with a battery needs some 20 us.
_IMPOSSIBLE_S: Final = 5e-6
#: A sync this slow can be felt: a message is acknowledged after one, with QoS 2 after two.
_SLOW_S, _VERY_SLOW_S = 0.1, 1.0
#: Less than this to go on without Kafka is a near limit; where no rate is known, in bytes; and so few files.
_LEAST_S, _LEAST_BYTES, _INODES = 3600.0, 1e9, 10_000
_LOCAL_DISK: Final = "Name a directory on a local disk in state_dir."
_ANOTHER: Final = "Put state_dir on another disk; towline size says what a load needs."
#: Of ``status`` of adjtimex(2): nothing disciplines the clock.
_STA_UNSYNC: Final = 0x0040
_MB: Final = 1_000_000
#: Of the bridge and the driver's Python, of a gateway, of a further line in Spark, of the Python workers of the first,
#: of a JVM beside its heap (docs/benchmarks.md).
_BRIDGE, _GATEWAY, _LINE, _WORKERS, _BESIDE_HEAP = 222 * _MB, 120 * _MB, 111 * _MB, 450 * _MB, 400 * _MB
_TRIED: Final = 'Take one that it is tried with: pip install "towline[spark]"'
#: Spark's spark.driver.memory where none is set.
_HEAP: Final = 1 << 30
_UNITS: Final = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class FileSystem:
    """Where a directory is, or will be.

    Attributes:
        there: The nearest directory above it that exists, or itself.
        device: Number of the file system; two directories with one share its room.
        kind, mounted: As Linux names it (``ext4``, ``nfs4``, ``tmpfs``), and where; empty where it can't be told.
        read_only, writable: Nothing can be written at all; this user may write here.
        mode: Permission bits; None where the directory is not there yet.
        free, inodes: Bytes and files that may still be made; None for files that are not counted.
    """

    there: Path
    device: int = 0
    kind: str = "ext4"
    mounted: str = ""
    read_only: bool = False
    writable: bool = True
    mode: int | None = None
    free: int
    inodes: int | None = None


@dataclass(frozen=True)
class Spot:
    """What a line has on this machine: its state directory, bytes of its journal at most and left free, its load."""

    line: str
    directory: Path
    max_bytes: int | None = None
    min_free: int = 0
    load: LineLoad | None = None
    #: Its journal takes what comes while Kafka is away; with ``ack_after = "kafka"`` the broker's queue does.
    grows: bool = True

    @property
    def written_s(self) -> float:
        """Bytes a second that the journal grows by while Kafka is away; 0 where it is not known."""
        return 0.0 if self.load is None else journal_bytes_s(self.load.messages_s, self.load.bytes_s)


def file_system(directory: Path) -> FileSystem:
    """Look at the place of a directory, without making it; raises OSError where it can't be."""
    there = next(one for one in (directory, *directory.parents) if one.is_dir())
    stat, room = there.stat(), os.statvfs(there)
    kind, mounted = _mount(stat.st_dev)
    return FileSystem(
        there=there,
        device=stat.st_dev,
        kind=kind,
        mounted=mounted,
        read_only=bool(room.f_flag & os.ST_RDONLY),
        writable=os.access(there, os.W_OK | os.X_OK),
        mode=stat.st_mode & 0o777 if there == directory else None,
        free=room.f_bavail * room.f_frsize,
        inodes=room.f_favail if room.f_files else None,
    )


def _mount(device: int) -> tuple[str, str]:
    """Kind and place of a mounted file system, proc(5) ``mountinfo``; the last of two on one place counts."""
    found = ("", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            front, _, back = line.partition(" - ")
            fields = front.split(" ")
            if len(fields) > 4 and fields[2] == f"{os.major(device)}:{os.minor(device)}" and back:
                found = (back.split(" ")[0], fields[4].replace("\\040", " "))
    return found


def syncs(directory: Path, sync: Callable[[int], None] = os.fdatasync) -> list[float]:
    """Seconds that fdatasync took after each of some appended blocks, sorted; the file has no name, where Linux can.

    Raises OSError where the file can't be written or synced; `sync` is injected in tests.
    """
    times: list[float] = []
    begun = time.perf_counter()
    with tempfile.TemporaryFile(prefix=f"{PROBE}-", dir=directory, buffering=0) as file:
        while len(times) < _SYNCS and time.perf_counter() < begun + _SYNC_S:
            file.write(bytes(_SYNC_BYTES))
            before = time.perf_counter()
            sync(file.fileno())
            times.append(time.perf_counter() - before)
    return sorted(times)


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Bytes of memory of this machine within the cgroups of this process: in all, and to be had without swapping."""
    told = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    total, available = (int(told[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        group = next(one for one in (root / "proc/self/cgroup").read_text().splitlines() if one.startswith("0::"))
        place = root / "sys/fs/cgroup" / group.removeprefix("0::").strip("/")
        for one in (place, *place.parents):  # the tightest limit counts, of this group or one above it
            if (one / "memory.max").exists() and (text := (one / "memory.max").read_text().strip()) != "max":
                used = int((one / "memory.current").read_text())
                total, available = min(total, int(text)), min(available, max(0, int(text) - used))
    return total, available


def synchronised() -> bool | None:
    """Whether something disciplines this machine's clock (NTP, PTP), by adjtimex(2); None where it can't be told."""
    buffer = ctypes.create_string_buffer(512)  # struct timex has 208 bytes at most
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
            return None
    except (OSError, AttributeError):
        return None
    # modes, then longs offset, freq, maxerror, esterror, then int status: modes is padded to a long.
    place = 5 * ctypes.sizeof(ctypes.c_long)
    return not int.from_bytes(buffer.raw[place : place + 4], "little") & _STA_UNSYNC


class ThisMachine:
    """This machine, as the lines of a bridge use it, with their load; each fact is asked for once."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @fact
    def places(self) -> Sequence[Sequence[tuple[Spot, FileSystem]]]:
        """What the lines have on each file system."""
        found: dict[int, list[tuple[Spot, FileSystem]]] = {}
        for spot in _spots(self.case):
            seen = file_system(spot.directory)
            found.setdefault(seen.device, []).append((spot, seen))
        return list(found.values())

    memory = fact(lambda _machine: host_memory())
    synchronised = fact(lambda _machine: synchronised())


def _spots(case: Case) -> Iterator[Spot]:
    """What the lines of a bridge have on this machine."""
    for line in case.bridge.lines:
        for one in line.each_gateway or (line.gateway,):
            load, limits = (case.loads.get(line.name), one.journal) if isinstance(line, Line) else (None, one.outbox)
            if limits is not None:
                grows = one.acks is not AckAfter.KAFKA
                yield Spot(line.name, one.state_dir, limits.max_bytes, limits.min_free_bytes, load, grows)


def _sound(machine: ThisMachine) -> Iterator[Answer]:
    """TL-D44: whether what is synced in a state directory survives, and whether it is ours alone."""
    for place in machine.places:
        yield _kept([spot for spot, _ in place], [seen for _, seen in place])
    yield from (Answer(WARNS, one.error.what, mend=one.error.do) for one in left_lines(machine.case.bridge))


def _kept(spots: Sequence[Spot], seen: Sequence[FileSystem]) -> Answer:
    first, kind, gone = seen[0], seen[0].kind, "messages, checkpoint and identity are gone then"
    where = f"{first.there} is on {kind or 'a file system of unknown kind'}, mounted at {first.mounted or '?'}"
    denied = ", ".join(str(one.there) for one in seen if not one.writable)
    shared = ", ".join(str(one.there) for one in seen if one.mode is not None and one.mode & 0o022)
    start, power = "now: no line starts", "the power fails: names and contents that were synced may be gone"
    remote = "another machine, or the way to it, keeps neither a sync nor a lock as a local disk does"
    volume, another = "Mount a volume, and name it in state_dir.", "another user of this machine puts something there"
    faults: tuple[tuple[object, Standing, str, str, str], ...] = (
        (first.read_only, BROKEN, f"{where}, read-only", start, _LOCAL_DISK),
        (denied, BROKEN, f"this user may not write in {denied}", start, _LOCAL_DISK),
        (kind in _IN_MEMORY, BROKEN, f"{where}, which is memory", f"this machine restarts: {gone}", _LOCAL_DISK),
        (kind in _LAYERED, WARNS, f"{where}, the layer of a container", f"the container is removed: {gone}", volume),
        (kind in _REMOTE or kind.startswith("fuse."), WARNS, f"{where}, over the network", remote, _LOCAL_DISK),
        (not kind, UNKNOWN, where, "", f"Look at it with df -T. {_LOCAL_DISK}"),
        (kind not in _LOCAL, WARNS, f"{where}, which has no journal that Towline is proved on", power, _LOCAL_DISK),
        (shared, WARNS, f"others may write in {shared}", another, f"chmod 700 {shared}"),
    )
    well = Answer(HOLDS, f"{where}, for {named(spot.line for spot in spots)}")
    return next((Answer(one[1], *one[2:]) for one in faults if one[0]), well)


def _room(machine: ThisMachine) -> Iterator[Answer]:
    """TL-D43: how long the journals can take what comes while Kafka is away."""
    for place in machine.places:
        yield _room_of([spot for spot, _ in place], place[0][1])


def _room_of(spots: Sequence[Spot], seen: FileSystem) -> Answer:
    least = max(spot.min_free for spot in spots)
    usable, where = seen.free - least, seen.mounted or str(seen.there)
    fact_ = f"{sized(seen.free)} free on {where}{f', {sized(least)} of it stay free (min_free_bytes)' if least else ''}"
    mend = "Make room, raise max_bytes of [uplink.journal], or put state_dir on a larger disk."
    stops = "intake then stops, and the broker's queue has to hold (TL-J02)"
    if seen.inodes is not None and seen.inodes < _INODES:
        because = f"{seen.inodes:,} inodes free on {where}"
        return Answer(WARNS if seen.inodes else BROKEN, because, "no file can be made there", mend)
    if usable <= 0:
        return Answer(BROKEN, fact_, f"now: {stops}", "Make room, or lower min_free_bytes.")
    if held := named(spot.line for spot in spots if not spot.grows):
        fact_ += f'; what comes to {held} waits in the broker (ack_after = "kafka")'
    if not (spots := [spot for spot in spots if spot.grows]):
        return Answer(LIMITED, fact_, "Kafka is away: intake stops, and the broker's queue has to hold (TL-D05)")
    limited = [spot for spot in spots if spot.max_bytes is not None]
    fact_ += "".join(f"; max_bytes = {spot.max_bytes:,} of {spot.line}" for spot in limited)
    written = sum(spot.written_s for spot in spots)
    if not written:
        most = min([usable, *(spot.max_bytes or usable for spot in limited)])
        near = most < _LEAST_BYTES
        until = f"{sized(most)} wait: {stops}"
    else:
        times = [spot.max_bytes / spot.written_s for spot in limited if spot.written_s and spot.max_bytes]
        seconds = min([usable / written, *times])
        near = seconds < _LEAST_S
        rate = sum(spot.load.messages_s for spot in spots if spot.load)
        fact_ += f"; {rate:,.0f} msg/s write {sized(written)}/s"
        until = f"Kafka is away for {span(seconds)}: {stops}"
    return Answer(WARNS if near else LIMITED, fact_, until, mend if near else "")


def _durable(machine: ThisMachine) -> Iterator[Answer]:
    """TL-D42: what a sync takes, for which every acknowledgement waits."""
    for place in machine.places:
        seen = place[0][1]
        if seen.writable and not seen.read_only and seen.free > 0:
            try:
                times = syncs(seen.there)
            except OSError as error:
                because = f"a file in {seen.there} could not be made durable: {files.why(error)}"
                yield Answer(BROKEN, because, "now: nothing can be acknowledged", _ANOTHER)
            else:
                yield _synced(times, seen.kind)


def _synced(times: Sequence[float], kind: str) -> Answer:
    typical, slow = times[len(times) // 2], times[len(times) * 99 // 100]
    because = f"fdatasync took {typical * 1000:.3g} ms, 99 % within {slow * 1000:.3g} ms ({len(times)} on {kind})"
    if typical < _IMPOSSIBLE_S:
        mend = "Is the disk of a virtual machine set to cache=unsafe, or libeatmydata loaded? Let syncs be made."
        because += ": no disk is as fast, so nothing is made durable"
        return Answer(WARNS, because, "the power fails: what was acknowledged may be gone", mend)
    if typical >= _SLOW_S or slow >= _VERY_SLOW_S:
        return Answer(WARNS, because, "a message is acknowledged after a sync, with QoS 2 after two", _ANOTHER)
    return Answer(HOLDS, because)


def _clock(machine: ThisMachine) -> Iterator[Answer]:
    """TL-D46: a record has this machine's time, and Kafka refuses, or deletes early, one that is far from its own."""
    servers = str(machine.case.bridge.kafka.client()["bootstrap.servers"]).split(",")
    if all(one.strip().startswith(("127.", "localhost:", "[::1]:")) for one in servers):
        yield Answer(HOLDS, "Kafka is on this machine: one clock for both")
    elif machine.synchronised is None:
        mend = "Look at it with timedatectl."
        yield Answer(UNKNOWN, "whether something synchronises this clock can't be told (adjtimex)", mend=mend)
    elif machine.synchronised:
        yield Answer(HOLDS, "this machine's clock is synchronised; those of the brokers are not compared")
    else:
        until = "it drifts, by seconds a day, from Kafka's: the time of a record is this machine's"
        mend = "Let it be synchronised: timedatectl set-ntp true, or chrony."
        yield Answer(WARNS, "nothing synchronises this machine's clock (adjtimex: STA_UNSYNC)", until, mend)


def _memory(machine: ThisMachine) -> Iterator[Answer]:
    """TL-D47: memory against what Spark, its workers and the gateways take."""
    (total, available), (heap, spark, gateways) = machine.memory, _needed(machine.case.bridge)
    need = heap + spark + gateways + _BRIDGE
    because = f"there are {sized(total)} of memory, {sized(available)} available; the bridge needs some {sized(need)}: "
    because += f"{sized(heap)} heap of Spark, {sized(spark)} beside it, {sized(gateways)} gateways"
    if need <= available:
        yield Answer(HOLDS, because)
        return
    until = "other processes keep what they have: the kernel then ends one"
    if need > total:
        until = "Spark is busy: the kernel then ends a process, and the line begins again and again"
    mend = "Lower spark.driver.memory in [spark.conf] or max_bytes_per_trigger, or take more memory."
    yield Answer(WARNS, because, until, mend)


def _needed(bridge: Bridge) -> tuple[int, int, int]:
    """Bytes that a bridge needs here: Spark's heap, what Spark takes beside it, gateways."""
    from towline.spark.session import is_cluster  # noqa: PLC0415 - where there is no PySpark, one row says so

    own = sum(len(line.each_gateway) for line in bridge.lines)
    # A whole batch may be in memory twice on its way to the sink; the measured figures have one of 64 MiB.
    batches = sum(2 * max(0, line.max_bytes_per_trigger - BATCH_BYTES) for line in bridge.uplinks)
    here = 0 if is_cluster(bridge.spark.master) else _WORKERS + _LINE * (len(bridge.lines) - 1) + batches
    # ``2g``, ``512m``; a number alone is MiB [Spark: JavaUtils.byteStringAsMb].
    text = str(bridge.spark.conf.get("spark.driver.memory") or "").lower()
    found = re.fullmatch(r"\s*(\d+)\s*([kmgt]?)b?\s*", text)
    heap = int(found[1]) * _UNITS[found[2] or "m"] if found else _HEAP
    return heap, _BESIDE_HEAP + here, _GATEWAY * own


def _spark(_machine: ThisMachine) -> Iterator[Answer]:
    """TL-D49: a PySpark and a Java that it runs on, as Spark looks for them."""
    try:
        version, tried = check_pyspark()
        check_java(version=True)
    except SetupError as error:
        yield Answer(BROKEN, error.what, "now: no line starts", error.do)
        return
    untried = Answer(
        WARNS, f"PySpark is {version}; Towline was not tried with it", "something has changed in it", _TRIED
    )
    yield Answer(HOLDS, f"PySpark is {version}, and finds a Java that it runs on") if tried else untried


CHECKS: Final = (
    Check("TL-D44", "state directory", _sound),
    Check("TL-D43", "room without Kafka", _room),
    Check("TL-D42", "durable writes", _durable),
    Check("TL-D46", "clock", _clock),
    Check("TL-D47", "memory", _memory),
    Check("TL-D49", "Java and PySpark", _spark),
)
