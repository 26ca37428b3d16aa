"""Atomic file replacement, fsync, file locks, and the check of who owns a state directory.

Durability takes two calls: fsync of the content before the rename, and fsync of the directory after it. A rename
without the first can leave an empty file, without the second the old file.

A state directory of another user is refused before anything is written there [I8]: one `towline run` as root in the
directory of a service leaves files that the service can't open any more.
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
PRIVATE_MODE = 0o600
#: Root, and the uid of owners that are not known here: over NFS, or in a user namespace (proc(5), overflowuid).
_NEUTRAL_OWNERS: Final = (0, 65_534)


def replace(path: Path, content: bytes | str, *, mode: int = PRIVATE_MODE, sync: bool = True) -> None:
    """Replace a file's content atomically: readers see the old or the new content.

    Args:
        path: File to replace; its directory exists.
        content: New content; text is written as UTF-8.
        mode: File mode; no moment has wider rights than the owner's.
        sync: Make the content durable before the rename, and by `sync_path` of its directory the name; without it a
            power failure may leave an empty file.

    Raises:
        OSError: The write failed; the old file stays.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".towline", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def replace_durably(path: Path, content: bytes | str) -> None:
    """Replace a private file durably: after a power failure it has the old or the new content.

    Raises:
        OSError: As `replace`, or the directory could not be synced: then either content may be there.
    """
    replace(path, content)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Make a file's content, or a directory's entries, durable with fsync.

    Raises:
        OSError: With the file's name. It must not be synced again: the kernel has forgotten the failure [I6].
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """Open a lock file, creating it if missing, and return its descriptor.

    Raises:
        OSError: The file can't be created or opened.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_MODE)


def try_lock(descriptor: int) -> bool:
    """Lock an open file without waiting, with flock(2); return False if another process holds the lock.

    The lock lasts until the descriptor is closed.

    Raises:
        OSError: This file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, against other processes and threads; waits for it, creates the file if missing.

    Raises:
        OSError: The file can't be created.
    """
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets go of the lock


def check_owner(directory: Path) -> None:
    """Check that a directory and everything in it belongs to this user; a missing directory passes.

    A directory of root, or of an owner unknown on this machine, passes if this user may write to it: a mounted volume
    is one. A file of another user fails only if this user can't read it; ``lost+found`` always passes.

    Raises:
        ConfigError: TL-J23, another user owns a part of it; nothing was written.
    """
    for path in (directory, *directory.rglob("*")):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # not yet, or removed by whoever runs there
            owner = path.stat(follow_symlinks=path == directory).st_uid
            if owner != os.geteuid() and not _is_harmless(path, owner):
                owner_name, current_name = user_name(owner), user_name(os.geteuid())
                problem = (
                    f"it belongs to the user {owner_name}, and this is {current_name}: what {current_name} writes "
                    f"there {owner_name} could"
                )
                remedy = (
                    f"Run this as {owner_name} (sudo -u), or hand it over: chown -R {current_name.removeprefix('#')} "
                    f"{path}."
                )
                raise ConfigError("TL-J23", str(path), f"{problem} not use any more", remedy)


def _is_harmless(path: Path, owner: int) -> bool:
    """Return True if a path of another user does not hinder this user."""
    if not path.is_dir():
        return os.access(path, os.R_OK, effective_ids=True)
    is_open = owner in _NEUTRAL_OWNERS and os.access(path, os.W_OK | os.X_OK, effective_ids=True)
    return is_open or path.name == "lost+found"


def user_name(user: int) -> str:
    """Return a user's name; ``#uid`` if he has none, the form that sudo takes."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"#{user}"


def file_version(path: Path) -> tuple[int, ...]:
    """Return a value that changes with a file's content or mode (mtime, size, inode, mode); empty if it is missing."""
    try:
        state = path.stat()
    except OSError:
        return ()
    return state.st_mtime_ns, state.st_size, state.st_ino, state.st_mode


def os_error_text(error: OSError) -> str:
    """Return the system's text of an error in lower case: ``permission denied``."""
    return (error.strerror or str(error)).lower()
