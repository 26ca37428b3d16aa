"""What the model of a disk without power takes for durable, on records written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.powerloss import DiskModel, UnsupportedCall
from tests.engines.strace import Injection, inject_command
from towline.errors import SetupError


def hexed(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)


def left(place: Path, *calls: str) -> dict[str, bytes]:
    """What the worst disk holds after a file ``a`` with a durable name, and these calls."""
    root = place / "root"
    path, directory = hexed(str(root / "a").encode()), hexed(str(root).encode())
    created = f'openat(AT_FDCWD, "{path}", O_RDWR|O_CREAT, 0600) = 3<{path}>'
    lines = [f"7 {created}", f"7 fsync(4<{directory}>) = 0", *calls]
    (place / "log").write_text("\n".join(line.replace("FD", f"3<{path}>") for line in lines))
    DiskModel.empty(root).replay(place / "log").restore(place / "copy")
    return {child.name: child.read_bytes() for child in (place / "copy").iterdir()}


X = f'7 write(FD, "{hexed(b"x")}", 1) = 1'


@pytest.mark.parametrize(
    ("calls", "content"),
    [
        ((X, "7 fdatasync(FD) = 0"), b"x"),
        ((X,), b""),
        *(
            ((X, f"7 fsync(FD{end}"), b"")
            for end in (") = 0 (INJECTED)", ") = -1 EIO (I/O)", ") = ?", " <unfinished ...>")
        ),
        (("7 fsync(FD <unfinished ...>", X.replace("7 ", "8 "), "7 <... fsync resumed>) = 0"), b""),
        (('7 writev(FD, [{iov_base="\\x61\\x62"}, {iov_base="\\x63"}], 2) = 2', "7 fsync(FD) = 0"), b"ab"),
    ],
)
def test_a_sync_covers_what_had_returned_when_it_began_and_counts_when_it_has(
    tmp_path: Path, calls: tuple[str, ...], content: bytes
) -> None:
    assert left(tmp_path, *calls) == {"a": content}


def test_what_the_model_does_not_follow_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCall):
        left(tmp_path, "7 mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_SHARED, FD, 0) = 0x7f0000000000")


def test_a_missing_strace_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SetupError, match=r"strace: not installed.*TL-S61"):
        inject_command(["true"], Injection("write", "1", "KILL"), tmp_path / "log")
