"""Crash points without touching the code: strace counts a system call, then makes its n-th occurrence kill or fail.

``when=N`` counts *per thread and per system call* (measured, strace 6.1), so enumerate one call at a time, up to the
largest count that any one thread reaches. A run whose n-th call never came ends by itself, which ends the enumeration.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from towline.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Injection", "calls_in", "can_trace", "counting", "fired", "wrapped"]

_CALL = re.compile(r"^(\d+)\s+(?:[\d.:]+ )?(\w+)\(")


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault at one system call.

    Attributes:
        call: Name of the system call, such as ``fdatasync``.
        when: Which occurrence in a thread, from 1; ``"3"``, ``"3+"`` for all from the third on.
        fault: ``KILL`` ends the process with SIGKILL after the call entered; the others make the call fail.
        paths: Only calls on these files count; empty for all.
    """

    call: str
    when: str
    fault: Literal["KILL", "EIO", "ENOSPC"]
    paths: tuple[Path, ...] = ()

    def arguments(self) -> list[str]:
        """Strace options that do it."""
        kind = "signal=KILL" if self.fault == "KILL" else f"error={self.fault}"
        return ["-e", f"trace={self.call}", "-e", f"inject={self.call}:{kind}:when={self.when}", *_limits(self.paths)]

    def __str__(self) -> str:
        return f"{self.fault} at {self.call} {self.when}"


def _limits(paths: Sequence[Path]) -> list[str]:
    return [argument for path in paths for argument in ("-P", str(path))]


def _strace() -> str:
    program = shutil.which("strace")
    if program is None:
        raise SetupError("TL-S61", "strace", "not installed", "apt-get install strace; crash points need it.")
    return program


def _traced(log: Path, *, quick: bool) -> list[str]:
    """Follow every thread.

    Args:
        log: Where the calls go.
        quick: Stop at the named calls only, by a filter in the kernel. Injected *signals* never come then (measured,
            strace 6.1), injected errors do.
    """
    return [_strace(), "-f", *(["--seccomp-bpf"] if quick else []), "-qq", "-o", str(log)]


def can_trace() -> bool:
    """Whether strace is installed and allowed here (ptrace may be forbidden in a container)."""
    try:
        return (
            subprocess.run([_strace(), "-qq", "-e", "trace=none", "true"], capture_output=True, check=False).returncode
            == 0
        )
    except SetupError:
        return False


def wrapped(command: Sequence[str], injection: Injection, log: Path) -> list[str]:
    """The command under strace with the fault armed; the calls seen go to `log`.

    Raises:
        SetupError: strace is missing (TL-S61).
    """
    return [*_traced(log, quick=injection.fault != "KILL"), *injection.arguments(), "--", *command]


def counting(command: Sequence[str], calls: Sequence[str], log: Path, paths: Sequence[Path] = ()) -> list[str]:
    """The command under strace, only watched; read the result with `calls_in`.

    Raises:
        SetupError: strace is missing (TL-S61).
    """
    return [*_traced(log, quick=True), "-e", f"trace={','.join(calls)}", *_limits(paths), "--", *command]


def calls_in(log: Path) -> dict[str, int]:
    """For each system call in a strace log, the largest number that one thread made (what ``when`` counts)."""
    per_thread: Counter[tuple[str, str]] = Counter()
    for line in log.read_text(errors="replace").splitlines():
        match = _CALL.match(line)
        if match:
            per_thread[match[1], match[2]] += 1
    most: dict[str, int] = {}
    for (_, call), count in per_thread.items():
        most[call] = max(most.get(call, 0), count)
    return most


def fired(log: Path) -> bool:
    """Whether the injected fault happened in this run."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "(INJECTED)" in text or "killed by SIGKILL" in text
