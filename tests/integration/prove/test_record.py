"""A real record of a real program: the model of its disk has what the program saw, and what it had synced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.powerloss import EVERYTHING, DiskModel
from tests.engines.strace import record_command

Files = dict[str, bytes | None]

_LIFE = """
import os, subprocess, sys, threading
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
def lines():
    with (root / "log").open("a") as log:
        for _ in range(20):
            log.write("line\\n")
            log.flush()
threads = [threading.Thread(target=lines) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
subprocess.run(["sh", "-c", "echo child >> log; ln log linked; mv linked l2; mkdir d; rmdir d"], cwd=root, check=True)
for at in (root, root / "sub"):
    os.fsync(os.open(at, os.O_RDONLY | os.O_DIRECTORY))
(root / "gone").write_text("x")
(root / "gone").unlink()
"""


def files(root: Path) -> Files:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


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
    worst: Files = {"sub": None, "sub/a": b"heXYo\0\xff", "log": b"", "l2": b""}
    assert files(tmp_path / "worst") == ({} if unsynced else worst)
    (root / "sub" / "new").write_text("behind strace's back")
    assert disk.differences() == ["/sub/new"]
