"""The examiner of the disk under a bridge: where the journals and checkpoints of its lines are, or will be.

What is judged is pure; `towline.doctor.host` reads. In the directory, or the nearest above it that exists, one file is
written, made durable a hundred times, and removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from towline import files
from towline.bridge.config.model import Line
from towline.doctor import host
from towline.doctor.findings import DoctorQuestion, Finding, Standing
from towline.doctor.kafka.flaws import days, named, sized
from towline.sizing import journal_bytes_s

if TYPE_CHECKING:
    from pathlib import Path

    from towline.bridge.config.model import DownLine
    from towline.doctor.case import Case, LineLoad
    from towline.doctor.host import FileSystem, Syncs
    from towline.gateway.settings import GatewaySettings

__all__ = ["Spot", "durable", "examine", "kept_apart", "room", "sound", "spots"]

#: File systems in memory: gone with the machine.
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
#: Those of a container, removed with it.
_LAYERED: Final = frozenset({"overlay", "aufs"})
#: On another machine: a sync is an answer of that one, and locks are its own.
_REMOTE: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "virtiofs"}
)
#: With a journal or copy-on-write: what was synced survives a power failure, names too.
_LOCAL: Final = frozenset({"ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "nilfs2"})
#: No disk makes a block durable in less; a cache of a controller with a battery needs some 20 us.
_IMPOSSIBLE_S: Final = 5e-6
#: A sync this slow can be felt: a message is acknowledged after one, with QoS 2 after two.
_SLOW_S, _VERY_SLOW_S = 0.1, 1.0
#: Share of what the window lets through that a load may use, so that there is something left after an outage.
_USED: Final = 0.5
#: Messages a second that a gateway drains at best (`towline.sizing`): a limit above it is none.
_PLENTY_S: Final = 300_000
#: Less than this to go on without Kafka is a near limit; where no rate is known, in bytes.
_LEAST_S: Final = 3600.0
_LEAST_BYTES: Final = 1e9
#: What Spark's checkpoint and scratch of a line want when a journal has taken all it may.
_CHECKPOINT_BYTES: Final = 64 << 20
_INODES: Final = 10_000
_LOCAL_DISK: Final = "Name a directory on a local disk in state_dir."
_STATE: Final = DoctorQuestion("TL-D44", "state directory")
_ROOM: Final = DoctorQuestion("TL-D43", "room without Kafka")
_SYNCS: Final = DoctorQuestion("TL-D42", "durable writes")


@dataclass(frozen=True)
class Spot:
    """What a line has on this machine's disks.

    Attributes:
        line: Its name.
        directory: Its state directory, which has the checkpoint too.
        journal: Whether messages wait here.
        max_bytes: Most bytes of the journal; None for what the disk has.
        min_free: Bytes that the journal leaves free.
        window: Messages that may be on the way from the broker without an answer; 0 for a line that sends.
        syncs: How often a message is made durable before its last answer: 2 with QoS 2.
        load: What comes in; None where it is not known.
    """

    line: str
    directory: Path
    journal: bool = True
    max_bytes: int | None = None
    min_free: int = 0
    window: int = 0
    syncs: int = 1
    load: LineLoad | None = None

    @property
    def written_s(self) -> float:
        """Bytes a second that the journal grows by while Kafka is away; 0 where it is not known."""
        return 0.0 if self.load is None else journal_bytes_s(self.load.messages_s, self.load.bytes_s)


def spots(case: Case) -> list[Spot]:
    """What the lines of a bridge have on this machine."""
    return [spot for line in case.bridge.lines for spot in _of_line(line, case.load_of(line.name))]


def _of_line(line: Line | DownLine, load: LineLoad | None) -> Iterator[Spot]:
    each = line.each_gateway
    if not each:
        yield Spot(line.name, line.gateway.state_dir, journal=False)
        return
    for settings in each:
        yield _spot(line, settings, load)


def _spot(line: Line | DownLine, settings: GatewaySettings, load: LineLoad | None) -> Spot:
    if isinstance(line, Line):
        twice = any(one.qos == 2 for one in settings.subscriptions)
        limits = settings.journal
        return Spot(
            line.name,
            settings.state_dir,
            max_bytes=limits.max_bytes,
            min_free=limits.min_free_bytes,
            window=settings.window,
            syncs=2 if twice else 1,
            load=load,
        )
    outbox = settings.outbox
    assert outbox is not None
    return Spot(line.name, settings.state_dir, max_bytes=outbox.max_bytes, min_free=outbox.min_free_bytes)


def examine(
    case: Case,
    sync: Callable[[Path], Syncs] = host.syncs,
    look: Callable[[Path], FileSystem] = host.file_system,
) -> Iterator[Finding]:
    """Look at every file system that a line uses (`towline.doctor.case.Examiner`).

    Args:
        case: Whose disks.
        sync: Measures a directory. Injected in tests.
        look: Looks at a directory. Injected in tests.
    """
    places: dict[int, list[tuple[Spot, FileSystem]]] = {}
    for spot in spots(case):
        try:
            seen = look(spot.directory)
        except OSError as error:
            yield _lost(spot, files.why(error))
            continue
        places.setdefault(seen.device, []).append((spot, seen))
    for found in places.values():
        yield from _examined(found, sync)


def _examined(found: Sequence[tuple[Spot, FileSystem]], sync: Callable[[Path], Syncs]) -> Iterator[Finding]:
    """One file system."""
    some = [spot for spot, _ in found]
    seen = found[0][1]
    kept = [*sound(some, [one for _, one in found])]
    yield from kept
    usable = not any(one.verdict is Standing.BROKEN for one in kept)
    yield from room(some, seen)
    yield from kept_apart(some)
    if usable and seen.free > 0:
        yield durable(some, seen, sync(seen.there))


def _lost(spot: Spot, why: str) -> Finding:
    because = f"{spot.directory} can't be looked at: {why}"
    return _STATE.answer(Standing.BROKEN, because, "now: the line does not start", _LOCAL_DISK, line=spot.line)


def sound(some: Sequence[Spot], seen: Sequence[FileSystem]) -> Iterator[Finding]:
    """TL-D44: whether what is synced there survives, and whether it is ours alone."""
    first = seen[0]
    lines = named(spot.line for spot in some)
    where = f"{first.there} is on {first.kind or 'a file system of unknown kind'}, mounted at {first.mounted or '?'}"
    kept = "messages, checkpoint and identity" if any(spot.journal for spot in some) else "checkpoint and identity"
    row = _STATE.answer

    if first.read_only:
        yield row(Standing.BROKEN, f"{where}, read-only", "now: no line starts", _LOCAL_DISK)
    elif not all(one.writable for one in seen):
        denied = next(one.there for one in seen if not one.writable)
        yield row(Standing.BROKEN, f"this user may not write in {denied}", "now: the line does not start", _LOCAL_DISK)
    elif first.kind in _IN_MEMORY:
        until = f"this machine restarts or loses power: {kept} are gone then"
        yield row(Standing.BROKEN, f"{where}, which is memory", until, _LOCAL_DISK)
    elif first.kind in _LAYERED:
        until = f"the container is removed: {kept} are gone then"
        yield row(
            Standing.WARNS, f"{where}, the layer of a container", until, "Mount a volume, and name it in state_dir."
        )
    elif first.kind in _REMOTE or first.kind.startswith("fuse."):
        until = "another machine, or the way to it, keeps neither a sync nor a lock as a local disk does"
        yield row(Standing.WARNS, f"{where}, over the network", until, _LOCAL_DISK)
    elif not first.kind:
        yield row(Standing.UNKNOWN, where, mend=f"Look at it with df -T. {_LOCAL_DISK}")
    elif first.kind not in _LOCAL:
        until = "the power fails: names and contents that were synced may be gone"
        yield row(Standing.WARNS, f"{where}, which has no journal that Towline is proved on", until, _LOCAL_DISK)
    elif open_to := [one.directory for one in seen if one.mode is not None and one.mode & 0o022]:
        until = "another user of this machine puts something in its place"
        yield row(Standing.WARNS, f"others may write in {open_to[0]}", until, f"chmod 700 {open_to[0]}")
    else:
        yield row(Standing.HOLDS, f"{where}, for {lines}")


def room(some: Sequence[Spot], seen: FileSystem) -> Iterator[Finding]:
    """TL-D43: how long the journals can take what comes while Kafka is away."""
    journals = [spot for spot in some if spot.journal]
    least = max((spot.min_free for spot in journals), default=0)
    usable = seen.free - least
    fact = f"{sized(seen.free)} free on {seen.mounted or seen.there}"
    fact += f", of which {sized(least)} stay free (min_free_bytes)" if least else ""
    more = "Make room, or put state_dir on a larger disk."
    if seen.inodes is not None and seen.inodes < _INODES:
        verdict = Standing.WARNS if seen.inodes else Standing.BROKEN
        yield _ROOM.answer(verdict, f"{seen.inodes:,} inodes free on {seen.mounted}", "no file can be made there", more)
    elif not journals:
        if seen.free < _CHECKPOINT_BYTES:
            until = "now: no batch can be committed" if seen.free == 0 else "the checkpoint has no room"
            yield _ROOM.answer(Standing.BROKEN if seen.free == 0 else Standing.WARNS, fact, until, more)
        else:
            yield _ROOM.answer(Standing.HOLDS, f"{fact}, for checkpoints")
    elif usable <= 0:
        until = "now: nothing is received; the broker's queue has to hold it (TL-J02)"
        yield _ROOM.answer(Standing.BROKEN, fact, until, "Make room, or lower min_free_bytes.")
    else:
        yield _timed(journals, usable, fact)


def _timed(journals: Sequence[Spot], usable: int, fact: str) -> Finding:
    """As a time where a rate is known, else as bytes."""
    limited = [spot for spot in journals if spot.max_bytes is not None]
    mend = "Make room, raise max_bytes of [uplink.journal], or put state_dir on a larger disk."
    written = sum(spot.written_s for spot in journals)
    if not written:
        most = min([usable, *(spot.max_bytes or usable for spot in limited)])
        fact += _limits(limited)
        until = f"{sized(most)} wait: intake then stops, and the broker's queue has to hold"
        near = most < _LEAST_BYTES
        return _ROOM.answer(Standing.WARNS if near else Standing.LIMITED, fact, until, mend if near else "")
    times = [(usable / written, "")]
    times += [(spot.max_bytes / spot.written_s, spot.line) for spot in limited if spot.written_s and spot.max_bytes]
    seconds, line = min(times)
    messages = sum(spot.load.messages_s for spot in journals if spot.load)
    fact += f"; {messages:,.0f} msg/s write {sized(written)}/s"
    if line:
        fact += _limits([spot for spot in limited if spot.line == line])
    until = f"Kafka is away for {days(seconds * 1000)}: intake then stops, and the broker's queue has to hold"
    near = seconds < _LEAST_S
    return _ROOM.answer(Standing.WARNS if near else Standing.LIMITED, fact, until, mend if near else "")


def _limits(limited: Iterable[Spot]) -> str:
    return "".join(f"; max_bytes = {spot.max_bytes:,} of {spot.line}" for spot in limited)


def kept_apart(some: Sequence[Spot]) -> Iterator[Finding]:
    """TL-D45: what a journal leaves the checkpoint on the same disk.

    A batch is committed in the checkpoint before its rows are removed from the journal: without room for the one there
    will never be room for the other.
    """
    journals = [spot for spot in some if spot.journal]
    if not journals:
        return
    least = min(journals, key=lambda spot: spot.min_free)
    near = least.min_free < _CHECKPOINT_BYTES
    fact = (
        f"checkpoint and journal share a disk, of which {sized(least.min_free)} stay free for the checkpoint and Spark"
    )
    yield Finding(
        code="TL-D45",
        promise="commit on a full disk",
        verdict=Standing.WARNS if near else Standing.HOLDS,
        because=f"{fact} (min_free_bytes of {least.line})",
        until="the disk is full: no batch can be committed then, so nothing is removed" if near else "",
        mend=f"Set min_free_bytes to {_CHECKPOINT_BYTES} at least; 536870912 is the default." if near else "",
    )


def durable(some: Sequence[Spot], seen: FileSystem, measured: Syncs) -> Finding:
    """TL-D42: what a sync takes, and so how many messages a second the broker's window lets through."""
    row = _SYNCS.answer
    another = "Put state_dir on another disk; towline size says what a load needs."
    if not measured.times:
        because = f"a file in {seen.there} could not be made durable: {measured.why}"
        return row(Standing.BROKEN, because, "now: nothing can be acknowledged", another)
    typical, slow = measured.at(0.5), measured.at(0.99)
    fact = f"fdatasync took {_milliseconds(typical)}, 99 % within {_milliseconds(slow)}"
    fact += f" ({len(measured.times)} on {seen.kind or '?'})"
    if typical < _IMPOSSIBLE_S:
        until = "the power fails: what was acknowledged may be gone"
        mend = "Is the disk of a virtual machine set to cache=unsafe, or libeatmydata loaded? Let syncs be made."
        return row(Standing.WARNS, f"{fact}: no disk is as fast, so nothing is made durable", until, mend)
    through = [(spot.window / (spot.syncs * typical), spot) for spot in some if spot.window]
    most, narrow = min(through, key=lambda one: one[0], default=(0.0, None))
    limit = ""
    if narrow is not None and most < _PLENTY_S:
        limit = f"{most:,.0f} msg/s of {narrow.line}: its window of {narrow.window:,} waits for syncs"
    over = [spot for rate, spot in through if spot.load is not None and spot.load.messages_s > _USED * rate]
    if over:
        load = over[0].load
        assert load is not None
        return row(Standing.WARNS, f"{fact}; {load.messages_s:,.0f} msg/s come in on {over[0].line}", limit, another)
    if typical >= _SLOW_S or slow >= _VERY_SLOW_S:
        return row(Standing.WARNS, fact, limit or "a sync is waited for", another)
    return row(Standing.LIMITED if limit else Standing.HOLDS, fact, limit)


def _milliseconds(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.3f} ms" if value < 0.1 else f"{value:.2g} ms" if value < 10 else f"{value:,.0f} ms"
