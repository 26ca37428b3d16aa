"""Fault injection by strace, which counts a system call and makes its n-th occurrence kill the process or fail.

``when=N`` counts *per thread and per system call* (measured, strace 6.1): enumerate one call at a time, up to the
largest count of a thread. A run that never reaches the n-th call ends normally, which ends the enumeration.

It also records the file changes and sends of a run, for `tests.engines.powerloss`: `record_command`, `read_record`.
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
    "can_trace",
    "count_calls",
    "count_command",
    "inject_command",
    "read_record",
    "record_command",
    "was_injected",
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
_MAX_RECORDED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Injection:
    """Fault at one system call.

    Attributes:
        call: Name of the system call, such as ``fdatasync``.
        occurrence: Number of the call in a thread, from 1: ``"3"``, or ``"3+"`` for all from the third on.
        fault: ``KILL`` ends the process with SIGKILL after the call entered; the others make the call fail.
        paths: Only calls on these files count; empty for all.
    """

    call: str
    occurrence: str
    fault: Literal["KILL", "EIO", "ENOSPC"]
    paths: tuple[Path, ...] = ()

    def arguments(self) -> list[str]:
        """Return the strace options for this fault."""
        kind = "signal=KILL" if self.fault == "KILL" else f"error={self.fault}"
        return [
            "-e",
            f"trace={self.call}",
            "-e",
            f"inject={self.call}:{kind}:when={self.occurrence}",
            *_path_options(self.paths),
        ]

    def __str__(self) -> str:
        return f"{self.fault} at {self.call} {self.occurrence}"


def _path_options(paths: Sequence[Path]) -> list[str]:
    return [argument for path in paths for argument in ("-P", str(path))]


def _strace_program() -> str:
    program = shutil.which("strace")
    if program is None:
        raise SetupError("TL-S61", "strace", "not installed", "apt-get install strace; crash points need it.")
    return program


def _strace_command(log: Path, *, only_named_calls: bool) -> list[str]:
    """Return the strace command that follows every thread.

    Args:
        log: Output file.
        only_named_calls: Stop at the named calls only, by a filter in the kernel. Injected *signals* never come then
            (measured, strace 6.1), injected errors do; and there is no filter for a process that runs already.
    """
    return [
        _strace_program(),
        "-f",
        *(["--seccomp-bpf"] if only_named_calls else []),
        "--quiet=exit,personality",
        "-o",
        str(log),
    ]


def can_trace() -> bool:
    """Return whether strace is installed and allowed here (ptrace may be forbidden in a container)."""
    try:
        return (
            subprocess.run(
                [_strace_program(), "-qq", "-e", "trace=none", "true"], capture_output=True, check=False
            ).returncode
            == 0
        )
    except SetupError:
        return False


def _target_options(target: Sequence[str] | int) -> list[str]:
    """Return the strace options for a command to start, or a process to attach to."""
    return ["-p", str(target)] if isinstance(target, int) else ["--", *target]


def inject_command(target: Sequence[str] | int, injection: Injection, log: Path) -> list[str]:
    """Return the strace command that runs, or attaches to, the target with a fault; its calls go to `log`.

    Raises:
        SetupError: strace is missing (TL-S61).
    """
    only_named_calls = injection.fault != "KILL" and not isinstance(target, int)
    return [*_strace_command(log, only_named_calls=only_named_calls), *injection.arguments(), *_target_options(target)]


def count_command(command: Sequence[str], calls: Sequence[str], log: Path, paths: Sequence[Path] = ()) -> list[str]:
    """Return the strace command that counts calls without a fault; `count_calls` reads its log.

    Raises:
        SetupError: strace is missing (TL-S61).
    """
    return [
        *_strace_command(log, only_named_calls=True),
        "-e",
        f"trace={','.join(calls)}",
        *_path_options(paths),
        "--",
        *command,
    ]


def count_calls(log: Path) -> dict[str, int]:
    """Return the largest count per thread of each system call in a strace log (as ``when`` counts)."""
    per_thread: Counter[tuple[str, str]] = Counter()
    for line in log.read_text(errors="replace").splitlines():
        match = _CALL.match(line)
        if match:
            per_thread[match[1], match[2]] += 1
    max_counts: dict[str, int] = {}
    for (_, call), count in per_thread.items():
        max_counts[call] = max(max_counts.get(call, 0), count)
    return max_counts


def was_injected(log: Path) -> bool:
    """Return whether the fault was injected in this run."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "(INJECTED)" in text or "killed by SIGKILL" in text


@dataclass(frozen=True, slots=True)
class Call:
    """Recorded system call.

    Attributes:
        name: Name of the system call.
        arguments: Text between the brackets; strings and paths in hex (``-xx``).
        result: Return value; None when the process ended first.
        result_text: Text after the result: for a descriptor ``<path>``, for a failure its name.
        start_line: Line of the record where the call was entered.
        end_line: Line where it returned: a call with a larger `start_line` came after it.
        is_injected: strace returned the result, without a call.
    """

    name: str
    arguments: str
    result: int | None
    result_text: str
    start_line: int
    end_line: int
    is_injected: bool

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the descriptors (``-y``), the result's last."""
        return tuple(_decode_hex(path) for path in _PATH.findall(self.arguments + self.result_text))

    @property
    def strings(self) -> tuple[bytes, ...]:
        """Strings among the arguments.

        Raises:
            ValueError: A string is too long for the record.
        """
        if '"...' in self.arguments:
            raise ValueError(
                f"a call of {self.name} has more than {_MAX_RECORDED_BYTES} bytes, which the record does not hold"
            )
        return tuple(bytes.fromhex(text.replace("\\x", "")) for text in _STRING.findall(self.arguments))

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers among the arguments, including descriptors with a path."""
        return tuple(
            int(number, 8 if re.match(r"0\d", number) else 0)
            for number in _NUMBER.findall(_STRING.sub("", _PATH.sub("", self.arguments)))
        )


_PATH = re.compile(r"<((?:\\x[0-9a-f]{2})+)>")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_NUMBER = re.compile(r"(?<![\w.])-?(?:0x[0-9a-f]+|\d+)(?![\w.])")
_LINE = re.compile(r"^(\d+)\s+(.*)$")
_RESUMED_CALL = re.compile(r"^<\.\.\. \w+ resumed>(.*)$")
_UNFINISHED_CALL = re.compile(r"^(\w+)\((.*?)\s*<unfinished \.\.\.>$")
_COMPLETE_CALL = re.compile(r"^(\w+)\((.*)\)\s+= (\?|-?\d+|0x[0-9a-f]+)(.*)$")


def _decode_hex(hex_text: str) -> str:
    return bytes.fromhex(hex_text.replace("\\x", "")).decode(errors="surrogateescape")


def _encode_hex(path: Path) -> str:
    return "".join(f"\\x{byte:02x}" for byte in str(path).encode())


def record_command(
    target: Sequence[str] | int,
    log: Path,
    *,
    injection: Injection | None = None,
    fake_syncs: bool = False,
    with_seeks: bool = True,
) -> list[str]:
    """Return the strace command that records file changes and sends of the target, for `read_record`.

    Args:
        target: The command, or the pid of a process; every process it starts is followed.
        log: The record.
        injection: A fault to inject as well.
        fake_syncs: Return success for every sync without making it, as for a program without syncs.
        with_seeks: Record lseek and mmap too. A JVM makes tens of thousands to read its jars; without them
            `tests.engines.powerloss.DiskModel.differences` shows whether they mattered.

    Raises:
        SetupError: strace is missing (TL-S61).
    """
    only_named_calls = (injection is None or injection.fault != "KILL") and not isinstance(target, int)
    calls = {*FILE_CALLS, *SENDS, *([injection.call] if injection else [])} - (
        set() if with_seeks else {"lseek", "mmap"}
    )
    faults = [part for part in injection.arguments() if part.startswith("inject=")] if injection else []
    faults += ["inject=fsync,fdatasync,sync,syncfs:retval=0"] if fake_syncs else []
    return [
        *_strace_command(log, only_named_calls=only_named_calls),
        *("-y", "-xx", "-s", str(_MAX_RECORDED_BYTES), "-e", f"trace={','.join(sorted(calls))}", "-e", "signal=none"),
        *(argument for fault in faults for argument in ("-e", fault)),
        *_target_options(target),
    ]


def read_record(log: Path, root: Path) -> Iterator[Call]:
    """Yield the calls on files below `root` and all sends of a record, in the order in which they returned.

    Args:
        log: A record of `record_command`.
        root: A directory, without symbolic links on the way.
    """
    root_hex, open_calls = _encode_hex(root), dict[str, tuple[int, str, str]]()
    for number, line in enumerate(log.read_text(errors="replace").splitlines()):
        match = _LINE.match(line)
        if match is None:
            continue
        thread, text = match.groups()
        if match_resumed := _RESUMED_CALL.match(text):
            start_line, name, arguments_start = open_calls.pop(thread, (number, "", ""))
            text = f"{name}({arguments_start}{match_resumed[1]}"
        elif root_hex not in text and not text.startswith(_RECORDED_CALLS):
            continue
        elif unfinished := _UNFINISHED_CALL.match(text):
            open_calls[thread] = number, unfinished[1], unfinished[2]
            continue
        else:
            start_line = number
        if complete := _COMPLETE_CALL.match(text):
            yield _parse_call(complete, start_line, number)
    for start_line, name, arguments in open_calls.values():
        yield Call(name, arguments, None, "", start_line, number + 1, is_injected=False)


_RECORDED_CALLS = tuple(f"{name}(" for name in (*SENDS, "sync", "syncfs"))


def _parse_call(match: re.Match[str], start_line: int, end_line: int) -> Call:
    name, arguments, result, result_text = match.groups()
    value = None if result == "?" else int(result, 0)
    return Call(name, arguments, value, result_text, start_line, end_line, is_injected="(INJECTED)" in result_text)
