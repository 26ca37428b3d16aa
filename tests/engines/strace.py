"""Crash points without touching the code: strace counts a system call, then makes its n-th occurrence kill or fail.

``when=N`` counts *per thread and per system call* (measured, strace 6.1), so enumerate one call at a time, up to the
largest count that any one thread reaches. A run whose n-th call never came ends by itself, which ends the enumeration.

And a record of what a run did to its files and told its peers, for `tests.engines.powerloss`: `recording`, `recorded`.
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
    from collections.abc import Iterator, Sequence

__all__ = [
    "FILE_CALLS",
    "SENDS",
    "Call",
    "Injection",
    "calls_in",
    "can_trace",
    "counting",
    "fired",
    "recorded",
    "recording",
    "wrapped",
]

_CALL = re.compile(r"^(\d+)\s+(?:[\d.:]+ )?(\w+)\(")

#: System calls that change files, or make a change durable.
FILE_CALLS = (
    *("openat", "open", "creat", "write", "writev", "pwrite64", "pwritev", "lseek", "ftruncate", "truncate"),
    *("fallocate", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat", "link"),
    *("linkat", "symlink", "symlinkat", "fsync", "fdatasync", "sync", "syncfs", "mmap", "sendfile"),
    *("copy_file_range", "splice", "dup", "dup2", "dup3"),
)
#: System calls that tell a peer something.
SENDS = ("sendto", "sendmsg")

#: Longest content of one call that a record holds, in bytes; a longer one is told as cut.
_MOST_BYTES = 16 << 20


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
            strace 6.1), injected errors do; and there is no filter for a process that runs already.
    """
    return [_strace(), "-f", *(["--seccomp-bpf"] if quick else []), "--quiet=exit,personality", "-o", str(log)]


def can_trace() -> bool:
    """Whether strace is installed and allowed here (ptrace may be forbidden in a container)."""
    try:
        return (
            subprocess.run([_strace(), "-qq", "-e", "trace=none", "true"], capture_output=True, check=False).returncode
            == 0
        )
    except SetupError:
        return False


def _target(target: Sequence[str] | int) -> list[str]:
    """A command to start, or a process to attach to."""
    return ["-p", str(target)] if isinstance(target, int) else ["--", *target]


def wrapped(target: Sequence[str] | int, injection: Injection, log: Path) -> list[str]:
    """The command, or the process with this pid, under strace with the fault armed; the calls seen go to `log`.

    Raises:
        SetupError: strace is missing (TL-S61).
    """
    quick = injection.fault != "KILL" and not isinstance(target, int)
    return [*_traced(log, quick=quick), *injection.arguments(), *_target(target)]


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


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded system call.

    Attributes:
        name: Of the system call.
        arguments: As text, without the brackets; strings and paths in hex (``-xx``).
        result: What it returned; None when the process ended before it did.
        answer: Text behind the result: for a descriptor ``<path>``, for a failure its name.
        began: Line of the record where it was entered.
        ended: Line where it returned: a call whose `began` is larger came after it.
        faked: It was not made at all, strace answered in the kernel's place.
    """

    name: str
    arguments: str
    result: int | None
    answer: str
    began: int
    ended: int
    faked: bool

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths behind descriptors (``-y``), the answer's last."""
        return tuple(_text(path) for path in _PATH.findall(self.arguments + self.answer))

    @property
    def strings(self) -> tuple[bytes, ...]:
        """The strings among the arguments.

        Raises:
            ValueError: One is too long for the record.
        """
        if '"...' in self.arguments:
            raise ValueError(f"a call of {self.name} has more than {_MOST_BYTES} bytes, which the record does not hold")
        return tuple(bytes.fromhex(text.replace("\\x", "")) for text in _STRING.findall(self.arguments))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers among the arguments, descriptors with a path included."""
        return tuple(
            int(number, 8 if re.match(r"0\d", number) else 0)
            for number in _NUMBER.findall(_STRING.sub("", _PATH.sub("", self.arguments)))
        )


_PATH = re.compile(r"<((?:\\x[0-9a-f]{2})+)>")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_NUMBER = re.compile(r"(?<![\w.])-?(?:0x[0-9a-f]+|\d+)(?![\w.])")
_LINE = re.compile(r"^(\d+)\s+(.*)$")
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>(.*)$")
_UNFINISHED = re.compile(r"^(\w+)\((.*?)\s*<unfinished \.\.\.>$")
_WHOLE = re.compile(r"^(\w+)\((.*)\)\s+= (\?|-?\d+|0x[0-9a-f]+)(.*)$")


def _text(hexed: str) -> str:
    return bytes.fromhex(hexed.replace("\\x", "")).decode(errors="surrogateescape")


def _hexed(path: Path) -> str:
    return "".join(f"\\x{byte:02x}" for byte in str(path).encode())


def recording(
    target: Sequence[str] | int,
    log: Path,
    *,
    injection: Injection | None = None,
    unsynced: bool = False,
    seeks: bool = True,
) -> list[str]:
    """The target under strace, all it does to files and tells its peers written down; read it with `recorded`.

    Args:
        target: The command, or the pid of a process; every process it starts is followed.
        log: The record.
        injection: A fault to arm as well.
        unsynced: Answer every sync with success and make none: what a program without syncs would do to its files.
        seeks: Write down lseek and mmap too. A JVM makes tens of thousands to read its jars; without them
            `tests.engines.powerloss.Disk.differs` tells whether they mattered.

    Raises:
        SetupError: strace is missing (TL-S61).
    """
    quick = (injection is None or injection.fault != "KILL") and not isinstance(target, int)
    calls = {*FILE_CALLS, *SENDS, *([injection.call] if injection else [])} - (set() if seeks else {"lseek", "mmap"})
    faults = [part for part in injection.arguments() if part.startswith("inject=")] if injection else []
    faults += ["inject=fsync,fdatasync,sync,syncfs:retval=0"] if unsynced else []
    return [
        *_traced(log, quick=quick),
        *("-y", "-xx", "-s", str(_MOST_BYTES), "-e", f"trace={','.join(sorted(calls))}", "-e", "signal=none"),
        *(argument for fault in faults for argument in ("-e", fault)),
        *_target(target),
    ]


def recorded(log: Path, root: Path) -> Iterator[Call]:
    """The calls of a record, in the order in which they returned: those about files below `root`, and all sends.

    Args:
        log: A record of `recording`.
        root: A directory, without symbolic links on the way.
    """
    mark, open_calls = _hexed(root), dict[str, tuple[int, str, str]]()
    for number, line in enumerate(log.read_text(errors="replace").splitlines()):
        match = _LINE.match(line)
        if match is None:
            continue
        thread, text = match.groups()
        if resumed := _RESUMED.match(text):
            began, name, before = open_calls.pop(thread, (number, "", ""))
            text = f"{name}({before}{resumed[1]}"
        elif mark not in text and not text.startswith(_ALWAYS):
            continue
        elif unfinished := _UNFINISHED.match(text):
            open_calls[thread] = number, unfinished[1], unfinished[2]
            continue
        else:
            began = number
        if whole := _WHOLE.match(text):
            yield _call(whole, began, number)
    for began, name, arguments in open_calls.values():
        yield Call(name, arguments, None, "", began, number + 1, faked=False)


_ALWAYS = tuple(f"{name}(" for name in (*SENDS, "sync", "syncfs"))


def _call(whole: re.Match[str], began: int, ended: int) -> Call:
    name, arguments, result, answer = whole.groups()
    value = None if result == "?" else int(result, 0)
    return Call(name, arguments, value, answer, began, ended, faked="(INJECTED)" in answer)
