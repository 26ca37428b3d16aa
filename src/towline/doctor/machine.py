"""Checks of this machine: disk of the state directories, clock, memory, Java and PySpark.

Linux: statvfs(3), adjtimex(2), proc(5), cgroups of version 2. Facts that another system lacks are unknown [I19].
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

import psutil

from towline import files
from towline.bridge.config.model import Bridge, Uplink
from towline.bridge.config.tables import DEFAULT_BATCH_BYTES
from towline.bridge.lines.identity import removed_lines
from towline.doctor.inputs import PROBE_PREFIX, Inputs, LineLoad
from towline.doctor.table import BROKEN, HOLDS, LIMITED, UNKNOWN, WARNS, Check, Finding, bytes_text, fact, names_text
from towline.errors import SetupError
from towline.guarantee import AckAfter
from towline.spark.java import check_java
from towline.spark.session import check_pyspark, is_cluster
from towline.text import duration_text

#: File systems in memory, lost at a restart; and in a container layer, removed with the container.
_MEMORY_TYPES: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_LAYER_TYPES: Final = frozenset({"overlay", "aufs"})
#: Network file systems: sync and locks depend on the server.
_NETWORK_TYPES: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "virtiofs"}
)
#: File systems with a journal or copy-on-write: synced data and names survive a power failure.
_JOURNALING_TYPES: Final = frozenset({"ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "nilfs2"})
#: Sync probe: bytes per write, number of syncs, total time limit in seconds.
_SYNC_BYTES, _SYNC_COUNT, _SYNC_TIMEOUT_S = 4096, 100, 2.0
#: Shortest plausible sync; a controller cache with a battery needs some 20 us.
_FASTEST_SYNC_S: Final = 5e-6
#: Noticeably slow median and p99 of a sync: an acknowledgement waits for one, with QoS 2 for two.
_SLOW_SYNC_S, _VERY_SLOW_SYNC_S = 0.1, 1.0
#: Near limits of the room without Kafka: seconds, bytes if the load is unknown, and free inodes.
_NEAR_LIMIT_S, _NEAR_LIMIT_BYTES, _NEAR_LIMIT_INODES = 3600.0, 1e9, 10_000
_LOCAL_DISK: Final = "Set state_dir to a directory on a local disk."
#: Bytes on disk of a row beside topic, payload and properties, and of a chunk; most chunks a second
#: (docs/scaling.md#sizing).
_ROW_BYTES: Final = 75
_CHUNK_BYTES: Final = 1300
_CHUNKS_PER_S: Final = 330
_OTHER_DISK: Final = "Put state_dir on another disk; docs/scaling.md#sizing has the room that a load needs."
#: Bit of ``status`` in adjtimex(2): the clock is not synchronised.
_STA_UNSYNC: Final = 0x0040
_MB: Final = 1_000_000
#: Memory of bridge and driver Python, a gateway, a further line in Spark, the first line's Python workers, and of a
#: JVM beside its heap (docs/benchmarks.md).
_BRIDGE, _GATEWAY, _LINE, _WORKERS, _JVM_OVERHEAD = 222 * _MB, 120 * _MB, 111 * _MB, 450 * _MB, 400 * _MB
#: Default of spark.driver.memory.
_DEFAULT_HEAP_BYTES: Final = 1 << 30
_UNIT_BYTES: Final = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class FileSystem:
    """File system of a directory, which need not exist yet.

    Attributes:
        existing_dir: The directory, or its nearest existing parent.
        device: Number of the file system; directories on one share its free space.
        fs_type, mount_point: Linux type (``ext4``, ``nfs4``, ``tmpfs``) and mount point; empty if unknown.
        writable: This user may write to the directory, and its file system is not read-only.
        mode: Permission bits; None if the directory does not exist.
        free_bytes, free_inodes: Free bytes and inodes for this user; None if inodes are not counted.
    """

    existing_dir: Path
    device: int = 0
    fs_type: str = "ext4"
    mount_point: str = ""
    writable: bool = True
    mode: int | None = None
    free_bytes: int
    free_inodes: int | None = None


@dataclass(frozen=True)
class StateDir:
    """State directory of a line's gateway, with the limits of its journal and its load."""

    line: str
    directory: Path
    max_bytes: int | None = None
    min_free_bytes: int = 0
    load: LineLoad | None = None
    #: The journal stores messages while Kafka is down; with ``ack_after = "kafka"`` the broker's queue does.
    journal_grows: bool = True

    @property
    def growth_bytes_s(self) -> float:
        """Growth of the journal without Kafka, in bytes a second; 0 if the load is unknown."""
        if self.load is None:
            return 0.0
        rate = self.load.messages_s
        return self.load.bytes_s + rate * _ROW_BYTES + min(rate, _CHUNKS_PER_S) * _CHUNK_BYTES


def probe_file_system(directory: Path) -> FileSystem:
    """Return the file system of a directory without creating it; raises OSError if it can't be read."""
    existing_dir = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    stat, statvfs = existing_dir.stat(), os.statvfs(existing_dir)
    fs_type, mount_point = _find_mount(existing_dir)
    return FileSystem(
        existing_dir=existing_dir,
        device=stat.st_dev,
        fs_type=fs_type,
        mount_point=mount_point,
        writable=os.access(existing_dir, os.W_OK | os.X_OK),
        mode=stat.st_mode & 0o777 if existing_dir == directory else None,
        free_bytes=statvfs.f_bavail * statvfs.f_frsize,
        free_inodes=statvfs.f_favail if statvfs.f_files else None,
    )


def _find_mount(directory: Path) -> tuple[str, str]:
    """Return type and mount point of the file system of an existing directory; ("", "") if unknown."""
    path = directory.resolve()
    mount_point = str(next(parent for parent in (path, *path.parents) if parent.is_mount()))
    partitions = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    return (partitions[mount_point], mount_point) if mount_point in partitions else ("", "")


def measure_syncs(directory: Path, sync: Callable[[int], None] = os.fdatasync) -> list[float]:
    """Return the sorted durations in seconds of fdatasync after appended blocks, on an unnamed file if possible.

    Raises OSError if the file can't be written or synced; `sync` is injected in tests.
    """
    durations_s: list[float] = []
    started_at = time.perf_counter()
    with tempfile.TemporaryFile(prefix=f"{PROBE_PREFIX}-", dir=directory, buffering=0) as file:
        while len(durations_s) < _SYNC_COUNT and time.perf_counter() < started_at + _SYNC_TIMEOUT_S:
            file.write(bytes(_SYNC_BYTES))
            sync_started_at = time.perf_counter()
            sync(file.fileno())
            durations_s.append(time.perf_counter() - sync_started_at)
    return sorted(durations_s)


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return total and available bytes of memory, within the cgroups of this process."""
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    total, available = (int(meminfo[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        cgroups = (root / "proc/self/cgroup").read_text().splitlines()
        cgroup_line = next(line for line in cgroups if line.startswith("0::"))
        cgroup = root / "sys/fs/cgroup" / cgroup_line.removeprefix("0::").strip("/")
        for directory in (cgroup, *cgroup.parents):  # the lowest limit of this group and its parents counts
            file = directory / "memory.max"
            if file.exists() and (text := file.read_text().strip()) != "max":
                used_bytes = int((directory / "memory.current").read_text())
                total, available = min(total, int(text)), min(available, max(0, int(text) - used_bytes))
    return total, available


def clock_synchronised() -> bool | None:
    """Return whether NTP or PTP disciplines this machine's clock, by adjtimex(2); None if unknown."""
    buffer = ctypes.create_string_buffer(512)  # struct timex has at most 208 bytes
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
            return None
    except (OSError, AttributeError):
        return None
    # modes, then longs offset, freq, maxerror, esterror, then int status: modes is padded to a long.
    status_offset = 5 * ctypes.sizeof(ctypes.c_long)
    return not int.from_bytes(buffer.raw[status_offset : status_offset + 4], "little") & _STA_UNSYNC


class MachineProbe:
    """Probes of this machine for the lines of a bridge; each fact is probed once."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    @fact
    def file_systems(self) -> Sequence[Sequence[tuple[StateDir, FileSystem]]]:
        """State directories grouped by file system."""
        directories: dict[int, list[tuple[StateDir, FileSystem]]] = {}
        for state_dir in _state_dirs(self.inputs):
            file_system = probe_file_system(state_dir.directory)
            directories.setdefault(file_system.device, []).append((state_dir, file_system))
        return list(directories.values())

    memory = fact(lambda _machine: host_memory())
    clock_synchronised = fact(lambda _machine: clock_synchronised())


def _state_dirs(inputs: Inputs) -> Iterator[StateDir]:
    """Yield the state directories of a bridge on this machine."""
    for line in inputs.bridge.lines:
        load = inputs.loads.get(line.name) if isinstance(line, Uplink) else None
        for gateway in line.all_gateways or (line.gateway,):
            limits = gateway.journal if isinstance(line, Uplink) else gateway.outbox
            if limits is not None:
                grows = gateway.effective_ack_after is not AckAfter.KAFKA
                yield StateDir(line.name, gateway.state_dir, limits.max_bytes, limits.min_free_bytes, load, grows)


def _check_state_directories(machine: MachineProbe) -> Iterator[Finding]:
    """TL-D44: durability and permissions of the state directories."""
    for group in machine.file_systems:
        yield _state_directory_finding([state_dir for state_dir, _ in group], [file_system for _, file_system in group])
    errors = (line.error for line in removed_lines(machine.inputs.bridge))
    yield from (Finding(WARNS, error.problem, remedy=error.remedy) for error in errors)


def _state_directory_finding(state_dirs: Sequence[StateDir], file_systems: Sequence[FileSystem]) -> Finding:
    fs, fs_type, loss = file_systems[0], file_systems[0].fs_type, "messages, checkpoint and identity are lost"
    location = f"{fs.existing_dir} is on {fs_type or 'an unknown file system'}, mounted at {fs.mount_point or '?'}"
    unwritable_dirs = ", ".join(str(fs.existing_dir) for fs in file_systems if not fs.writable)
    shared_dirs = ", ".join(str(fs.existing_dir) for fs in file_systems if fs.mode is not None and fs.mode & 0o022)
    start_limit, power_loss = "now: no line starts", "the power fails: synced names and contents may be lost"
    network = "the server or the network fails: syncs and locks are not those of a local disk"
    volume, intruder = "Mount a volume, and set state_dir to it.", "another user of this machine writes there"
    faults = (
        (unwritable_dirs, BROKEN, f"this user may not write in {unwritable_dirs}", start_limit, _LOCAL_DISK),
        (fs_type in _MEMORY_TYPES, BROKEN, f"{location}, in memory", f"this machine restarts: {loss}", _LOCAL_DISK),
        (fs_type in _LAYER_TYPES, WARNS, f"{location}, a container layer", f"the container is removed: {loss}", volume),
        (fs_type in _NETWORK_TYPES or fs_type.startswith("fuse."), WARNS, f"{location}, remote", network, _LOCAL_DISK),
        (not fs_type, UNKNOWN, location, "", f"Check it with df -T. {_LOCAL_DISK}"),
        (fs_type not in _JOURNALING_TYPES, WARNS, f"{location}, an untested type", power_loss, _LOCAL_DISK),
        (shared_dirs, WARNS, f"others may write in {shared_dirs}", intruder, f"chmod 700 {shared_dirs}"),
    )
    default = Finding(HOLDS, f"{location}, for {names_text(state_dir.line for state_dir in state_dirs)}")
    return next((Finding(fault[1], *fault[2:]) for fault in faults if fault[0]), default)


def _check_room(machine: MachineProbe) -> Iterator[Finding]:
    """TL-D43: time that the journals can store incoming messages without Kafka."""
    for group in machine.file_systems:
        yield _room_finding([state_dir for state_dir, _ in group], group[0][1])


def _room_finding(state_dirs: Sequence[StateDir], fs: FileSystem) -> Finding:
    min_free_bytes = max(state_dir.min_free_bytes for state_dir in state_dirs)
    usable_bytes, location = fs.free_bytes - min_free_bytes, fs.mount_point or str(fs.existing_dir)
    evidence = f"{bytes_text(fs.free_bytes)} free on {location}"
    evidence += f", {bytes_text(min_free_bytes)} of it stay free (min_free_bytes)" if min_free_bytes else ""
    remedy = "Make room, raise max_bytes of [uplink.journal], or put state_dir on a larger disk."
    stop_text = "intake then stops, and the broker has to queue (TL-J02)"
    if fs.free_inodes is not None and fs.free_inodes < _NEAR_LIMIT_INODES:
        verdict, evidence = WARNS if fs.free_inodes else BROKEN, f"{fs.free_inodes:,} inodes free on {location}"
        return Finding(verdict, evidence, "no file can be created there", remedy)
    if usable_bytes <= 0:
        return Finding(BROKEN, evidence, f"now: {stop_text}", "Make room, or lower min_free_bytes.")
    if kafka_acked_lines := names_text(state_dir.line for state_dir in state_dirs if not state_dir.journal_grows):
        evidence += f'; messages of {kafka_acked_lines} wait in the broker (ack_after = "kafka")'
    if not (state_dirs := [state_dir for state_dir in state_dirs if state_dir.journal_grows]):
        return Finding(LIMITED, evidence, "Kafka is down: intake stops, and the broker has to queue (TL-D05)")
    limited_dirs = [state_dir for state_dir in state_dirs if state_dir.max_bytes is not None]
    evidence += "".join(f"; max_bytes = {state_dir.max_bytes:,} of {state_dir.line}" for state_dir in limited_dirs)
    growth_bytes_s = sum(state_dir.growth_bytes_s for state_dir in state_dirs)
    if not growth_bytes_s:
        max_bytes = min([usable_bytes, *(state_dir.max_bytes or usable_bytes for state_dir in limited_dirs)])
        is_near = max_bytes < _NEAR_LIMIT_BYTES
        limit = f"{bytes_text(max_bytes)} wait: {stop_text}"
    else:
        limits = [(state_dir.max_bytes, state_dir.growth_bytes_s) for state_dir in limited_dirs]
        fill_times_s = [max_bytes / growth for max_bytes, growth in limits if growth and max_bytes]
        time_left_s = min([usable_bytes / growth_bytes_s, *fill_times_s])
        is_near = time_left_s < _NEAR_LIMIT_S
        rate = sum(state_dir.load.messages_s for state_dir in state_dirs if state_dir.load)
        evidence += f"; {rate:,.0f} msg/s write {bytes_text(growth_bytes_s)}/s"
        limit = f"Kafka is down for {duration_text(time_left_s)}: {stop_text}"
    return Finding(WARNS if is_near else LIMITED, evidence, limit, remedy if is_near else "")


def _check_syncs(machine: MachineProbe) -> Iterator[Finding]:
    """TL-D42: duration of a disk sync, which each acknowledgement waits for."""
    for group in machine.file_systems:
        fs = group[0][1]
        if fs.writable and fs.free_bytes > 0:
            try:
                durations_s = measure_syncs(fs.existing_dir)
            except OSError as error:
                evidence = f"a file in {fs.existing_dir} could not be synced: {files.os_error_text(error)}"
                yield Finding(BROKEN, evidence, "now: nothing can be acknowledged", _OTHER_DISK)
            else:
                yield _sync_finding(durations_s, fs.fs_type)


def _sync_finding(durations_s: Sequence[float], fs_type: str) -> Finding:
    median_s, p99_s = durations_s[len(durations_s) // 2], durations_s[len(durations_s) * 99 // 100]
    count = len(durations_s)
    evidence = f"fdatasync took {median_s * 1000:.3g} ms, 99 % within {p99_s * 1000:.3g} ms ({count} on {fs_type})"
    if median_s < _FASTEST_SYNC_S:
        remedy = "Is the disk of a virtual machine set to cache=unsafe, or libeatmydata loaded? Enable real syncs."
        evidence += ": no disk is so fast, so nothing is really synced"
        return Finding(WARNS, evidence, "the power fails: acknowledged messages may be lost", remedy)
    if median_s >= _SLOW_SYNC_S or p99_s >= _VERY_SLOW_SYNC_S:
        return Finding(WARNS, evidence, "a message is acknowledged after a sync, with QoS 2 after two", _OTHER_DISK)
    return Finding(HOLDS, evidence)


def _check_clock(machine: MachineProbe) -> Iterator[Finding]:
    """TL-D46: clock of this machine: Kafka refuses or deletes early a record whose time differs much from its own."""
    servers = str(machine.inputs.bridge.kafka.client_settings()["bootstrap.servers"]).split(",")
    if all(server.strip().startswith(("127.", "localhost:", "[::1]:")) for server in servers):
        yield Finding(HOLDS, "Kafka is on this machine: one clock for both")
    elif machine.clock_synchronised is None:
        remedy = "Check it with timedatectl."
        yield Finding(UNKNOWN, "whether this clock is synchronised is unknown (adjtimex)", remedy=remedy)
    elif machine.clock_synchronised:
        yield Finding(HOLDS, "this machine's clock is synchronised; those of the brokers are not compared")
    else:
        limit = "it drifts, by seconds a day, from Kafka's: the time of a record is this machine's"
        remedy = "Enable NTP: timedatectl set-ntp true, or chrony."
        yield Finding(WARNS, "nothing synchronises this machine's clock (adjtimex: STA_UNSYNC)", limit, remedy)


def _check_memory(machine: MachineProbe) -> Iterator[Finding]:
    """TL-D47: memory against the needs of Spark, its workers and the gateways."""
    (total, available), (heap, spark, gateways) = machine.memory, _needed_memory(machine.inputs.bridge)
    needed_bytes = heap + spark + gateways + _BRIDGE
    evidence = f"there are {bytes_text(total)} of memory, {bytes_text(available)} available; the bridge needs some "
    evidence += f"{bytes_text(needed_bytes)}: {bytes_text(heap)} heap of Spark, {bytes_text(spark)} beside it, "
    evidence += f"{bytes_text(gateways)} gateways"
    if needed_bytes <= available:
        yield Finding(HOLDS, evidence)
        return
    limit = "other processes keep their memory: OOM kill of one"
    if needed_bytes > total:
        limit = "Spark is under load: OOM kill, restart loop"
    remedy = "Lower spark.driver.memory in [spark.conf] or max_bytes_per_trigger, or add memory."
    yield Finding(WARNS, evidence, limit, remedy)


def _needed_memory(bridge: Bridge) -> tuple[int, int, int]:
    """Return the bytes needed here: Spark heap, other memory of Spark, gateways."""
    gateway_count = sum(len(line.all_gateways) for line in bridge.lines)
    # A batch may be in memory twice before the sink; the measured figures include one of 64 MiB.
    batch_bytes = sum(2 * max(0, line.max_bytes_per_trigger - DEFAULT_BATCH_BYTES) for line in bridge.uplinks)
    spark_bytes = _WORKERS + _LINE * (len(bridge.lines) - 1) + batch_bytes
    if is_cluster(bridge.spark.master):
        spark_bytes = 0
    # ``2g``, ``512m``; a number alone is MiB [Spark: JavaUtils.byteStringAsMb].
    heap_text = str(bridge.spark.conf.get("spark.driver.memory") or "").lower()
    match = re.fullmatch(r"\s*(\d+)\s*([kmgt]?)b?\s*", heap_text)
    heap_bytes = int(match[1]) * _UNIT_BYTES[match[2] or "m"] if match else _DEFAULT_HEAP_BYTES
    return heap_bytes, _JVM_OVERHEAD + spark_bytes, _GATEWAY * gateway_count


def _check_spark(_machine: MachineProbe) -> Iterator[Finding]:
    """TL-D49: a tested PySpark, and a Java that it runs on."""
    try:
        version, is_tested = check_pyspark()
        check_java()
    except SetupError as error:
        yield Finding(BROKEN, error.problem, "now: no line starts", error.remedy)
        return
    if is_tested:
        yield Finding(HOLDS, f"PySpark is {version}, and finds a Java that it runs on")
    else:
        evidence = f"PySpark is {version}; Towline was not tested with it"
        remedy = 'Install a tested version: pip install "towline[spark]"'
        yield Finding(WARNS, evidence, "a change in PySpark breaks Towline", remedy)


CHECKS: Final = (
    Check("TL-D44", "state directory", _check_state_directories),
    Check("TL-D43", "room without Kafka", _check_room),
    Check("TL-D42", "durable writes", _check_syncs),
    Check("TL-D46", "clock", _check_clock),
    Check("TL-D47", "memory", _check_memory),
    Check("TL-D49", "Java and PySpark", _check_spark),
)
