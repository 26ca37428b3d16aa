"""Files that are whole: each step of a replacement may be the last, and each is in its order."""

from __future__ import annotations

import os
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
