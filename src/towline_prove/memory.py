"""How much memory a process takes, and disk its spools, sampled from /proc while something else runs."""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from towline_prove.processes import memory_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Peaks", "Watch"]

_EVERY_S = 0.05
#: Spools are looked for among the files of every process, so less often.
_SPOOLS_EVERY = 10
#: A file that never had a name, open(2) ``O_TMPFILE``.
_NAMELESS = re.compile(r"/#\d+ \(deleted\)$")


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
    """Samples in a thread of its own; a context manager.

    Attributes:
        pid: Names the process whose memory is watched; None while there is none.
        everyone: Names the processes that may have spools.
        peaks: So far.
    """

    pid: Callable[[], int | None]
    everyone: Callable[[], Iterable[int]]
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
            self._look(spools=turn % _SPOOLS_EVERY == 0)
            turn += 1

    def _look(self, *, spools: bool) -> None:
        pid, peaks = self.pid(), self.peaks
        if pid is not None:
            sizes = memory_fields(pid)
            peaks.rss = max(peaks.rss, sizes.get("VmRSS", 0), sizes.get("VmHWM", 0))
            peaks.anonymous = max(peaks.anonymous, sizes.get("RssAnon", 0))
            peaks.mapped = max(peaks.mapped, sizes.get("RssFile", 0))
        if spools:
            peaks.spool = max(peaks.spool, sum(map(_spooled, self.everyone())))


def _spooled(pid: int) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if _NAMELESS.search(str(descriptor.readlink())):
                    total += descriptor.stat().st_size
    return total
