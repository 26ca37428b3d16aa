"""The model of a disk without power against real files: the same calls, the same content."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engines.powerloss import EVERYTHING, NOTHING, DiskModel, UnsupportedCall, random_changes
from tests.engines.strace import read_record, record_command

Files = dict[str, bytes | None]


def hexed(text: str | bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in (text.encode() if isinstance(text, str) else text))


class Program:
    """Makes real system calls below a directory, and the record that strace would write of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines: list[str] = []
        #: Kept open, so that no inode number is used twice.
        self.open: dict[int, str] = {}
        self._content: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {root.stat().st_ino: {}}

    def say(self, text: str) -> None:
        self.lines.append(f"4711 {text}")

    def fd(self, descriptor: int) -> str:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        name = path.removesuffix(" (deleted)")
        return f"{descriptor}<{hexed(name)}>{'(deleted)' if name != path else ''}"

    def create(self, path: str, *, append: bool = False) -> int:
        flags = os.O_RDWR | os.O_CREAT | (os.O_APPEND if append else 0)
        descriptor = os.open(self.root / path, flags, 0o600)
        self.open[descriptor] = path
        shown = "O_RDWR|O_CREAT" + ("|O_APPEND" if append else "")
        name = hexed(str(self.root / path))
        self.say(f'openat(AT_FDCWD<{hexed(str(Path.cwd()))}>, "{name}", {shown}, 0600) = {self.fd(descriptor)}')
        return descriptor

    def write(self, descriptor: int, data: bytes) -> None:
        os.write(descriptor, data)
        self.say(f'write({self.fd(descriptor)}, "{hexed(data)}", {len(data)}) = {len(data)}')

    def write_at(self, descriptor: int, data: bytes, at: int) -> None:
        os.pwrite(descriptor, data, at)
        self.say(f'pwrite64({self.fd(descriptor)}, "{hexed(data)}", {len(data)}, {at}) = {len(data)}')

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)
        self.say(f"ftruncate({self.fd(descriptor)}, {size}) = 0")

    def seek(self, descriptor: int, at: int) -> None:
        os.lseek(descriptor, at, os.SEEK_SET)
        self.say(f"lseek({self.fd(descriptor)}, {at}, SEEK_SET) = {at}")

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        stat = os.fstat(descriptor)
        self._content[stat.st_ino] = os.pread(descriptor, stat.st_size, 0)
        self.say(f"fdatasync({self.fd(descriptor)}) = 0")

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(self.root / path, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(descriptor)
        self._names[os.fstat(descriptor).st_ino] = {
            child.name: child.stat().st_ino for child in (self.root / path).iterdir()
        }
        self.say(f"fsync({self.fd(descriptor)}) = 0")
        os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        (self.root / old).replace(self.root / new)
        self.say(f'rename("{hexed(str(self.root / old))}", "{hexed(str(self.root / new))}") = 0')

    def unlink(self, path: str) -> None:
        (self.root / path).unlink()
        self.say(f'unlink("{hexed(str(self.root / path))}") = 0')

    def mkdir(self, path: str) -> None:
        (self.root / path).mkdir()
        self._names[(self.root / path).stat().st_ino] = {}
        self.say(f'mkdir("{hexed(str(self.root / path))}", 0700) = 0')

    def close(self) -> None:
        for descriptor in self.open:
            os.close(descriptor)

    def durable(self) -> Files:
        """The worst disk, as snapshots that were taken of the real files at each sync."""
        return dict(self._below(self.root.stat().st_ino, ""))

    def _below(self, directory: int, path: str) -> Iterator[tuple[str, bytes | None]]:
        for name, inode in self._names[directory].items():
            if inode in self._names:
                yield f"{path}{name}/", None
                yield from self._below(inode, f"{path}{name}/")
            else:
                yield f"{path}{name}", self._content.get(inode, b"")

    def disk(self, log: Path) -> DiskModel:
        log.write_text("\n".join(self.lines) + "\n")
        disk = DiskModel.empty(self.root)
        for call in read_record(log, self.root):
            disk.apply(call)
        return disk


def files(root: Path) -> Files:
    return {
        f"{path.relative_to(root)}{'/' if path.is_dir() else ''}": None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    (tmp_path / "root").mkdir()
    traced = Program(tmp_path / "root")
    yield traced
    traced.close()


def left(program: Program, disk: DiskModel | None = None) -> Files:
    """What the worst disk holds."""
    disk = disk or program.disk(program.root.parent / "log")
    copy = Path(tempfile.mkdtemp(dir=program.root.parent)) / "copy"
    disk.restore(copy, NOTHING)
    return files(copy)


def test_a_sync_covers_only_what_had_returned_when_it_began(program: Program) -> None:
    fd = program.create("a")
    program.sync_directory("")
    program.say(f"fdatasync({program.fd(fd)} <unfinished ...>")
    program.lines.append(f'4712 write({program.fd(fd)}, "{hexed(b"late")}", 4) = 4')
    assert left(program) == {"a": b""}
    program.say("<... fdatasync resumed>) = 0")
    assert left(program) == {"a": b""}
    assert program.disk(program.root.parent / "log").unsynced_changes() == {"/a": 1}


@pytest.mark.parametrize("end", [") = 0 (INJECTED)", ") = -1 EIO (Input/output error)", ") = ?", " <unfinished ...>"])
def test_a_sync_that_failed_or_never_returned_is_none(program: Program, end: str) -> None:
    fd = program.create("a")
    program.sync_directory("")
    program.write(fd, b"x")
    program.say(f"fsync({program.fd(fd)}{end}")
    assert left(program) == {"a": b""}


def test_a_short_write_wrote_what_it_returned(program: Program) -> None:
    fd = program.create("a")
    program.sync_directory("")
    program.say(f'writev({program.fd(fd)}, [{{iov_base="{hexed(b"ab")}", iov_len=2}}, '
                f'{{iov_base="{hexed(b"cd")}", iov_len=2}}], 2) = 3')  # fmt: skip
    program.say(f"fsync({program.fd(fd)}) = 0")
    assert left(program) == {"a": b"abc"}


def test_what_the_model_does_not_follow_is_said(program: Program) -> None:
    fd = program.create("a")
    program.say(f"mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_SHARED, {program.fd(fd)}, 0) = 0x7f0000000000")
    with pytest.raises(UnsupportedCall):
        left(program)


def test_a_directory_that_was_there_is_durable(tmp_path: Path) -> None:
    (tmp_path / "root" / "sub").mkdir(parents=True)
    (tmp_path / "root" / "sub" / "a").write_bytes(b"x")
    DiskModel.of(tmp_path / "root").restore(tmp_path / "copy")
    assert files(tmp_path / "copy") == {"sub/": None, "sub/a": b"x"}


# -- any program -----------------------------------------------------------------------------------------------------

STEPS = ("create", "append", "write", "write_at", "truncate", "seek", "sync", "sync_dir", "rename", "unlink", "mkdir")


def live(program: Program, seed: int, steps: list[str]) -> None:
    """Make the calls, with names and sizes by the dice."""
    dice = Random(seed)
    for step in steps:
        directories = [path for path, content in files(program.root).items() if content is None]
        names = [path for path, content in files(program.root).items() if content is not None]
        into = dice.choice(["", *directories])
        new = f"{into}{dice.choice('abcd')}"
        descriptor = dice.choice(list(program.open)) if program.open else None
        if step in {"create", "append"} and not (program.root / new).is_dir():
            program.create(new, append=step == "append")
        elif step == "mkdir" and not (program.root / new).exists():
            program.mkdir(new)
        elif step == "sync_dir":
            program.sync_directory(into)
        elif step in {"rename", "unlink"} and names:
            old = dice.choice(names)
            if step == "unlink":
                program.unlink(old)
            elif not (program.root / new).is_dir() and old != new:
                program.rename(old, new)
        elif descriptor is not None and step in {"write", "write_at", "truncate", "seek", "sync"}:
            at, data = dice.randrange(40), dice.randbytes(dice.randrange(1, 20))
            arguments = {"write": (data,), "write_at": (data, at), "truncate": (at,), "seek": (at,), "sync": ()}[step]
            getattr(program, step)(descriptor, *arguments)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), steps=st.lists(st.sampled_from(STEPS), min_size=5, max_size=60))
def test_the_model_agrees_with_real_files(seed: int, steps: list[str]) -> None:
    """All that was written is what is there; the worst disk is the snapshots of the syncs; the rest lies between."""
    place = Path(tempfile.mkdtemp())
    (place / "root").mkdir()
    program = Program(place / "root")
    try:
        live(program, seed, steps)
        disk = program.disk(place / "log")
        disk.restore(place / "all", EVERYTHING)
        assert files(place / "all") == files(program.root)
        assert left(program, disk) == program.durable()
        disk.restore(place / "some", random_changes(seed))
        if not disk.unsynced_changes():
            assert files(place / "some") == files(program.root)
    finally:
        program.close()
        shutil.rmtree(place)


# -- a real record ---------------------------------------------------------------------------------------------------

_LIFE = """
import os, subprocess, sys, tempfile, threading
from pathlib import Path
root = Path(sys.argv[1])
(root / "sub").mkdir()
fd = os.open(root / "a.tmp", os.O_RDWR | os.O_CREAT | os.O_EXCL)
os.writev(fd, [b"hello", b"\\0\\xff"])
os.pwrite(fd, b"XY", 2)
os.fsync(fd)
os.rename(root / "a.tmp", root / "sub" / "a")
os.ftruncate(fd, 4)
os.lseek(fd, 4, os.SEEK_SET)
os.write(fd, b"z" * 5000)
os.posix_fallocate(os.open(root / "room", os.O_RDWR | os.O_CREAT), 0, 65536)
def lines():
    with (root / "log").open("a") as log:
        for _ in range(20):
            log.write("line\\n")
            log.flush()
threads = [threading.Thread(target=lines) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
subprocess.run(["sh", "-c", "echo child >> log; mv room room2; mkdir d; rmdir d"], cwd=root, check=True)
for at in (root, root / "sub"):
    os.fsync(os.open(at, os.O_RDONLY | os.O_DIRECTORY))
(root / "gone").write_text("x")
(root / "gone").unlink()
"""


@pytest.mark.usefixtures("ptrace")
@pytest.mark.parametrize("unsynced", [False, True])
def test_a_real_record_rebuilds_the_directory(tmp_path: Path, *, unsynced: bool) -> None:
    root, log = tmp_path / "root", tmp_path / "log"
    root.mkdir()
    subprocess.run(record_command([sys.executable, "-c", _LIFE, str(root)], log, fake_syncs=unsynced), check=True)
    disk = DiskModel.empty(root).replay(log)
    disk.restore(tmp_path / "all", EVERYTHING)
    assert files(tmp_path / "all") == files(root)
    assert disk.differences() == []
    disk.restore(tmp_path / "worst")
    worst: Files = {"sub/": None, "sub/a": b"heXYo\0\xff", "log": b"", "room2": b""}
    assert files(tmp_path / "worst") == ({} if unsynced else worst)
    DiskModel.empty(root).replay(log, include_syncs=False).restore(tmp_path / "without syncs")
    assert files(tmp_path / "without syncs") == {}


@pytest.mark.usefixtures("ptrace")
def test_a_record_with_a_hole_shows(tmp_path: Path) -> None:
    root, log = tmp_path / "root", tmp_path / "log"
    root.mkdir()
    subprocess.run(record_command([sys.executable, "-c", _LIFE, str(root)], log, with_seeks=False), check=True)
    (root / "sub" / "new").write_text("behind strace's back")
    disk = DiskModel.empty(root).replay(log)
    assert disk.differences() == ["/sub/a", "/sub/new"]
