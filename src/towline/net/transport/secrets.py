"""Files that hold the secret of a connection: each is read at each connection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from towline import files
from towline.errors import ConfigError

__all__ = ["secret_of"]

T = TypeVar("T")


def secret_of(key: str, path: str | Path, read: Callable[[bytes], T]) -> T:
    """The secret in a file, as it is now.

    Args:
        key: The setting that names the file.
        path: The file.
        read: Makes the secret of the content without its last line end; its ValueError says what is wrong, and quotes
            nothing of it [I12].

    Raises:
        ConfigError: TL-C31, the file can't be read, is empty, or holds something else.
    """
    try:
        if content := files.secret(Path(path).expanduser()):
            return read(content)
        what = f"{key} is empty: is it being written?"
    except OSError as error:
        what = f"{key} can't be read ({files.why(error)})"
    except ValueError as error:  # UnicodeDecodeError is one, and would quote it
        what = f"{key}: {'it is no text in UTF-8' if isinstance(error, UnicodeError) else error}"
    raise ConfigError("TL-C31", str(path), what, "Check its name, rights and content: it is read at each connection.")
