"""How much memory processes take, and disk their spools and files: peaks over a run, and single looks."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from towline_prove import processes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from towline_prove.rig import Rig
    from towline_prove.subject import BridgeRun

_EVERY_S: Final = 0.05
#: Spools are looked for among the files of every process, so less often.
_SPOOLS_EVERY: Final = 10
#: A file that never had a name, open(2) ``O_TMPFILE``.
_NAMELESS: Final = re.compile(r"/#\d+ \(deleted\)$")
#: What is in the heap, in `jcmd PID GC.heap_info`: a line for each generation.
_USED: Final = re.compile(r"(?:generation|heap)\s+total \d+K, used (\d+)K")
#: Growth that a process without a JVM may show between a tenth of the run and its end; buffers settle late.
_PYTHON_GROWTH_MB: Final = 20.0
#: The same for what lives in the JVM's heap. What is resident tells nothing: garbage stays until the heap is full.
_HEAP_GROWTH_MB: Final = 20.0
#: Files that a run may keep: Spark keeps 100 entries of each log with their checksums (``minBatchesToRetain``).
_MOST_FILES: Final = 1_000


@dataclass(slots=True)
class Peaks:
    """The largest values seen, in bytes.

    Attributes:
        rss: Resident memory, pages of mapped files included; the kernel's own peak where it is larger.
        anonymous: Of that, what belongs to no file.
        mapped: Of that, pages of mapped files, which the kernel may take back at any time.
        spool: Files without a name below the temporary directory, of all processes together.
    """

    rss: int = 0
    anonymous: int = 0
    mapped: int = 0
    spool: int = 0


@dataclass
class Watch:
    """Samples the memory of a gateway and the spools of all processes in a thread of its own; a context manager.

    Attributes:
        bridge: Whose they are.
        peaks: So far.
    """

    bridge: BridgeRun
    peaks: Peaks = field(default_factory=Peaks)
    _done: threading.Event = field(default_factory=threading.Event, init=False)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        turn = 0
        while not self._done.wait(_EVERY_S):
            self.look(spools=turn % _SPOOLS_EVERY == 0)
            turn += 1

    def look(self, *, spools: bool) -> None:
        """Take a sample, with the spools or without."""
        gateway, peaks = self.bridge.gateway(), self.peaks
        if gateway is not None:
            sizes = processes.memory_fields(gateway.pid)
            peaks.rss = max(peaks.rss, sizes.get("VmRSS", 0), sizes.get("VmHWM", 0))
            peaks.anonymous = max(peaks.anonymous, sizes.get("RssAnon", 0))
            peaks.mapped = max(peaks.mapped, sizes.get("RssFile", 0))
        if spools:
            peaks.spool = max(peaks.spool, sum(map(_spooled, self.bridge.everyone())))


def _spooled(pid: int) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if _NAMELESS.search(str(descriptor.readlink())):
                    total += descriptor.stat().st_size
    return total


@dataclass(frozen=True, slots=True)
class Look:
    """What there was after so many batches.

    Attributes:
        batches: In the commit log so far.
        memory_mb: Resident megabytes of the largest process of each role.
        heap_mb: What lives in the heap of Spark's JVM, after a collection.
        files: In the bridge's state directory, the checkpoint's among them.
        kilobytes: Of these files.
    """

    batches: int
    memory_mb: dict[str, float]
    heap_mb: float
    files: int
    kilobytes: int

    @classmethod
    def at(cls, rig: Rig) -> Look | None:
        """What there is now; None while no JVM answers ``jcmd``, as after a kill."""
        heap_mb = _heap_mb(rig)
        if heap_mb is None:
            return None
        memory: dict[str, int] = {}
        for pid in rig.bridge.everyone():
            role = processes.role_of(pid).value
            memory[role] = max(memory.get(role, 0), processes.memory_of(pid))
        files = [path for path in (rig.directory / "state").rglob("*") if path.is_file()]
        kilobytes = sum(path.stat().st_size for path in files if path.exists()) // 1000
        megabytes = {role: round(size / 1e6, 1) for role, size in sorted(memory.items())}
        return cls(rig.batches, megabytes, heap_mb, len(files), kilobytes)


def _heap_mb(rig: Rig) -> float | None:
    """What lives in the heap; collects all garbage first."""
    jvm = rig.bridge.find(processes.Role.JVM)
    if jvm is None:
        return None
    for command in ("GC.run", "GC.heap_info"):
        answer = subprocess.run(["jcmd", str(jvm.pid), command], check=False, capture_output=True, text=True)
        if answer.returncode:
            return None
    return round(sum(int(used) for used in _USED.findall(answer.stdout)) / 1000, 1)


def growth(looks: Sequence[Look]) -> list[str]:
    """What has grown between a tenth of the looks and the last one, and may not."""
    settled, last = looks[len(looks) // 10], looks[-1]
    problems = [
        f"{role} grew from {settled.memory_mb[role]:.0f} to {now:.0f} MB"
        for role, now in last.memory_mb.items()
        if role != processes.Role.JVM and now - settled.memory_mb.get(role, now) > _PYTHON_GROWTH_MB
    ]
    if last.heap_mb - settled.heap_mb > _HEAP_GROWTH_MB:
        problems.append(f"the JVM's heap grew from {settled.heap_mb:.0f} to {last.heap_mb:.0f} MB")
    if last.files > _MOST_FILES:
        problems.append(f"{last.files:,} files in the state directory")
    return problems
