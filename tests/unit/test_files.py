"""Files that are whole: each step of a replacement may be the last, and each is in its order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from towline import files

STEPS = ("fsync", "replace", "fsync directory")


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_leaves_the_old_file_or_the_new_one(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one"
    files.replace_durably(path, "old")
    fsync = os.fsync

    def failing(descriptor: Any, *_rest: Any) -> Any:
        if step != "replace":
            directory = Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path
            if directory is not (step == "fsync directory"):
                return fsync(descriptor)
        raise OSError(5, "Input/output error")

    if step == "replace":
        monkeypatch.setattr(Path, "replace", failing)
    else:
        monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        files.replace_durably(path, "new")
    assert path.read_text() == ("new" if step == "fsync directory" else "old")
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_owner_reads_it_whatever_was_there_and_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_text("old")
    path.chmod(0o666)
    umask = os.umask(0)
    try:
        files.replace(path, b"new", sync=False)
    finally:
        os.umask(umask)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)


def test_a_lock_is_another_process_s_until_it_ends(tmp_path: Path) -> None:
    program = "import sys; from towline.files import *; print(try_lock(open_lock(sys.argv[1])), flush=True); input()"
    command = [sys.executable, "-c", program, str(tmp_path / "lock")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"True\n"
        mine = files.open_lock(tmp_path / "lock")
        assert not files.try_lock(mine)
        other.communicate(b"\n", timeout=30)
        assert files.try_lock(mine)
        os.close(mine)
    finally:
        other.kill()
        other.communicate()
