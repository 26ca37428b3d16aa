"""Files that are whole or not there: replaced in one step, made durable, locked by one process at a time.

The rules that make a write durable are one call each: content by fsync before the rename, the name by fsync of its
directory after it. A rename without the first can leave an empty file, without the second the old one.

A directory with state that is another user's is refused before anything is written there [I8]: one `towline run` as
root in the directory of a service leaves files there that the service can't open any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from towline.errors import ConfigError

#: Mode of all that holds messages, places or secrets (design section 10).
PRIVATE = 0o600
#: Root, and the uid of owners that are not known here: over NFS, or in a user namespace (proc(5), overflowuid).
_NOBODYS: Final = (0, 65_534)


def replace(path: Path, content: bytes | str, *, mode: int = PRIVATE, synced: bool = True, new: bool = False) -> None:
    """Give a file new content in one step: who reads it sees the old or the new.

    Args:
        path: Its directory is there.
        content: Text is written as UTF-8.
        mode: From the first byte on nobody sees more than its owner does.
        synced: The content is durable before it has the name; the name is when `sync_directory` returns. Without it a
            power failure may leave an empty file.
        new: A file that is there stays as it is.

    Raises:
        FileExistsError: With `new`, it is there.
        OSError: The directory does not take it; what was there stays.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".towline", dir=path.parent)
    scratch = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if synced:
                os.fsync(file.fileno())
        if new:
            os.link(scratch, path)  # unlike a rename it replaces nothing
            scratch.unlink()
        else:
            scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def replace_durably(path: Path, content: bytes | str, *, new: bool = False) -> None:
    """Give a private file new content so that a power failure leaves the old or the new one, never neither.

    Raises:
        OSError: As `replace`, or the directory could not be synced: then either may be there.
    """
    replace(path, content, new=new)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Make the content of a file durable.

    Raises:
        OSError: With the file's name; it must not be synced again, the kernel has forgotten the failure [I6].
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: to Linux they are its content; OSError as `sync_file`."""
    sync_file(path)


def open_lock(path: Path) -> int:
    """Open a file that processes lock, creating it if need be, and return its descriptor.

    Raises:
        OSError: The directory does not take it.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)


def locked(descriptor: int) -> bool:
    """Lock an open file for as long as its description is open, flock(2); False if another has it.

    Raises:
        OSError: This file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait for the lock on a file, created if need be, and hold it against other processes and threads.

    Raises:
        OSError: The directory does not take the file.
    """
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets go of the lock


def check_owner(place: Path) -> None:
    """See that a directory, and all below it, is of this user; where none is yet there is nothing to see.

    A directory of root that lets this user write counts as his own: a mounted volume is one; so does one whose owner
    this machine can't tell. Of a file only one that this user can't read is another's, since people leave notes; and
    ``lost+found`` is the file system's.

    Raises:
        ConfigError: TL-J23, it belongs to another user; nothing was written.
    """
    for path in (place, *place.rglob("*")):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # not yet, or removed by whoever runs there
            owner = path.stat(follow_symlinks=path == place).st_uid
            if owner != os.geteuid() and not _usable(path, owner):
                theirs, ours = user_name(owner), user_name(os.geteuid())
                what = f"it belongs to the user {theirs}, and this is {ours}: what {ours} writes there {theirs} could"
                do = f"Run this as {theirs} (sudo -u), or hand it over: chown -R {ours.removeprefix('#')} {path}."
                raise ConfigError("TL-J23", str(path), f"{what} not use any more", do)


def _usable(path: Path, owner: int) -> bool:
    """Whether what is another user's is in nobody's way."""
    if not path.is_dir():
        return os.access(path, os.R_OK, effective_ids=True)
    lets_in = owner in _NOBODYS and os.access(path, os.W_OK | os.X_OK, effective_ids=True)
    return lets_in or path.name == "lost+found"


def user_name(user: int) -> str:
    """A user's name; ``#`` and his number where he has none, as sudo takes it."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"#{user}"


def version(path: Path) -> tuple[int, ...]:
    """A value that differs once a file has another content or other rights; empty where there is no file."""
    try:
        state = path.stat()
    except OSError:
        return ()
    return state.st_mtime_ns, state.st_size, state.st_ino, state.st_mode


def why(error: OSError) -> str:
    """Say what the system said, for the middle of a sentence: ``permission denied``."""
    return (error.strerror or str(error)).lower()
