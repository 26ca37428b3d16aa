"""Writes a draft: whole or not at all, durable, and over nothing that is there unless it is told to."""

from __future__ import annotations

import contextlib
from pathlib import Path

from towline import files
from towline.bridge.draft.document import Draft, render
from towline.errors import ConfigError

__all__ = ["refuse_present", "write"]


def refuse_present(file: Path, *, force: bool) -> None:
    """Say that a file is there before anything is asked.

    Raises:
        ConfigError: TL-C162.
    """
    if not force and (file.exists() or file.is_symlink()):
        raise _present(file)


def write(draft: Draft, file: Path, *, force: bool) -> list[Path]:
    """Write a bridge file and its password files, mode 0600.

    Args:
        draft: What it says.
        file: Where; its directory is there.
        force: Replace what is there.

    Returns:
        What was written: the bridge file first.

    Raises:
        ConfigError: TL-C162, one of them is there; TL-C164, the directory does not take them. Nothing was written then.
    """
    contents = {file.parent / name: f"{secret}\n" for name, secret in draft.secrets.items()}
    contents[file] = render(draft, file)  # last: what it names is there
    made: list[Path] = []
    try:
        for path, text in contents.items():
            if force:
                files.replace_durably(path, text)
            else:
                files.create_durably(path, text)
                made.append(path)
    except OSError as error:
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink()
        if isinstance(error, FileExistsError):
            raise _present(path) from error
        do = "Name a file in a directory that is there and that this user may write."
        raise ConfigError("TL-C164", str(path), f"it can't be written ({files.why(error)})", do) from error
    return list(reversed(contents))


def _present(path: Path) -> ConfigError:
    return ConfigError("TL-C162", str(path), "it is there already", "Name another file, or replace it with --force.")
