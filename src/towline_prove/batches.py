"""Very many small micro-batches through one run of a bridge: nothing that lives as long as a query may grow.

Messages come a few at a time, so that Spark makes one small batch after the other. What is looked at on the way: the
memory of each process, and the files of checkpoint and state directory.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from towline.checkpoint import Checkpoint
from towline_prove import processes
from towline_prove.rig import LINE, PATIENCE_S, Rig
from towline_prove.soak import KEEP_ALL
from towline_prove.subject import NotReady

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from towline_prove.account import RunAccount

__all__ = ["BatchesPlan", "BatchesRun", "run_batches"]

#: Looks at memory and files in a run.
_LOOKS: Final = 20
#: Messages of one piece of load: a claim file each, and a look at the batches in between.
_PIECE_S: Final = 20.0
#: Growth that a process without a JVM may show between a tenth of the run and its end; buffers settle late.
_PYTHON_GROWTH_MB: Final = 20.0
#: The same for what lives in the JVM's heap. What is resident tells nothing: garbage stays until the heap is full.
_HEAP_GROWTH_MB: Final = 20.0
#: What is in the heap, in `jcmd PID GC.heap_info`: a line for each generation.
_USED: Final = re.compile(r"(?:generation|heap)\s+total \d+K, used (\d+)K")
#: Files that a run may keep: Spark keeps 100 entries of each log with their checksums (``minBatchesToRetain``).
_MOST_FILES: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesPlan:
    """One run.

    Attributes:
        batches: How many micro-batches at least.
        rate: Messages a second.
        guarantee: Of the line.
        seconds: The run ends after this time, finished or not.
    """

    batches: int = 20_000
    rate: float = 40.0
    guarantee: str = "exactly_once"
    seconds: float = 7_200.0


@dataclass(frozen=True, slots=True)
class Look:
    """What there was after so many batches.

    Attributes:
        batches: In the commit log so far.
        memory_mb: Resident megabytes of the largest process of each role.
        heap_mb: What lives in the heap of Spark's JVM, after a collection.
        files: In the line's state directory, the checkpoint's among them.
        kilobytes: Of these files.
    """

    batches: int
    memory_mb: dict[str, float]
    heap_mb: float
    files: int
    kilobytes: int


@dataclass(slots=True)
class BatchesRun:
    """How a run ended.

    Attributes:
        plan: What was done.
        looks: In order.
        account: What was sent and what was found; None before the end.
        seconds: How long it took.
    """

    plan: BatchesPlan
    looks: list[Look] = field(default_factory=list)
    account: RunAccount | None = None
    seconds: float = 0.0

    def problems(self) -> list[str]:
        """What has grown or gone wrong."""
        found = [] if self.account is None else self.account.problems()
        if not self.looks or self.looks[-1].batches < self.plan.batches:
            return [*found, f"not {self.plan.batches:,} batches in {self.plan.seconds:,.0f} s"]
        settled, last = self.looks[len(self.looks) // 10], self.looks[-1]
        for role, now in last.memory_mb.items():
            if role != processes.Role.JVM and now - settled.memory_mb.get(role, now) > _PYTHON_GROWTH_MB:
                found.append(f"{role} grew from {settled.memory_mb[role]:.0f} to {now:.0f} MB")
        if last.heap_mb - settled.heap_mb > _HEAP_GROWTH_MB:
            found.append(f"the JVM's heap grew from {settled.heap_mb:.0f} to {last.heap_mb:.0f} MB")
        if last.files > _MOST_FILES:
            found.append(f"{last.files:,} files in the state directory")
        return found

    @property
    def ok(self) -> bool:
        """Every message arrived as promised and nothing grew."""
        return self.account is not None and self.account.ok and not self.problems()

    def as_json(self) -> dict[str, Any]:
        """What was asked for and what was seen, as a record in ``docs/proof`` has it."""
        plan = asdict(self.plan)
        longest = plan.pop("seconds")
        counts = {} if self.account is None else self.account.verdict.counts()
        looks = [asdict(look) for look in self.looks]
        return {**plan, "longest_s": longest, **counts, "looks": looks, "problems": self.problems()}


def run_batches(plan: BatchesPlan, directory: Path, say: Callable[[str], None] = lambda _: None) -> BatchesRun:
    """Run a plan in a directory, with brokers of its own.

    Raises:
        NotReady: The bridge did not start, or there is no jcmd (TL-P01).
    """
    if shutil.which("jcmd") is None:
        raise NotReady(
            "TL-P01", "jcmd", "it is missing, and shows what lives in a JVM", "Install a JDK, not a JRE alone."
        )
    run = BatchesRun(plan)
    with Rig(directory, mosquitto=KEEP_ALL, guarantee=plan.guarantee, direct=True) as rig:
        rig.warm()
        began = time.monotonic()
        with rig.trial() as trial:
            while (done := _batches(rig)) < plan.batches and time.monotonic() - began < plan.seconds:
                if done >= len(run.looks) * plan.batches / _LOOKS:
                    run.looks.append(_look(rig, done))
                    say(str(run.looks[-1]))
                trial.load(int(plan.rate * _PIECE_S), rate=plan.rate)
            run.looks.append(_look(rig, _batches(rig)))
            run.account = trial.account(PATIENCE_S)
        run.seconds = time.monotonic() - began
    return run


def _batches(rig: Rig) -> int:
    return (Checkpoint(str(_state_dir(rig) / "checkpoint")).last_commit_batch() or 0) + 1


def _state_dir(rig: Rig) -> Path:
    return rig.directory / "state" / LINE


def _look(rig: Rig, batches: int) -> Look:
    memory: dict[str, int] = {}
    for pid in rig.bridge.everyone():
        role = processes.role_of(pid).value
        memory[role] = max(memory.get(role, 0), processes.memory_of(pid))
    files = [path for path in (rig.directory / "state").rglob("*") if path.is_file()]
    kilobytes = sum(path.stat().st_size for path in files if path.exists()) // 1000
    megabytes = {role: round(size / 1e6, 1) for role, size in sorted(memory.items())}
    return Look(batches, megabytes, _heap_mb(rig), len(files), kilobytes)


def _heap_mb(rig: Rig) -> float:
    """What lives in the heap; collects all garbage first."""
    jvm = rig.bridge.find(processes.Role.JVM)
    assert jvm is not None
    for command in ("GC.run", "GC.heap_info"):
        said = subprocess.run(["jcmd", str(jvm.pid), command], check=True, capture_output=True, text=True).stdout
    return round(sum(int(used) for used in _USED.findall(said)) / 1000, 1)
