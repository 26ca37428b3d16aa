"""System calls of a process counted, killed and failed by strace, and its file changes and sends recorded.

``when=N`` counts *per thread and per system call* (measured, strace 6.1). A run that never reaches the n-th call ends
normally, which ends an enumeration.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from towline.errors import SetupError

#: System calls that change files, or make a change durable.
_FILE_CALLS = (
    *("openat", "open", "creat", "write", "writev", "pwrite64", "pwritev", "lseek", "ftruncate", "truncate"),
    *("fallocate", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat", "link"),
    *("linkat", "symlink", "symlinkat", "fsync", "fdatasync", "sync", "syncfs", "mmap", "sendfile"),
    *("copy_file_range", "splice", "dup", "dup2", "dup3"),
)
#: System calls that tell a peer something.
SENDS = ("sendto", "sendmsg")
#: Longest content of one call that a record holds.
_MAX_RECORDED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Injection:
    """Fault at the n-th such call of a thread; ``KILL`` ends the process after the call entered, others fail it."""

    call: str
    occurrence: str
    fault: Literal["KILL", "EIO"]

    def option(self) -> str:
        """The option of strace."""
        kind = "signal=KILL" if self.fault == "KILL" else f"error={self.fault}"
        return f"inject={self.call}:{kind}:when={self.occurrence}"


def _strace_command(log: Path, target: Sequence[str], *, kills: bool, options: Sequence[str]) -> list[str]:
    """The command that starts the target.

    A filter in the kernel stops it at the named calls only: injected *signals* never come then (measured, strace 6.1),
    injected errors do.
    """
    program = shutil.which("strace")
    if program is None:
        raise SetupError("TL-S61", "strace", "not installed", "apt-get install strace; crash points need it.")
    filtered = [] if kills else ["--seccomp-bpf"]
    words = (word for option in options for word in ("-e", option))
    return [program, "-f", *filtered, "--quiet=exit,personality", "-o", str(log), *words, "--", *target]


def inject_command(target: Sequence[str], injection: Injection, log: Path) -> list[str]:
    """Return the strace command that runs the target with a fault; its calls go to `log`."""
    options = [f"trace={injection.call}", injection.option()]
    return _strace_command(log, target, kills=injection.fault == "KILL", options=options)


def was_injected(log: Path) -> bool:
    """Return whether the fault was injected in this run."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "(INJECTED)" in text or "killed by SIGKILL" in text


def record_command(target: Sequence[str], log: Path, *, fake_syncs: bool = False, with_seeks: bool = True) -> list[str]:
    """Return the strace command that records file changes and sends of the target, for `read_record`.

    Args:
        target: The command; every process it starts is followed.
        log: The record.
        fake_syncs: Return success for every sync without making it, as for a program without syncs.
        with_seeks: Record lseek and mmap too. A JVM makes tens of thousands to read its jars; without them
            `tests.engines.powerloss.DiskModel.differences` shows whether they mattered.
    """
    calls = {*_FILE_CALLS, *SENDS} - (set() if with_seeks else {"lseek", "mmap"})
    options = [f"trace={','.join(sorted(calls))}", "signal=none"]
    options += ["inject=fsync,fdatasync,sync,syncfs:retval=0"] if fake_syncs else []
    command = _strace_command(log, target, kills=False, options=options)
    return [command[0], "-y", "-xx", "-s", str(_MAX_RECORDED_BYTES), *command[1:]]


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
    """

    name: str
    arguments: str
    result: int | None
    result_text: str
    start_line: int
    end_line: int

    @property
    def is_injected(self) -> bool:
        """Whether strace returned the result, without a call."""
        return "(INJECTED)" in self.result_text

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the descriptors (``-y``), the result's last."""
        found = _PATH.findall(self.arguments + self.result_text)
        return tuple(_decode_hex(path).decode(errors="surrogateescape") for path in found)

    @property
    def strings(self) -> tuple[bytes, ...]:
        """Strings among the arguments; ValueError if one is too long for the record."""
        if '"...' in self.arguments:
            raise ValueError(f"a call of {self.name} has more bytes than the record holds")
        return tuple(map(_decode_hex, _STRING.findall(self.arguments)))

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers among the arguments, including descriptors with a path."""
        found = _NUMBER.findall(_STRING.sub("", _PATH.sub("", self.arguments)))
        return tuple(int(number, 8 if re.match(r"0\d", number) else 0) for number in found)


_PATH = re.compile(r"<((?:\\x[0-9a-f]{2})+)>")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_NUMBER = re.compile(r"(?<![\w.])-?(?:0x[0-9a-f]+|\d+)(?![\w.])")
_LINE = re.compile(r"^(\d+)\s+(.*)$")
_RESUMED_CALL = re.compile(r"^<\.\.\. \w+ resumed>(.*)$")
_UNFINISHED_CALL = re.compile(r"^(\w+)\((.*?)\s*<unfinished \.\.\.>$")
_COMPLETE_CALL = re.compile(r"^(\w+)\((.*)\)\s+= (\?|-?\d+|0x[0-9a-f]+)(.*)$")
_WITHOUT_PATH = tuple(f"{name}(" for name in (*SENDS, "sync", "syncfs"))


def _decode_hex(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def read_record(log: Path, root: Path) -> Iterator[Call]:
    """Yield the calls on files below `root` and all sends of a record, in the order in which they returned."""
    root_hex = "".join(f"\\x{byte:02x}" for byte in str(root).encode())
    open_calls = dict[str, tuple[int, str, str]]()
    for number, line in enumerate(log.read_text(errors="replace").splitlines()):
        match = _LINE.match(line)
        if match is None:
            continue
        thread, text = match.groups()
        start_line = number
        if resumed := _RESUMED_CALL.match(text):
            start_line, name, arguments = open_calls.pop(thread, (number, "", ""))
            text = f"{name}({arguments}{resumed[1]}"
        elif root_hex not in text and not text.startswith(_WITHOUT_PATH):
            continue
        elif unfinished := _UNFINISHED_CALL.match(text):
            open_calls[thread] = number, unfinished[1], unfinished[2]
            continue
        if complete := _COMPLETE_CALL.match(text):
            name, arguments, result, result_text = complete.groups()
            yield Call(name, arguments, None if result == "?" else int(result, 0), result_text, start_line, number)
    for start_line, name, arguments in open_calls.values():
        yield Call(name, arguments, None, "", start_line, number + 1)
