"""kill -9 before and after every system call that changes the disk, each of them, not a sample."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.journal.support import SMALL, opened, rows, served

# One process that forks for each crash point: the child writes down what was acknowledged, then kills itself.
DRIVER = """
import os, signal, sys
from pathlib import Path
from tests.unit.journal.support import SMALL, FaultyDisk, opened, rows

class Killing(FaultyDisk):
    def __init__(self, at, after):
        super().__init__()
        self.point, self.after, self.seen = at, after, 0

def killing(name):
    def call(self, *arguments):
        self.seen += 1
        hit = self.seen == self.point
        if hit and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = getattr(FaultyDisk, name)(self, *arguments)
        if hit:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

for name in ("create", "write", "sync_data", "sync", "sync_directory", "rename", "remove", "truncate", "allocate"):
    setattr(Killing, name, killing(name))

def life(directory, disk):
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for run in range(2):
        journal = opened(directory / "journal", SMALL, disk)
        for number in range(12):
            os.write(log, b"%d\\n" % journal.append(rows(journal.end, 8)))
            if number % 5 == 2:
                journal.set_session({"run": run, "number": number})
            if number % 4 == 3:
                journal.commit("spark", journal.end - 8)
        journal.close()

root, after = Path(sys.argv[1]), sys.argv[2] == "after"
point = 0
while True:
    point += 1
    directory = root / str(point)
    directory.mkdir()
    child = os.fork()
    if not child:
        life(directory, Killing(point, after))
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
print(point - 1)
"""


@pytest.mark.faults
@pytest.mark.parametrize("when", ["before", "after"])
def test_kill_at_every_call(memory_path: Path, when: str) -> None:
    command = [sys.executable, "-c", DRIVER, str(memory_path), when]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    points = int(done.stdout)
    assert points > 100
    for point in range(1, points + 1):
        directory = memory_path / str(point)
        log = (directory / "log").read_text().split()
        acknowledged = int(log[-1]) if log else 0
        with opened(directory / "journal", SMALL) as journal:
            assert acknowledged <= journal.end <= acknowledged + 8, point
            assert journal.first_offset <= journal.committed
            served(journal)
            journal.append(rows(journal.end, 1))
