"""Credentials from outside: a file, or a function of the user's, ``module:function``, for what is short-lived.

A file is read anew for each credential, so that a renewed one is used. A function is imported and called where a
connection is opened, in the process that opens it; its module has to be importable there (installed, or on
``PYTHONPATH``). What a function returns is the secret, and what it raises may quote one: neither ever stands in an
error [I12].
"""

from __future__ import annotations

import importlib
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from towline import files
from towline.errors import ConfigError

T = TypeVar("T")

#: Bytes of a file that are read at most: it may be one without an end, as /dev/zero.
_LONGEST: Final = 1 << 20
#: Rights of those who are neither the owner of a file nor of its group.
_OTHERS: Final = 0o007
_NAME: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_provider(name: str, where: str) -> None:
    """Check the form of a provider's name; nothing is imported. `where` is whom an error is about.

    Raises:
        ConfigError: TL-C179, it is not ``module:function``.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError("TL-C179", where, f'"{name}" is not module:function', "Name a function of a Python module.")


def credential(name: str, where: str, read: Callable[[Any], T], form: str, *arguments: object) -> T:
    """Ask a provider for a credential.

    Args:
        name: ``module:function``.
        where: Whom an error is about.
        read: Makes the credential of what the function returned; raises whatever it likes for another form.
        form: What the function has to return, in words.
        arguments: What the function is called with.

    Raises:
        ConfigError: TL-C179: it can't be imported, raised, or returned something else. It may do better a moment later.
    """
    check_provider(name, where)
    module, _, function = name.partition(":")
    doing = "can't be imported"
    try:
        call = getattr(importlib.import_module(module), function)
        doing = "failed"
        given = call(*arguments)
        doing = f"returned {type(given).__name__} and not {form}"
        return read(given)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        at = traceback.extract_tb(error.__traceback__)[-1]
        lacking = f" {error.name}" if isinstance(error, ImportError) and error.name else ""
        what = f'"{name}" {doing} ({type(error).__name__}{lacking}, {Path(at.filename).name} line {at.lineno})'
        do = f"Is its module installed, or in PYTHONPATH? Call {function} by hand, as the same user."
        raise ConfigError("TL-C179", where, what, do) from None


#: What a person does about the secret of a connection to a broker.
_CHECK: Final = "Check its name, rights and content: it is read at each connection."


def secret_of(
    key: str,
    path: str | Path,
    read: Callable[[bytes], T],
    code: str = "TL-C31",
    do: str = _CHECK,
    *,
    private: bool = False,
) -> T:
    """The secret in a file, as it is now.

    Args:
        key: The setting that names the file, or what is in it.
        path: The file.
        read: Makes the secret of the content without its last line end; its ValueError says what is wrong, and quotes
            nothing of it [I12].
        code: Of the error.
        do: What to do about it.
        private: Other users of this machine may neither read nor write the file.

    Raises:
        ConfigError: The file can't be read, is empty or larger than 1 MiB, or holds something else.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            content, mode = file.read(_LONGEST + 1), os.fstat(file.fileno()).st_mode
        if private and mode & _OTHERS:
            what, do = f"{key}: every user of this machine may read or write it", "chmod 600 it."
        elif len(content) > _LONGEST:
            what = f"{key} is larger than 1 MiB"
        elif content := content.rstrip(b"\r\n"):
            return read(content)
        else:
            what = f"{key} is empty: is it being written?"
    except OSError as error:
        what = f"{key} can't be read ({files.why(error)})"
    except ValueError as error:  # UnicodeDecodeError is one, and would quote it
        what = f"{key}: {'it is no text in UTF-8' if isinstance(error, UnicodeError) else error}"
    raise ConfigError(code, str(path), what, do)
